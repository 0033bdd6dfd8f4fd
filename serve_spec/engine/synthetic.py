"""Rounds nobody asked for: plans that cost what real ones of their size do."""

from __future__ import annotations

import random
from typing import NamedTuple

from serve_spec.core.plan import RowPlan, StepPlan
from serve_spec.core.request import SamplingParams


class Cell(NamedTuple):
    """One size of round: `batch_size` decode rows of `context` tokens draft `num_steps` each."""

    context: int
    batch_size: int
    num_steps: int

    @property
    def num_rows(self) -> int:
        """Rows the target verifies."""
        return self.batch_size * (self.num_steps + 1)

    @property
    def num_catch_up(self) -> int:
        """Draft entries to make up, per row: as after a round that kept half of its drafts."""
        return 1 + (self.num_steps + 1) // 2 if self.num_steps else 0

    def num_pages(self, page_size: int) -> int:
        """Pages its plan takes, from page 0 on."""
        return self.batch_size * self.pages_per_row(page_size)

    def pages_per_row(self, page_size: int) -> int:
        """Pages of one sequence and its drafts."""
        return -(-(self.context + self.num_steps) // page_size)


class SyntheticPlans:
    """Makes plans of random tokens, every row on pages of its own."""

    def __init__(self, page_size: int, vocab_size: int) -> None:
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._random = random.Random(0)  # its own, so that nobody else's numbers change

    def plan(self, cell: Cell, temperature: float) -> StepPlan:
        """A round of this size."""
        params = SamplingParams(temperature=temperature)
        rows = tuple(self._row(cell, b, params) for b in range(cell.batch_size))
        return StepPlan(rows, cell.num_steps, cell.batch_size)

    def _row(self, cell: Cell, b: int, params: SamplingParams) -> RowPlan:
        start = cell.context - 1
        pages = cell.pages_per_row(self._page_size)
        return RowPlan(
            request_id=f"synthetic-{b}",
            token_ids=self._tokens(1),
            start=start,
            samples=True,
            page_ids=tuple(range(b * pages, (b + 1) * pages)),
            params=params,
            seed=b,
            is_decode=True,
            num_steps=cell.num_steps,
            draft_start=start - cell.num_catch_up if cell.num_steps else 0,
            catch_up_ids=self._tokens(cell.num_catch_up),
        )

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(self._vocab_size) for _ in range(count))
