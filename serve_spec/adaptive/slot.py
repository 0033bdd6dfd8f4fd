"""SGLang's rule of strategy `ema`, by batch size; `ema.py` holds what serving adds to it."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from serve_spec.config.adaptive_file import AdaptiveSource, SlotConfig, load_slots, parse_slot


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
        self.ema_accept_len = float(self.current_steps - 1)
        """Moving average of correct drafts; -1 before a slot that starts at 0 has drafted."""
        self.batch_count = 0
        """Verified rounds counted so far."""

    def update(self, num_correct_drafts: Sequence[int]) -> bool:
        """Learn from one verified round, a count per row; return whether the steps changed."""
        return self.observe(num_correct_drafts) and self.decide()

    def observe(self, num_correct_drafts: Sequence[int]) -> bool:
        """Count one verified round, unless it is empty; return whether a decision is due."""
        if not num_correct_drafts:
            return False
        if self.current_steps > 0:  # without drafts there is nothing to learn
            mean = sum(num_correct_drafts) / len(num_correct_drafts)
            alpha = self.config.ema_alpha
            self.ema_accept_len = (1 - alpha) * self.ema_accept_len + alpha * mean
        self.batch_count += 1
        rounds = self.batch_count - self.config.warmup_batches
        return rounds > 0 and rounds % self.config.update_interval == 0

    def decide(self) -> bool:
        """Move to the steps the average asks for and return whether they changed."""
        old, ladder = self.current_steps, self.candidate_steps
        if old:
            self.current_steps = self._follow_average()
        else:  # nothing but drafting can show whether it pays
            self.current_steps = ladder[min(1, len(ladder) - 1)]
            if self.ema_accept_len < 0:
                self.ema_accept_len = float(self.current_steps - 1)
        return self.current_steps != old

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


class AdaptiveSpeculativeParams:
    """One `AdaptiveStepSlot` per batch-size slot. Named as in SGLang.

    A batch size is padded to the next captured graph size when those are known, then belongs to
    the largest slot key not above it; below the first key, to the first slot.
    """

    def __init__(self, initial_steps: int, cfg_path: AdaptiveSource | None = None) -> None:
        """Start every slot at its candidate nearest to `initial_steps`.

        cfg_path: JSON file, the mapping it would hold, or None for the conservative preset.

        Raises:
            ConfigError: the config is unreadable, or anything in it is unknown or out of range.
            ValueError: `initial_steps` is not an integer ≥ 0.
        """
        configs = load_slots("conservative" if cfg_path is None else cfg_path)
        self.slots = {key: AdaptiveStepSlot(initial_steps, slot) for key, slot in configs.items()}
        """The slots by the lower bound of their batch sizes, ascending."""
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
