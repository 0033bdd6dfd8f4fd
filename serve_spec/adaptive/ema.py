"""Strategy `ema`: SGLang's rule by batch size, some of whose decisions serving withholds:

dwell       steps are kept for a minimum number of rounds, so that a slot does not flap
back-off    at 0 steps the rule probes at every decision, and with poor drafts half of all rounds
            are probes; here each bad probe doubles the wait before the next one
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from serve_spec.adaptive.policy import Reason
from serve_spec.config.adaptive_file import AdaptiveSource, SlotConfig, load_slots, parse_slot
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, RoundNotes, RoundSteps

DEFAULT_DWELL_ROUNDS = 8
FIRST_PROBE_WAIT_ROUNDS = 5
LAST_PROBE_WAIT_ROUNDS = 640


class AdaptiveStepSlot:
    """One slot: follows the mean of `num_correct_drafts` and picks `current_steps`.

    Defaults with candidates 1, 3, 7: 1→3 above 0.5, 3→7 above 2.5, 7→3 at 2.25, 3→1 at 0.25.
    """

    def __init__(self, initial_steps: int, cfg: Mapping[str, Any] | SlotConfig) -> None:
        """Start at the candidate nearest to `initial_steps` (tie: the smaller).

        Raises:
            ConfigError: `cfg` lacks candidate_steps, or anything in it is unknown or out of range.
            ValueError: `initial_steps` is not an integer ≥ 0.
        """
        if type(initial_steps) is not int or initial_steps < 0:
            raise ValueError(f"initial_steps={initial_steps!r}: use an integer ≥ 0")
        self.config = parse_slot(cfg)
        self.candidate_steps = list(self.config.candidate_steps)
        self.current_steps = min(self.candidate_steps, key=lambda k: (abs(k - initial_steps), k))
        # The average of correct drafts; -1 before a slot that starts at 0 has drafted.
        self.ema_accept_len = float(self.current_steps - 1)
        self.min_dwell_rounds: int | None = None
        """The minimum of dwell; None, the default: decide as documented, and never back off."""
        self.reason = Reason.WARM_UP
        self.is_probing = False
        """Whether these steps are a probe on which nothing is decided yet."""
        self.batch_count = self._num_probe_rounds = 0
        self._rounds_here, self._probe_wait = 0, FIRST_PROBE_WAIT_ROUNDS

    def update(self, num_correct_drafts: Sequence[int]) -> bool:
        """Learn from one verified round, a count per row; return whether the steps changed."""
        if not num_correct_drafts:
            return False
        if old := self.current_steps:  # without drafts there is nothing to learn
            mean = sum(num_correct_drafts) / len(num_correct_drafts)
            alpha = self.config.ema_alpha
            self.ema_accept_len = (1 - alpha) * self.ema_accept_len + alpha * mean
        self.batch_count += 1
        self._rounds_here += 1
        self._num_probe_rounds += self.is_probing
        rounds, here = self.batch_count - self.config.warmup_batches, self._rounds_here
        if rounds <= 0 or rounds % self.config.update_interval:
            return False
        dwell = self.min_dwell_rounds
        if dwell is not None and here < (dwell if old else max(dwell, self._probe_wait)):
            self.reason = Reason.DWELL if here < dwell else Reason.BACK_OFF
            return False
        new = self.current_steps = self._follow_average() if old else self._first_steps()
        if self.is_probing:
            doubled = min(2 * self._probe_wait, LAST_PROBE_WAIT_ROUNDS)
            self._probe_wait = FIRST_PROBE_WAIT_ROUNDS if new else doubled
        self.is_probing = new > old == 0
        if new == old:
            self.reason = Reason.STEADY
            return False
        self.reason = Reason.PROBE if not old else Reason.GAIN if new > old else Reason.LOSS
        self._rounds_here = 0
        return True

    def _first_steps(self) -> int:
        """Return the fewest steps above 0: nothing but drafting can show whether it pays."""
        steps = self.candidate_steps[min(1, len(self.candidate_steps) - 1)]
        if self.ema_accept_len < 0:
            self.ema_accept_len = float(steps - 1)
        return steps

    def _follow_average(self) -> int:
        ladder, ema, config = self.candidate_steps, self.ema_accept_len, self.config
        here = start = ladder.index(self.current_steps)
        # The drop to 0 steps compares with half a draft.
        while here > 0 and ema <= (ladder[here - 1] or 1) - 0.5 + config.down_hysteresis:
            here -= 1
        if here == start:
            # Strict where the drop is inclusive: at equality a slot keeps the fewer steps.
            while here + 1 < len(ladder) and ema > ladder[here] - 0.5 + config.up_hysteresis:
                here += 1
        if here <= start and config.ceiling_coeff > 0:  # a ceiling never blocks a rise
            ceiling = max(1, math.ceil(ema * config.ceiling_coeff))
            while here > 0 and ladder[here] > ceiling:
                here -= 1
        return ladder[here]

    def snapshot(self) -> dict[str, object]:
        """Return the slot as an operator sees it."""
        return {
            "current_steps": self.current_steps,
            "ema_accept_len": round(self.ema_accept_len, 4),
            "candidate_steps": self.candidate_steps,
            "num_rounds": self.batch_count,
            "rounds_at_tier": self._rounds_here,
            "probe_wait_rounds": self._probe_wait,
            "num_probe_rounds": self._num_probe_rounds,
            "last_reason": self.reason.value,
        }


class AdaptiveSpeculativeParams:
    """One `AdaptiveStepSlot` per batch-size slot. Named as in SGLang.

    A batch size is padded to the next captured graph size when those are known, then belongs to
    the largest slot key not above it; below the first key, to the first slot.
    """

    def __init__(self, initial_steps: int, cfg_path: AdaptiveSource | None = None) -> None:
        """Start every slot as `AdaptiveStepSlot` does.

        cfg_path: JSON file, the mapping it would hold, or None for the conservative preset.
        """
        configs = load_slots("conservative" if cfg_path is None else cfg_path)
        self.slots = {key: AdaptiveStepSlot(initial_steps, slot) for key, slot in configs.items()}
        self._cuda_graph_bs: list[int] | None = None

    @property
    def candidate_steps(self) -> list[int]:
        """Every number of steps that any slot can reach, ascending."""
        return sorted({step for slot in self.slots.values() for step in slot.candidate_steps})

    def slot_key(self, batch_size: int) -> int:
        """Return the key of the slot that decides for `batch_size` decode rows."""
        keys, captured = list(self.slots), self._cuda_graph_bs or []
        padded = captured[bisect_left(captured, batch_size) :]
        return keys[max(0, bisect_right(keys, padded[0] if padded else batch_size) - 1)]

    def get_steps_for_batch(self, bs: int) -> int:
        """Return the steps of the next round of `bs` decode rows."""
        return self.slots[self.slot_key(bs)].current_steps

    def on_verify_complete(
        self, num_correct_drafts_per_req: Sequence[int], batch_size: int
    ) -> int | None:
        """Tell the slot of a batch about a verified round; return its new steps if they changed."""
        slot = self.slots[self.slot_key(batch_size)]
        return slot.current_steps if slot.update(num_correct_drafts_per_req) else None

    def set_cuda_graph_bs(self, sizes: Iterable[int] | None) -> None:
        """Name the captured batch sizes; None: nothing is captured, nothing is padded."""
        self._cuda_graph_bs = None if sizes is None else sorted(set(sizes))

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Return the captured batch sizes whose slot can reach `step`; None if none are known."""
        sizes, slots = self._cuda_graph_bs, self.slots
        if sizes is None:
            return None
        return [size for size in sizes if step in slots[self.slot_key(size)].candidate_steps]


class EmaPolicy:
    """`AdaptiveSpeculativeParams` with dwell and back-off, fed with fresh results only.

    trees: by slot; the largest of a depth is drafted instead of a chain.
    """

    def __init__(
        self,
        params: AdaptiveSpeculativeParams,
        min_dwell_rounds: int,
        trees: Mapping[int, Sequence[DraftShape]] | None = None,
    ) -> None:
        self._params = params
        self._trees: dict[tuple[int, int], DraftShape] = {}
        for key, slot in params.slots.items():
            slot.min_dwell_rounds = min_dwell_rounds
            for tree in sorted((trees or {}).get(key, ())):
                if tree.depth in slot.candidate_steps:
                    self._trees[key, tree.depth] = tree
        branched = set(self._trees.values())
        self.shapes = (*map(DraftShape.chain, params.candidate_steps), *sorted(branched))
        self.last_reason = Reason.WARM_UP
        self._last_key: int | None = None
        self._num_stale_rounds = 0

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return the present steps of the slot of this batch size.

        A batch that moves to another slot takes that slot's steps at once, without dwell: the old
        ones may lie outside the new slot, and rounds at foreign steps would teach it nothing.
        """
        key = self._params.slot_key(batch.size)
        slot = self._params.slots[key]
        self.last_reason = slot.reason if self._last_key in (None, key) else Reason.RANGE
        self._last_key = key
        depth, average = slot.current_steps, slot.ema_accept_len
        shape = self._trees.get((key, depth)) or DraftShape.chain(depth)
        notes = RoundNotes(is_probe=slot.is_probing, slot=str(key), ema_accept_length=average)
        return RoundSteps(shape, notes=notes)

    def observe(self, record: StepRecord) -> None:
        """Tell the slot of the batch that was verified.

        Only rows that drafted the full depth count: a row clamped to 1 draft would read as failure
        at depth 7. A result of a depth that the slot has left changes neither average nor count.
        """
        slot = self._params.slots[self._params.slot_key(record.num_planned_seqs)]
        depth = record.shape.depth
        if depth != slot.current_steps:
            self._num_stale_rounds += 1
            return
        _, row_steps, row_correct_drafts, _ = record.model_drafts
        columns = zip(row_steps, row_correct_drafts, strict=True)
        slot.update([correct for steps, correct in columns if steps == depth])

    def forget(self, request_id: str) -> None:
        """Know no request."""

    def snapshot(self) -> dict[str, object]:
        """Return every slot by its key, and the slot of the last batch."""
        return {
            "strategy": "ema",
            "slot": None if self._last_key is None else str(self._last_key),
            "slots": {str(key): slot.snapshot() for key, slot in self._params.slots.items()},
            "num_stale_rounds": self._num_stale_rounds,
        }
