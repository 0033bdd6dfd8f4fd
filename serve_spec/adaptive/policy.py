"""What a policy is: asked before drafting, told after verification, never inside a round."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, RoundSteps


class Reason(StrEnum):
    """Why a tier was chosen, or a change withheld. The words `/server_info` and metrics use."""

    STATIC = "static"  # the tier is fixed
    WARM_UP = "warm-up"  # too few rounds for a first decision
    STEADY = "steady"  # decided: the tier fits what is accepted
    GAIN = "gain"  # up: enough drafts are accepted
    LOSS = "loss"  # down: too few are
    PROBE = "probe"  # up from 0, to see whether drafting pays again
    DWELL = "dwell"  # withheld: the tier is too young
    BACK_OFF = "back-off"  # withheld: the last probes were bad, the next one waits
    RANGE = "range"  # the batch size moved to another slot
    PROMPTS = "prompts"  # down while prompts share the round: they take room, and will be rows
    KV = "kv"  # no room for drafts: free pages or the token budget ran short
    BASELINE = "baseline"  # one round at 0, to measure what speculation is compared with
    GUARD = "guard"  # off: measured slower than measured plain decoding
    FALLBACK = "fallback"  # the policy can not decide; a fixed tier instead
    RECONFIGURED = "reconfigured"  # an operator changed the policy, or costs became known


class BadMeasurement(ValueError):
    """Times that can not be those of rounds, again and again: negative, endless, not numbers."""


class StepPolicy(Protocol):
    """Picks how many drafts the next round verifies. Holds numbers only; asks no clock."""

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """Every shape it may choose."""
        ...

    @property
    def last_reason(self) -> Reason:
        """Why the tier returned last was chosen."""
        ...

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """The next round's shape and, where rows differ, each row's levels; batch.size ≥ 1."""
        ...

    def observe(self, record: StepRecord) -> None:
        """Learns from one step.

        Raises:
            BadMeasurement: the clock is broken, or what reads it.
        """
        ...

    def forget(self, request_id: str) -> None:
        """Drops what is known of a request that left the batch, however it left."""
        ...

    def snapshot(self) -> dict[str, object]:
        """What an operator should see of it, JSON-able."""
        ...


class StaticPolicy:
    """Always the same shape; `PLAIN` is plain decoding."""

    def __init__(self, shape: DraftShape, reason: Reason = Reason.STATIC) -> None:
        self.shapes = (shape,)
        self.last_reason = reason

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return the one shape."""
        return RoundSteps(self.shapes[0])

    def observe(self, record: StepRecord) -> None:
        """Learns nothing."""

    def forget(self, request_id: str) -> None:
        """Knows no request."""

    def snapshot(self) -> dict[str, object]:
        """Its name; no slots."""
        return {"strategy": "static", "slots": {}}
