"""Request schemas of the OpenAI API.

Unsupported fields are accepted with their neutral values. Unknown ones are accepted and named by
`ignored_fields`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import MAX_GRAMMAR_CHARS
from serve_spec.core.request import SamplingParams, SpeculativeOptions
from serve_spec.serving.errors import ApiError
from serve_spec.serving.protocols import fields
from serve_spec.serving.protocols.fields import (
    FEW,
    IGNORED,
    Biases,
    Choices,
    Content,
    FewInts,
    FewTokenIds,
    FewWords,
    Int32,
    Int64,
    Label,
    Name,
    NumLogprobs,
    Prompts,
    Salt,
    Stops,
    StrictFields,
    Text,
    Unavailable,
    Variables,
    about,
    grammar_of,
    refuse_unavailable,
)
from serve_spec.serving.protocols.tools import Choice, Function, ToolCalls, Tools, offered

MAX_CHOICES_PER_PROMPT = 128
_MOST = f"At most {MAX_GRAMMAR_CHARS} characters."


class StreamOptions(StrictFields):
    """`stream_options` of the OpenAI API."""

    include_usage: bool = Field(False, description="Send a last chunk that holds `usage`.")
    continuous_usage_stats: bool | None = about("With include_usage: `usage` in every chunk.")
    include_obfuscation: Literal[False] | None = about("Only false: chunks are not padded.")


class SpeculativeRequest(StrictFields):
    """Speculative decoding options of this request."""

    enabled: bool = Field(True, description="false: plain decoding.")
    max_steps: Int32 | None = about("Maximum draft tokens per round; null: no limit.")


class ResponseFormat(StrictFields):
    """`response_format` of the OpenAI API."""

    type: Name = Field(description='"text", "json_object" or "json_schema".')
    json_schema: dict[str, Any] | None = about(
        'With type "json_schema": `name`, `schema`, `description`, `strict`.'
    )


class BaseRequest(StrictFields):
    """Fields of all generating endpoints. Null means the default, as in the OpenAI API."""

    model: Name | None = about("Served model name; optional.")
    temperature: float | None = about("Default 1; 0 is greedy.")
    top_p: float | None = about("Nucleus probability mass in (0, 1]; default 1.")
    top_k: Int32 | None = about("Keep the k most likely; -1 (default), 0: all.")
    min_p: float | None = about("Minimum probability relative to the top; default 0.")
    frequency_penalty: float | None = about(
        "Subtracted from a token's logit for each occurrence; in [-2, 2], default 0."
    )
    presence_penalty: float | None = about(
        "Subtracted once from the logits of generated tokens; in [-2, 2], default 0."
    )
    repetition_penalty: float | None = about(
        "Divides positive, multiplies negative logits of tokens so far; in [0.01, 100], default 1."
    )
    logit_bias: Biases = about(f"Added to logits by token id, up to ±{fields.MAX_BIAS}.")
    allowed_token_ids: FewTokenIds | None = about("Only these tokens are generated; default: all.")
    bad_token_ids: FewTokenIds | None = about("These tokens are never generated.")
    bad_words: FewWords | None = about(
        "Texts that are never generated, at the start of a word or within one."
    )
    min_tokens: Int32 | None = about("Minimum number of generated tokens; default 0.")
    n: int | None = about(
        "Choices per prompt, default 1. Seeds depend on `seed` and the index; choice 0 has `seed`.",
        ge=1,
        le=MAX_CHOICES_PER_PROMPT,
    )
    seed: Int64 | None = about("Makes the text reproducible; default: random.")
    stop: Stops = about(
        f"A string or up to {fields.MAX_STOPS} that end the completion and are not part of it."
    )
    stop_token_ids: FewInts | None = about("Token ids that end the completion.")
    ignore_eos: bool | None = about("Generate past the end-of-text token.")
    include_stop_str_in_output: bool | None = about("Keep the stop string or token; default false.")
    no_stop_trim: bool | None = about("SGLang's name of include_stop_str_in_output.")
    skip_special_tokens: bool | None = about("Leave special tokens out of the text; default true.")
    spaces_between_special_tokens: bool | None = about(
        "Keep spaces that some tokenizers write between shown special tokens; default true."
    )
    add_special_tokens: bool | None = about(
        "Add the special tokens that the tokenizer puts around a text; default true, chats: false."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = about(
        "Keep only the last N tokens of the prompt; -1: as many as fit with `max_tokens`."
    )
    truncation_side: Literal["left", "right"] | None = about(
        "The side that truncate_prompt_tokens removes; default left."
    )
    prompt_logprobs: NumLogprobs | None = about(
        "The model's own log-probabilities of prompt tokens and of this many most likely ones; not "
        "with `stream`."
    )
    return_token_ids: bool | None = about("Return `prompt_token_ids` and `token_ids`.")
    return_spec_tokens_details: bool | None = about("Return `sglext.spec_tokens_details`.")
    return_tokens_as_token_ids: bool | None = about('Name tokens of `logprobs` as "token_id:5".')
    priority: Int64 | None = about("Lower is served first and preempted last; default 0.")
    request_id: Name | None = about("The last part of the answer's `id`; default: random.")
    cache_salt: Salt | None = about("Prefixes are cached separately for every salt; default: none.")
    response_format: ResponseFormat | None = about("Required format of the text.")
    guided_json: dict[str, Any] | Text | None = about(f"The text is JSON of this schema. {_MOST}")
    guided_regex: Text | None = about(f"The whole text matches this regular expression. {_MOST}")
    guided_grammar: Text | None = about(f"Grammar of the text, Lark or GBNF. {_MOST}")
    guided_choice: Choices | None = about(f"The text is one of these. {_MOST}")
    json_schema: Text | None = about("SGLang's name of guided_json.")
    regex: Text | None = about("SGLang's name of guided_regex.")
    ebnf: Text | None = about("SGLang's name of guided_grammar.")
    structured_outputs: dict[str, Any] | None = about(
        f"An object with one of `json`, `json_object`, `regex`, `grammar`, `choice`. {_MOST}"
    )
    stream: bool | None = about("Send server-sent events.")
    stream_options: StreamOptions | None = about("Only with `stream`.")
    speculative: SpeculativeRequest | None = None
    user: Annotated[Label | None, IGNORED] = None
    metadata: Annotated[dict[Label, Label] | None, FEW, IGNORED] = None

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def num_candidates(self) -> int:
        """Choices per prompt that are generated; the best of them are returned."""
        return self.num_choices

    @property
    def changes_tokens(self) -> bool:
        """Whether the prompt's tokens are others than those of its text."""
        return self.add_special_tokens is not None or self.truncate_prompt_tokens is not None

    def kept(self, token_ids: list[int], room: int) -> list[int]:
        """Return the prompt's tokens after `truncate_prompt_tokens`; room: most that fit."""
        if self.truncate_prompt_tokens is None:
            return token_ids
        # One token is left, so that the error names a limit that fits no prompt at all.
        count = max(1, room) if self.truncate_prompt_tokens < 0 else self.truncate_prompt_tokens
        first = 0 if self.truncation_side == "right" else max(0, len(token_ids) - count)
        return token_ids[first : first + count]

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_continuous_usage(self) -> bool:
        """Whether every chunk of a stream holds `usage`."""
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)

    def _params(
        self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """Return the parameters of choice 0; None: the default, or no log-probabilities."""
        refuse_unavailable(self)
        if self.stream_options is not None and not self.stream:
            fix = "allowed only with stream=true"
            raise InvalidRequest("stream_options", self.stream_options.model_dump(), fix)
        given = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if max_tokens is not None:
            given["max_tokens"] = max_tokens
        if self.no_stop_trim:
            given["include_stop_str_in_output"] = True
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs", self.prompt_logprobs, "not with stream=true")
        if prompt_logprobs is not None:
            given["prompt_logprobs"] = prompt_logprobs
        form = self.response_format
        grammar = grammar_of(
            response_format=None if form is None else (form.type, form.json_schema),
            structured_outputs=self.structured_outputs,
            named={name: getattr(self, name) for name in fields.GRAMMAR_FIELDS},
        )
        speculative = self.speculative or SpeculativeRequest()
        options = SpeculativeOptions(speculative.enabled, speculative.max_steps)
        return SamplingParams(**given, grammar=grammar, logprobs=logprobs, speculative=options)


# Request fields that are SamplingParams fields of the same name and meaning.
_SAMPLING_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)} & set(
    BaseRequest.model_fields
) - {"speculative", "n", "structured_outputs", "truncate_prompt_tokens"}
"""Those that the router passes on as they are."""


class CompletionRequest(BaseRequest):
    """Body of POST /v1/completions."""

    prompt: Prompts = Field(
        description="A string, strings, token ids, or lists of token ids. Prompt p has the choices "
        "with the indices p · n to p · n + n - 1."
    )
    max_tokens: Int32 | None = about(
        "Maximum output tokens; default 16. 0 with `echo`: only the prompt."
    )
    echo: bool | None = about("Return the prompt, and its `logprobs`, before the completion.")
    best_of: int | None = about(
        "Generate this many choices and return the `n` most likely per token; not with `stream`.",
        ge=1,
        le=MAX_CHOICES_PER_PROMPT,
    )
    logprobs: NumLogprobs | None = about(
        "Return log-probabilities of every token and of this many most likely ones, after "
        "penalties, biases, `temperature` and filters; of an echoed prompt, the model's own."
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
    content: Content | None = about(
        "A string, or text parts, joined by line breaks; assistants may omit it."
    )
    name: Name | None = about("Passed to the chat template.")
    tool_calls: ToolCalls | None = about("Calls of an earlier answer.")
    tool_call_id: Name | None = about("The call that a tool's message answers.")
    reasoning_content: Text | None = about("Reasoning of an earlier answer.")
    reasoning: Text | None = about("Other name of reasoning_content.")

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
    max_completion_tokens: Int32 | None = about("Maximum output tokens; default: what fits.")
    max_tokens: Int32 | None = about("Old name of max_completion_tokens.")
    add_generation_prompt: bool | None = about("Begin the assistant's turn; default true.")
    continue_final_message: bool | None = about("Let the answer continue the last message.")
    chat_template_kwargs: Variables = about("Additional variables for the model's chat template.")
    logprobs: bool | None = about(
        "Return the log-probability of every output token, after penalties, biases, `temperature` "
        "and filters."
    )
    top_logprobs: NumLogprobs | None = about(
        "Also of this many most likely tokens; needs `logprobs`."
    )

    tools: Tools | None = about("Functions that the model may call.")
    tool_choice: Choice = about("Whether functions are called, and which; default auto.")
    parallel_tool_calls: bool | None = about("Return more than one call; default true.")
    reasoning_effort: Name | None = about(
        "Passed to the chat template; `none` also sets `enable_thinking` to false."
    )
    include_reasoning: bool | None = about("false: drop reasoning, as in vLLM.")
    separate_reasoning: bool | None = about("false: reasoning stays in `content`, as in SGLang.")
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
    def may_call_again(self) -> bool:
        """Whether the answer may have several calls."""
        names_one = self.tool_choice is not None and self.tool_choice.name is not None
        return self.parallel_tool_calls is not False and not names_one

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


def unknown_field(name: str, request: type[BaseModel]) -> ApiError:
    """Return 400: `router.strict_fields` refuses the unknown field of a `request`."""
    section, _, leaf = re.sub(r"\.\d+", "", name).rpartition(".")
    model = _NESTED.get(section) if section else request
    near = difflib.get_close_matches(leaf, model.model_fields if model else ())
    hint = f"; did you mean {section}{'.' if section else ''}{near[0]}?" if near else ""
    return ApiError(400, f"{name}: unknown field{hint}", param=name)
