"""The interface of policies: they choose before drafting and observe after verification."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from serve_spec.core.draft import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, Reason, RoundSteps


class StepPolicy(ABC):
    """Picks how many drafts the next round verifies. Times come with the records."""

    shapes: tuple[DraftShape, ...]  # every shape that it may choose
    last_reason: Reason  # why the shape returned last was chosen

    @abstractmethod
    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return the next round's shape and, if requests differ, their levels; batch.size ≥ 1."""

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """Return what an operator should see of it, JSON-able; `slots` by name, if it has any."""

    def observe(self, record: StepRecord) -> None:  # noqa: B027
        """Learn from one step; by default nothing."""

    def forget(self, request_id: str) -> None:  # noqa: B027
        """Drop what is known of a request that left the batch, however it left."""


class StaticPolicy(StepPolicy):
    """Always the same shape; `PLAIN` is plain decoding."""

    def __init__(self, shape: DraftShape, reason: Reason = Reason.STATIC) -> None:
        self.shapes = (shape,)
        self.last_reason = reason

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return the one shape."""
        return RoundSteps(self.shapes[0])

    def snapshot(self) -> dict[str, Any]:
        """Return its name."""
        return {"strategy": "static"}
