"""Keep a policy's answer for a step that is planned later than it was asked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from serve_spec.core.round import DecodeBatch, RoundSteps
from serve_spec.scheduler.requests import wanted_steps


@dataclass(frozen=True)
class PostponedChoice:
    """Draft counts by request id. Requests may end or change places before the step is planned."""

    steps: RoundSteps
    row_steps: dict[str, int]
    text_steps: dict[str, int] | None

    @classmethod
    def of(cls, steps: RoundSteps, batch: DecodeBatch) -> PostponedChoice:
        """Return what the policy answered for `batch`."""
        ids, from_text = batch.request_ids, steps.text_steps
        return cls(
            steps,
            dict(zip(ids, wanted_steps(steps, batch), strict=True)),
            None if from_text is None else dict(zip(ids, from_text, strict=True)),
        )

    @property
    def has_drafts(self) -> bool:
        """Whether the postponed step drafts."""
        return any(self.row_steps.values()) or any((self.text_steps or {}).values())

    def now(self, batch: DecodeBatch) -> RoundSteps:
        """Return the same answer for the requests that are left."""
        ids, from_text = batch.request_ids, self.text_steps
        return replace(
            self.steps,
            row_steps=[self.row_steps.get(request_id, 0) for request_id in ids],
            text_steps=None
            if from_text is None
            else [from_text.get(request_id, 0) for request_id in ids],
        )
