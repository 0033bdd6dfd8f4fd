"""Strategy `ema`: SGLang's rule by batch size, some of whose decisions serving withholds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from serve_spec.adaptive.policy import StepPolicy
from serve_spec.adaptive.state import State, number, section
from serve_spec.config.adaptive_file import (
    AdaptiveSource,
    SlotConfig,
    load_slots,
    parse_slot,
    slot_of,
)
from serve_spec.core.draft import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, Reason, RoundNotes, RoundSteps

FIRST_PROBE_WAIT_ROUNDS = 5
"""Rounds at 0 steps before a probe; each bad one doubles them"""
LAST_PROBE_WAIT_ROUNDS = 640
"""up to so many."""


class AdaptiveStepSlot:
    """One slot: follows the mean of `num_correct_drafts` and picks `current_steps`.

    Defaults with candidates 1, 3, 7: 1→3 above 0.5, 3→7 above 2.5, 7→3 at 2.25, 3→1 at 0.25.
    """

    def __init__(
        self, initial_steps: int, cfg: Mapping[str, Any] | SlotConfig, min_dwell_rounds: int = 0
    ) -> None:
        """Start at the candidate nearest to `initial_steps` (tie: the smaller).

        min_dwell_rounds: fewest rounds between changes, more after bad probes; 0: as published.
        """
        self.config = parse_slot(cfg)
        self.candidate_steps = list(self.config.candidate_steps)
        self.current_steps = min(self.candidate_steps, key=lambda k: (abs(k - initial_steps), k))
        # The average of correct drafts; -1 before a slot that starts at 0 has drafted.
        self.ema_accept_len = float(self.current_steps - 1)
        self.min_dwell_rounds = min_dwell_rounds
        self.reason = Reason.WARM_UP
        self.batch_count = self._rounds_here = 0
        self._probe_wait = FIRST_PROBE_WAIT_ROUNDS

    @property
    def is_probing(self) -> bool:
        """Return whether these steps are a probe on which nothing is decided yet."""
        return self.current_steps > 0 and self._probe_wait > FIRST_PROBE_WAIT_ROUNDS

    def update(self, num_correct_drafts: Sequence[int]) -> bool:
        """Learn from one verified round, a count per request; return whether the steps changed."""
        if not num_correct_drafts:
            return False
        alpha, old = self.config.ema_alpha, self.current_steps
        if old:  # without drafts there is nothing to learn
            mean = sum(num_correct_drafts) / len(num_correct_drafts)
            self.ema_accept_len = (1 - alpha) * self.ema_accept_len + alpha * mean
        self.batch_count += 1
        self._rounds_here += 1
        rounds = self.batch_count - self.config.warmup_batches
        if rounds <= 0 or rounds % self.config.update_interval:
            return False
        wait = self.min_dwell_rounds
        if wait and not old:
            wait = max(wait, self._probe_wait)
        if self._rounds_here < wait:
            self.reason = Reason.DWELL if old else Reason.BACK_OFF
            return False
        new = self.current_steps = self._next_steps()
        if not old:  # a probe, bad until it lasts
            self._probe_wait = min(2 * self._probe_wait, LAST_PROBE_WAIT_ROUNDS)
        elif new:
            self._probe_wait = FIRST_PROBE_WAIT_ROUNDS
        if new == old:
            self.reason = Reason.STEADY
            return False
        self.reason = Reason.PROBE if not old else Reason.GAIN if new > old else Reason.LOSS
        self._rounds_here = 0
        return True

    def _next_steps(self) -> int:
        ladder, config, ema = self.candidate_steps, self.config, self.ema_accept_len
        here = start = ladder.index(self.current_steps)
        if not self.current_steps:  # nothing but drafting can show whether it pays
            steps = ladder[1] if len(ladder) > 1 else 0
            self.ema_accept_len = ema if ema >= 0 else steps - 1.0
            return steps
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

    def state(self) -> State:
        """Return what outlives a restart."""
        return {
            "current_steps": self.current_steps,
            "ema_accept_len": self.ema_accept_len,
            "probe_wait": self._probe_wait,
        }

    def restore(self, state: State) -> None:
        """Continue from a state; raise ValueError if its steps are no candidate."""
        steps = int(number(state, "current_steps"))
        if steps not in self.candidate_steps:
            raise ValueError(f"current_steps={steps}: not one of {self.candidate_steps}")
        waits = FIRST_PROBE_WAIT_ROUNDS, LAST_PROBE_WAIT_ROUNDS
        self.ema_accept_len = number(state, "ema_accept_len", -1.0, self.candidate_steps[-1])
        self._probe_wait = int(number(state, "probe_wait", *waits))
        self.current_steps = steps

    def snapshot(self) -> dict[str, object]:
        """Return the slot as an operator sees it."""
        return {
            "current_steps": self.current_steps,
            "ema_accept_len": round(self.ema_accept_len, 4),
            "candidate_steps": self.candidate_steps,
            "num_rounds": self.batch_count,
            "probe_wait_rounds": self._probe_wait,
        }


class AdaptiveSpeculativeParams:
    """One `AdaptiveStepSlot` per slot of batch sizes. Named as in SGLang."""

    def __init__(
        self, initial_steps: int, cfg_path: AdaptiveSource | None = None, min_dwell_rounds: int = 0
    ) -> None:
        """Start every slot; `cfg_path` None is the conservative preset."""
        configs = (load_slots() if cfg_path is None else load_slots(cfg_path)).items()
        self.slots = {k: AdaptiveStepSlot(initial_steps, c, min_dwell_rounds) for k, c in configs}
        self._cuda_graph_bs: list[int] | None = None

    @property
    def candidate_steps(self) -> list[int]:
        """Every number of steps that any slot can reach, ascending."""
        return sorted({step for slot in self.slots.values() for step in slot.candidate_steps})

    def slot_key(self, batch_size: int) -> int:
        """Return the slot of a batch, padded to the next captured size if those are known."""
        captured = self._cuda_graph_bs or []
        padded = captured[bisect_left(captured, batch_size) :]
        return slot_of(self.slots, padded[0] if padded else batch_size)

    def get_steps_for_batch(self, bs: int) -> int:
        """Return the steps of the next round."""
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
        reaching = [key for key, slot in self.slots.items() if step in slot.candidate_steps]
        sizes = self._cuda_graph_bs
        return sizes and [size for size in sizes if self.slot_key(size) in reaching]


class EmaPolicy(StepPolicy):
    """`AdaptiveSpeculativeParams`, fed with fresh results. Trees, by slot, replace chains."""

    def __init__(
        self, params: AdaptiveSpeculativeParams, trees: Mapping[int, Sequence[DraftShape]]
    ) -> None:
        self._params, self._trees = params, trees
        branched = set().union(*self._trees.values())
        self.shapes = (*map(DraftShape.chain, params.candidate_steps), *sorted(branched))
        self.last_reason = Reason.WARM_UP
        self._key: int | None = None

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return the present steps of the slot of this batch size."""
        key = self._params.slot_key(batch.size)
        slot = self._params.slots[key]
        self.last_reason = slot.reason if self._key in (None, key) else Reason.RANGE
        self._key = key
        chain = DraftShape.chain(slot.current_steps)
        trees = [tree for tree in self._trees.get(key, ()) if tree.depth == chain.depth]
        notes = RoundNotes(slot.is_probing, slot=str(key), ema_accept_length=slot.ema_accept_len)
        return RoundSteps(trees[0] if trees else chain, notes=notes)

    def observe(self, record: StepRecord) -> None:
        """Update the slot by requests that drafted its depth in full, see `model_drafts`."""
        size, depth = record.num_planned_seqs, record.shape.depth
        if depth == self._params.get_steps_for_batch(size):
            steps_per_req, num_correct_drafts_per_req = record.model_drafts[1:3]
            reqs = zip(steps_per_req, num_correct_drafts_per_req, strict=True)
            self._params.on_verify_complete([kept for k, kept in reqs if k == depth], size)

    def state(self) -> State:
        """Return steps, average and patience of every slot."""
        return {str(key): slot.state() for key, slot in self._params.slots.items()}

    def restore(self, state: State) -> None:
        """Continue from a state of the same slots."""
        for key, slot in self._params.slots.items():
            slot.restore(section(state, str(key)))

    def snapshot(self) -> dict[str, Any]:
        """Return every slot by its key, and the slot of the last batch."""
        return {
            "strategy": "ema",
            "slot": None if self._key is None else str(self._key),
            "slots": {str(key): slot.snapshot() for key, slot in self._params.slots.items()},
        }
