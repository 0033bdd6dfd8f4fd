"""An answer of the policy that has to wait for its round."""

from __future__ import annotations

from dataclasses import dataclass, replace

from serve_spec.core.round import DecodeBatch, RoundSteps
from serve_spec.scheduler.rows import wanted_steps


@dataclass(frozen=True)
class PostponedChoice:
    """Drafts by request, for rows that may leave or change places meanwhile."""

    steps: RoundSteps
    row_steps: dict[str, int]
    text_steps: dict[str, int] | None

    @classmethod
    def of(cls, steps: RoundSteps, batch: DecodeBatch) -> PostponedChoice:
        """What the policy answered when asked about `batch`."""
        ids, from_text = batch.request_ids, steps.text_steps
        return cls(
            steps,
            dict(zip(ids, wanted_steps(steps, batch), strict=True)),
            None if from_text is None else dict(zip(ids, from_text, strict=True)),
        )

    @property
    def has_drafts(self) -> bool:
        """Whether it is drafts that it waits for."""
        return any(self.row_steps.values()) or any((self.text_steps or {}).values())

    def now(self, batch: DecodeBatch) -> RoundSteps:
        """The same answer for the rows that are left."""
        ids, from_text = batch.request_ids, self.text_steps
        return replace(
            self.steps,
            row_steps=[self.row_steps.get(request_id, 0) for request_id in ids],
            text_steps=None
            if from_text is None
            else [from_text.get(request_id, 0) for request_id in ids],
        )
