"""Schema of the fields that all generating endpoints share, and their meaning.

Unknown fields are accepted and named by `ignored_fields`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import Field

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import MAX_GRAMMAR_CHARS
from serve_spec.core.request import SamplingParams, SpeculativeOptions
from serve_spec.serving import fields
from serve_spec.serving.fields import (
    FEW,
    IGNORED,
    Biases,
    FewInts,
    FewTokenIds,
    FewWords,
    Int32,
    Int64,
    Label,
    Name,
    NumLogprobs,
    Salt,
    Stops,
    StrictFields,
    Text,
    grammar_of,
    refuse_unavailable,
)

MAX_CHOICES_PER_PROMPT = 128
_GRAMMAR_LIMIT = f"At most {MAX_GRAMMAR_CHARS} characters."


class StreamOptions(StrictFields):
    """`stream_options` of the OpenAI API."""

    include_usage: bool = Field(False, description="Send a last chunk that holds `usage`.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: every chunk holds the `usage` so far."
    )
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


class BaseRequest(StrictFields):
    """Fields of all generating endpoints. Null means the default, as in the OpenAI API."""

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
    bad_words: FewWords | None = Field(
        None, description="These texts are never generated, at the start of a word or within one."
    )
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
    seed: Int64 | None = Field(None, description="Makes the text reproducible; default: random.")
    stop: Stops = Field(
        None,
        description=f"One or up to {fields.MAX_STOPS} strings that end the completion and are not "
        "part of it.",
    )
    stop_token_ids: FewInts | None = Field(None, description="Token ids that end the completion.")
    ignore_eos: bool | None = Field(None, description="Generate past the end-of-text token.")
    include_stop_str_in_output: bool | None = Field(
        None, description="Keep the stop string or token that ends the text; default false."
    )
    no_stop_trim: bool | None = Field(
        None, description="SGLang's name of include_stop_str_in_output."
    )
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text; default true."
    )
    spaces_between_special_tokens: bool | None = Field(
        None,
        description="Without skip_special_tokens: keep the spaces that some tokenizers write "
        "between special tokens; default true.",
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Add the special tokens that the tokenizer puts around a text; default true for"
        " prompts, false for chats, whose template has them.",
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(
        None,
        description="Keep only the last so many tokens of the prompt; -1: as many as fit with "
        "`max_tokens`.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description='The side that truncate_prompt_tokens removes; default "left".'
    )
    prompt_logprobs: NumLogprobs | None = Field(
        None,
        description="Return the model's own log-probability of every prompt token and of this many "
        "most likely tokens; not with `stream`.",
    )
    return_token_ids: bool | None = Field(
        None, description="Return `prompt_token_ids` and the `token_ids` of every choice."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Name the tokens of `logprobs` by their id, as "token_id:5".'
    )
    priority: Int64 | None = Field(
        None,
        description="Lower is served first, and preempted last if memory is short; default 0.",
    )
    request_id: Name | None = Field(
        None, description="The last part of the answer's `id`; default: random."
    )
    cache_salt: Salt | None = Field(
        None, description="Prefixes are cached separately for every salt; default: none."
    )
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
    json_schema: Text | None = Field(None, description="SGLang's name of guided_json.")
    regex: Text | None = Field(None, description="SGLang's name of guided_regex.")
    ebnf: Text | None = Field(None, description="SGLang's name of guided_grammar.")
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
        count = room if self.truncate_prompt_tokens < 0 else self.truncate_prompt_tokens
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
        return SamplingParams(
            **given,
            grammar=grammar,
            logprobs=logprobs,
            speculative=options,
        )


# Request fields that are SamplingParams fields of the same name and meaning.
_SAMPLING_FIELDS = {field.name for field in dataclasses.fields(SamplingParams)} & set(
    BaseRequest.model_fields
) - {"speculative"}
