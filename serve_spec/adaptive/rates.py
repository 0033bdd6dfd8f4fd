"""How often drafts were accepted, by position.

Serves depths that do not run, and drafts without scores.
Counts are discounted. Every position is estimated relative to the one before, as a ratio of odds,
so that a position that did not run lately follows the others when the text changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from serve_spec.adaptive.calibration import Indices

FIRST_RATE = 0.7
"""Share of reached drafts that are accepted, of a drafter of which nothing is known."""
PRIOR_TRIALS = 8.0
"""Trials that the prior of a position is worth."""
MEMORY_TRIALS = 400.0
"""Trials of a position after which an older one weighs 1/e,"""
MEMORY_ROUNDS = 30.0
"""and rounds that draft, if they are fewer."""
_UNTRIED = 0.05  # a position that does not run ages at this share of the first one's pace


class PositionRates:
    """Discounted trials, accepted drafts, and how many the position before let expect."""

    def __init__(self, max_steps: int, prior: Sequence[float] | None = None) -> None:
        self.max_steps = max_steps
        self.trials, self._hits, self._expected = ([0.0] * max_steps for _ in range(3))
        if prior is not None and (len(prior) < max_steps or not all(0 < p < 1 for p in prior)):
            fix = f"give {max_steps} rates between 0 and 1"
            raise ValueError(f"prior_rates={list(prior)!r}: {fix}")
        self._prior = list(prior or [FIRST_RATE] * max_steps)[:max_steps]
        self.rates: list[float] = []
        """Chance that a draft is accepted once reached, by position."""
        self._update()

    def learn(self, trials: Sequence[float], hits: Sequence[float], num_rounds: int) -> None:
        """Take in the trials of some rounds, by position, and how many of them were accepted."""
        ages = [min(n / MEMORY_TRIALS, num_rounds / MEMORY_ROUNDS) for n in trials]
        before = 0.5
        for j, (n, h) in enumerate(zip(trials, hits, strict=True)):
            fade = math.exp(-max(ages[j], _UNTRIED * ages[0]))
            self.trials[j] = self.trials[j] * fade + n
            self._hits[j] = self._hits[j] * fade + h
            self._expected[j] = self._expected[j] * fade + n * before
            before = self.rates[j]
        self._update()

    def _update(self) -> None:
        rates, odds, before = [], 1.0, 0.5
        columns = zip(self._hits, self.trials, self._expected, self._prior, strict=True)
        for hits, trials, expected, prior in columns:
            h, n = hits + PRIOR_TRIALS * prior, trials + PRIOR_TRIALS
            e = expected + PRIOR_TRIALS * before
            odds = min(max(odds * h * (n - e) / max((n - h) * e, 1e-9), 1e-3), 999.0)
            rates.append(odds / (1.0 + odds))
            before = prior
        self.rates = rates

    def snapshot(self) -> list[dict[str, object]]:
        """Return the rates and trials by position, as a fleet merges them."""
        columns = zip(self.rates, self.trials, strict=True)
        return [
            {"position": position, "accept_rate": round(rate, 4), "trials": round(trials, 1)}
            for position, (rate, trials) in enumerate(columns, start=1)
        ]


def tallied(verified: Indices, correct: Indices, max_steps: int) -> tuple[list[float], list[float]]:
    """Return trials and accepted drafts by position."""
    kept = [float((correct > j).sum()) for j in range(max_steps)]
    tried = [float(((verified > j) & (correct >= j)).sum()) for j in range(max_steps)]
    return tried, kept
