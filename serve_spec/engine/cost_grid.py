"""The grid of steps that a cost table holds, and values for those that were not measured."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from serve_spec.config.cost_table import monotone

Milliseconds: TypeAlias = NDArray[np.float64]
"""[contexts, batch sizes, steps]."""

_SHORT_CONTEXT = 128
_LONG_CONTEXT = 512
_LONGEST_CONTEXT = 4096
_FEWEST_OF_A_LINE = 3
_UNEVEN = 0.2


def batch_grid(max_batch_size: int) -> list[int]:
    """Return 1, 2, 4, ... and `max_batch_size` itself."""
    powers = [1 << i for i in range(max_batch_size.bit_length())]
    return sorted({*powers, max_batch_size})


def step_grid(depths: Collection[int], max_steps: int, *, every: bool = False) -> list[int]:
    """Return the depths to measure up to `max_steps`, each at least 7/5 of the one before.

    Of 0 .. 14 these are 0, 1, 2, 3, 5, 7, 10, 14. every: return all of them.
    """
    captured = sorted(depth for depth in depths if depth <= max_steps)
    grid: list[int] = []
    for depth in captured:
        if every or not grid or 5 * depth >= 7 * grid[-1] or depth == captured[-1]:
            grid.append(depth)
    return grid


def context_grid(longest: int) -> tuple[int, int]:
    """Return a short and a long context in tokens, at most `longest`.

    The long one is about a quarter of `longest`; costs are extrapolated beyond it.
    """
    long = min(longest, max(_LONG_CONTEXT, min(_LONGEST_CONTEXT, longest // 4)))
    return min(_SHORT_CONTEXT, long // 4), long


def even_steps(draft_ms: Milliseconds, steps: Sequence[int]) -> Milliseconds:
    """Return drafting times smoothed to be linear in the steps; NaN stays.

    The steps of a chain take equal times, but measured depths differ by noise, and a policy
    compares depths by their difference. If no line fits every cell within `_UNEVEN`, the measured
    times are kept: a depth may use another depth's stage.
    """
    evened = draft_ms.copy()
    numbers = np.array(steps, dtype=np.float64)
    for at in np.ndindex(draft_ms.shape[:2]):
        ms = draft_ms[at]
        known = np.isfinite(ms) & (numbers > 0) & (ms > 0.0)
        if known.sum() < _FEWEST_OF_A_LINE:
            continue
        # Fit relative errors, because noise grows with the time.
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
    """Return the table with gaps (NaN) extrapolated linearly in the number of tokens.

    Gaps are large steps, which are bound by arithmetic, so linear in their tokens. At the shorter
    context the smallest batch size must hold its plain step and another one.
    """
    missing = np.isnan(ms)
    # The cost model will make the measured cells monotone, so extrapolate from that.
    measured = np.where(missing, np.nan, monotone(np.where(missing, np.inf, ms)))
    filled = measured.copy()
    for c, b, k in np.argwhere(missing):  # ascending: smaller cells are filled first
        if c:
            guess = _longer(filled, b, k, batch_sizes, num_steps)
        else:
            guess = _larger(measured[0], filled[0], b, k, batch_sizes, num_steps)
        filled[c, b, k] = np.nanmax([guess, *filled[: c + 1, : b + 1, : k + 1].flat])
    return np.where(missing, filled, ms)


def fill_tree(ms: Milliseconds, expected: Milliseconds) -> Milliseconds:
    """Return the times [contexts, batch sizes] of one tree shape with gaps (NaN) filled.

    A gap gets the multiple of `expected` that was measured at the shorter context, or else at the
    batch size before, or `expected` itself.
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
    """Return a missing cell of the shorter context, [batch sizes, steps]."""
    known = np.flatnonzero(~np.isnan(measured[b]))
    if len(known) > 2 and measured[b, 0] == 0:
        known = known[1:]  # drafting nothing is free, so no point of the line
    if len(known) >= 2:
        first, last = known[0], known[-1]
        rise = (measured[b, last] - measured[b, first]) / (num_steps[last] - num_steps[first])
        return float(measured[b, last] + rise * (num_steps[k] - num_steps[last]))
    # The batch size before, with the part that grows with steps scaled to this one.
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
    """Return a missing cell of the longer context: the surplus grows with the tokens."""
    added = filled[1] - filled[0]
    if b:
        more = added[b - 1, k] * batch_sizes[b] / batch_sizes[b - 1]
    elif k:
        more = added[b, k - 1] * (num_steps[k] + 1) / (num_steps[k - 1] + 1)
    else:
        more = 0.0
    return float(filled[0, b, k] + more)
