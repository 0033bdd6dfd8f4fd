"""Synthetic plans that cost as much as those of a scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from serve_spec.core.draft import DraftShape
from serve_spec.core.plan import ScheduledBatch, ScheduledRequest
from serve_spec.core.request import SamplingParams

_GOLDEN = (5**0.5 - 1) / 2

SlotsPast: TypeAlias = Callable[[DraftShape], int]
"""See `SpecWorker.slots_past`."""


class Point(NamedTuple):
    """What one plan runs: `batch_size` requests of `context` tokens draft a `shape` each.

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
        part = (0.5 + index * _GOLDEN) % 1.0  # evenly spread for any batch size
        return min(self.length(index) - 1, 1 + int(part * (self.shape.depth + 1))) or 1

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
