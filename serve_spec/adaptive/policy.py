"""What a policy is: asked before drafting, told after verification, never inside a round."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol


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
    RECONFIGURED = "reconfigured"  # an operator changed the policy


class StepPolicy(Protocol):
    """Picks a tier per round from what was verified. Holds numbers only; asks no clock."""

    @property
    def candidate_steps(self) -> tuple[int, ...]:
        """Every tier it may choose, ascending."""
        ...

    @property
    def last_reason(self) -> Reason:
        """Why the tier returned last was chosen."""
        ...

    def choose_steps(self, batch_size: int) -> int:
        """The tier of the next round; `batch_size` counts decode rows, prefill rows excluded."""
        ...

    def observe(
        self, num_correct_drafts: Sequence[int], batch_size: int, num_steps: int
    ) -> int | None:
        """Learns from one round verified at tier `num_steps`; the slot's new tier if it changed."""
        ...

    def snapshot(self) -> dict[str, object]:
        """What an operator should see of it, JSON-able."""
        ...


class StaticPolicy:
    """Always the same tier; 0 is plain decoding."""

    last_reason = Reason.STATIC

    def __init__(self, num_steps: int) -> None:
        self.candidate_steps = (num_steps,)

    def choose_steps(self, batch_size: int) -> int:
        """The one tier."""
        return self.candidate_steps[0]

    def observe(
        self, num_correct_drafts: Sequence[int], batch_size: int, num_steps: int
    ) -> int | None:
        """Learns nothing."""
        return None

    def snapshot(self) -> dict[str, object]:
        """Its name; no slots."""
        return {"strategy": "static", "slots": {}}
