"""Request schemas of the OpenAI API, and the errors of invalid requests.

Unsupported fields of the API are accepted with their neutral values.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    Field,
    ValidationError,
)

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import SamplingParams
from serve_spec.serving import fields
from serve_spec.serving.base_request import (
    MAX_CHOICES_PER_PROMPT,
    BaseRequest,
    ResponseFormat,
    SpeculativeRequest,
    StreamOptions,
)
from serve_spec.serving.errors import ApiError
from serve_spec.serving.fields import (
    IGNORED,
    Content,
    Int32,
    Label,
    Name,
    NumLogprobs,
    Prompts,
    StrictFields,
    Text,
    Unavailable,
    Variables,
    refuse_unavailable,
)
from serve_spec.serving.tools import Choice, Function, ToolCalls, Tools, offered


class CompletionRequest(BaseRequest):
    """Body of POST /v1/completions."""

    prompt: Prompts = Field(
        description="A string, strings, token ids, or lists of token ids. Prompt p has the choices "
        "with the indices p · n to p · n + n - 1."
    )
    max_tokens: Int32 | None = Field(
        None,
        description="Maximum number of output tokens; default 16. 0 with `echo`: only the prompt.",
    )
    echo: bool | None = Field(
        None, description="Return the prompt, and its `logprobs`, before the completion."
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES_PER_PROMPT,
        description="Generate so many choices and return the `n` of the highest log-probability; "
        "not with `stream`.",
    )
    logprobs: NumLogprobs | None = Field(
        None,
        description="Return the log-probability of every token and of this many of the most "
        "likely tokens. "
        "For generated tokens they refer to the distribution after penalties, biases, "
        "`temperature` and filters; for an echoed prompt, to the model's own.",
    )
    suffix: Annotated[
        Text | None, Unavailable("", instead="this model has no fill-in-the-middle format")
    ] = None

    @property
    def is_prompt_only(self) -> bool:
        """Whether only the prompt is scored and nothing is generated."""
        return self.max_tokens == 0 and bool(self.echo)

    @property
    def needs_token_ids(self) -> bool:
        """Whether the router encodes the prompts; else the replica does."""
        is_scored = bool(self.echo) and self.logprobs is not None
        return self.changes_tokens or bool(self.return_token_ids) or is_scored

    @property
    def num_candidates(self) -> int:
        """See `BaseRequest`."""
        return self.best_of or self.num_choices

    def sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of choice 0, or raise InvalidRequest.

        With `is_prompt_only`, they are of one hidden token.
        """
        if self.max_tokens == 0 and not self.echo:
            fix = "use an integer in [1, 2³¹); 0 is allowed only with echo=true"
            raise InvalidRequest("max_tokens", 0, fix)
        if self.num_candidates < self.num_choices:
            fix = f"use at least n={self.num_choices}"
            raise InvalidRequest("best_of", self.best_of, fix)
        is_ranked = self.num_candidates > self.num_choices
        if is_ranked and self.stream:
            raise InvalidRequest("best_of", self.best_of, "not with stream=true")
        scored = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return self._params(
            1 if self.is_prompt_only else self.max_tokens,
            0 if is_ranked and self.logprobs is None else self.logprobs,
            max((count for count in scored if count is not None), default=None),
        )


class ChatMessage(StrictFields):
    """One message. Unsupported fields of an earlier answer are accepted if they are empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(
        None, description="A string, or text parts, joined by line breaks; optional for assistants."
    )
    name: Name | None = Field(None, description="Passed to the chat template.")
    tool_calls: ToolCalls | None = Field(None, description="Calls of an earlier answer.")
    tool_call_id: Name | None = Field(None, description="The call that a tool's message answers.")
    reasoning_content: Text | None = Field(None, description="Reasoning of an earlier answer.")
    reasoning: Text | None = Field(None, description="Other name of reasoning_content.")

    annotations: Annotated[list[Any] | None, IGNORED] = None
    audio: Annotated[dict[str, Any] | None, Unavailable()] = None
    function_call: Annotated[dict[str, Any] | None, Unavailable()] = None
    refusal: Annotated[Text | None, Unavailable()] = None


_NO_TOOLS = "use tools and tool_choice"


class ChatRequest(BaseRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(
        min_length=1,
        max_length=fields.MAX_MESSAGES,
        fail_fast=True,
        description="The conversation so far, oldest first.",
    )
    max_completion_tokens: Int32 | None = Field(
        None, description="Maximum number of generated tokens; default: up to the context length."
    )
    max_tokens: Int32 | None = Field(None, description="Old name of max_completion_tokens.")
    add_generation_prompt: bool | None = Field(
        None, description="Append the template's start of the assistant's turn; default true."
    )
    continue_final_message: bool | None = Field(
        None, description="Leave the last message open, so that the answer continues it."
    )
    chat_template_kwargs: Variables = Field(
        None, description="Additional variables for the model's chat template."
    )
    logprobs: bool | None = Field(
        None,
        description="Return the log-probability of every token, in the distribution after "
        "penalties, biases, `temperature` and filters.",
    )
    top_logprobs: NumLogprobs | None = Field(
        None, description="Also return this many most likely tokens; only with `logprobs`."
    )

    tools: Tools | None = Field(None, description="Functions that the model may call.")
    tool_choice: Choice = Field(
        None, description="Whether functions are called, and which; default auto."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Return more than one call; default true."
    )
    reasoning_effort: Name | None = Field(
        None,
        description="Passed to the chat template; none: also `enable_thinking` false.",
    )
    include_reasoning: bool | None = Field(None, description="false: drop reasoning, as in vLLM.")
    separate_reasoning: bool | None = Field(
        None, description="false: reasoning stays in `content`, as in SGLang."
    )
    prompt_cache_key: Annotated[Label | None, IGNORED] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, IGNORED] = None
    prompt_cache_retention: Annotated[Label | None, IGNORED] = None
    safety_identifier: Annotated[Label | None, IGNORED] = None
    service_tier: Annotated[Label | None, IGNORED] = None
    store: Annotated[bool | None, IGNORED] = None

    audio: Annotated[dict[str, Any] | None, Unavailable()] = None
    function_call: Annotated[
        Text | dict[str, Any] | None, Unavailable("none", "auto", instead=_NO_TOOLS)
    ] = None
    functions: Annotated[list[Any] | None, Unavailable([], instead=_NO_TOOLS)] = None
    modalities: Annotated[list[Any] | None, Unavailable(["text"])] = None
    moderation: Annotated[dict[str, Any] | None, Unavailable()] = None
    prediction: Annotated[dict[str, Any] | None, Unavailable()] = None
    verbosity: Annotated[Text | None, Unavailable("medium")] = None
    web_search_options: Annotated[dict[str, Any] | None, Unavailable()] = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """The name and value of the field that limits the answer's tokens."""
        if self.max_tokens is None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def callable_functions(self) -> list[Function]:
        """The functions that the answer may call."""
        return offered(self.tools, self.tool_choice)

    @property
    def must_call(self) -> bool:
        """Whether the answer is a call."""
        return self.tool_choice is not None and self.tool_choice.mode == "required"

    @property
    def generation_prompt(self) -> bool:
        """Whether the template appends the start of the assistant's turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    def sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of choice 0, or raise InvalidRequest.

        Without a `limit`, `max_tokens` is a default.
        """
        for index, message in enumerate(self.messages):
            refuse_unavailable(message, f"messages.{index}.")
            if message.content is None and message.role != "assistant":
                fix = "give a string or a list of text parts"
                raise InvalidRequest(f"messages.{index}.content", None, fix)
        _ = self.callable_functions
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            fix = "conflicts with max_completion_tokens, its newer name; give only one of them"
            raise InvalidRequest("max_tokens", self.max_tokens, fix)
        if self.add_generation_prompt and self.continue_final_message:
            fix = "conflicts with add_generation_prompt=true; give only one of them"
            raise InvalidRequest("continue_final_message", True, fix)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(
                "top_logprobs", self.top_logprobs, "allowed only with logprobs=true"
            )
        name, value = self.limit
        if value is not None and value < 1:
            raise InvalidRequest(name, value, "use an integer in [1, 2³¹)")
        if value is None and self.min_tokens is not None:
            value = max(SamplingParams.max_tokens, self.min_tokens)
        return self._params(value, (self.top_logprobs or 0) if self.logprobs else None)


_NESTED: Mapping[str, type[BaseModel]] = {
    "stream_options": StreamOptions,
    "speculative": SpeculativeRequest,
    "response_format": ResponseFormat,
    "messages": ChatMessage,
}


@cache
def _known_fields(request: type[BaseModel]) -> list[str]:
    known = list(request.model_fields)
    for section, model in _NESTED.items():
        if section in request.model_fields:
            known += [f"{section}.{name}" for name in model.model_fields]
    return known


def unknown_field(name: str, request: type[BaseModel]) -> ApiError:
    """Return 400: `router.strict_fields` refuses the unknown field of a `request`."""
    section, _, leaf = re.sub(r"\.\d+", "", name).rpartition(".")
    known = [field.rpartition(".") for field in _known_fields(request)]
    near = difflib.get_close_matches(leaf, [part for place, _, part in known if place == section])
    hint = f"; did you mean {section}{'.' if section else ''}{near[0]}?" if near else ""
    return ApiError(400, f"{name}: unknown field{hint}", param=name)


_Body = TypeVar("_Body", bound=BaseModel)


def validated(model: type[_Body], data: Mapping[str, object]) -> _Body:
    """Return `data` as a body of another endpoint.

    Raises:
        ApiError: a field is wrong.
    """
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
    """Return 400 for the first of FastAPI's validation errors.

    errors: pydantic's dictionaries with `type`, `loc` (starting with "body") and `msg`.
    """
    error = errors[0]
    location = error["loc"]
    assert isinstance(location, tuple), "pydantic gives locations as tuples"
    place = [str(part)[: fields.MAX_NAME_CHARS] for part in location[1:]]
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
