"""What serving adds around the documented rule of a slot. It only ever withholds a decision.

dwell       a tier is kept for a minimum number of rounds, so that a slot cannot flap
back-off    at tier 0 the documented rule probes at every decision, and with poor drafts half of
            all rounds are probes; here each bad probe doubles the wait before the next one
"""

from __future__ import annotations

from collections.abc import Sequence

from serve_spec.adaptive.policy import Reason
from serve_spec.adaptive.slot import AdaptiveStepSlot

DEFAULT_DWELL_ROUNDS = 8
FIRST_PROBE_WAIT_ROUNDS = 5
LAST_PROBE_WAIT_ROUNDS = 640


class GuardedSlot:
    """A slot that decides when it is due and its guard lets it."""

    def __init__(self, slot: AdaptiveStepSlot, min_dwell_rounds: int) -> None:
        self.slot = slot
        self.min_dwell_rounds = min_dwell_rounds
        self.rounds_at_tier = 0
        """Rounds counted since the last switch."""
        self.probe_wait_rounds = FIRST_PROBE_WAIT_ROUNDS
        """Rounds at tier 0 before the next probe."""
        self.probing = False
        """Whether the present tier is a probe on which nothing is decided yet."""
        self.num_probe_rounds = 0
        self.reason = Reason.WARM_UP

    def update(self, num_correct_drafts: Sequence[int]) -> bool:
        """Learns from one round verified at the present tier; whether the tier changed."""
        if not num_correct_drafts:
            return False
        slot = self.slot
        slot.observe(num_correct_drafts)
        self.rounds_at_tier += 1
        self.num_probe_rounds += self.probing
        if not slot.decision_due:
            return False
        withheld = self._withheld()
        if withheld is not None:
            self.reason = withheld
            return False
        return self._decide()

    def _withheld(self) -> Reason | None:
        """Why the slot may not decide now, if it may not. Both waits hold at tier 0."""
        if self.rounds_at_tier < self.min_dwell_rounds:
            return Reason.DWELL
        if self.slot.current_steps == 0 and self.rounds_at_tier < self.probe_wait_rounds:
            return Reason.BACK_OFF
        return None

    def _decide(self) -> bool:
        old = self.slot.current_steps
        changed = self.slot.decide()
        new = self.slot.current_steps
        if self.probing:
            bad = new == 0
            self.probe_wait_rounds = (
                min(2 * self.probe_wait_rounds, LAST_PROBE_WAIT_ROUNDS)
                if bad
                else FIRST_PROBE_WAIT_ROUNDS
            )
        self.probing = changed and old == 0
        self.reason = self._why(old, new)
        if changed:
            self.rounds_at_tier = 0
        return changed

    @staticmethod
    def _why(old: int, new: int) -> Reason:
        if new == old:
            return Reason.STEADY
        if old == 0:
            return Reason.PROBE
        return Reason.GAIN if new > old else Reason.LOSS

    def snapshot(self) -> dict[str, object]:
        """The slot as an operator sees it."""
        return {
            "current_steps": self.slot.current_steps,
            "ema_accept_len": round(self.slot.ema_accept_len, 4),
            "candidate_steps": list(self.slot.candidate_steps),
            "num_rounds": self.slot.batch_count,
            "rounds_at_tier": self.rounds_at_tier,
            "probe_wait_rounds": self.probe_wait_rounds,
            "num_probe_rounds": self.num_probe_rounds,
            "last_reason": self.reason.value,
        }
