"""The documented rule of one batch-size slot: a moving average walks a ladder of tiers.

Exactly SGLang's rule, so that it stays comparable; `guard.py` holds what serving adds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from serve_spec.config.adaptive_file import SlotConfig, parse_slot


class AdaptiveStepSlot:
    """One slot: follows the mean of `num_correct_drafts` and picks `current_steps`.

    Defaults with candidates 1, 3, 7: 1→3 above 0.5, 3→7 above 2.5, 7→3 at 2.25, 3→1 at 0.25.
    """

    def __init__(self, initial_steps: int, cfg: Mapping[str, Any] | SlotConfig) -> None:
        """Starts at the candidate nearest to `initial_steps` (tie: the smaller).

        Raises:
            ConfigError: `cfg` lacks candidate_steps, or anything in it is unknown or out of range.
            ValueError: `initial_steps` is not an integer ≥ 0.
        """
        if type(initial_steps) is not int or initial_steps < 0:
            raise ValueError(f"initial_steps={initial_steps!r}: use an integer ≥ 0")
        self.config = cfg if isinstance(cfg, SlotConfig) else parse_slot(cfg)
        self.candidate_steps = list(self.config.candidate_steps)
        self.current_steps = min(
            self.candidate_steps, key=lambda steps: (abs(steps - initial_steps), steps)
        )
        self.ema_accept_len = float(self.current_steps - 1)
        """Moving average of correct drafts; -1 before a slot that starts at 0 has drafted."""
        self.batch_count = 0
        """Verified rounds counted so far."""

    def update(self, num_correct_drafts: Sequence[int]) -> bool:
        """Learns from one verified round, a count per row; whether `current_steps` changed."""
        self.observe(num_correct_drafts)
        return bool(num_correct_drafts) and self.decision_due and self.decide()

    def observe(self, num_correct_drafts: Sequence[int]) -> None:
        """Counts one verified round without deciding. An empty one does not count."""
        if not num_correct_drafts:
            return
        if self.current_steps > 0:  # without drafts there is nothing to learn
            mean = sum(num_correct_drafts) / len(num_correct_drafts)
            alpha = self.config.ema_alpha
            self.ema_accept_len = (1 - alpha) * self.ema_accept_len + alpha * mean
        self.batch_count += 1

    @property
    def decision_due(self) -> bool:
        """Whether the round counted last is one to decide after (by default 15, 20, 25, ...)."""
        rounds = self.batch_count - self.config.warmup_batches
        return rounds > 0 and rounds % self.config.update_interval == 0

    def decide(self) -> bool:
        """Moves to the tier the average asks for; whether it changed."""
        old = self.current_steps
        self.current_steps = self._probe() if old == 0 else self._follow_average()
        return self.current_steps != old

    def _probe(self) -> int:
        """The first tier that drafts: at 0 nothing else can show whether drafting pays."""
        target = self.candidate_steps[min(1, len(self.candidate_steps) - 1)]
        if target > 0 and self.ema_accept_len < 0:
            self.ema_accept_len = float(target - 1)
        return target

    def _follow_average(self) -> int:
        ladder, ema = self.candidate_steps, self.ema_accept_len
        here = start = ladder.index(self.current_steps)
        while here > 0 and ema <= self._drop_threshold(ladder[here - 1]):
            here -= 1
        if here == start:
            # Strict where the drop is inclusive: at equality a slot keeps the cheaper tier.
            while here + 1 < len(ladder) and ema > ladder[here] - 0.5 + self.config.up_hysteresis:
                here += 1
        ceiling = self._ceiling()
        if ladder[here] <= ladder[start]:  # a ceiling never blocks a rise
            while here > 0 and ladder[here] > ceiling:
                here -= 1
        return ladder[here]

    def _drop_threshold(self, lower: int) -> float:
        return (0.5 if lower == 0 else lower - 0.5) + self.config.down_hysteresis

    def _ceiling(self) -> float:
        if self.config.ceiling_coeff <= 0:
            return math.inf
        return max(1, math.ceil(self.ema_accept_len * self.config.ceiling_coeff))
