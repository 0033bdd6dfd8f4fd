"""Speed of decoding while a batch is full: without prompts, and without its thinning end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, harmonic_mean

from serve_spec.core.record import StepRecord

SETTLE_ROUNDS = 2
"""The first full rounds of a batch are not counted: drafts catch up over the prompts there."""


@dataclass
class FullBatches:
    """Batches of one size that ran one after the other, each from its prompts to its last end.

    A batch that is refilled holds a request the longer the slower it is. So its speed is
    batch_size · H / T, with H the harmonic mean of the requests' tokens per round and T the mean
    time of a round; both over the rounds in which all requests decode and none has ended.
    """

    batch_size: int
    tokens_per_round: list[float] = field(default_factory=list)
    """Of every request."""
    round_ms: list[float] = field(default_factory=list)

    def add(self, rounds: Sequence[StepRecord]) -> None:
        """Adds the rounds of a batch that started together; of a smaller one, none counts."""
        full = [r for r in rounds if r.decodes_only and r.batch_size == self.batch_size]
        counted = full[SETTLE_ROUNDS:]
        # Nobody has left, so a request has the same place in every round.
        by_request = zip(*(r.accept_lengths for r in counted), strict=True)
        self.tokens_per_round += map(fmean, by_request)
        self.round_ms += (r.step_ms for r in counted)

    @property
    def tokens_per_second(self) -> float | None:
        """None if no round was counted."""
        if not self.round_ms:
            return None
        tokens = self.batch_size * harmonic_mean(self.tokens_per_round)
        return tokens / fmean(self.round_ms) * 1e3
