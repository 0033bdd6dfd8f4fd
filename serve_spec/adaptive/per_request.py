"""Strategy `per_request`: every sequence follows its own acceptance, blind to cost."""

from __future__ import annotations

from serve_spec.adaptive.policy import Reason
from serve_spec.adaptive.speculator import INITIAL_STEPS, AdaptiveSpeculator
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, RoundSteps

DEFAULT_MAX_STEPS = 8


class PerRequestPolicy:
    """One `AdaptiveSpeculator` per request; it lives as long as the request is in the batch."""

    last_reason = Reason.STEADY

    def __init__(self, max_steps: int = DEFAULT_MAX_STEPS, tree: DraftShape | None = None) -> None:
        """With a `tree`, of at most `max_steps` levels, each row drafts its own levels of it."""
        self.max_steps = max_steps if tree is None else tree.depth
        self._tree = tree
        chains = tuple(map(DraftShape.chain, range(1, self.max_steps + 1)))
        self.shapes = chains if tree is None else (*chains, tree)
        self._speculators: dict[str, AdaptiveSpeculator] = {}

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return each row's own number of steps; the chain is as deep as the largest of them."""
        row_steps = [
            (self._speculators.get(request_id) or self._new(request_id)).num_steps
            for request_id in batch.request_ids
        ]
        return RoundSteps(self._tree or DraftShape.chain(max(row_steps)), row_steps)

    def observe(self, record: StepRecord) -> None:
        """Tells each sequence what became of the model's drafts; without them it learns nothing."""
        request_ids, row_steps, row_correct_drafts, _ = record.model_drafts
        columns = zip(request_ids, row_steps, row_correct_drafts, strict=True)
        for request_id, steps, correct in columns:
            if steps:
                speculator = self._speculators.get(request_id) or self._new(request_id)
                speculator.update(steps, correct)

    def forget(self, request_id: str) -> None:
        """Drops the request's history."""
        self._speculators.pop(request_id, None)

    def snapshot(self) -> dict[str, object]:
        """How many requests sit at which number of steps."""
        # A copy first: the engine's thread may add a request meanwhile.
        steps = [speculator.num_steps for speculator in list(self._speculators.values())]
        requests = {str(k): steps.count(k) for k in sorted(set(steps))}
        return {"strategy": "per_request", "slots": {}, "requests_by_num_steps": requests}

    def _new(self, request_id: str) -> AdaptiveSpeculator:
        first = min(INITIAL_STEPS, self.max_steps)
        speculator = AdaptiveSpeculator(first, max_steps=self.max_steps)
        self._speculators[request_id] = speculator
        return speculator
