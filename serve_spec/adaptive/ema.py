"""Strategy `ema`: the slot of each batch size decides, fed with fresh results only.

Serving withholds some decisions of the documented rule and never adds one:

dwell       steps are kept for a minimum number of rounds, so that a slot does not flap
back-off    at 0 steps the rule probes at every decision, and with poor drafts half of all rounds
            are probes; here each bad probe doubles the wait before the next one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serve_spec.adaptive.policy import Reason
from serve_spec.adaptive.slot import AdaptiveSpeculativeParams, AdaptiveStepSlot
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, RoundNotes, RoundSteps

DEFAULT_DWELL_ROUNDS = 8
FIRST_PROBE_WAIT_ROUNDS = 5
LAST_PROBE_WAIT_ROUNDS = 640


class GuardedSlot:
    """A slot that decides when it is due and neither dwell nor back-off withholds it."""

    def __init__(self, slot: AdaptiveStepSlot, min_dwell_rounds: int) -> None:
        self.slot = slot
        self.is_probing = False
        """Whether these steps are a probe on which nothing is decided yet."""
        self.reason = Reason.WARM_UP
        self._min_dwell_rounds = min_dwell_rounds
        self._rounds = 0  # since the last switch
        self._probe_wait = FIRST_PROBE_WAIT_ROUNDS  # rounds at 0 steps before the next probe
        self._num_probe_rounds = 0

    def update(self, num_correct_drafts: Sequence[int]) -> bool:
        """Learn from one round verified at the present steps; return whether they changed."""
        if not num_correct_drafts:
            return False
        slot, old = self.slot, self.slot.current_steps
        self._rounds += 1
        self._num_probe_rounds += self.is_probing
        if not slot.observe(num_correct_drafts):
            return False
        is_young = self._rounds < self._min_dwell_rounds
        if is_young or (old == 0 and self._rounds < self._probe_wait):
            self.reason = Reason.DWELL if is_young else Reason.BACK_OFF
            return False
        changed, new = slot.decide(), slot.current_steps
        if self.is_probing:
            doubled = min(2 * self._probe_wait, LAST_PROBE_WAIT_ROUNDS)
            self._probe_wait = FIRST_PROBE_WAIT_ROUNDS if new else doubled
        self.is_probing = changed and old == 0
        if changed:
            self._rounds = 0
        moved = Reason.GAIN if new > old else Reason.LOSS
        self.reason = Reason.PROBE if self.is_probing else moved if changed else Reason.STEADY
        return changed

    def snapshot(self) -> dict[str, object]:
        """Return the slot as an operator sees it."""
        return {
            "current_steps": self.slot.current_steps,
            "ema_accept_len": round(self.slot.ema_accept_len, 4),
            "candidate_steps": list(self.slot.candidate_steps),
            "num_rounds": self.slot.batch_count,
            "rounds_at_tier": self._rounds,
            "probe_wait_rounds": self._probe_wait,
            "num_probe_rounds": self._num_probe_rounds,
            "last_reason": self.reason.value,
        }


class EmaPolicy:
    """A guarded slot for each batch-size slot.

    trees: what is drafted at a depth, if not chains, by slot and depth.
    """

    def __init__(
        self,
        params: AdaptiveSpeculativeParams,
        min_dwell_rounds: int,
        trees: Mapping[int, Mapping[int, DraftShape]] | None = None,
    ) -> None:
        self._params, self._trees = params, trees or {}
        branched = {shape for by_depth in self._trees.values() for shape in by_depth.values()}
        self.shapes = (*map(DraftShape.chain, params.candidate_steps), *sorted(branched))
        self.last_reason = Reason.WARM_UP
        self._slots = {k: GuardedSlot(slot, min_dwell_rounds) for k, slot in params.slots.items()}
        self._last_key: int | None = None
        self._num_stale_rounds = 0

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return the present steps of the slot of this batch size.

        A batch that moves to another slot takes that slot's steps at once, without dwell: the old
        ones may lie outside the new slot, and rounds at foreign steps would teach it nothing.
        """
        key = self._params.slot_key(batch.size)
        guarded = self._slots[key]
        self.last_reason = guarded.reason if self._last_key in (None, key) else Reason.RANGE
        self._last_key = key
        depth, average = guarded.slot.current_steps, guarded.slot.ema_accept_len
        shape = self._trees.get(key, {}).get(depth) or DraftShape.chain(depth)
        notes = RoundNotes(is_probe=guarded.is_probing, slot=str(key), ema_accept_length=average)
        return RoundSteps(shape, notes=notes)

    def observe(self, record: StepRecord) -> None:
        """Tell the slot of the batch that was verified.

        Only rows that drafted the full depth count: a row clamped to 1 draft would read as failure
        at depth 7. A result of a depth that the slot has left changes neither average nor count.
        """
        guarded = self._slots[self._params.slot_key(record.num_planned_seqs)]
        depth = record.shape.depth
        if depth != guarded.slot.current_steps:
            self._num_stale_rounds += 1
            return
        _, row_steps, row_correct_drafts, _ = record.model_drafts
        columns = zip(row_steps, row_correct_drafts, strict=True)
        guarded.update([correct for steps, correct in columns if steps == depth])

    def forget(self, request_id: str) -> None:
        """Know no request."""

    def snapshot(self) -> dict[str, object]:
        """Return every slot by its key, and the slot of the last batch."""
        return {
            "strategy": "ema",
            "slot": None if self._last_key is None else str(self._last_key),
            "slots": {str(key): guarded.snapshot() for key, guarded in self._slots.items()},
            "num_stale_rounds": self._num_stale_rounds,
        }
