"""The grid of steps that a cost table holds: plans that cost as much as real ones, and gaps."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from serve_spec.config.cost_table import monotone
from serve_spec.core.draft import DraftShape
from serve_spec.core.plan import ScheduledBatch, ScheduledRequest
from serve_spec.core.request import SamplingParams

Milliseconds: TypeAlias = NDArray[np.float64]
"""[contexts, batch sizes, steps]."""

_SHORT_CONTEXT = 128
_LONG_CONTEXT = 512
_LONGEST_CONTEXT = 4096
_FEWEST_OF_A_LINE = 3
_UNEVEN = 0.2
_GOLDEN = (5**0.5 - 1) / 2


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


def same_at_all_depths(draft_ms: Milliseconds, steps: Sequence[int]) -> Milliseconds:
    """Return the median drafting time of all depths but 0 for each; NaN if there is none."""
    same, drafts = draft_ms.copy(), np.array(steps) > 0
    for at in np.ndindex(draft_ms.shape[:2]):
        known = draft_ms[at][drafts & np.isfinite(draft_ms[at])]
        if len(known):
            same[at][drafts] = np.median(known)
    return same


def fill_missing(
    ms: Milliseconds, batch_sizes: Sequence[int], num_steps: Sequence[int]
) -> Milliseconds:
    """Return the table with gaps (NaN) extrapolated linearly in the number of tokens.

    Gaps are large steps, which are bound by arithmetic, so linear in their tokens. At the shorter
    context the smallest batch size must hold its plain step and another one.
    """

    def larger(b: int, k: int) -> float:
        """Return a missing cell of the shorter context."""
        of_size = measured[0, b]
        known = np.flatnonzero(~np.isnan(of_size))
        if len(known) > 2 and of_size[0] == 0:
            known = known[1:]  # drafting nothing is free, so no point of the line
        if len(known) >= 2:
            first, last = known[0], known[-1]
            rise = (of_size[last] - of_size[first]) / (num_steps[last] - num_steps[first])
            return float(of_size[last] + rise * (num_steps[k] - num_steps[last]))
        # The batch size before, with the part that grows with steps scaled to this one.
        growth, before = batch_sizes[b] / batch_sizes[b - 1], filled[0, b - 1]
        if k == 0:
            return float(before[0] * growth)
        return float(filled[0, b, 0] + (before[k] - before[0]) * growth)

    def longer(b: int, k: int) -> float:
        """Return a missing cell of the longer context: the surplus grows with the tokens."""
        added, more = filled[1] - filled[0], 0.0
        if b:
            more = added[b - 1, k] * batch_sizes[b] / batch_sizes[b - 1]
        elif k:
            more = added[b, k - 1] * (num_steps[k] + 1) / (num_steps[k - 1] + 1)
        return float(filled[0, b, k] + more)

    missing = np.isnan(ms)
    # The cost model will make the measured cells monotone, so extrapolate from that.
    measured = np.where(missing, np.nan, monotone(np.where(missing, np.inf, ms)))
    filled = measured.copy()
    for c, b, k in np.argwhere(missing):  # ascending: smaller cells are filled first
        guess = longer(b, k) if c else larger(b, k)
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


SlotsPast: TypeAlias = Callable[[DraftShape], int]
"""See `SpecWorker.slots_past`."""


class Point(NamedTuple):
    """A point of the cost grid: `batch_size` requests of `context` tokens draft a `shape` each.

    As in real steps, requests differ, which costs time: contexts by up to a quarter around the
    mean, missing draft KV entries from 1 to all that a step can leave, on average half of that.
    """

    context: int
    batch_size: int
    shape: DraftShape

    @property
    def num_tokens(self) -> int:
        """Tokens of the target forward."""
        return self.batch_size * (self.shape.size + 1)

    def covers(self, other: Point) -> bool:
        """Return whether every dimension is at least as large as that of another point."""
        mine, its = self.shape, other.shape
        return (
            self.context >= other.context
            and self.batch_size >= other.batch_size
            and mine.depth >= its.depth
            and mine.size >= its.size
            and mine.topk >= its.topk
        )

    def length(self, index: int) -> int:
        """Return the context tokens of one request."""
        spread = (2 * index + 1 - self.batch_size) / (4 * self.batch_size)
        return max(1, round(self.context * (1 + spread)))

    def num_missing(self, index: int) -> int:
        """Return the draft KV entries that one request lacks, as after a step."""
        if not self.shape.depth:
            return 0
        share = (0.5 + index * _GOLDEN) % 1.0  # evenly spread for any batch size
        return min(self.length(index) - 1, 1 + int(share * (self.shape.depth + 1))) or 1

    def num_pages(self, page_size: int, slots_past: SlotsPast) -> int:
        """Return the pages of the plan."""
        return self.batch_size * self.pages_per_request(page_size, slots_past)

    def pages_per_request(self, page_size: int, slots_past: SlotsPast) -> int:
        """Return the pages of the longest sequence and its drafts."""
        longest = self.length(self.batch_size - 1)
        return -(-(longest + slots_past(self.shape)) // page_size)


@dataclass(eq=False, repr=False)
class SyntheticPlans:
    """Makes plans of random tokens, every request on its own pages.

    slots_past: see `SpecWorker`. pages: returns the ids of so many pages that a plan may overwrite.
    """

    page_size: int
    vocab_size: int
    slots_past: SlotsPast
    pages: Callable[[int], Sequence[int]] = range

    def __post_init__(self) -> None:
        self._num_plans = 0
        self._random = random.Random(0)  # does not touch the global state

    def plan(self, point: Point, temperature: float) -> ScheduledBatch:
        """Return the plan of a point."""
        params = SamplingParams(temperature=temperature)
        self._num_plans += 1  # new request ids, so that no state is reused
        pages = self.pages(point.num_pages(self.page_size, self.slots_past))
        reqs = tuple(self._request(point, b, params, pages) for b in range(point.batch_size))
        num_missing = max(len(req.extend_ids) for req in reqs)
        return ScheduledBatch(reqs, point.shape, point.batch_size, max_missing=num_missing)

    def _request(
        self, point: Point, b: int, params: SamplingParams, pages: Sequence[int]
    ) -> ScheduledRequest:
        start, num_missing = point.length(b) - 1, point.num_missing(b)
        num_pages = point.pages_per_request(self.page_size, self.slots_past)
        return ScheduledRequest(
            request_id=f"synthetic-{self._num_plans}-{b}",
            token_ids=self._tokens(1),
            start=start,
            samples=True,
            page_ids=tuple(pages[b * num_pages : (b + 1) * num_pages]),
            params=params,
            seed=b,
            is_decode=True,
            shape=point.shape,
            draft_start=start - num_missing if point.shape.depth else 0,
            extend_ids=self._tokens(num_missing),
            extends=point.shape.depth > 0,
            num_missing=num_missing,
            request_slot=b,
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self.vocab_size) for _ in range(count))
