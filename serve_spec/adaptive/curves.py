"""Two curves of a cost table: drafting by batch size and depth, verification by tokens.

    draft ms = draft(B, depth) + depth · B · (context - table's context) · ms per token
    verify ms = verify(tokens) + B · context · ms per token

Both are interpolated between measured points and continued in a line beyond the last.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from serve_spec.config.cost_table import CostTable
from serve_spec.core.draft import DraftShape

Floats: TypeAlias = NDArray[np.float64]


class StepCurves:
    """Predicts the milliseconds of the two stages of a round from a table alone."""

    def __init__(self, table: CostTable) -> None:
        self.max_steps = table.num_steps[-1]
        self._context = table.context
        self._slopes = table.draft_context_ms, table.verify_context_ms
        self._sizes = np.array(table.batch_sizes, dtype=float)
        self._depths = np.arange(self.max_steps + 1.0)
        points = [0.0, *table.num_steps]
        rows = [np.interp(self._depths, points, [0.0, *row]) for row in table.draft_ms]
        self._draft = monotone(np.array(rows))
        self._tokens, self._verify = (
            np.array(column, dtype=float) for column in (table.num_tokens, table.verify_ms)
        )
        # Neighbours may be one measurement apart, so the last line spans half of the tokens.
        half = np.interp(self._tokens[-1] / 2, self._tokens, self._verify)
        self._last_slope = (self._verify[-1] - half) / (self._tokens[-1] / 2)
        self._trees = {tree.shape: np.array(tree.draft_ms) for tree in table.trees}
        self._of_size = lru_cache(maxsize=1024)(lambda size: self._on_lines(self._draft, size))

    @property
    def trees(self) -> list[tuple[int, int]]:
        """Return depth and size of the trees of the table."""
        return list(self._trees)

    def draft_ms(self, size: int, context: float) -> Floats:
        """Return ms of drafting 0 .. max_steps deep: [max_steps + 1]."""
        more = size * max(0.0, context - self._context) * self._slopes[0]
        # Only far beyond the largest batch size could lines have crossed.
        found: Floats = np.maximum.accumulate(self._of_size(size)) + more * self._depths
        return found

    def verify_ms(self, size: int, context: float, num_tokens: Any) -> Floats:
        """Return ms of verifying numbers of tokens of `size` requests: [M]."""
        tokens = np.asarray(num_tokens, dtype=float)
        beyond = np.maximum(tokens - self._tokens[-1], 0.0) * self._last_slope
        found: Floats = np.interp(tokens, self._tokens, self._verify) + beyond
        return found + size * context * self._slopes[1]

    def tree_draft_ms(self, shape: DraftShape, size: int, context: float) -> float:
        """Return ms of drafting a tree."""
        more = size * max(0.0, context - self._context) * self._slopes[0]
        found = self._on_lines(self._trees[shape.depth, shape.size], size)
        return float(found + more * shape.depth)

    def _on_lines(self, values: Floats, size: int) -> Floats:
        """Return `values` [sizes, ...] at a batch size; a single size grows in proportion."""
        sizes = self._sizes
        if len(sizes) == 1:
            return np.asarray(values[0] * max(1.0, size / sizes[0]))
        i = min(max(bisect_right(sizes.tolist(), size) - 1, 0), len(sizes) - 2)
        part = max(0.0, (size - sizes[i]) / (sizes[i + 1] - sizes[i]))
        return np.asarray(values[i] + part * (values[i + 1] - values[i]))


def monotone(ms: Floats) -> Floats:
    """Make each time the least of itself and all times beyond it: rising along every axis.

    Other work only ever makes a round slower, so of two times that contradict each other the
    smaller one is the better measurement.
    """
    for axis in range(ms.ndim):
        ms = np.flip(np.minimum.accumulate(np.flip(ms, axis), axis), axis)
    return ms
