"""Strategy `per_request`: every sequence follows its own acceptance, blind to cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import Any

from serve_spec.adaptive.policy import StepPolicy
from serve_spec.core.draft import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, Reason, RoundSteps

FIRST_STEPS = 5
"""Drafts of a sequence's first round,"""
MAX_STEPS = 8
"""and most drafts of any."""
RAISE_ABOVE = 0.85
"""Fraction of a sequence's drafts that were accepted, above which it drafts one more,"""
LOWER_BELOW = 0.55
"""and below which it drafts one less."""


class AdaptiveSpeculator:
    """One sequence's number of steps, moved by the accepted fraction of all its drafts."""

    def __init__(
        self, initial_steps: int = FIRST_STEPS, min_steps: int = 1, max_steps: int = MAX_STEPS
    ) -> None:
        if not 1 <= min_steps <= initial_steps <= max_steps:
            raise ValueError(f"{min_steps=}, {initial_steps=}, {max_steps=}: must ascend from 1")
        self.min_steps, self.max_steps, self.num_steps = min_steps, max_steps, initial_steps
        self.num_draft_tokens = self.num_correct_drafts = 0

    def update(self, num_draft_tokens: int, num_correct_drafts: int) -> bool:
        """Learn from one verification; return whether `num_steps` changed.

        Raises:
            ValueError: not 0 ≤ accepted ≤ drafts ≤ max_steps; nothing was counted.
        """
        if not 0 <= num_correct_drafts <= num_draft_tokens <= self.max_steps:
            given = f"{num_correct_drafts=}, {num_draft_tokens=}"
            raise ValueError(f"{given}: give 0 ≤ accepted ≤ drafts ≤ {self.max_steps}")
        if not num_draft_tokens:
            return False
        self.num_draft_tokens += num_draft_tokens
        self.num_correct_drafts += num_correct_drafts
        rate, before = self.num_correct_drafts / self.num_draft_tokens, self.num_steps
        if rate > RAISE_ABOVE:
            self.num_steps = min(before + 1, self.max_steps)
        elif rate < LOWER_BELOW:
            self.num_steps = max(before - 1, self.min_steps)
        return self.num_steps != before


class PerRequestPolicy(StepPolicy):
    """One `AdaptiveSpeculator` per request; it lives as long as the request is in the batch."""

    last_reason = Reason.STEADY

    def __init__(self, largest: DraftShape) -> None:
        """Draft chains up to `largest`, or if it is a tree, its first levels."""
        self._largest, most = largest, largest.depth
        chains = map(DraftShape.chain, range(1, most + 1))
        self.shapes = tuple(dict.fromkeys([*chains, largest]))
        fresh = partial(AdaptiveSpeculator, min(FIRST_STEPS, most), max_steps=most)
        self._speculators: defaultdict[str, AdaptiveSpeculator] = defaultdict(fresh)

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return each request's number of steps; the chain is as deep as the largest."""
        steps = [self._speculators[request_id].num_steps for request_id in batch.request_ids]
        largest = self._largest
        return RoundSteps(DraftShape.chain(max(steps)) if largest.is_chain else largest, steps)

    def observe(self, record: StepRecord) -> None:
        """Tell each sequence what became of the model's drafts."""
        for request_id, steps, correct in zip(*record.model_drafts[:3], strict=True):
            if steps:
                self._speculators[request_id].update(steps, correct)

    def forget(self, request_id: str) -> None:
        """Drop the request's history."""
        self._speculators.pop(request_id, None)

    def snapshot(self) -> dict[str, Any]:
        """Return how many requests are at which number of steps."""
        # A copy first: the engine's thread may add a request meanwhile.
        steps = Counter(each.num_steps for each in list(self._speculators.values()))
        return {"strategy": "per_request", "requests_by_num_steps": dict(sorted(steps.items()))}
