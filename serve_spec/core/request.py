"""Requests and their outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import Grammar, structured_grammar
from serve_spec.core.stats import SpeculationStats

Prompt: TypeAlias = str | list[int]
"""A text, or token ids."""

MAX_OUTPUTS = 128
"""Most texts of one prompt, as in the OpenAI API."""

MAX_LOGPROBS = 20
"""Most alternatives a request may ask for, as in the OpenAI API and vLLM."""


class TokenLogprob(NamedTuple):
    """A token, its natural log-probability, and the likeliest tokens at its position.

    `rank` is 1 for the likeliest token; ties rank by token id. `top` holds (token id,
    log-probability), likeliest first: as many as requested, or as the filters leave.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class FinishReason(StrEnum):
    """Why a text ended, as in the OpenAI API; `abort`: cancelled."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class RequestOutputKind(Enum):
    """What each output of an `AsyncLLM` holds, as in vLLM.

    CUMULATIVE: everything so far; DELTA: what is new; FINAL_ONLY: one output, at the end.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams(dict[str, Any]):
    """Keys of `SamplingParams.structured_outputs`, written as in vLLM: one of json, json_object,
    regex, grammar, choice."""


@dataclass(frozen=True)
class SpeculativeOptions:
    """Speculation of one request: switch it off, or cap its depth.

    lists_rounds: whether its `SpeculationStats` lists every round.
    """

    enabled: bool = True
    max_steps: int | None = None
    lists_rounds: bool = False

    def __post_init__(self) -> None:
        names = self.__dataclass_fields__
        _check_types("speculative.", {name: getattr(self, name) for name in names})
        if self.max_steps is not None and self.max_steps < 0:
            raise InvalidRequest("speculative.max_steps", self.max_steps, "use an integer ≥ 0")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, named as in the OpenAI API and vLLM.

    `temperature=0` is greedy, and so is any value below 1e-5. The filters act jointly on the
    tempered distribution: a token survives if it is among the `top_k` likeliest, inside the
    smallest set of mass `top_p`, and at least `min_p` times as likely as the likeliest. `seed`
    fixes the text; without one a random seed is drawn on arrival.

    Before that, logits are edited, in this order. `logit_bias` is added to the logits of its token
    ids. `repetition_penalty` divides the positive and multiplies the negative logits of every token
    that is in the prompt or was generated; `frequency_penalty` is subtracted once for each time a
    token was generated, `presence_penalty` once if it was at all. Then tokens outside
    `allowed_token_ids` (None: all) and inside `bad_token_ids` are masked. Until `min_tokens` are
    generated, tokens that end the text (`stop_token_ids`, and end-of-text tokens, also with
    `ignore_eos`) are masked, too, and `stop` strings do not end it.

    A `grammar` masks last. A complete text ends, even with `ignore_eos`. If the other masks leave
    none of the tokens that the grammar allows, the grammar wins: the text may end before
    `min_tokens`, and bad tokens may be drawn.

    `logprobs` asks for the log-probabilities of every generated token and of that many likeliest
    ones (0: of the generated token alone; None: none). They are those of the distribution the token
    was drawn from: edited, tempered, filtered and normalised; for greedy requests, the softmax of
    the edited logits. This is vLLM's `processed_logprobs`. `prompt_logprobs` asks for those of the
    prompt's tokens: the model's own, whatever the parameters; the first token has none.

    `bad_words` are texts, or sequences of token ids, of which the last token is never drawn after
    the others; a text is banned at the start of a word and within one. The text includes the stop
    string or token that ends it with `include_stop_str_in_output`, and the names of special tokens
    without `skip_special_tokens`; then `spaces_between_special_tokens` keeps the spaces that some
    tokenizers write between added tokens.

    `priority` orders waiting requests, lower first; equal ones are served in order of arrival. If
    pages run out, the least urgent and youngest running request is preempted.
    Requests share cached prefixes only with those of the same `cache_salt`.

    The rest is for Python. `n` texts are made of a prompt; the seeds of all but the first follow
    from `seed`. `structured_outputs` (`{"json": schema}`; see `StructuredOutputsParams`) becomes
    the `grammar`. Of a prompt the last `truncate_prompt_tokens` tokens are kept (-1: as many as
    fit beside `max_tokens`). Without `detokenize` there are tokens and no text. `output_kind`: see
    `RequestOutputKind`.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_token_ids: Sequence[int] = ()
    bad_words: Sequence[str | Sequence[int]] = ()
    min_tokens: int = 0
    grammar: Grammar | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    speculative: SpeculativeOptions = field(default_factory=SpeculativeOptions)
    n: int = 1
    structured_outputs: Mapping[str, Any] | None = field(default=None, hash=False)
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        _check_types("", {name: getattr(self, name) for name in self.__dataclass_fields__})
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        for name in ("stop_token_ids", "bad_token_ids", "allowed_token_ids"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        words = tuple(word if isinstance(word, str) else tuple(word) for word in self.bad_words)
        object.__setattr__(self, "bad_words", words)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        largest = 2**31 - 1
        for name, ok, fix in (
            ("max_tokens", 1 <= self.max_tokens <= largest, "use an integer in [1, 2³¹)"),
            ("temperature", _in_range(self.temperature, 0, 100), "use a number in [0, 100]"),
            ("top_k", -1 <= self.top_k <= largest, "use an integer in [1, 2³¹), or -1: no limit"),
            ("top_p", _in_range(self.top_p, 0, 1) and self.top_p > 0, "use a number in (0, 1]"),
            ("min_p", _in_range(self.min_p, 0, 1), "use a number in [0, 1]"),
            ("frequency_penalty", _in_range(self.frequency_penalty, -2, 2), _PENALTY),
            ("presence_penalty", _in_range(self.presence_penalty, -2, 2), _PENALTY),
            # Scores far beyond those of a model would leave the range of float32.
            ("repetition_penalty", _in_range(self.repetition_penalty, 0.01, 100), _REPETITION),
            ("logit_bias", all(_in_range(b, -100, 100) for b in self.logit_bias.values()), _BIAS),
            ("allowed_token_ids", self.allowed_token_ids != (), "name at least one, or None: all"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, _MIN_TOKENS),
            ("stop", all(self.stop), "a stop string must not be empty"),
            ("bad_words", all(self.bad_words), "a word must not be empty"),
            ("priority", -(2**63) <= self.priority < 2**63, "use an integer in [-2⁶³, 2⁶³)"),
            ("cache_salt", self.cache_salt != "", "give a text that is not empty, or None"),
            ("logprobs", _is_count(self.logprobs), _COUNT),
            ("prompt_logprobs", _is_count(self.prompt_logprobs), _COUNT),
            ("n", 1 <= self.n <= MAX_OUTPUTS, f"use an integer in [1, {MAX_OUTPUTS}]"),
            ("truncate_prompt_tokens", self.truncate_prompt_tokens in (None, -1)
                or self.truncate_prompt_tokens > 0, _TRUNCATE),
            ("detokenize", self.detokenize or not self.stop, "stop strings need the text"),
        ):  # fmt: skip
            if not ok:
                raise InvalidRequest(name, _shown(getattr(self, name)), fix)
        if self.structured_outputs is not None:
            if self.grammar is not None:
                fix = "conflicts with grammar; give only one of them"
                raise InvalidRequest("structured_outputs", _shown(self.structured_outputs), fix)
            object.__setattr__(self, "grammar", structured_grammar(self.structured_outputs))
            object.__setattr__(self, "structured_outputs", None)

    def each(self) -> list[SamplingParams]:
        """Return the parameters of each of the `n` texts."""
        if self.n == 1:
            return [self]
        seeds = [
            None if self.seed is None else choice_seed(self.seed, index) for index in range(self.n)
        ]
        wanted = self.prompt_logprobs, *[None] * (self.n - 1)  # the same for all texts
        return [
            replace(self, n=1, seed=seed, prompt_logprobs=count)
            for seed, count in zip(seeds, wanted, strict=True)
        ]

    @cached_property
    def edits_scores(self) -> bool:
        """Return whether the model's logits are edited before a draw."""
        is_biased = bool(self.logit_bias or self.bad_token_ids or self.min_tokens)
        return is_biased or self.allowed_token_ids is not None or self.counts_tokens

    @property
    def counts_tokens(self) -> bool:
        """Return whether there is a penalty, which depends on the tokens before a draw."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )

    @property
    def masks_text(self) -> bool:
        """Return whether the tokens that may be drawn depend on the text before."""
        return self.grammar is not None or bool(self.bad_words)

    @property
    def is_greedy(self) -> bool:
        """Return whether every draw takes the likeliest token."""
        return self.temperature < 1e-5

    @property
    def filters(self) -> bool:
        """Return whether any of top-k, top-p, min-p can remove a token."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of text `index`, which does not depend on `n`; text 0 has the request's.

    The others have the first 63 bits of BLAKE2b-64 over "SEED INDEX" in decimal.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


_PENALTY = "use a number in [-2, 2]"
_REPETITION = "use a number in [0.01, 100]; 1 changes nothing"
_BIAS = "use numbers in [-100, 100]; bad_token_ids rules tokens out"
_MIN_TOKENS = "use an integer in [0, max_tokens]"
_TRUNCATE = "use an integer ≥ 1, -1 (as many as fit), or None: refuse prompts that are too long"
_MAX_SHOWN = 8
_COUNT = f"use an integer in [0, {MAX_LOGPROBS}], or None: none"


def _check_types(prefix: str, values: dict[str, object]) -> None:
    for name, value in values.items():
        is_right, wanted = _TYPES[name]
        if not is_right(value):
            raise InvalidRequest(prefix + name, value, f"use {wanted}")


def _is(*types: type) -> Callable[[object], bool]:
    """Return a check of a value's type. A bool is no integer."""
    return lambda value: isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _are(item: type) -> Callable[[object], bool]:
    return lambda value: (
        isinstance(value, list | tuple) and all(type(each) is item for each in value)
    )


def _is_bias(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        type(token) is int and type(bias) in (int, float) for token, bias in value.items()
    )


def _are_words(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(word, str) or _are(int)(word) for word in value
    )


_SWITCH = _is(bool), "True or False"
_INTEGER, _NUMBER = (_is(int), "an integer"), (_is(int, float), "a number")
_MAYBE_INTEGER = _is(int, type(None)), "an integer or None"
_TYPES: dict[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("max_tokens", "top_k", "min_tokens", "priority", "n"), _INTEGER),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), _NUMBER),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), _NUMBER),
    **dict.fromkeys(("seed", "logprobs", "prompt_logprobs", "max_steps"), _MAYBE_INTEGER),
    "truncate_prompt_tokens": _MAYBE_INTEGER,
    **dict.fromkeys(
        ("ignore_eos", "skip_special_tokens", "enabled", "detokenize", "lists_rounds"), _SWITCH
    ),
    **dict.fromkeys(("spaces_between_special_tokens", "include_stop_str_in_output"), _SWITCH),
    **dict.fromkeys(("stop_token_ids", "bad_token_ids"), (_are(int), "a list of int")),
    "allowed_token_ids": (lambda ids: ids is None or _are(int)(ids), "a list of int"),
    "stop": (lambda texts: isinstance(texts, str) or _are(str)(texts), "a list of str"),
    "logit_bias": (_is_bias, "a mapping of token id to number"),
    "bad_words": (_are_words, "a list of texts or of lists of token ids"),
    "grammar": (_is(Grammar, type(None)), "a Grammar or None"),
    "cache_salt": (_is(str, type(None)), "a text or None"),
    "structured_outputs": (_is(Mapping, type(None)), "a mapping or None"),
    "output_kind": (_is(RequestOutputKind), "a RequestOutputKind"),
    "speculative": (_is(SpeculativeOptions), "a SpeculativeOptions"),
}


def _shown(value: object) -> object:
    """Return a value for an error message; of a long mapping only its size."""
    is_long = isinstance(value, Mapping) and len(value) > _MAX_SHOWN
    return f"<{len(value)} keys>" if is_long else value  # type: ignore[arg-type]


def _is_count(value: int | None) -> bool:
    return value is None or 0 <= value <= MAX_LOGPROBS


def _in_range(value: float, low: float, high: float) -> bool:
    """Return whether low ≤ value ≤ high; False for NaN."""
    return low <= value <= high


class TokenDelta(NamedTuple):
    """What one step adds to one request: new tokens and text. A tuple, because hundreds are made.

    Text is held back while a character or a stop string is incomplete, so `text` may be empty.
    `finish_reason` is set on the last delta only, `num_cached_tokens` (prompt tokens taken from the
    prefix cache) and `prefill_s` (from admission to the first token) on the first. `logprobs` are
    aligned with `token_ids`, and `prompt_logprobs`, on the first delta only, with the prompt, whose
    first token has none; both are None unless wanted.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    speculation: SpeculationStats | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached_tokens: int = 0
    prefill_s: float = 0.0


class Logprob(NamedTuple):
    """The log-probability of a token, its rank (1: the likeliest) and its text, as in vLLM."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One text of a prompt, named as in vLLM.

    `logprobs` has, for each token, a `Logprob` by token id: its own and those of the likeliest
    tokens; `token_logprobs` has them as the engine reports them. `cumulative_logprob` is the sum
    over the tokens. All are None unless wanted. `finish_reason`: None before the end.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    speculation: SpeculationStats
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    token_logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Return the sum of the tokens' log-probabilities; None unless wanted."""
        found = self.token_logprobs
        return None if found is None else sum(token.logprob for token in found)

    def finished(self) -> bool:
        """Return whether the text has ended."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """The texts of a prompt: `outputs`, of which the properties show the first.

    `prompt`: None if it was given as token ids. `num_cached_tokens`: prompt tokens taken from the
    prefix cache. `prompt_logprobs` are aligned with `prompt_token_ids`, whose first has none; None
    unless wanted.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Return whether all texts have ended."""
        return all(output.finished() for output in self.outputs)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the tokens of the first text."""
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        """Return the first text."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        """Return why the first text ended; None before its end."""
        return self.outputs[0].finish_reason

    @property
    def speculation(self) -> SpeculationStats:
        """Return the speculation of the first text, complete once it has ended."""
        return self.outputs[0].speculation

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Return the log-probabilities of the first text's tokens; None unless wanted."""
        return self.outputs[0].token_logprobs
