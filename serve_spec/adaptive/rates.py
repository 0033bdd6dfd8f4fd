"""How often drafts were accepted, by position.

Serves depths that do not run, and drafts without scores. Counts are discounted; a position of
which little is known is taken for the one before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from serve_spec.adaptive.calibration import Indices

FIRST_RATE = 0.7
"""Share of reached drafts that are accepted, of a drafter of which nothing is known."""
PRIOR_TRIALS = 8.0
"""Trials that the prior of a position counts as."""
RATE_TRIALS = 128.0
"""Trials of the first position after which an older one weighs 1/e."""
_LEAST = 1e-3


class PositionRates:
    """Discounted trials and accepted drafts by position."""

    def __init__(self, max_steps: int, prior: Sequence[float] | None = None) -> None:
        self.max_steps = max_steps
        self.trials, self._hits = ([0.0] * max_steps for _ in range(2))
        if prior is not None and (len(prior) < max_steps or not all(0 < p < 1 for p in prior)):
            fix = f"give {max_steps} rates between 0 and 1"
            raise ValueError(f"prior_rates={list(prior)!r}: {fix}")
        self._prior = list(prior or [FIRST_RATE] * max_steps)[:max_steps]
        self.rates: list[float] = []  # chance that a draft is accepted once reached
        self._update()

    def learn(self, trials: Sequence[float], hits: Sequence[float]) -> None:
        """Take in the trials of some rounds, by position, and how many of them were accepted."""
        fade = math.exp(-trials[0] / RATE_TRIALS)
        self.trials = [n * fade + new for n, new in zip(self.trials, trials, strict=True)]
        self._hits = [h * fade + new for h, new in zip(self._hits, hits, strict=True)]
        self._update()

    def _update(self) -> None:
        """Shrink each position to its prior, moved as far as the position before."""
        rates, moved = [], 1.0
        for prior, hits, trials in zip(self._prior, self._hits, self.trials, strict=True):
            rate = (hits + PRIOR_TRIALS * min(prior * moved, 1.0)) / (trials + PRIOR_TRIALS)
            rates.append(min(max(rate, _LEAST), 1.0 - _LEAST))
            moved = rates[-1] / prior
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
