"""Strategy `ema`: the documented slots, each behind its guard, fed with fresh results only."""

from __future__ import annotations

from collections.abc import Sequence

from serve_spec.adaptive.guard import GuardedSlot
from serve_spec.adaptive.params import AdaptiveSpeculativeParams
from serve_spec.adaptive.policy import Reason


class EmaPolicy:
    """`AdaptiveSpeculativeParams` with the corrections serving wants (see `guard`)."""

    def __init__(self, params: AdaptiveSpeculativeParams, min_dwell_rounds: int) -> None:
        self.params = params
        self.candidate_steps = tuple(params.candidate_steps)
        self.last_reason = Reason.WARM_UP
        self._guarded = {
            key: GuardedSlot(slot, min_dwell_rounds) for key, slot in params.slots.items()
        }
        self._last_key: int | None = None
        self._num_stale_rounds = 0

    def choose_steps(self, batch_size: int) -> int:
        """The present tier of the slot of `batch_size`.

        A batch that moves to another slot takes that slot's tier at once, without dwell: the old
        tier may lie outside the new slot, and rounds at a foreign tier would teach it nothing.
        """
        key = self.params.slot_key(batch_size)
        guarded = self._guarded[key]
        moved = self._last_key is not None and key != self._last_key
        self.last_reason = Reason.RANGE if moved else guarded.reason
        self._last_key = key
        return guarded.slot.current_steps

    def observe(
        self, num_correct_drafts: Sequence[int], batch_size: int, num_steps: int
    ) -> int | None:
        """Feeds the slot of the batch that was verified.

        A result of a tier that the slot has left meanwhile changes neither average nor count: at
        tier 1 a perfect round shows 1 correct draft, and would read as failure at tier 7.
        """
        guarded = self._guarded[self.params.slot_key(batch_size)]
        if num_steps != guarded.slot.current_steps:
            self._num_stale_rounds += 1
            return None
        return guarded.slot.current_steps if guarded.update(num_correct_drafts) else None

    def snapshot(self) -> dict[str, object]:
        """Every slot by its key, and the slot of the last batch."""
        return {
            "strategy": "ema",
            "slot": None if self._last_key is None else str(self._last_key),
            "slots": {str(key): guarded.snapshot() for key, guarded in self._guarded.items()},
            "num_stale_rounds": self._num_stale_rounds,
        }
