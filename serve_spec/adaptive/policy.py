"""The interface of policies: they choose before drafting and observe after verification."""

from __future__ import annotations

from typing import Any, Protocol

from serve_spec.core.draft import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, Reason, RoundSteps


class StepPolicy(Protocol):
    """Picks how many drafts the next round verifies. Times come with the records."""

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """Return every shape that the policy may choose."""

    @property
    def last_reason(self) -> Reason:
        """Why the shape returned last was chosen."""

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return the next round's shape and, if requests differ, their levels; batch.size ≥ 1."""

    def observe(self, record: StepRecord) -> None:
        """Learn from one step."""

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request that left the batch, however it left."""

    def snapshot(self) -> dict[str, Any]:
        """Return what an operator should see of it, JSON-able; `slots` by name, if it has any."""


class StaticPolicy:
    """Always the same shape; `PLAIN` is plain decoding."""

    def __init__(self, shape: DraftShape, reason: Reason = Reason.STATIC) -> None:
        self.shapes = (shape,)
        self.last_reason = reason

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return the one shape."""
        return RoundSteps(self.shapes[0])

    def observe(self, record: StepRecord) -> None:
        """Learn nothing."""

    def forget(self, request_id: str) -> None:
        """Do nothing: no state is kept by request."""

    def snapshot(self) -> dict[str, object]:
        """Return its name."""
        return {"strategy": "static"}
