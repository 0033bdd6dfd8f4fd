"""Bodies of one endpoint that become those of another, and what is wrong with a body."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from serve_spec.core.errors import InvalidRequest
from serve_spec.serving.errors import MAX_NAME_CHARS, ApiError

_Body = TypeVar("_Body", bound=BaseModel)


def validated(model: type[_Body], data: Mapping[str, object]) -> _Body:
    """Return `data` as a body of another endpoint; raise ApiError if a field is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise invalid_body([{**first, "loc": ("body", *first["loc"])}]) from None


@contextmanager
def renamed(own_name: Callable[[str], str]) -> Iterator[None]:
    """Name fields in errors as in the body of another endpoint."""
    try:
        yield
    except InvalidRequest as error:
        name = own_name(error.field)
        raise InvalidRequest(name, error.value, error.fix, too_long=error.too_long) from None
    except ApiError as error:
        if error.status != 400 or error.param is None:
            raise
        name = own_name(error.param)
        raise ApiError(400, error.message.replace(error.param, name, 1), param=name) from None


def invalid_body(errors: Sequence[Mapping[str, object]]) -> ApiError:
    """Return 400 for the first of pydantic's `errors`, whose `loc` starts with "body"."""
    error = errors[0]
    location = error["loc"]
    assert isinstance(location, tuple), "pydantic gives locations as tuples"
    place = [str(part)[:MAX_NAME_CHARS] for part in location[1:]]
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {_json_problem(error)}")
    if not place:
        fix = "send one JSON object, with the header Content-Type: application/json"
        return ApiError(400, f"The body is not a JSON object: {fix}")
    field = ".".join(place)
    return ApiError(400, f"{field}: {message[:1].lower()}{message[1:]}", param=field)


def _json_problem(error: Mapping[str, object]) -> str:
    context = error.get("ctx")
    return str(context.get("error")) if isinstance(context, dict) else str(error["msg"])
