"""The OpenAI completions API: what a request may say, and how a wrong one is refused.

The schema is closed: an unknown field is refused by name. Fields of the API that this version can
not honour are accepted at their neutral value only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from serve_spec.config.base import unknown_key
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import SamplingParams, SpeculativeOptions
from serve_spec.serving.errors import ApiError

# Request fields that are SamplingParams fields of the same name and meaning.
_SAMPLING_FIELDS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)
# Field -> the value besides null that asks for nothing.
_NEUTRAL: Mapping[str, object] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "logprobs": None,
    "n": 1,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "suffix": "",
}
_INT64 = 2**63


# Larger numbers do not fit into the engine's tensors.
Int32: TypeAlias = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class _Closed(BaseModel):
    """Unknown fields and coerced types (`"3"`, `true` for a number) are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class StreamOptions(_Closed):
    """`stream_options` of the OpenAI API."""

    include_usage: bool = Field(False, description="Send a last chunk that holds `usage`.")


class SpeculativeRequest(_Closed):
    """Speculation of this request; it changes speed, never the text."""

    enabled: bool = Field(True, description="false: plain decoding.")
    max_steps: Int32 | None = Field(None, description="Most drafts per round; null: no cap.")


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _is_prompt(value: object) -> bool:
    return isinstance(value, str) or (_is_token_ids(value) and bool(value))


def _one_prompt(value: object) -> object:
    """A text or one list of token ids; a list of exactly one of either is unwrapped."""
    if isinstance(value, list) and value and not _is_token_ids(value):
        if len(value) > 1 and all(_is_prompt(item) for item in value):
            raise ValueError(
                f"{len(value)} prompts in one request are not available; send one each"
            )
        value = value[0] if len(value) == 1 else None
    if not _is_prompt(value):
        raise ValueError("give a text or a non-empty list of token ids")
    return _unicode(value) if isinstance(value, str) else value


def _unicode(text: str) -> str:
    """JSON can spell half of a surrogate pair, which is no character and has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not a Unicode text: {error.reason}") from None
    return text


def _stops(value: object) -> object:
    if value is None:
        return None
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("give a text or a list of texts")
    return [_unicode(stop) for stop in stops]


class CompletionRequest(_Closed):
    """Body of POST /v1/completions. Null means the default, as everywhere in the OpenAI API."""

    prompt: Annotated[str | list[int], BeforeValidator(_one_prompt)] = Field(
        description="Text, or token ids."
    )
    model: str | None = Field(None, description="Served model name; may be left out.")
    max_tokens: Int32 | None = Field(None, description="Most tokens to generate; default 16.")
    temperature: float | None = Field(None, description="Default 1; 0 is greedy.")
    top_p: float | None = Field(None, description="Nucleus mass in (0, 1]; default 1.")
    top_k: Int32 | None = Field(None, description="Keep the k likeliest; -1 (default) or 0: all.")
    min_p: float | None = Field(None, description="Least share of the top probability; default 0.")
    seed: int | None = Field(
        None, ge=-_INT64, lt=_INT64, description="Fixes the text; default: a random seed."
    )
    stop: Annotated[list[str] | None, BeforeValidator(_stops)] = Field(
        None, description="Text or texts that end the completion; they are not part of it."
    )
    stop_token_ids: list[Int32] | None = Field(None, description="Token ids that end it.")
    ignore_eos: bool | None = Field(None, description="Generate past the end-of-text token.")
    stream: bool | None = Field(None, description="Send server-sent events.")
    stream_options: StreamOptions | None = None
    speculative: SpeculativeRequest | None = None
    user: str | None = Field(None, description="Accepted and ignored.")

    best_of: int | None = Field(None, description="Only 1 works.")
    echo: bool | None = Field(None, description="Only false works.")
    frequency_penalty: float | None = Field(None, description="Only 0 works.")
    logit_bias: dict[str, float] | None = Field(None, description="Only {} works.")
    logprobs: int | None = Field(None, description="Only null works.")
    n: int | None = Field(None, description="Only 1 works.")
    presence_penalty: float | None = Field(None, description="Only 0 works.")
    repetition_penalty: float | None = Field(None, description="Only 1 works.")
    suffix: str | None = Field(None, description="Only null works.")

    def sampling_params(self) -> SamplingParams:
        """How to draw the tokens.

        Raises:
            InvalidRequest: a value out of range, or one this version can not honour.
        """
        self._refuse_what_is_missing()
        given = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        speculative = self.speculative or SpeculativeRequest()
        options = SpeculativeOptions(speculative.enabled, speculative.max_steps)
        return SamplingParams(**given, speculative=options)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _refuse_what_is_missing(self) -> None:
        for name, neutral in _NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and value != neutral:
                shown = "null" if neutral is None else repr(neutral)
                raise InvalidRequest(
                    name, value, f"not available in this version; leave it out or use {shown}"
                )
        if self.stream_options is not None and not self.stream:
            fix = "allowed only with stream=true"
            raise InvalidRequest("stream_options", self.stream_options.model_dump(), fix)


_KNOWN_FIELDS = (
    *CompletionRequest.model_fields,
    *(f"stream_options.{name}" for name in StreamOptions.model_fields),
    *(f"speculative.{name}" for name in SpeculativeRequest.model_fields),
)


def invalid_body(errors: Sequence[Mapping[str, object]]) -> ApiError:
    """400 for the first of FastAPI's validation errors, naming the field.

    errors: dictionaries with `type`, `loc` (beginning with "body"), `msg`, as pydantic makes them.
    """
    error = errors[0]
    location = error["loc"]
    assert isinstance(location, tuple), "pydantic gives locations as tuples"
    place = [str(part) for part in location[1:]]
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {_json_problem(error)}")
    if not place:
        fix = "send one JSON object, with the header Content-Type: application/json"
        return ApiError(400, f"The body is not a JSON object: {fix}")
    field = ".".join(place)
    if error["type"] == "extra_forbidden":
        return ApiError(400, unknown_key(field, _KNOWN_FIELDS), param=field)
    return ApiError(400, f"{field}: {message[:1].lower()}{message[1:]}", param=field)


def _json_problem(error: Mapping[str, object]) -> str:
    context = error.get("ctx")
    return str(context.get("error")) if isinstance(context, dict) else str(error["msg"])
