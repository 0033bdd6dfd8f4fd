"""Which rounds a cost table is made of, and the cells that could not be measured."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from serve_spec.adaptive.cost_surface import monotone

Milliseconds: TypeAlias = NDArray[np.float64]
"""[contexts, batch sizes, steps]."""

_SHORT_CONTEXT = 128
_LONG_CONTEXT = 512
_LONGEST_CONTEXT = 4096
_FEWEST_OF_A_LINE = 3
_UNEVEN = 0.2


def batch_grid(max_batch_size: int) -> list[int]:
    """1, 2, 4, ... and `max_batch_size` itself."""
    powers = [1 << i for i in range(max_batch_size.bit_length())]
    return sorted({*powers, max_batch_size})


def step_grid(tiers: Collection[int], max_steps: int, *, every: bool = False) -> list[int]:
    """Tiers to measure up to `max_steps`: all small ones, then each two fifths above the last.

    every: all of them.

    Of all tiers 0 .. 14: 0, 1, 2, 3, 5, 7, 10, 14. Costs between them follow.
    """
    built = sorted(tier for tier in tiers if tier <= max_steps)
    grid: list[int] = []
    for tier in built:
        if every or not grid or 5 * tier >= 7 * grid[-1] or tier == built[-1]:
            grid.append(tier)
    return grid


def context_grid(longest: int) -> tuple[int, int]:
    """A short and a long text in tokens, where the longest possible has `longest`.

    Long is a quarter of the longest within reason: costs of still longer texts continue the line.
    """
    long = min(longest, max(_LONG_CONTEXT, min(_LONGEST_CONTEXT, longest // 4)))
    return min(_SHORT_CONTEXT, long // 4), long


def even_steps(draft_ms: Milliseconds, steps: Sequence[int]) -> Milliseconds:
    """Drafting of which every further step takes the same; NaN stays.

    A chain begins once, and its steps are alike; measured one by one they differ by what else the
    machine did, and between two depths the difference decides. Where no straight line comes within
    `_UNEVEN` of every cell, steps are not alike (another stage may stand in for one), and are kept.
    """
    evened = draft_ms.copy()
    numbers = np.array(steps, dtype=np.float64)
    for at in np.ndindex(draft_ms.shape[:2]):
        ms = draft_ms[at]
        known = np.isfinite(ms) & (numbers > 0) & (ms > 0.0)
        if known.sum() < _FEWEST_OF_A_LINE:
            continue
        # Relative errors: a deep chain is measured as well as a short one, by its own measure.
        line = np.stack([np.ones(known.sum()), numbers[known]], axis=1)
        of_ms = line / ms[known, None]
        begin_ms, step_ms = np.linalg.lstsq(of_ms, np.ones(known.sum()), rcond=None)[0]
        found = line @ np.array([begin_ms, max(0.0, step_ms)])
        if (abs(found / ms[known] - 1.0) <= _UNEVEN).all():
            evened[at][known] = found
    return evened


def fill_missing(
    ms: Milliseconds, batch_sizes: Sequence[int], num_steps: Sequence[int]
) -> Milliseconds:
    """The table without gaps (NaN): each continues, linearly in rows, what was measured near it.

    What is missing is large, and large rounds are bound by arithmetic: linear in their rows. At
    the shorter context the smallest batch size must hold its plain round and one other.
    """
    missing = np.isnan(ms)
    # Lines start from what the cost model will make of the measured cells.
    measured = np.where(missing, np.nan, monotone(np.where(missing, np.inf, ms)))
    filled = measured.copy()
    for c, b, k in np.argwhere(missing):  # ascending: whatever is smaller is filled by then
        if c:
            guess = _longer(filled, b, k, batch_sizes, num_steps)
        else:
            guess = _larger(measured[0], filled[0], b, k, batch_sizes, num_steps)
        filled[c, b, k] = np.nanmax([guess, *filled[: c + 1, : b + 1, : k + 1].flat])
    return np.where(missing, filled, ms)


def fill_tree(ms: Milliseconds, expected: Milliseconds) -> Milliseconds:
    """[contexts, batch sizes] of one shape of trees without gaps (NaN).

    What is missing takes the multiple of `expected` that was measured at the shorter context, or
    else at the batch size before; where nothing was measured, `expected` itself.
    """
    missing = np.isnan(ms)
    ratios = ms / expected
    for c, b in np.argwhere(missing):
        ratios[c, b] = ratios[0, b] if c else ratios[0, b - 1] if b else 1.0
    return np.where(missing, ratios * expected, ms)


def _larger(
    measured: Milliseconds,
    filled: Milliseconds,
    b: int,
    k: int,
    batch_sizes: Sequence[int],
    num_steps: Sequence[int],
) -> float:
    """A cell of the shorter context, [batch sizes, steps]."""
    known = np.flatnonzero(~np.isnan(measured[b]))
    if len(known) > 2 and measured[b, 0] == 0:
        known = known[1:]  # drafting nothing is free: a corner, not a point of the line
    if len(known) >= 2:
        first, last = known[0], known[-1]
        rise = (measured[b, last] - measured[b, first]) / (num_steps[last] - num_steps[first])
        return float(measured[b, last] + rise * (num_steps[k] - num_steps[last]))
    # The batch size before, its part that grows with steps scaled to the rows of this one.
    growth = batch_sizes[b] / batch_sizes[b - 1]
    if k == 0:
        return float(filled[b - 1, 0] * growth)
    return float(filled[b, 0] + (filled[b - 1, k] - filled[b - 1, 0]) * growth)


def _longer(
    filled: Milliseconds,
    b: int,
    k: int,
    batch_sizes: Sequence[int],
    num_steps: Sequence[int],
) -> float:
    """A cell of the longer context: what it adds grows with the rows that attend to it."""
    added = filled[1] - filled[0]
    if b:
        more = added[b - 1, k] * batch_sizes[b] / batch_sizes[b - 1]
    elif k:
        more = added[b, k - 1] * (num_steps[k] + 1) / (num_steps[k - 1] + 1)
    else:
        more = 0.0
    return float(filled[0, b, k] + more)
