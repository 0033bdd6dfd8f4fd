"""Request schemas of the OpenAI API, and the errors of invalid requests.

Unknown fields are rejected by name. Unsupported fields of the API are accepted with their neutral
values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
)

from serve_spec.config.base import unknown_key
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import MAX_GRAMMAR_CHARS
from serve_spec.core.request import SamplingParams, SpeculativeOptions
from serve_spec.serving import fields
from serve_spec.serving.errors import ApiError
from serve_spec.serving.fields import (
    FEW,
    IGNORED,
    Biases,
    Content,
    FewInts,
    FewTokenIds,
    Int32,
    Label,
    Name,
    NumLogprobs,
    Prompts,
    Stops,
    StrictFields,
    Text,
    Unavailable,
    Variables,
    grammar_of,
    refuse_unavailable,
)
from serve_spec.serving.tools import Choice, Function, ToolCalls, Tools, offered

MAX_CHOICES_PER_PROMPT = 128
_GRAMMAR_LIMIT = f"At most {MAX_GRAMMAR_CHARS} characters."

_INT64 = 2**63


class StreamOptions(StrictFields):
    """`stream_options` of the OpenAI API."""

    include_usage: bool = Field(False, description="Send a last chunk that holds `usage`.")
    include_obfuscation: Literal[False] | None = Field(
        None, description="Only false is supported: chunks are not padded."
    )


class SpeculativeRequest(StrictFields):
    """Speculative decoding options of this request."""

    enabled: bool = Field(True, description="false: plain decoding.")
    max_steps: Int32 | None = Field(
        None, description="Maximum draft tokens per round; null: no limit."
    )


class ResponseFormat(StrictFields):
    """`response_format` of the OpenAI API."""

    type: Name = Field(description='"text", "json_object" or "json_schema".')
    json_schema: dict[str, Any] | None = Field(
        None, description='With type "json_schema": `name`, `schema`, `description`, `strict`.'
    )


class _Request(StrictFields):
    """Fields of both endpoints. Null means the default, as in the OpenAI API."""

    model: Name | None = Field(None, description="Served model name; optional.")
    temperature: float | None = Field(None, description="Default 1; 0 is greedy.")
    top_p: float | None = Field(None, description="Nucleus probability mass in (0, 1]; default 1.")
    top_k: Int32 | None = Field(None, description="Keep the k most likely; -1 (default), 0: all.")
    min_p: float | None = Field(
        None, description="Minimum probability relative to the top; default 0."
    )
    frequency_penalty: float | None = Field(
        None,
        description="Subtracted from a token's logit for each time it was generated; in [-2, 2], "
        "default 0.",
    )
    presence_penalty: float | None = Field(
        None, description="Subtracted once if a token was generated at all; in [-2, 2], default 0."
    )
    repetition_penalty: float | None = Field(
        None,
        description="Divides the positive and multiplies the negative logits of tokens in prompt "
        "and completion; in [0.01, 100], default 1.",
    )
    logit_bias: Biases = Field(
        None,
        description=f"Added to logits, in [-{fields.MAX_BIAS}, {fields.MAX_BIAS}], by token id.",
    )
    allowed_token_ids: FewTokenIds | None = Field(
        None, description="Only these tokens are generated; default: all."
    )
    bad_token_ids: FewTokenIds | None = Field(None, description="These tokens are never generated.")
    min_tokens: Int32 | None = Field(
        None, description="Minimum number of tokens before the completion may end; default 0."
    )
    n: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES_PER_PROMPT,
        description="Choices per prompt, default 1. Choice 0 uses `seed`, as with n=1; the seed of "
        "choice i depends only on `seed` and i.",
    )
    seed: int | None = Field(
        None, ge=-_INT64, lt=_INT64, description="Makes the text reproducible; default: random."
    )
    stop: Stops = Field(
        None,
        description=f"One or up to {fields.MAX_STOPS} strings that end the completion and are not "
        "part of it.",
    )
    stop_token_ids: FewInts | None = Field(None, description="Token ids that end the completion.")
    ignore_eos: bool | None = Field(None, description="Generate past the end-of-text token.")
    response_format: ResponseFormat | None = Field(None, description="Required format of the text.")
    guided_json: dict[str, Any] | Text | None = Field(
        None, description=f"The text is JSON that conforms to this schema. {_GRAMMAR_LIMIT}"
    )
    guided_regex: Text | None = Field(
        None, description=f"The whole text matches this regular expression. {_GRAMMAR_LIMIT}"
    )
    guided_grammar: Text | None = Field(
        None,
        description="The text conforms to this grammar in Lark's notation or GBNF. "
        f"{_GRAMMAR_LIMIT}",
    )
    guided_choice: Annotated[list[Text], Field(fail_fast=True)] | None = Field(
        None, description=f"The text is one of these strings. {_GRAMMAR_LIMIT}"
    )
    structured_outputs: dict[str, Any] | None = Field(
        None,
        description="An object with one of `json`, `json_object`, `regex`, `grammar`, `choice`. "
        f"{_GRAMMAR_LIMIT}",
    )
    stream: bool | None = Field(None, description="Send server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    speculative: SpeculativeRequest | None = None
    user: Annotated[Label | None, IGNORED] = None
    metadata: Annotated[dict[Label, Label] | None, FEW, IGNORED] = None

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _params(
        self,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """Return the sampling parameters of choice 0.

        max_tokens: None for the default.
        logprobs, prompt_logprobs: as in `SamplingParams`.
        """
        refuse_unavailable(self)
        if self.stream_options is not None and not self.stream:
            fix = "allowed only with stream=true"
            raise InvalidRequest("stream_options", self.stream_options.model_dump(), fix)
        given = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if max_tokens is not None:
            given["max_tokens"] = max_tokens
        form = self.response_format
        grammar = grammar_of(
            response_format=None if form is None else (form.type, form.json_schema),
            structured_outputs=self.structured_outputs,
            guided={
                language: getattr(self, f"guided_{language}")
                for language in ("json", "regex", "grammar", "choice")
            },
        )
        speculative = self.speculative or SpeculativeRequest()
        options = SpeculativeOptions(speculative.enabled, speculative.max_steps)
        return SamplingParams(
            **given,
            grammar=grammar,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            speculative=options,
        )


# Request fields that are SamplingParams fields of the same name and meaning.
_SAMPLING_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)} & set(
    _Request.model_fields
) - {"speculative"}


class CompletionRequest(_Request):
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
    best_of: int | None = Field(None, description="Only null or the value of `n` is supported.")
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

    def sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of choice 0, or raise InvalidRequest.

        With `is_prompt_only`, they are of one hidden token.
        """
        if self.max_tokens == 0 and not self.echo:
            fix = "use an integer in [1, 2³¹); 0 is allowed only with echo=true"
            raise InvalidRequest("max_tokens", 0, fix)
        if self.best_of is not None and self.best_of != self.num_choices:
            fix = f"ranking candidates is not supported; use n={max(self.best_of, 1)} and rank them"
            raise InvalidRequest("best_of", self.best_of, fix)
        return self._params(
            1 if self.is_prompt_only else self.max_tokens,
            self.logprobs,
            self.logprobs if self.echo else None,
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


class ChatRequest(_Request):
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


def invalid_body(
    errors: Sequence[Mapping[str, object]], request: type[BaseModel] = CompletionRequest
) -> ApiError:
    """Return 400 for the first of FastAPI's validation errors of a `request`.

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
    if error["type"] == "extra_forbidden":
        return ApiError(400, unknown_key(field, _known_fields(request)), param=field)
    return ApiError(400, f"{field}: {message[:1].lower()}{message[1:]}", param=field)


def _json_problem(error: Mapping[str, object]) -> str:
    context = error.get("ctx")
    return str(context.get("error")) if isinstance(context, dict) else str(error["msg"])
