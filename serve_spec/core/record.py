"""Figures of a finished step: `ScheduledBatch` -> `BatchResult` -> `StepRecord`.

The engine makes one record per step. The policy learns from it, counters and metrics add it up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.core.round import NO_NOTES, RoundNotes


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Milliseconds of a step as measured; a broken clock gives NaN or negative times."""

    draft_ms: float
    verify_ms: float
    step_ms: float
    """The whole step, with the host's part."""
    idle_ms: float = 0.0
    """Time the device was idle before the step; 0 if unknown."""


class DraftColumns(NamedTuple):
    """Drafts per request in a step of one shape, and how many of them the target accepted.

    first_per_req: see `StepRecord`.
    """

    request_ids: Sequence[str]
    steps_per_req: Sequence[int]
    correct_per_req: Sequence[int]
    shape: DraftShape = PLAIN
    first_per_req: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Figures of a finished step.

    The columns from `request_ids` to `is_ngram` hold the decoding requests that continue after
    the step, because acceptance past a stop means nothing. `accept_lengths` and the sums are over
    all decoding requests. Requests that ended while the step was in flight count in
    `num_planned_seqs` and `num_planned_drafts` only.
    """

    shape: DraftShape
    """What was drafted; the policy may have switched since."""
    request_ids: Sequence[str] = ()
    steps_per_req: Sequence[int] = ()
    """Drafts verified of each, after grammar drafts that were all accepted; of trees, levels."""
    correct_per_req: Sequence[int] = ()
    """Drafts the target accepted of each, before any stop."""
    drafted_per_req: Sequence[int] = ()
    """Drafts of each that could have been verified, had the budget allowed; of trees, drafts, not
    levels. Empty if all were verified."""
    first_per_req: Sequence[int] = ()
    """Grammar drafts before those of each: the place of its first draft in the other columns. Empty
    if none has any."""
    draft_logprobs: NDArray[np.float32] | None = field(default=None, compare=False)
    """[requests, N]: log probability of each draft by its place when drawn, see `ops.draw`; any
    number elsewhere. None if unknown."""
    budget: int | None = None
    """Most drafts of the step that could be verified; None: all."""
    is_sampled: Sequence[bool] = ()
    """Which of them sample; empty if unknown."""
    is_ngram: Sequence[bool] = ()
    """Which of them verified n-gram drafts; empty if there is only one source of drafts."""
    accept_lengths: Sequence[int] = ()
    """Tokens each decoding request emitted, without accepted grammar drafts."""
    num_draft_tokens: int = 0
    """Drafts verified, n-gram drafts included."""
    grammar_drafts: Sequence[tuple[int, int]] = ()
    """Of each run of grammar drafts that was reached: those verified, and those accepted. They are
    not in the other columns."""
    num_grammar_drafts: int = 0
    """Grammar drafts verified."""
    num_grammar_tokens: int = 0
    """Grammar drafts accepted and emitted."""
    num_following_tokens: int = 0
    """Those of them behind other drafts."""
    num_tokens: int = 0
    """Context tokens of all decoding requests, before the step."""
    num_stale_seqs: int = 0
    """Planned decoding requests that ended while the step was in flight,"""
    num_stale_drafts: int = 0
    """and their drafts."""
    num_sampled: int = 0
    """Planned decoding requests that sample."""
    num_drafting: int = 0
    """Those for which a model drafted, or, without a model, that drafted."""
    deepest: int = 0
    """Most drafts any of these drafted."""
    num_ngram_drafts: int = 0
    """N-gram drafts, if there is a draft model, too."""
    num_extend_tokens: int = 0
    """Draft KV entries made by draft extend: a few per request, or all of a prompt."""
    num_prefill_tokens: int = 0
    """Prompt tokens computed. If there are any, the times are not those of decoding alone."""
    num_prefill_pairs: int = 0
    """Pairs of query and key that attention computed for them."""
    num_ended: int = 0
    """Requests that ended in this step,"""
    num_ended_prompt_tokens: int = 0
    """the prompt tokens that were computed for them,"""
    num_ended_tokens: int = 0
    """and the tokens they emitted."""
    times: StepTimes | None = None
    """None if not measured."""
    follows: bool = False
    """It was launched ahead, so its time may be the host's time for the step before."""
    was_postponed: bool = False
    """It was not launched ahead, because its drafts depend on the result of the step before: the
    device's idle time is a cost of drafting, even if nothing was drafted."""
    notes: RoundNotes = NO_NOTES
    """What the policy expected."""
    switch_reason: str | None = None
    """Why the policy switched the shape for this step; None if it did not."""
    speedup: float | None = None
    """Measured speed of steps with drafts over plain steps near this batch size."""
    num_broken_drafts: int = 0
    """Sequences whose draft gave NaN or an unknown token; they stop drafting."""
    num_running_seqs: int = 0
    num_waiting_seqs: int = 0
    num_used_pages: int = 0
    num_pages: int = 0
    num_prefix_query_tokens: int = 0
    """Tokens of the requests admitted since the step before,"""
    num_prefix_hit_tokens: int = 0
    """and those of them that the cache held."""

    @property
    def batch_size(self) -> int:
        """Return the number of decoding requests."""
        return len(self.accept_lengths)

    @property
    def num_output_tokens(self) -> int:
        """Tokens they emitted."""
        return sum(self.accept_lengths) + self.num_grammar_tokens

    @property
    def num_correct_drafts(self) -> int:
        """Accepted and emitted drafts, without grammar drafts."""
        return sum(self.accept_lengths) - len(self.accept_lengths)

    @property
    def num_drafted_tokens(self) -> int:
        """Tokens that came by other drafts than grammar drafts at first, and bonus tokens."""
        return sum(self.accept_lengths) + self.num_following_tokens

    @property
    def num_planned_seqs(self) -> int:
        """Decoding requests that were computed."""
        return len(self.accept_lengths) + self.num_stale_seqs

    @property
    def num_planned_drafts(self) -> int:
        """Drafts that were computed."""
        return self.num_draft_tokens + self.num_grammar_drafts + self.num_stale_drafts

    @property
    def is_plain(self) -> bool:
        """Return whether the step neither drafted nor waited for drafts.

        Grammar drafts, which all steps may have, do not count.
        """
        return not (self.num_draft_tokens or self.num_stale_drafts or self.was_postponed)

    @property
    def draft_ms(self) -> float:
        """Time of drafting. This and the next three are 0 if not measured."""
        return 0.0 if self.times is None else _measured(self.times.draft_ms)

    @property
    def verify_ms(self) -> float:
        """Time of the target."""
        return 0.0 if self.times is None else _measured(self.times.verify_ms)

    @property
    def step_ms(self) -> float:
        """Time of the step."""
        return 0.0 if self.times is None else _measured(self.times.step_ms)

    @property
    def idle_ms(self) -> float:
        """Idle time of the device before the step."""
        return 0.0 if self.times is None else _measured(self.times.idle_ms)

    @property
    def decodes_only(self) -> bool:
        """Return whether the step was measured and computed no prompt tokens."""
        return self.batch_size > 0 and self.num_prefill_tokens == 0 and self.step_ms > 0

    @property
    def overhead_ratio(self) -> float:
        """Time of drafting over time of verification."""
        return self.draft_ms / self.verify_ms if self.draft_ms and self.verify_ms else 0.0

    @property
    def model_drafts(self) -> DraftColumns:
        """The columns of model drafts; requests with n-gram drafts count as without drafts."""
        if any(self.is_ngram):
            return self._drafts(self.shape, is_ngram=False)
        columns = self.request_ids, self.steps_per_req, self.correct_per_req
        return DraftColumns(*columns, self.shape, self.first_per_req)

    @property
    def ngram_drafts(self) -> DraftColumns:
        """The columns of n-gram drafts, as chains; other requests count as without drafts."""
        return self._drafts(PLAIN, is_ngram=True)

    def _drafts(self, shape: DraftShape, *, is_ngram: bool) -> DraftColumns:
        flags = self.is_ngram or [False] * len(self.steps_per_req)
        columns = zip(self.steps_per_req, self.correct_per_req, flags, strict=True)
        drafts = [(k, m) if flag == is_ngram else (0, 0) for k, m, flag in columns]
        steps, correct = [k for k, _ in drafts], [m for _, m in drafts]
        return DraftColumns(self.request_ids, steps, correct, shape, self.first_per_req)


def _measured(ms: float) -> float:
    """Return 0 for NaN, infinite and negative times, which would spoil every sum."""
    return ms if 0.0 <= ms < math.inf else 0.0
