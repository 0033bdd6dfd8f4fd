"""Input and answer of a speculation policy. A round is one draft-verify step of a batch.

Columns hold one value per decoding request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from serve_spec.core.draft import DraftShape

Calibration: TypeAlias = tuple[tuple[tuple[float, float], ...], ...]
"""From log probabilities to acceptance, see `ops.admission`: (weight, bias) by kind and place.

Kinds: model drafts of `GREEDY` and of `SAMPLED` requests, n-gram drafts (`FROM_NGRAM`) and grammar
drafts (`FROM_GRAMMAR`). A position past the end has the last pair.
"""

GREEDY, SAMPLED, FROM_NGRAM, FROM_GRAMMAR = range(4)

AS_DRAWN: Calibration = (((1.0, 0.0),),) * 4
"""A draft's probability of acceptance is the one it was drawn with."""


class Reason(StrEnum):
    """Why a shape was chosen, or a change withheld. The words `/server_info` and metrics use.

    `adaptive.reasons` has their meanings.
    """

    STATIC = "static"
    WARM_UP = "warm-up"
    STEADY = "steady"
    GAIN = "gain"
    LOSS = "loss"
    PROBE = "probe"
    DWELL = "dwell"
    BACK_OFF = "back-off"
    RANGE = "range"
    KV = "kv"
    LIMIT = "limit"
    BASELINE = "baseline"
    GUARD = "guard"
    FALLBACK = "fallback"
    RECONFIGURED = "reconfigured"


class PendingPrompt(NamedTuple):
    """A prompt whose tokens from position `start` on are not computed: `num_tokens` of them."""

    start: int
    num_tokens: int

    @property
    def pairs(self) -> int:
        """Return the pairs of query and key that attention computes for these tokens."""
        return self.num_tokens * self.start + self.num_tokens * (self.num_tokens + 1) // 2


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The decoding requests of the next step. Columns, because a policy reads hundreds of requests
    in a few microseconds.
    """

    request_ids: Sequence[str]
    max_steps: Sequence[int]
    """Most drafts each request can use: its own limit, and one less than its remaining tokens."""
    num_tokens: int
    """Context tokens of all requests together."""
    num_sampled: int
    """Requests with temperature > 0: each of their draws costs noise."""
    max_draft_tokens: int
    """Most drafts of the whole step, by token budget and free pages."""
    num_missing_entries: Sequence[int] = ()
    """Draft KV entries each request lacks and needs before it drafts: those of one step, or all
    since its prompt began. Empty without a draft model."""
    num_remaining: Sequence[int] = ()
    """Most tokens each request may still emit; empty if unknown."""
    prompts: Sequence[PendingPrompt] = ()
    """Sequences in prefill, in the order in which their tokens are computed: the batch will soon be
    larger by so many."""
    max_prompt_tokens: int = 0
    """Most prompt tokens of the step, if it drafts nothing."""
    ngram_steps: Sequence[int] = ()
    """N-gram drafts of each request, which it may verify instead of a model's; empty if there is
    only one source of drafts."""
    grammar_steps: Sequence[int] = ()
    """Grammar drafts of each request, which it verifies before any others; empty: none."""

    @property
    def size(self) -> int:
        """Decoding requests: the batch size."""
        return len(self.request_ids)

    @property
    def num_prompts(self) -> int:
        """Sequences in prefill."""
        return len(self.prompts)

    @property
    def context(self) -> float:
        """Mean context tokens per request."""
        return self.num_tokens / len(self.request_ids) if self.request_ids else 0.0


@dataclass(frozen=True, slots=True)
class RoundNotes:
    """A policy's notes on its answer, for metrics and for itself."""

    is_probe: bool = False
    """Chosen to explore."""
    begins_plan: bool = False
    """First round of a plan: what planning took is part of its time."""
    predicted_ms: float | None = None
    """Predicted time of the step; None without a cost table."""
    slot: str | None = None
    """Batch-size slot of a policy that keeps an average per slot."""
    ema_accept_length: float | None = None
    """That average when the shape was chosen: correct drafts per request."""
    expected_drafts: float | None = None
    """Drafts of the whole step that were expected to be accepted; None if not predicted."""


NO_NOTES = RoundNotes()


@dataclass(frozen=True, slots=True)
class RoundSteps:
    """A policy's answer: the shape, and how many levels of it each request drafts (None: all).

    A request never drafts deeper than its `max_steps`. With n-gram drafts it verifies `ngram_steps`
    of them, whatever the shape (None: as many as it would draft otherwise; 0: a model drafts).
    With grammar drafts it verifies those first, at most `grammar_steps` (None: all), whatever the
    rest. They are levels of the shape: a model drafts the others, if there are any.
    """

    shape: DraftShape
    steps_per_req: Sequence[int] | None = None
    notes: RoundNotes = field(default=NO_NOTES, compare=False)
    ngram_steps: Sequence[int] | None = None
    budget: int | None = None
    """Most drafts of the whole step that the target verifies, beside grammar drafts: those
    likeliest to be accepted. None: all that were drafted."""
    grammar_steps: int | None = None
    grammar_room: int | None = None
    """Most grammar drafts behind a model's; None: as many as `grammar_steps`."""
    calibration: Calibration = field(default=AS_DRAWN, compare=False)
    """Turns a draft's log probability into its probability of acceptance."""
    prompt_tokens: int | None = None
    """Most prompt tokens of the step, of `DecodeBatch.max_prompt_tokens`. None: the controller
    chooses."""
