"""The OpenAI API: what a request may say, and how a wrong one is refused.

The schemas are closed: an unknown field is refused by name. Fields of the API that this version can
not honour are accepted at the values that ask for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

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
    Biases,
    Closed,
    Content,
    FewInts,
    FewTokenIds,
    Int32,
    Label,
    Name,
    NumLogprobs,
    Prompts,
    Stops,
    Text,
    Unavailable,
    Variables,
    grammar_of,
)

MAX_CHOICES_PER_PROMPT = 128
_GRAMMAR_LIMIT = f"At most {MAX_GRAMMAR_CHARS} characters."

# Request fields that are SamplingParams fields of the same name and meaning.
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_token_ids",
    "min_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)
_INT64 = 2**63


class StreamOptions(Closed):
    """`stream_options` of the OpenAI API."""

    include_usage: bool = Field(False, description="Send a last chunk that holds `usage`.")
    include_obfuscation: Literal[False] | None = Field(
        None, description="Only false works: chunks are as long as what they say."
    )


class SpeculativeRequest(Closed):
    """Speculation of this request; it changes speed, never the text."""

    enabled: bool = Field(True, description="false: plain decoding.")
    max_steps: Int32 | None = Field(None, description="Most drafts per round; null: no cap.")


class ResponseFormat(Closed):
    """`response_format` of the OpenAI API."""

    type: Name = Field(description='"text", "json_object" or "json_schema".')
    json_schema: dict[str, Any] | None = Field(
        None, description='With type "json_schema": `name`, `schema`, `description`, `strict`.'
    )


class _Request(Closed):
    """What both endpoints take. Null means the default, as everywhere in the OpenAI API."""

    unavailable: ClassVar[Mapping[str, Unavailable]] = {}

    model: Name | None = Field(None, description="Served model name; may be left out.")
    temperature: float | None = Field(None, description="Default 1; 0 is greedy.")
    top_p: float | None = Field(None, description="Nucleus mass in (0, 1]; default 1.")
    top_k: Int32 | None = Field(None, description="Keep the k likeliest; -1 (default) or 0: all.")
    min_p: float | None = Field(None, description="Least share of the top probability; default 0.")
    frequency_penalty: float | None = Field(
        None,
        description="Taken off a token's logit for each time it was generated; in [-2, 2], "
        "default 0.",
    )
    presence_penalty: float | None = Field(
        None, description="Taken off once if it was generated at all; in [-2, 2], default 0."
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
    bad_token_ids: FewTokenIds | None = Field(None, description="These tokens never are.")
    min_tokens: Int32 | None = Field(
        None, description="Nothing ends the completion before it has so many; default 0."
    )
    n: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES_PER_PROMPT,
        description="Choices per prompt, default 1. Choice 0 draws from `seed`, as the only choice "
        "would; choice i from a seed that depends on `seed` and i alone.",
    )
    seed: int | None = Field(
        None, ge=-_INT64, lt=_INT64, description="Fixes the text; default: a random seed."
    )
    stop: Stops = Field(
        None,
        description=f"A text, or up to {fields.MAX_STOPS}, that ends the completion; not part of "
        "it.",
    )
    stop_token_ids: FewInts | None = Field(None, description="Token ids that end it.")
    ignore_eos: bool | None = Field(None, description="Generate past the end-of-text token.")
    response_format: ResponseFormat | None = Field(
        None, description="What the text has to look like; it ends where that is complete."
    )
    guided_json: dict[str, Any] | Text | None = Field(
        None, description=f"The text is JSON that is valid under this schema. {_GRAMMAR_LIMIT}"
    )
    guided_regex: Text | None = Field(
        None, description=f"The text matches this regular expression as a whole. {_GRAMMAR_LIMIT}"
    )
    guided_grammar: Text | None = Field(
        None,
        description="The text is one of this grammar, in Lark's notation or GBNF. "
        f"{_GRAMMAR_LIMIT}",
    )
    guided_choice: Annotated[list[Text], Field(fail_fast=True)] | None = Field(
        None, description=f"The text is one of these. {_GRAMMAR_LIMIT}"
    )
    structured_outputs: dict[str, Any] | None = Field(
        None,
        description="Another way to say one of these: `json`, `json_object`, `regex`, `grammar`, "
        f"`choice`. {_GRAMMAR_LIMIT}",
    )
    stream: bool | None = Field(None, description="Send server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with `stream`.")
    speculative: SpeculativeRequest | None = None
    user: Label | None = Field(None, description="Accepted and ignored.")
    metadata: Annotated[dict[Label, Label] | None, FEW] = Field(
        None, description="Accepted and ignored."
    )

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _params(
        self,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """How to draw the tokens of the first choice.

        max_tokens: None: the default number of them.
        logprobs, prompt_logprobs: as in `SamplingParams`.

        Raises:
            InvalidRequest: a value out of range, or one this version cannot honour.
        """
        for name, field in self.unavailable.items():
            field.check(name, getattr(self, name))
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
                "json": self.guided_json,
                "regex": self.guided_regex,
                "grammar": self.guided_grammar,
                "choice": self.guided_choice,
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


class CompletionRequest(_Request):
    """Body of POST /v1/completions."""

    unavailable: ClassVar[Mapping[str, Unavailable]] = {
        "suffix": Unavailable("", instead="no format for filling a gap is known of this model"),
    }

    prompt: Prompts = Field(
        description="A text, texts, token ids, or lists of token ids. The choices of prompt p are "
        "those with the indices from p · n on."
    )
    max_tokens: Int32 | None = Field(
        None, description="Most tokens to generate; default 16. With `echo`, 0: the prompt alone."
    )
    echo: bool | None = Field(
        None, description="Put the prompt before the completion: its text, and its `logprobs`."
    )
    best_of: int | None = Field(None, description="Only null or the value of `n` works.")
    logprobs: NumLogprobs | None = Field(
        None,
        description="Report the log-probability of every token, and of that many likeliest tokens "
        "in its place. Generated tokens have those of the distribution that they were drawn from, "
        "after penalties, biases, `temperature` and filters; tokens of an echoed prompt have the "
        "model's own.",
    )
    suffix: Text | None = Field(None, description="Only null works.")

    @property
    def is_prompt_only(self) -> bool:
        """Whether nothing is to be generated: the client wants to see what prompts are worth."""
        return self.max_tokens == 0 and bool(self.echo)

    def sampling_params(self) -> SamplingParams:
        """How to draw the tokens of choice 0; `is_prompt_only`: one, which is not shown.

        Raises:
            InvalidRequest: a value out of range, or one this version cannot honour.
        """
        if self.max_tokens == 0 and not self.echo:
            fix = "use an integer in [1, 2³¹); 0 goes with echo=true alone"
            raise InvalidRequest("max_tokens", 0, fix)
        if self.best_of is not None and self.best_of != self.num_choices:
            fix = f"candidates are not ranked here; ask for n={max(self.best_of, 1)} and choose"
            raise InvalidRequest("best_of", self.best_of, fix)
        return self._params(
            1 if self.is_prompt_only else self.max_tokens,
            self.logprobs,
            self.logprobs if self.echo else None,
        )


class ChatMessage(Closed):
    """One message. What a client sends back of an earlier answer is accepted where it is empty."""

    unavailable: ClassVar[Mapping[str, Unavailable]] = {
        "audio": Unavailable(),
        "function_call": Unavailable(),
        "refusal": Unavailable(),
        "tool_calls": Unavailable([]),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Content = Field(description="A text, or text parts, which become its lines.")
    name: Name | None = Field(None, description="Handed to the chat template.")

    annotations: list[Any] | None = Field(None, description="Accepted and ignored.")
    audio: dict[str, Any] | None = Field(None, description="Only null works.")
    function_call: dict[str, Any] | None = Field(None, description="Only null works.")
    refusal: Text | None = Field(None, description="Only null works.")
    tool_calls: list[Any] | None = Field(None, description="Only [] works.")


_NO_TOOLS = "describe the tools in a message and read the calls out of the text"


class ChatRequest(_Request):
    """Body of POST /v1/chat/completions."""

    unavailable: ClassVar[Mapping[str, Unavailable]] = {
        "audio": Unavailable(),
        "function_call": Unavailable("none", "auto", instead=_NO_TOOLS),
        "functions": Unavailable([], instead=_NO_TOOLS),
        "modalities": Unavailable(["text"]),
        "moderation": Unavailable(),
        "prediction": Unavailable(),
        "reasoning_effort": Unavailable(
            "none", instead="a template that knows effort takes it in chat_template_kwargs"
        ),
        "tool_choice": Unavailable("none", "auto", instead=_NO_TOOLS),
        "tools": Unavailable([], instead=_NO_TOOLS),
        "verbosity": Unavailable("medium"),
        "web_search_options": Unavailable(),
    }

    messages: list[ChatMessage] = Field(
        min_length=1,
        max_length=fields.MAX_MESSAGES,
        fail_fast=True,
        description="The conversation so far, oldest first.",
    )
    max_completion_tokens: Int32 | None = Field(
        None, description="Most tokens to generate; default: what the context has room for."
    )
    max_tokens: Int32 | None = Field(None, description="Older name of max_completion_tokens.")
    add_generation_prompt: bool | None = Field(
        None, description="Let the template begin the assistant's turn; default true."
    )
    continue_final_message: bool | None = Field(
        None, description="Leave the last message open, so that the answer goes on in it."
    )
    chat_template_kwargs: Variables = Field(
        None, description="More variables for the model's chat template."
    )
    logprobs: bool | None = Field(
        None,
        description="Report the log-probability of every token: that of the distribution that it "
        "was drawn from, after penalties, biases, `temperature` and filters.",
    )
    top_logprobs: NumLogprobs | None = Field(
        None, description="Report those of that many likeliest tokens too; only with `logprobs`."
    )

    parallel_tool_calls: bool | None = Field(None, description="Accepted and ignored.")
    prompt_cache_key: Label | None = Field(None, description="Accepted and ignored.")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="Accepted and ignored.")
    prompt_cache_retention: Label | None = Field(None, description="Accepted and ignored.")
    safety_identifier: Label | None = Field(None, description="Accepted and ignored.")
    service_tier: Label | None = Field(None, description="Accepted and ignored.")
    store: bool | None = Field(None, description="Accepted and ignored: nothing is stored.")

    audio: dict[str, Any] | None = Field(None, description="Only null works.")
    function_call: Text | dict[str, Any] | None = Field(
        None, description='Only "none" or "auto" works.'
    )
    functions: list[Any] | None = Field(None, description="Only [] works.")
    modalities: list[Any] | None = Field(None, description='Only ["text"] works.')
    moderation: dict[str, Any] | None = Field(None, description="Only null works.")
    prediction: dict[str, Any] | None = Field(None, description="Only null works.")
    reasoning_effort: Text | None = Field(None, description='Only "none" works.')
    tool_choice: Text | dict[str, Any] | None = Field(
        None, description='Only "none" or "auto" works.'
    )
    tools: list[Any] | None = Field(None, description="Only [] works.")
    verbosity: Text | None = Field(None, description='Only "medium" works.')
    web_search_options: dict[str, Any] | None = Field(None, description="Only null works.")

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value."""
        if self.max_tokens is None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def generation_prompt(self) -> bool:
        """Return whether the template begins the assistant's turn."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt

    def sampling_params(self) -> SamplingParams:
        """How to draw the tokens of choice 0; `max_tokens` is a default where `limit` is None.

        Raises:
            InvalidRequest: a value out of range, or one this version cannot honour.
        """
        for index, message in enumerate(self.messages):
            for name, field in message.unavailable.items():
                field.check(f"messages.{index}.{name}", getattr(message, name))
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            fix = "max_completion_tokens is its newer name; give one of them"
            raise InvalidRequest("max_tokens", self.max_tokens, fix)
        if self.add_generation_prompt and self.continue_final_message:
            fix = "an open last message leaves no room for add_generation_prompt; use one of them"
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


def _known_fields(request: type[BaseModel]) -> list[str]:
    known = list(request.model_fields)
    for section, model in _NESTED.items():
        if section in request.model_fields:
            known += [f"{section}.{name}" for name in model.model_fields]
    return known


_KNOWN_FIELDS: Mapping[type[BaseModel], list[str]] = {
    request: _known_fields(request) for request in (CompletionRequest, ChatRequest)
}


def invalid_body(
    errors: Sequence[Mapping[str, object]], request: type[BaseModel] = CompletionRequest
) -> ApiError:
    """400 for the first of FastAPI's validation errors of a `request`, naming the field.

    errors: dictionaries with `type`, `loc` (beginning with "body"), `msg`, as pydantic makes them.
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
        return ApiError(400, unknown_key(field, _KNOWN_FIELDS[request]), param=field)
    return ApiError(400, f"{field}: {message[:1].lower()}{message[1:]}", param=field)


def _json_problem(error: Mapping[str, object]) -> str:
    context = error.get("ctx")
    return str(context.get("error")) if isinstance(context, dict) else str(error["msg"])
