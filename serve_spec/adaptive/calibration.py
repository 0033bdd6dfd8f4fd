"""How likely drafts are accepted, from the shares they were drawn with.

    chance = sigmoid(weight · logit(share) + bias)      weight, bias by kind and position
    survival = chance · survival of the draft before    1 for the root

The pairs start at (1, 0), which takes a share for a chance, and are fitted online: a Newton step
of a logistic regression for every plan, on a discounted Hessian, with a pull to (1, 0). Only drafts
that were verified and reached count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from serve_spec.core.round import FROM_TEXT, Calibration

Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]
Indices: TypeAlias = NDArray[np.intp]

PULL_TRIALS = 128.0
"""Drafts that the initial value (1, 0) counts as."""
MEMORY_TRIALS = 2048.0
"""Drafts of a position after which an older one weighs 1/e."""
_LARGEST_LOGIT = 15.0  # as in `ops.admission`
_LEAST, _MOST = (0.0, -6.0), (3.0, 6.0)
_BINS = 10


class DraftCalibration:
    """Fits the chances of model drafts by kind and position, and compares them with outcomes."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self._pairs: Floats = np.tile([1.0, 0.0], (FROM_TEXT, max_steps, 1))
        # A trial's p (1 - p) is about an eighth.
        self._pull: Floats = PULL_TRIALS / 8.0 * np.eye(2)
        self._hessians: Floats = np.tile(self._pull, (FROM_TEXT, max_steps, 1, 1))
        self._bins: Floats = np.zeros((3, max_steps, _BINS))

    def chances(self, shares: Floats, kinds: Indices) -> Floats:
        """Return the chance [R, n] of every draft; 0 for a share that is no number or -inf.

        shares: [R, n], logarithms. kinds: [R].
        """
        pairs = self._pairs[kinds, : shares.shape[1]]
        chances = 1.0 / (1.0 + np.exp(-pairs[..., 0] * logits(shares) - pairs[..., 1]))
        return np.where(shares > -np.inf, chances, 0.0)

    def learn(self, shares: Floats, kinds: Indices, verified: Indices, correct: Indices) -> None:
        """Fit to the outcome of some requests.

        shares: [R, max_steps]. verified, correct: [R], drafts of each that the target verified,
        and that it accepted.
        """
        place = np.arange(self.max_steps)
        counts = (place < verified[:, None]) & (place <= correct[:, None]) & (shares > -np.inf)
        accepted, logit = place < correct[:, None], logits(shares)
        chances = self.chances(shares, kinds)
        self._compare(chances, accepted, counts)
        error = np.where(counts, accepted - chances, 0.0)
        spread = np.where(counts, chances * (1.0 - chances), 0.0)
        columns = [error * logit, error, spread * logit * logit, spread * logit, spread, counts]
        is_kind = np.arange(FROM_TEXT)[:, None] == kinds
        sums = is_kind.astype(np.float64) @ np.concatenate(columns, axis=1)
        slope, offset, xx, x, one, trials = np.split(sums, 6, axis=1)
        fade = np.exp(-trials / MEMORY_TRIALS)[..., None]
        # Older drafts fade; the pull to the start does not.
        self._hessians -= (1.0 - fade)[..., None] * (self._hessians - self._pull)
        self._hessians += np.stack([np.stack([xx, x], -1), np.stack([x, one], -1)], -2)
        gradient = np.stack([slope, offset], -1)
        gradient += (1.0 - fade) * (([1.0, 0.0] - self._pairs) @ self._pull)
        step = np.linalg.solve(self._hessians, gradient[..., None])[..., 0]
        self._pairs = (self._pairs + np.nan_to_num(step)).clip(_LEAST, _MOST)

    def _compare(self, chances: Floats, accepted: Flags, counts: Flags) -> None:
        """Count drafts, expected and accepted ones by position and bin of their chance."""
        row, place = np.nonzero(counts)
        known = chances[row, place]
        bins = place * _BINS + np.minimum(known * _BINS, _BINS - 1).astype(np.intp)
        self._bins *= math.exp(-len(row) / (MEMORY_TRIALS * self.max_steps))
        for sums, weights in zip(self._bins, (None, known, accepted[row, place]), strict=True):
            sums += np.bincount(bins, weights, sums.size).reshape(sums.shape)

    def pairs(self, text_rates: Sequence[float]) -> Calibration:
        """Return what the device is given. N-gram drafts have no scores: their rates decide.

        text_rates: chance that an n-gram draft is accepted once reached, by position.
        """
        model = [tuple([(w, b) for w, b in kind]) for kind in self._pairs.round(4).tolist()]
        text = [(0.0, round(math.log(rate / (1.0 - rate)), 4)) for rate in text_rates]
        return (*model, tuple(text))

    def snapshot(self) -> list[dict[str, object]]:
        """Return expected and observed acceptance by position; the error is that of ten bins."""
        shown: list[dict[str, object]] = []
        columns = zip(*self._bins.copy(), strict=True)
        for position, (trials, expected, observed) in enumerate(columns, start=1):
            if (total := trials.sum()) >= 1.0:
                figures = {
                    "trials": total,
                    "expected": expected.sum() / total,
                    "observed": observed.sum() / total,
                    "error": np.abs(expected - observed).sum() / total,
                }
                rounded = {name: round(float(x), 4) for name, x in figures.items()}
                shown.append({"position": position, **rounded})
        return shown


def logits(shares: Floats) -> Floats:
    """Return logit(share) of logarithms of shares, cut at ±15; NaN counts as -inf."""
    known = np.where(shares > -_LARGEST_LOGIT, np.minimum(shares, -1e-7), -_LARGEST_LOGIT)
    cut: Floats = (known - np.log(-np.expm1(known))).clip(-_LARGEST_LOGIT, _LARGEST_LOGIT)
    return cut
