"""One stage of a round as a smooth surface: ms over batch size, steps and context.

A measured table has noise, gaps between its points and an edge. Here it becomes monotone in every
direction, is interpolated between its points and continued in straight lines beyond the last ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from serve_spec.config.cost_table import Grid

Floats: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]

_CONTEXT_PARTS = 16
"""Contexts are told apart in sixteenths of the distance between the two measured ones."""
_MAX_CACHED = 4096


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
        self.max_steps = num_steps[-1]
        self._contexts = contexts
        every_step = np.arange(self.max_steps + 1)
        values = monotone(np.array(ms))
        values = np.apply_along_axis(
            lambda cells: np.interp(every_step, num_steps, cells), 2, values
        )
        values, self._sizes = _continued(values, [float(size) for size in batch_sizes], axis=1)
        # Contexts are positions here: 0 the shorter, 1 the longer, 2 as far again.
        self._ms, self._positions = _continued(values, [0.0, 1.0], axis=0)
        self._deepest = [_deepest(cells, self._sizes) for cells in self._ms]
        self._cache: dict[tuple[int, float], Floats] = {}

    def curve(self, batch_size: int, context: float) -> Floats:
        """ms at 0 .. max_steps steps for each of `batch_size` rows; shared, not to be written."""
        point = batch_size, self._position(context)
        found = self._cache.get(point)
        if found is None:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            found = self._cache[point] = self._interpolated(*point)
        return found

    def deepest(self, num_rows: Any, context: float) -> Floats:
        """ms of batches of so many rows in all, each sequence going as deep as it can.

        Of all batches of so many rows these read the fewest texts. Fewer rows than the smallest one
        has cost what it costs. Between two sizes costs rise as the larger one's do with its depth.
        """
        i, w = _segment(self._positions, self._position(context))
        (rows, low), (_, high) = self._deepest[i : i + 2]
        ms = _between(low, high, w)
        beyond = np.maximum(0, num_rows - rows[-1]) * (ms[-1] - ms[-2]) / (rows[-1] - rows[-2])
        on_lines: Floats = np.interp(num_rows, rows, ms) + beyond
        return on_lines

    def _position(self, context: float) -> float:
        short, long = self._contexts
        position = max(0.0, (context - short) / (long - short))
        return round(position * _CONTEXT_PARTS) / _CONTEXT_PARTS

    def _interpolated(self, batch_size: int, position: float) -> Floats:
        i, w = _segment(self._sizes, batch_size)
        by_context = _between(self._ms[:, i], self._ms[:, i + 1], w)
        i, w = _segment(self._positions, position)
        curve = _between(by_context[i], by_context[i + 1], w)
        # Only far beyond both edges could lines have crossed.
        return np.maximum.accumulate(curve)


def monotone(ms: Floats) -> Floats:
    """Each cell becomes the least of itself and all cells beyond it: rising along every axis.

    Why the least and not an average of the cells that contradict each other (isotonic regression):
    noise in timings has one sign, other work only ever makes a round slower, so of two cells that
    contradict each other the cheaper one is the better measurement. One disturbed cell would pull
    a pooled average up; it can not pull a minimum. Where the minimum errs it makes smaller rounds
    too cheap, plain ones first of all: towards fewer drafts, until rounds that run correct it.
    """
    for axis in range(ms.ndim):
        ms = np.flip(np.minimum.accumulate(np.flip(ms, axis), axis), axis)
    return ms


def _continued(ms: Floats, points: list[float], axis: int) -> tuple[Floats, list[float]]:
    """Adds the point twice as far as the last one, on the line through the last two.

    From a single point the line starts at nothing. Slopes are made monotone along the other axes:
    then so is whatever lies on the lines, however far.
    """
    last: Floats = np.take(ms, -1, axis)
    if len(points) > 1:
        before: Floats = np.take(ms, -2, axis)
        slope = monotone((last - before) / (points[-1] - points[-2]))
    else:
        slope = last / points[-1]
    far = last + slope * points[-1]
    return np.concatenate([ms, np.expand_dims(far, axis)], axis), [*points, 2 * points[-1]]


def _deepest(ms: Floats, sizes: Sequence[float]) -> tuple[Floats, Floats]:
    """Rows and ms [n] of the deepest of every size, ms [sizes, steps], and of what lies between.

    The last size was not measured: a line leads to it.
    """
    depths = np.arange(1.0, ms.shape[1] + 1)
    rows, costs = [np.array([sizes[0] * depths[-1]])], [ms[0, -1:]]
    for size, curve in zip(sizes[1:-1], ms[1:-1], strict=True):
        before, last = rows[-1][-1], costs[-1][-1]
        start, rise = np.interp(before / size, depths, curve), curve[-1] - last
        inside = size * depths > before
        shape = (curve - start) / (curve[-1] - start) if curve[-1] > start else depths / depths[-1]
        rows.append(size * depths[inside])
        costs.append(last + rise * shape[inside])
    rows.append(np.array([sizes[-1] * depths[-1]]))
    return np.concatenate(rows), np.concatenate([*costs, ms[-1, -1:]])


def _segment(points: Sequence[float], x: float) -> tuple[int, float]:
    """i and w such that x lies at w of the way from points[i] to points[i+1].

    Below the first point w is 0; beyond the last one it is above 1.
    """
    i = min(max(bisect_right(points, x) - 1, 0), len(points) - 2)
    return i, max(0.0, (x - points[i]) / (points[i + 1] - points[i]))


def _between(low: Floats, high: Floats, w: float) -> Floats:
    return low + w * (high - low)
