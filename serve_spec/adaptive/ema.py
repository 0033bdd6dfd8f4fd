"""Strategy `ema`: the documented slots, each behind its guard, fed with fresh results only."""

from __future__ import annotations

from collections.abc import Mapping

from serve_spec.adaptive.guard import GuardedSlot
from serve_spec.adaptive.params import AdaptiveSpeculativeParams
from serve_spec.adaptive.policy import Reason
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, RoundNotes, RoundSteps


class EmaPolicy:
    """`AdaptiveSpeculativeParams` with the corrections serving wants (see `guard`)."""

    def __init__(
        self,
        params: AdaptiveSpeculativeParams,
        min_dwell_rounds: int,
        trees: Mapping[int, Mapping[int, DraftShape]] | None = None,
    ) -> None:
        """trees: what is drafted at a depth, if not chains, by slot and depth."""
        self.params = params
        self._trees = trees or {}
        branched = {shape for by_depth in self._trees.values() for shape in by_depth.values()}
        self.shapes = (*map(DraftShape.chain, params.candidate_steps), *sorted(branched))
        self.last_reason = Reason.WARM_UP
        self._guarded = {
            key: GuardedSlot(slot, min_dwell_rounds) for key, slot in params.slots.items()
        }
        self._last_key: int | None = None
        self._num_stale_rounds = 0

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """The present tier of the slot of this batch size.

        A batch that moves to another slot takes that slot's tier at once, without dwell: the old
        tier may lie outside the new slot, and rounds at a foreign tier would teach it nothing.
        """
        key = self.params.slot_key(batch.size)
        guarded = self._guarded[key]
        moved = self._last_key is not None and key != self._last_key
        self.last_reason = Reason.RANGE if moved else guarded.reason
        self._last_key = key
        slot = guarded.slot
        notes = RoundNotes(
            is_probe=guarded.probing, slot=str(key), ema_accept_length=slot.ema_accept_len
        )
        depth = slot.current_steps
        tree = self._trees.get(key, {}).get(depth)
        return RoundSteps(tree or DraftShape.chain(depth), notes=notes)

    def observe(self, record: StepRecord) -> None:
        """Feeds the slot of the batch that was verified.

        Only rows that drafted the tier's full depth count: a row clamped to 1 draft shows at most
        1 correct one, and would read as failure at tier 7. So would a result of a tier that the
        slot has left meanwhile; it changes neither average nor count.
        """
        guarded = self._guarded[self.params.slot_key(record.num_planned_seqs)]
        depth = record.shape.depth
        if depth != guarded.slot.current_steps:
            self._num_stale_rounds += 1
            return
        drafts = record.model_drafts  # those from texts fare differently, and are not chosen here
        columns = zip(drafts.row_steps, drafts.row_correct_drafts, strict=True)
        guarded.update([correct for steps, correct in columns if steps == depth])

    def forget(self, request_id: str) -> None:
        """Knows no request."""

    def snapshot(self) -> dict[str, object]:
        """Every slot by its key, and the slot of the last batch."""
        return {
            "strategy": "ema",
            "slot": None if self._last_key is None else str(self._last_key),
            "slots": {str(key): guarded.snapshot() for key, guarded in self._guarded.items()},
            "num_stale_rounds": self._num_stale_rounds,
        }
