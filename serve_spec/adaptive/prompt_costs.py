"""Milliseconds that prompt tokens add to a round, learned from rounds that computed some.

    more ms = a · round ms + b · curve(tokens) + c · slope · pairs + d · slope · entries

`curve` says what so many more tokens of a target forward cost, by the cost table, and `slope` what
one costs where many are computed. `pairs` of query and key are what attention computes for a chunk,
and `entries` are the draft KV that is missing after it. The weights a, b, c, d come from Bayesian
linear regression; each round counts in proportion to its own time, and fades with age.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from serve_spec.adaptive.curves import Floats
from serve_spec.adaptive.state import State, array, number

_FADE = 1.0 - 1.0 / 64.0
_NOISE = 0.1
# What is expected of a, b, c, d before any round, and how far they may be from it.
_MEANS = np.array([0.0, 1.0, 0.0, 0.05])
_SPREADS = np.array([0.2, 0.5, 2e-4, 0.1])
_LEAST = np.array([0.0, 0.05, 0.0, 0.0])
_MOST_RATIO = 3.0  # a round that took longer by more was delayed by something else
_BOUND, _BOUND_STEP = 0.99, 0.02

MoreMs = Callable[[float, float, Floats], Floats]
"""Milliseconds of more tokens in a target forward: requests, drafts, more tokens."""


class PromptCosts:
    """Predicts and learns what prompts and missing draft KV add to the time of a round."""

    def __init__(self, curve: MoreMs | None = None) -> None:
        """curve: by the cost table; None: it is learned, too, as a line."""
        self._curve = curve
        self._slope = 0.0 if curve is None else float(curve(1.0, 0.0, np.array(4096.0))) / 4096.0
        self._products: Floats = np.zeros((4, 4))
        self._errors: Floats = np.zeros(4)
        self._weights: Floats | None = _MEANS
        self.margin = 1.1
        """Measured over predicted time that 99 of 100 rounds with prompts keep within."""

    @property
    def is_known(self) -> bool:
        """Return whether there is a curve yet."""
        return self._slope > 0.0

    @property
    def weights(self) -> Floats:
        """Return a, b, c and d."""
        if self._weights is None:
            precision = np.diag(_SPREADS**-2.0)
            given = precision + self._products / _NOISE**2
            found = np.linalg.solve(given, precision @ _MEANS + self._errors / _NOISE**2)
            self._weights = np.maximum(found, _LEAST)
        return self._weights

    @property
    def entry_ms(self) -> float:
        """Return the milliseconds of one missing draft KV entry."""
        return float(self.weights[3] * self._slope)

    @property
    def pair_ms(self) -> float:
        """Return the milliseconds of one pair of query and key."""
        return float(self.weights[2] * self._slope)

    def more_ms(self, round_ms: Floats, curve_ms: Floats, pairs: Floats) -> Floats:
        """Return the ms that prompts add to rounds of `round_ms`, of curve and pairs as given."""
        a, b, _, _ = self.weights
        return np.asarray(a * round_ms + b * curve_ms + self.pair_ms * pairs)

    def curve_ms(self, size: float, drafts: float, prompts: Floats) -> Floats:
        """Return what numbers of prompt tokens cost by the curve alone."""
        if self._curve is None:
            return self._slope * prompts
        return self._curve(size, drafts, prompts)

    def learn(
        self, work: tuple[int, float, int, int, int], round_ms: float, step_ms: float
    ) -> None:
        """Learn from a round of size, drafts, prompt tokens, pairs and entries `work`.

        round_ms: predicted without prompts and entries. step_ms: measured.
        """
        size, drafts, prompts, pairs, entries = work
        more = step_ms - round_ms
        if self._curve is None and not self._slope:
            if not prompts or more <= 0.0:
                return
            self._slope = more / prompts
        curve = float(self.curve_ms(size, drafts, np.array(float(prompts))))
        row = np.array([round_ms, curve, self._slope * pairs, self._slope * entries])
        if not prompts:
            row[0] = 0.0
        predicted = round_ms + float(self.weights @ row)
        ratio = step_ms / predicted
        if prompts:
            over = ratio > self.margin
            self.margin += _BOUND_STEP * (_BOUND if over else _BOUND - 1.0)
            self.margin = min(max(self.margin, 1.0), _MOST_RATIO)
        more = min(more, _MOST_RATIO * predicted - round_ms)
        row, more = row / predicted, more / predicted
        self._products = _FADE * self._products + np.outer(row, row)
        self._errors = _FADE * self._errors + row * more
        self._weights = None

    def state(self) -> State:
        """Return what outlives a restart."""
        return {
            "slope": self._slope,
            "products": self._products.tolist(),
            "errors": self._errors.tolist(),
            "margin": self.margin,
        }

    def restore(self, state: State) -> None:
        """Continue from a state; raise ValueError if it is none."""
        products = array(state, "products", (4, 4), 0.0)
        errors, slope = array(state, "errors", (4,)), number(state, "slope", 0.0)
        margin = number(state, "margin", 1.0, _MOST_RATIO)
        self._products, self._errors, self._slope = products, errors, slope
        self.margin, self._weights = margin, None
