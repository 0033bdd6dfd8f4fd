"""One stage of a round as a smooth surface: ms over batch size, steps and context.

A measured table has noise, gaps between its points and an edge. Here it becomes monotone in every
direction, is interpolated between its points and continued in straight lines beyond the last ones.
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
"""Contexts are distinguished in sixteenths of the distance between the two measured ones."""


class CostSurface:
    """ms of one stage for every batch size, every number of steps, every context.

    Contexts below the shorter measured one cost what it costs.
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
        if len(self._sizes) == 1:  # twice as many take twice as long
            values = np.concatenate([values, 2.0 * values], axis=1)
            self._sizes.append(2 * self._sizes[0])
        self._ms = values
        self._curve = lru_cache(maxsize=1024)(self._interpolated)

    def curve(self, batch_size: int, context: float) -> Floats:
        """Return ms at 0 .. max_steps steps of `batch_size` requests; shared, not to be written."""
        return self._curve(batch_size, self._position(context))

    def _interpolated(self, batch_size: int, position: float) -> Floats:
        short, long = (_on_lines(self._sizes, each, batch_size) for each in self._ms)
        # Only far beyond both edges could lines have crossed.
        curve: Floats = np.maximum.accumulate(short + position * np.maximum(long - short, 0.0))
        return curve

    def of_tokens(self, num_tokens: Any, context: float) -> Floats:
        """Return ms of so many tokens of any requests, an array: those of full depth decide."""
        position, tokens = self._position(context), np.array(self._sizes) * self._ms.shape[2]
        ms = self._ms[0, :, -1] + position * (self._ms[1, :, -1] - self._ms[0, :, -1])
        slope = (ms[-1] - ms[-2]) / (tokens[-1] - tokens[-2])
        beyond = np.maximum(np.asarray(num_tokens) - tokens[-1], 0.0) * slope
        found: Floats = np.interp(num_tokens, tokens, ms) + beyond
        return found

    def _position(self, context: float) -> float:
        """Return where a context lies: 0 the shorter, 1 the longer, 2 as far again."""
        short, long = self._contexts
        position = max(0.0, (context - short) / (long - short))
        return round(position * _CONTEXT_PARTS) / _CONTEXT_PARTS


def monotone(ms: Floats) -> Floats:
    """Make each cell the least of itself and all cells beyond it: rising along every axis.

    Other work only ever makes a round slower, so of two cells that contradict each other the
    cheaper one is the better measurement.
    """
    for axis in range(ms.ndim):
        ms = np.flip(np.minimum.accumulate(np.flip(ms, axis), axis), axis)
    return ms


def _on_lines(points: Sequence[int], values: Floats, x: int) -> Floats:
    """Return `values` [n, ...] at x: lines between the points and beyond the last, flat before."""
    i = min(max(bisect_right(points, x) - 1, 0), len(points) - 2)
    part = max(0.0, (x - points[i]) / (points[i + 1] - points[i]))
    found: Floats = values[i] + part * (values[i + 1] - values[i])
    return found
