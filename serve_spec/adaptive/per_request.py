"""Strategy `per_request`: every sequence follows its own acceptance, blind to cost."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from serve_spec.adaptive.policy import Reason
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, RoundSteps

DEFAULT_MAX_STEPS = 8
FIRST_STEPS = 5


class AdaptiveSpeculator:
    """One sequence's number of steps, moved by the share of all its drafts that were accepted.

    After each verification: above 0.85 one step more, below 0.55 one less, within the bounds.
    """

    def __init__(
        self, initial_steps: int = FIRST_STEPS, min_steps: int = 1, max_steps: int = 8
    ) -> None:
        if min_steps < 1:
            fix = "use an integer ≥ 1: a sequence that drafts nothing never learns to draft again"
            raise ValueError(f"min_steps={min_steps}: {fix}")
        if max_steps < min_steps:
            raise ValueError(f"max_steps={max_steps}: use at least min_steps={min_steps}")
        if not min_steps <= initial_steps <= max_steps:
            raise ValueError(f"initial_steps={initial_steps}: must lie in {min_steps}..{max_steps}")
        self.min_steps, self.max_steps, self.num_steps = min_steps, max_steps, initial_steps
        self.num_draft_tokens = self.num_correct_drafts = 0

    def update(self, num_draft_tokens: int, num_correct_drafts: int) -> bool:
        """Learn from the drafts of one verification and return whether `num_steps` changed.

        Raises:
            ValueError: drafts outside 0..max_steps, or more kept than drafted; nothing was counted.
        """
        drafts, correct = num_draft_tokens, num_correct_drafts
        if not 0 <= drafts <= self.max_steps:
            fix = f"must lie in 0..{self.max_steps}, the drafts verified in one round"
            raise ValueError(f"num_draft_tokens={drafts}: {fix}")
        if not 0 <= correct <= drafts:
            fix = f"must lie in 0..{drafts}, the drafts, without the final token"
            raise ValueError(f"num_correct_drafts={correct}: {fix}")
        if not drafts:
            return False
        self.num_draft_tokens += drafts
        self.num_correct_drafts += correct
        rate, before = self.num_correct_drafts / self.num_draft_tokens, self.num_steps
        if rate > 0.85:
            self.num_steps = min(before + 1, self.max_steps)
        elif rate < 0.55:
            self.num_steps = max(before - 1, self.min_steps)
        return self.num_steps != before


class PerRequestPolicy:
    """One `AdaptiveSpeculator` per request; it lives as long as the request is in the batch."""

    last_reason = Reason.STEADY

    def __init__(self, max_steps: int = DEFAULT_MAX_STEPS, tree: DraftShape | None = None) -> None:
        """With a `tree`, of at most `max_steps` levels, each row drafts its own levels of it."""
        most = max_steps if tree is None else tree.depth
        chains = tuple(map(DraftShape.chain, range(1, most + 1)))
        self.shapes = chains if tree is None else (*chains, tree)
        self._tree = tree
        fresh = partial(AdaptiveSpeculator, min(FIRST_STEPS, most), max_steps=most)
        self._speculators: defaultdict[str, AdaptiveSpeculator] = defaultdict(fresh)

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return each row's own number of steps; the chain is as deep as the largest of them."""
        row_steps = [self._speculators[request_id].num_steps for request_id in batch.request_ids]
        return RoundSteps(self._tree or DraftShape.chain(max(row_steps)), row_steps)

    def observe(self, record: StepRecord) -> None:
        """Tell each sequence what became of the model's drafts; without them it learns nothing."""
        for request_id, steps, correct in zip(*record.model_drafts[:3], strict=True):
            if steps:
                self._speculators[request_id].update(steps, correct)

    def forget(self, request_id: str) -> None:
        """Drop the request's history."""
        self._speculators.pop(request_id, None)

    def snapshot(self) -> dict[str, object]:
        """Return how many requests are at which number of steps."""
        # A copy first: the engine's thread may add a request meanwhile.
        steps = [each.num_steps for each in list(self._speculators.values())]
        counts = {str(k): steps.count(k) for k in sorted(set(steps))}
        return {"strategy": "per_request", "slots": {}, "requests_by_num_steps": counts}
