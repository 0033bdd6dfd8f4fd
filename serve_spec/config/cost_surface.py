"""Interpolated cost of one stage of a round: ms by batch size, steps and context.

The measured table is made monotone in every direction, interpolated linearly between its points and
extrapolated linearly beyond the last ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from serve_spec.config.cost_table import Grid

Floats: TypeAlias = NDArray[np.float64]

_CONTEXT_PARTS = 16
"""Contexts are rounded to 1/16 of the distance between the two measured ones."""


class CostSurface:
    """ms of one stage for any batch size, number of steps and context.

    Contexts below the shorter measured one have its cost.
    """

    def __init__(
        self,
        ms: Grid,
        *,
        contexts: tuple[int, int],
        batch_sizes: Sequence[int],
        num_steps: Sequence[int],
    ) -> None:
        self._contexts = contexts
        steps = np.arange(num_steps[-1] + 1)
        values = np.apply_along_axis(
            lambda cells: np.interp(steps, num_steps, cells), 2, monotone(np.array(ms))
        )
        self._sizes = list(batch_sizes)
        if len(self._sizes) == 1:  # extrapolate in proportion to the batch size
            values = np.concatenate([values, 2.0 * values], axis=1)
            self._sizes.append(2 * self._sizes[0])
        self._ms = values
        self._curve = lru_cache(maxsize=1024)(self._interpolated)

    def curve(self, batch_size: int, context: float) -> Floats:
        """Return ms at 0 .. max_steps steps of `batch_size` requests; do not write to the array."""
        return self._curve(batch_size, self._position(context))

    def _interpolated(self, batch_size: int, position: float) -> Floats:
        short, long = (_on_lines(self._sizes, each, batch_size) for each in self._ms)
        # Extrapolated lines may cross.
        curve: Floats = np.maximum.accumulate(short + position * np.maximum(long - short, 0.0))
        return curve

    def of_rows(self, num_rows: Any, context: float) -> Floats:
        """Return ms by the number of tokens, an array, from the costs at full depth."""
        position, rows = self._position(context), np.array(self._sizes) * self._ms.shape[2]
        ms = self._ms[0, :, -1] + position * (self._ms[1, :, -1] - self._ms[0, :, -1])
        slope = (ms[-1] - ms[-2]) / (rows[-1] - rows[-2])
        beyond = np.maximum(np.asarray(num_rows) - rows[-1], 0.0) * slope
        found: Floats = np.interp(num_rows, rows, ms) + beyond
        return found

    def _position(self, context: float) -> float:
        """Return the position of a context: 0 at the shorter measured one, 1 at the longer."""
        short, long = self._contexts
        position = max(0.0, (context - short) / (long - short))
        return round(position * _CONTEXT_PARTS) / _CONTEXT_PARTS


def monotone(ms: Floats) -> Floats:
    """Return values that do not decrease along any axis, by reducing those that are too high.

    Interference only makes a round slower, so of two contradicting values the lower one is right.
    """
    for axis in range(ms.ndim):
        ms = np.flip(np.minimum.accumulate(np.flip(ms, axis), axis), axis)
    return ms


def _on_lines(points: Sequence[int], values: Floats, x: int) -> Floats:
    """Interpolate `values` [n, ...] linearly at x; extrapolate beyond the last point only."""
    i = min(max(bisect_right(points, x) - 1, 0), len(points) - 2)
    part = max(0.0, (x - points[i]) / (points[i + 1] - points[i]))
    found: Floats = values[i] + part * (values[i + 1] - values[i])
    return found
