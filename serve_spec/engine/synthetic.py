"""Rounds nobody asked for: plans that cost what real ones of their size do."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.plan import ScheduledBatch, ScheduledRequest
from serve_spec.core.request import SamplingParams

_GOLDEN = (5**0.5 - 1) / 2


class Cell(NamedTuple):
    """One size of round: `batch_size` decode rows of `context` tokens draft a `shape` each.

    Rows of a real round differ, and what computes them together pays for that; so rows differ
    here: their contexts by up to a quarter around the mean, their backlogs from 1 to all that a
    round can leave, in the mean half of it for any number of rows.
    """

    context: int
    batch_size: int
    shape: DraftShape

    @property
    def num_rows(self) -> int:
        """Rows the target verifies."""
        return self.batch_size * (self.shape.size + 1)

    def holds(self, other: Cell) -> bool:
        """Return whether the round is at least as large as another one in everything."""
        mine, its = self.shape, other.shape
        return (
            self.context >= other.context
            and self.batch_size >= other.batch_size
            and mine.depth >= its.depth
            and mine.size >= its.size
            and mine.topk >= its.topk
        )

    def length(self, row: int) -> int:
        """Tokens of one row."""
        spread = (2 * row + 1 - self.batch_size) / (4 * self.batch_size)
        return max(1, round(self.context * (1 + spread)))

    def num_catch_up(self, row: int) -> int:
        """Draft entries one row has to make up, as after rounds that kept all or few drafts."""
        if not self.shape.depth:
            return 0
        share = (0.5 + row * _GOLDEN) % 1.0  # as even as can be over the first rows, however many
        return min(self.length(row) - 1, 1 + int(share * (self.shape.depth + 1))) or 1

    def num_pages(self, page_size: int) -> int:
        """Pages its plan takes."""
        return self.batch_size * self.pages_per_row(page_size)

    def pages_per_row(self, page_size: int) -> int:
        """Pages of the longest sequence and its drafts."""
        longest = self.length(self.batch_size - 1)
        return -(-(longest + self.shape.draft_slots) // page_size)


class SyntheticPlans:
    """Makes plans of random tokens, every row on pages of its own.

    pages: ids of so many pages that a plan may overwrite.
    """

    def __init__(
        self, page_size: int, vocab_size: int, pages: Callable[[int], Sequence[int]] = range
    ) -> None:
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._pages = pages
        self._num_plans = 0
        self._random = random.Random(0)  # its own, so that nobody else's numbers change

    def plan(self, cell: Cell, temperature: float) -> ScheduledBatch:
        """A round of this size."""
        params = SamplingParams(temperature=temperature)
        self._num_plans += 1  # other requests every time, for none continues the last plan's
        pages = self._pages(cell.num_pages(self._page_size))
        rows = tuple(self._row(cell, b, params, pages) for b in range(cell.batch_size))
        num_missing = max(len(row.extend_ids) for row in rows)
        return ScheduledBatch(rows, cell.shape, cell.batch_size, max_missing=num_missing)

    def _row(
        self, cell: Cell, b: int, params: SamplingParams, pages: Sequence[int]
    ) -> ScheduledRequest:
        start, num_catch_up = cell.length(b) - 1, cell.num_catch_up(b)
        num_pages = cell.pages_per_row(self._page_size)
        return ScheduledRequest(
            request_id=f"synthetic-{self._num_plans}-{b}",
            token_ids=self._tokens(1),
            start=start,
            samples=True,
            page_ids=tuple(pages[b * num_pages : (b + 1) * num_pages]),
            params=params,
            seed=b,
            is_decode=True,
            shape=cell.shape,
            draft_start=start - num_catch_up if cell.shape.depth else 0,
            extend_ids=self._tokens(num_catch_up),
            extends=cell.shape.depth > 0,
            num_missing=num_catch_up,
            request_slot=b,
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self._vocab_size) for _ in range(count))
