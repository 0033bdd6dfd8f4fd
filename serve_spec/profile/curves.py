"""Which points are measured, and the two curves that are made of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from statistics import fmean

import numpy as np

from serve_spec.adaptive.curves import Floats

_SHORT_CONTEXT = 128
_LONG_CONTEXT = 512
_LONGEST_CONTEXT = 4096
_FEWEST_OF_A_LINE = 3
_UNEVEN = 0.2
_LEAST_MS = 1e-6


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


def draft_curve(ms: Floats, sizes: Sequence[int], steps: Sequence[int]) -> Floats:
    """Return drafting times [batch sizes, steps] without noise between depths and without gaps.

    ms: NaN where nothing ran; the first batch size has a time. The steps of a chain take equal
    times, but measured depths differ by noise, and a policy compares depths by their difference. So
    a line replaces the times of a batch size if it fits each within 20 % (a depth may use another
    depth's captured stage, then they stay). Other gaps take the multiple of the batch size before
    that was measured.
    """
    filled = np.maximum(ms, _LEAST_MS)
    numbers = np.array(steps, dtype=float)
    for b, row in enumerate(filled):
        before = filled[b - 1] if b else numbers
        known = np.isfinite(row)
        if not known.any():
            row[:] = before * sizes[b] / sizes[b - 1]
            if b > 1:  # in a line
                rise = (before - filled[b - 2]) / (sizes[b - 1] - sizes[b - 2])
                row[:] = before + np.maximum(rise, 0.0) * (sizes[b] - sizes[b - 1])
            continue
        line = _line(numbers[known], row[known], numbers)
        last = np.flatnonzero(known)[-1]
        other = before * row[last] / before[last]
        row[:] = np.where(known, row, other) if line is None else line
    return np.maximum(filled, _LEAST_MS)


def same_at_all_depths(ms: Floats) -> Floats:
    """Return the median of each batch size for all its depths, NaN if it has none.

    ms: as of `draft_curve`, of a drafter whose drafts of all depths cost the same.
    """
    same = ms.copy()
    for row in same:
        known = row[np.isfinite(row)]
        if len(known):
            row[:] = np.median(known)
    return same


def _line(x: Floats, y: Floats, at: Floats) -> Floats | None:
    """Return a rising line at `at` by least relative errors; None: it does not fit (x, y)."""
    if len(x) < _FEWEST_OF_A_LINE:
        return None
    # Relative errors, because noise grows with the time.
    columns = np.stack([np.ones(len(x)), x], axis=1) / y[:, None]
    begin, slope = np.linalg.lstsq(columns, np.ones(len(x)), rcond=None)[0]
    slope = max(0.0, slope)
    if (abs((begin + slope * x) / y - 1.0) > _UNEVEN).any():
        return None
    return np.asarray(begin + slope * at)


def token_curve(points: Iterable[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Return tokens, ascending, and verification times that never fall, from (tokens, ms).

    Times of equal tokens are averaged, and neighbours that fall are replaced by their mean
    (isotonic regression).
    """
    by_tokens = defaultdict(list)
    for tokens, ms in points:
        by_tokens[tokens].append(ms)
    blocks: list[tuple[float, int, int]] = []  # mean, measurements, entries
    for tokens in sorted(by_tokens):
        block = fmean(by_tokens[tokens]), len(by_tokens[tokens]), 1
        while blocks and blocks[-1][0] >= block[0]:
            mean, count, entries = blocks.pop()
            total = mean * count + block[0] * block[1]
            block = total / (count + block[1]), count + block[1], entries + block[2]
        blocks.append(block)
    return sorted(by_tokens), [mean for mean, _, entries in blocks for _ in range(entries)]


def context_slope(rows: Sequence[tuple[float, float, float]]) -> float:
    """Return the ms per context token by least squares, at least 0; 0 without rows.

    rows: additional context tokens, additional ms, ms; noise grows with the latter.
    """
    tokens, more, ms = np.array(rows, dtype=float).reshape(-1, 3).T
    weights = tokens / np.maximum(ms, _LEAST_MS) ** 2
    total = float(weights @ tokens)
    return max(0.0, float(weights @ more) / total) if total else 0.0


def tree_curve(ms: Floats, expected: Floats) -> Floats:
    """Return the drafting times [batch sizes] of one tree shape with gaps (NaN) filled.

    A gap gets the multiple of `expected` of the batch size before, or `expected` itself.
    """
    filled = ms.copy()
    for b in np.flatnonzero(np.isnan(ms)):
        filled[b] = expected[b] * (filled[b - 1] / expected[b - 1] if b else 1.0)
    return filled
