"""HTTP errors in OpenAI's form, and the middleware that answers with them.

It checks API keys, limits request bodies, and notes client and time of arrival.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_spec.core.errors import InvalidRequest
from serve_spec.log import TRACE_ID, get_logger

logger = get_logger(__name__)

# The start of a replica takes from half a minute to several.
_START_S = 5
MAX_NAME_CHARS = 256
"""Maximum length of a name in a request, and of what an error repeats of it."""


class ApiError(Exception):
    """An HTTP error response: the fields of OpenAI's error object, and Retry-After in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """Return the JSON body; also sent as the error event of a stream."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Return the headers of this error."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


class ReplicaLost(ApiError):
    """The request's replica or its engine died. Another replica may succeed.

    replica: its name, if the request had not been accepted yet. is_orderly: whether the replica was
    shutting down, so the request is not the cause.
    """

    def __init__(
        self, error: ApiError, *, replica: str | None = None, is_orderly: bool = False
    ) -> None:
        self.replica = replica
        self.is_orderly = is_orderly
        super().__init__(
            error.status,
            error.message,
            kind=error.kind,
            code=error.code,
            retry_after_s=error.retry_after_s,
        )


class ClientTooSlow(ApiError):
    """The client reads its stream too slowly; no replica has failed."""


def refused(error: InvalidRequest) -> ApiError:
    """Return 400 with the name of the field, or 413 for a prompt that is too long."""
    if error.too_long:
        return ApiError(413, str(error), param=error.field, code="context_length_exceeded")
    return ApiError(400, str(error), param=error.field)


def body_too_large(max_bytes: int) -> ApiError:
    """Return 413: the body is larger than `max_body_bytes`."""
    message = f"The body is larger than {max_bytes} bytes; send fewer or shorter prompts"
    return ApiError(413, message, code="request_too_large")


def body_timed_out(timeout_s: float) -> ApiError:
    """Return 408: the body did not arrive in time."""
    message = (
        f"The body did not arrive within body_timeout_s={timeout_s:g} seconds; send it faster or "
        "raise router.body_timeout_s"
    )
    return ApiError(408, message, kind="timeout_error", code="body_timeout")


def broken_off() -> ApiError:
    """Return 400: HAProxy cannot read the rest of a body."""
    return ApiError(400, "The body breaks off or is not valid HTTP; send the request again")


def unknown_model(asked: str, served: str) -> ApiError:
    """Return 404: the model is not served here."""
    message = f"The model {asked!r} does not exist; this server serves {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def too_many_choices(num_prompts: int, num_choices: int, most: int) -> ApiError:
    """Return 400: one request has more choices than the queue holds."""
    several = ("prompt", f"<{num_prompts} prompts>")
    field, value = ("n", num_choices) if num_prompts == 1 else several
    asked = num_prompts * num_choices
    fix = f"{asked} choices are more than the {most} that fit at once; send several requests"
    return ApiError(400, f"{field}={value!r}: {fix}", param=field)


def queue_full(why: str, retry_after_s: int) -> ApiError:
    """Return 429: a queue is full."""
    message = f"Too many requests: {why}; try again in {retry_after_s} s"
    kind, code = "rate_limit_error", "queue_full"
    return ApiError(429, message, kind=kind, code=code, retry_after_s=retry_after_s)


def _unavailable(message: str, code: str, after_s: int = 1) -> ApiError:
    kind = "service_unavailable_error"
    return ApiError(503, message, kind=kind, code=code, retry_after_s=after_s)


def no_replica(why: str) -> ApiError:
    """Return 503: no engine replica can take the request."""
    message = f"No healthy engine replica: {why}; try again shortly"
    return _unavailable(message, "no_healthy_replica")


def starting() -> ApiError:
    """Return 503: the first replica is not ready yet."""
    message = "The model is being loaded; try again when /health answers 200"
    return _unavailable(message, "starting", _START_S)


def server_lost() -> ApiError:
    """Return 503: the router process that handled the request was killed."""
    message = "The server process that had the request is gone; send the request again"
    return _unavailable(message, "server_lost")


def no_router() -> ApiError:
    """Return 503: no router takes requests."""
    return _unavailable("No router takes requests; try again shortly", "no_healthy_router")


def timed_out(timeout_s: float) -> ApiError:
    """Return 408: the request did not finish within its deadline."""
    message = (
        f"The request did not finish within request_timeout_s={timeout_s:g} seconds; "
        "ask for fewer tokens or raise router.request_timeout_s"
    )
    return ApiError(408, message, kind="timeout_error", code="request_timeout")


def client_too_slow(max_unread_bytes: int) -> ClientTooSlow:
    """Return 408: the client reads its stream too slowly."""
    message = (
        f"The client reads too slowly: more than router.max_unread_bytes={max_unread_bytes} bytes "
        "are unread; read faster or raise router.max_unread_bytes"
    )
    return ClientTooSlow(408, message, kind="timeout_error", code="client_too_slow")


def defect(error: Exception) -> ApiError:
    """Return 500: an unexpected exception, whose details are only in the log."""
    message = f"Internal error ({type(error).__name__}); see the server's log"
    return ApiError(500, message, kind="server_error")


def engine_failed(message: str) -> ApiError:
    """Return 500: the engine failed this request."""
    return ApiError(500, message, kind="server_error", code="engine_error")


def replicas_lost(num_replicas: int, error: ApiError) -> ApiError:
    """Return 500: several replicas died with this request; `error` is the last failure."""
    message = (
        f"{num_replicas} replicas were lost while running this request; it is not retried "
        f"({error.message})"
    )
    return ApiError(500, message, kind="server_error", code="replicas_lost")


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


class AsciiJSON(JSONResponse):
    """JSON response in ASCII, as an error may quote a lone surrogate, which UTF-8 cannot encode."""

    def render(self, content: object) -> bytes:
        """Return the body."""
        return _encode(content).encode("ascii")


def encode_by_items(content: Mapping[str, object] | Sequence[object]) -> bytes:
    """Return JSON in ASCII; list items are encoded separately so that other threads can run."""

    def encode(value: object) -> str:
        if isinstance(value, list):
            return f"[{','.join(map(_encode, value))}]"
        return _encode(value)

    if not isinstance(content, Mapping):
        return encode(content).encode("ascii")
    fields = (f"{_encode(name)}:{encode(value)}" for name, value in content.items())
    return f"{{{','.join(fields)}}}".encode("ascii")


def _encode(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def error_answer(error: ApiError) -> Response:
    """Return the response for `error`."""
    return AsciiJSON(error.body(), status_code=error.status, headers=error.headers())


def trace_id(request: Request) -> str:
    """Return x-request-id. Serve adds one if the client sends none, and returns it."""
    return request.headers.get("x-request-id", "-")


def add_error_answers(api: FastAPI) -> None:
    """Answer all errors with OpenAI error objects, also unknown routes and invalid JSON."""

    @api.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        if error.status >= 500 or error.status == 408:
            logger.warning("request %s: %d %s", trace_id(request), error.status, error.message)
        return error_answer(error)

    @api.exception_handler(InvalidRequest)
    async def invalid_request(request: Request, error: InvalidRequest) -> Response:
        return error_answer(refused(error))

    @api.exception_handler(RequestValidationError)
    async def validation(request: Request, error: RequestValidationError) -> Response:
        return error_answer(invalid_body(error.errors()))

    @api.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        answer = error_answer(_of_framework(request, error))
        answer.headers.update(error.headers or {})
        return answer

    @api.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        # Serve logs the traceback.
        logger.error("request %s: 500 %r", trace_id(request), error)
        return error_answer(defect(error))


def _of_framework(request: Request, error: HTTPException) -> ApiError:
    what = f"{request.method} {request.url.path}"
    message = {404: f"Unknown URL ({what})", 405: f"Not allowed: {what}"}
    if isinstance(error.__cause__, ApiError):
        return error.__cause__
    if isinstance(error.__cause__, ClientDisconnect):  # for access logs only
        return ApiError(499, "The client closed the connection before its body was complete")
    if error.status_code == 400 and error.__cause__ is not None:
        reason = type(error.__cause__).__name__
        return ApiError(400, f"The body cannot be read as JSON in UTF-8 ({reason})")
    return ApiError(error.status_code, message.get(error.status_code, str(error.detail)))


# Health probes have no key; the status page asks for one.
_OPEN_PATHS = frozenset({"/health", "/health_generate", "/ping", "/"})

ARRIVED: ContextVar[float | None] = ContextVar("arrived", default=None)
"""`perf_counter` at the arrival of the current request."""

CLIENT: ContextVar[str] = ContextVar("client", default="")
"""The client of the current request: its API key, else its address."""


def key_client(index: int) -> str:
    """Return `CLIENT` of requests with the API key of this index."""
    return f"key {index}"


class Arrival:
    """Sets time, trace id and client of a request; 401 if there are `keys` and it has none."""

    def __init__(self, app: ASGIApp, keys: Collection[str] = ()) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Set the context variables; forward requests with a valid key or to an open path."""
        app = self._app
        if scope["type"] == "http":
            ARRIVED.set(time.perf_counter())
            TRACE_ID.set(trace_id(Request(scope)))
            key = self._key(scope)
            CLIENT.set((scope.get("client") or ("",))[0] if key is None else key_client(key))
            if self._keys and key is None and not _is_open(scope):
                message = "Give one of the server's API keys: Authorization: Bearer KEY"
                app = error_answer(ApiError(401, message, code="invalid_api_key"))
        await app(scope, receive, send)

    def _key(self, scope: Scope) -> int | None:
        scheme, _, token = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        # All keys are compared, in constant time, to prevent timing attacks.
        matches = [hmac.compare_digest(token.strip(), key) for key in self._keys]
        return matches.index(True) if scheme.lower() == b"bearer" and any(matches) else None


class BodyLimits:
    """Middleware that limits the size of a body (413) and the time it takes to arrive (408)."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request; reading beyond a limit raises an exception."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        num_bytes, is_whole = 0, False

        async def limited() -> Message:
            nonlocal num_bytes, is_whole
            if is_whole:  # the next message is the disconnect, which has no deadline
                return await receive()
            # FastAPI passes on only HTTPException while it reads a body.
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                error = HTTPException(408, headers={"Connection": "close"})
                raise error from body_timed_out(self._timeout_s)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413) from body_too_large(self._max_bytes)
            is_whole = not message.get("more_body", False)
            return message

        await self._app(scope, limited if scope["type"] == "http" else receive, send)


def _is_open(scope: Scope) -> bool:
    """Return whether the path needs no key; the application's route prefix is ignored."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path in _OPEN_PATHS or path.startswith("/static/")
