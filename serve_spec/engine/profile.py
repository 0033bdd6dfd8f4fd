"""Measures what rounds cost by running them: the real worker on synthetic plans.

What the plans leave in the caches is garbage, so they may only use pages that no sequence holds: a
sequence writes every page anew before it reads it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from serve_spec.config.cost_table import Grid, TreeCosts
from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.plan import BatchResult, ScheduledBatch
from serve_spec.engine.cost_grid import (
    Milliseconds,
    batch_grid,
    context_grid,
    even_steps,
    fill_missing,
    fill_tree,
    step_grid,
)
from serve_spec.engine.synthetic import Cell, SyntheticPlans

WARM_UP_RUNS = 3
MEASURED_RUNS = 5

_TABLE_SHARE = 0.85
"""Of the budget; the rest measures what sampling adds."""
_SAMPLED_CELLS = 3
_SAMPLED_PAIRS = 5
_TEMPERATURE = 0.8
_LEAST_MS = 1e-6
_ESSENTIAL_BUDGETS = 3.0
"""Budgets that the rounds no table can do without may take, on a machine that is busy."""


class RunsRounds(Protocol):
    """What is measured: a `SpecWorker`."""

    vocab_size: int

    @property
    def states(self) -> Collection[DraftShape]:
        """Shapes a plan may have."""
        ...

    def execute(self, plan: ScheduledBatch) -> BatchResult:
        """Runs a round."""
        ...


@dataclass(frozen=True)
class MeasuredCosts:
    """What a `CostTable` holds beside its key; see there."""

    batch_sizes: tuple[int, ...]
    num_steps: tuple[int, ...]
    contexts: tuple[int, int]
    draft_ms: Grid
    verify_ms: Grid
    sampled_row_ms: float
    extrapolated: tuple[tuple[int, int], ...]
    measured_s: float
    trees: tuple[TreeCosts, ...] = ()
    is_rough: bool = False
    """Whether time ran out before every batch size was measured; no part of a table."""


Measurement: TypeAlias = Generator[float, None, MeasuredCosts]
"""Runs a round each time it is advanced and yields the share of the budget that is spent."""


def measure_costs(
    worker: RunsRounds,
    *,
    page_size: int,
    num_pages: int,
    max_batch_size: int,
    max_steps: int,
    max_num_rows: int,
    max_model_len: int,
    budget_s: float,
    every_step: bool = False,
    trees: Sequence[DraftShape] = (),
    clock: Callable[[], float] = time.perf_counter,
    pages: Callable[[int], Sequence[int]] = range,
    longest_run_s: float = math.inf,
) -> Measurement:
    """Runs rounds of every size for up to `budget_s` seconds and takes medians; see `finish`.

    Batch sizes that do not fit even with short texts and no drafts are left out; other rounds that
    do not fit the pages, `max_num_rows` or the budget are extrapolated. Short rounds without and
    with drafts are measured even if that takes a few budgets.

    Args:
        max_num_rows: most rows of one target forward.
        max_model_len: most tokens of a sequence.
        every_step: measures every tier, not a selection; where rounds are quick.
        trees: shapes to measure beside chains, ascending.
        clock: seconds; may stand still while the measurement is not advanced.
        pages: ids of so many pages that no sequence holds, for the next round.
        longest_run_s: rounds expected to take longer are extrapolated, but for the shortest.

    Raises:
        ValueError: lengths, pages or time leave nothing to measure.
    """
    started = clock()
    room = _Room(page_size, num_pages, max_num_rows, max_model_len)
    chains = [shape.depth for shape in worker.states if shape.is_chain]
    steps = step_grid(chains, max_steps, every=every_step)
    shapes = [*map(DraftShape.chain, steps), *trees]
    contexts = room.contexts(steps[-1])
    sizes = [b for b in batch_grid(max_batch_size) if room.holds(Cell(contexts[0], b, PLAIN))]
    essential = [Cell(contexts[0], 1, shape) for shape in shapes[: len(steps[:2])]]
    if not all(map(room.holds, essential)):
        raise ValueError(
            f"max_num_batched_tokens={max_num_rows}: no round with drafts fits; raise it"
        )
    cells = [Cell(c, b, shape) for c in contexts for b in sizes for shape in shapes]
    plans = SyntheticPlans(page_size, worker.vocab_size, pages)
    profiler = _Profiler(worker, plans, clock, budget_s, longest_run_s)
    yield from profiler.sweeps(essential, list(filter(room.holds, cells)))
    draft, verify = profiler.tables(contexts, sizes, steps)
    if np.isfinite(verify[0, 0]).sum() < len(essential):
        raise ValueError(
            f"no round with drafts ended within {_ESSENTIAL_BUDGETS * budget_s:.3g} s: the machine "
            "is too busy; leave it more room, or name a table of `serve-spec tune` as "
            "speculative_cost_table"
        )
    sampled_row_ms = yield from profiler.sampled_row_ms()
    yield 1.0
    missing = np.argwhere(np.isnan(verify).any(axis=0))
    draft = fill_missing(even_steps(draft, steps), sizes, steps)
    verify = fill_missing(verify, sizes, steps)
    return MeasuredCosts(
        batch_sizes=tuple(sizes),
        num_steps=tuple(steps),
        contexts=contexts,
        draft_ms=_as_grid(draft),
        verify_ms=_as_grid(verify),
        sampled_row_ms=round(sampled_row_ms, 6),
        extrapolated=tuple((sizes[b], steps[k]) for b, k in missing),
        measured_s=round(clock() - started, 3),
        trees=tuple(
            _tree_costs(tree, profiler.tree_table(tree, contexts, sizes), draft, verify, steps)
            for tree in trees
        ),
        is_rough=profiler.lacks(Cell(contexts[0], b, PLAIN) for b in sizes),
    )


def finish(
    measurement: Measurement, progress: Callable[[float], None] = lambda share: None
) -> MeasuredCosts:
    """Runs a measurement to its end. progress: told the share of the budget that is spent."""
    while True:
        try:
            progress(next(measurement))
        except StopIteration as end:
            measured: MeasuredCosts = end.value
            return measured


@dataclass(frozen=True)
class _Room:
    """What the engine has room for."""

    page_size: int
    num_pages: int
    max_num_rows: int
    max_model_len: int

    def contexts(self, max_steps: int) -> tuple[int, int]:
        """A short and a long text that leave room for drafts. Raises ValueError if none does."""
        longest = min(self.max_model_len, self.num_pages * self.page_size) - max_steps
        short, long = context_grid(longest * 4 // 5)  # rows are up to a quarter longer
        if short * 3 // 4 <= max_steps + 1:
            raise ValueError(
                f"max_model_len={self.max_model_len}, num_pages={self.num_pages} of "
                f"page_size={self.page_size}: too short for {max_steps} steps; raise them, or "
                "name fewer candidate_steps in speculative_adaptive_config"
            )
        return short, long

    def holds(self, cell: Cell) -> bool:
        """Whether the round fits."""
        pages = cell.num_pages(self.page_size)
        return pages <= self.num_pages and cell.num_rows <= self.max_num_rows


Outcome = TypeVar("Outcome")
_Rounds: TypeAlias = Generator[float, None, Outcome]
"""Part of a `Measurement`."""


class _Run(NamedTuple):
    """What one execution took."""

    draft_ms: float
    verify_ms: float
    wall_s: float
    sweep: int
    """Number of the sweep it was part of."""


class _Profiler:
    """Runs cells while there is time, and keeps what every run took."""

    def __init__(
        self,
        worker: RunsRounds,
        plans: SyntheticPlans,
        clock: Callable[[], float],
        budget_s: float,
        longest_run_s: float,
    ) -> None:
        self._worker = worker
        self._plans = plans
        self._clock = clock
        self._started = clock()
        self._budget_s = budget_s
        self._longest_run_s = longest_run_s
        self._runs: dict[Cell, list[_Run]] = {}
        self._shortest_s: dict[Cell, float] = {}
        """Of every cell that ran, for whatever reason."""
        self._num_sweeps = 0

    def sweeps(self, essential: list[Cell], cells: list[Cell]) -> _Rounds[None]:
        """Measures the cells in sweeps.

        A sweep runs all rounds of one batch size once, so that a noisy moment hits every number of
        steps alike; before it the first of them, for another size has left the caches cold. First
        come the essential ones, until they are warm, then the plain rounds of all sizes. Then every
        batch size gets about the same time: small ones many sweeps, large ones few. Where time is
        short even for that, the largest are cut short.
        """
        by_size: dict[int, list[Cell]] = {}
        for cell in cells:
            by_size.setdefault(cell.batch_size, []).append(cell)
        # Whatever runs first pays for the start of libraries: nothing may be judged by that.
        for _ in range(WARM_UP_RUNS + 1):
            yield from self._sweep(essential, _ESSENTIAL_BUDGETS, math.inf)
        # These count only where time is too short for sweeps of all steps.
        essential_runs, self._runs = self._runs, {}
        plain = [same_size[0] for same_size in by_size.values()]
        yield from self._sweep(plain[1:], _TABLE_SHARE)
        while by_size:
            size = min(by_size, key=lambda size: self._turn_s(by_size[size]))
            if self._has_time_for(by_size[size][0], 2, _TABLE_SHARE):
                yield from self._run(by_size[size][0], temperature=0.0)  # counts for nothing
            if not (yield from self._sweep(by_size[size], _TABLE_SHARE)):
                del by_size[size]
        self._runs = essential_runs | self._runs

    def lacks(self, cells: Iterable[Cell]) -> bool:
        """Whether one of the cells had no time to run."""
        return any(
            cell not in self._runs and self._expected_s(cell) <= self._longest_run_s
            for cell in cells
        )

    def _sweep(
        self, cells: list[Cell], share: float, longest_run_s: float | None = None
    ) -> _Rounds[bool]:
        """Runs every cell once that is not done and fits the time; whether any did."""
        self._num_sweeps += 1
        before = sum(map(len, self._runs.values()))
        for cell in cells:
            is_done = len(self._runs.get(cell, ())) >= WARM_UP_RUNS + MEASURED_RUNS
            if not is_done and self._has_time_for(cell, 1, share, longest_run_s):
                run = yield from self._run(cell, temperature=0.0)
                self._runs.setdefault(cell, []).append(run)
        return sum(map(len, self._runs.values())) > before

    def _has_time_for(
        self, cell: Cell, count: int, share: float, longest_run_s: float | None = None
    ) -> bool:
        """Whether so many runs would end within a share of the budget, none of them too long."""
        expected_s = self._expected_s(cell)
        if expected_s > (self._longest_run_s if longest_run_s is None else longest_run_s):
            return False
        return self._clock() + count * expected_s <= self._started + share * self._budget_s

    def _turn_s(self, cells: list[Cell]) -> float:
        """The lowest is next: time spent, and part of what is due, so that dear ones wait a bit."""
        spent = sum(run.wall_s for cell in cells for run in self._runs.get(cell, ()))
        return spent + sum(map(self._expected_s, cells)) / 4

    def _expected_s(self, cell: Cell) -> float:
        """What a run takes: as before, or at most in proportion to a smaller round; 0: unknown."""
        if cell in self._shortest_s:
            return self._shortest_s[cell]
        bounds = [
            wall_s * (cell.num_rows / known.num_rows) * (cell.context / known.context)
            for known, wall_s in self._shortest_s.items()
            if cell.holds(known)
        ]
        return min(bounds, default=0.0)

    def _run(self, cell: Cell, temperature: float) -> _Rounds[_Run]:
        plan = self._plans.plan(cell, temperature)
        started = self._clock()
        result = self._worker.execute(plan)
        wall_s = self._clock() - started
        self._shortest_s[cell] = min(wall_s, self._shortest_s.get(cell, wall_s))
        yield min(1.0, (self._clock() - self._started) / self._budget_s)
        return _Run(result.draft_ms, result.verify_ms, wall_s, self._num_sweeps)

    def tables(
        self, contexts: Sequence[int], sizes: Sequence[int], steps: Sequence[int]
    ) -> tuple[Milliseconds, Milliseconds]:
        """Drafting and verification, see `_medians`; NaN where nothing ran."""
        draft = np.full((len(contexts), len(sizes), len(steps)), np.nan)
        verify = draft.copy()
        draft[:, :, 0] = 0.0  # a glance that finds nothing to draft
        for cell, (draft_ms, verify_ms) in self._medians.items():
            if not cell.shape.is_chain:
                continue
            at = (
                contexts.index(cell.context),
                sizes.index(cell.batch_size),
                steps.index(cell.shape.depth),
            )
            verify[at] = verify_ms
            if cell.shape != PLAIN:
                draft[at] = draft_ms
        return draft, verify

    def tree_table(
        self, tree: DraftShape, contexts: Sequence[int], sizes: Sequence[int]
    ) -> Milliseconds:
        """Of drafting and of verification, [2, contexts, sizes]; NaN where nothing ran."""
        ms = np.full((2, len(contexts), len(sizes)), np.nan)
        for cell, stages_ms in self._medians.items():
            if cell.shape == tree:
                ms[:, contexts.index(cell.context), sizes.index(cell.batch_size)] = stages_ms
        return ms

    @cached_property
    def _medians(self) -> dict[Cell, tuple[float, float]]:
        """What ran, and what drafting and verification took once it was warm.

        Over the sweeps of a batch size, each by how fast the machine was meanwhile. For when all
        sweeps are over.
        """
        medians: dict[Cell, tuple[float, float]] = {}
        for size in {cell.batch_size for cell in self._runs}:
            cells = [cell for cell in self._runs if cell.batch_size == size]
            runs = [_warm_runs(self._runs[cell]) for cell in cells]
            draft_ms = _settled([{run.sweep: run.draft_ms for run in same} for same in runs])
            verify_ms = _settled([{run.sweep: run.verify_ms for run in same} for same in runs])
            medians |= zip(cells, zip(draft_ms, verify_ms, strict=True), strict=True)
        return medians

    def sampled_row_ms(self) -> _Rounds[float]:
        """What sampling adds to one verified row: a median over some cells.

        0 where there is no time for a pair of rounds; rounds that run correct it.
        """
        # Jitter grows with a run's length, what is looked for with its rows, pairs are the fewer
        # the longer they are: this finds the cells that tell most in the time there is.
        cells = sorted(self._runs, key=lambda cell: self._expected_s(cell) ** 1.5 / cell.num_rows)
        greedy: dict[Cell, float] = {}
        sampled: dict[Cell, float] = {}
        for cell in cells[:_SAMPLED_CELLS] * _SAMPLED_PAIRS:
            # A sampled round may take twice as long as a greedy one.
            if self._has_time_for(cell, 3, 1.0):
                for best, temperature in ((greedy, 0.0), (sampled, _TEMPERATURE)):
                    verify_ms = (yield from self._run(cell, temperature)).verify_ms
                    best[cell] = min(verify_ms, best.get(cell, verify_ms))
        extra = [(sampled[cell] - greedy[cell]) / cell.num_rows for cell in sampled]
        return max(0.0, median(extra)) if extra else 0.0


def _warm_runs(runs: Sequence[_Run]) -> Sequence[_Run]:
    """All but the first ones, or the later half of few."""
    return runs[min(WARM_UP_RUNS, (len(runs) - 1) // 2) :]


def _settled(ms_by_sweep: Sequence[Mapping[int, float]]) -> list[float]:
    """One time for every column of a table with gaps, whose rows (sweeps) differ by their pace.

    Tukey's median polish, of two rounds. The lower one of two medians: noise only ever adds.
    """
    sweeps = sorted(set().union(*ms_by_sweep))
    ms = np.array([[column.get(sweep, np.nan) for column in ms_by_sweep] for sweep in sweeps])
    usual = _median_low(ms)
    for _ in range(2):
        ratios = ms / np.maximum(usual, _LEAST_MS)
        pace = np.maximum(_median_low(ratios.T), _LEAST_MS)
        usual = _median_low(ms / pace[:, None])
    found: list[float] = (usual * _median_low(pace)).tolist()
    return found


def _median_low(values: Milliseconds) -> Milliseconds:
    """Of every column, gaps (NaN) aside."""
    found: Milliseconds = np.nanquantile(values, 0.5, axis=0, method="lower")
    return found


def _tree_costs(
    tree: DraftShape,
    measured: Milliseconds,
    draft: Milliseconds,
    verify: Milliseconds,
    steps: Sequence[int],
) -> TreeCosts:
    """What was measured of a shape; the rest follows chains, [contexts, sizes, steps] each."""
    step_ms = np.maximum(_LEAST_MS, draft[:, :, -1] / steps[-1])
    draft_ms = fill_tree(measured[0], step_ms * tree.depth)
    rise = (verify[:, :, -1] - verify[:, :, 0]) / steps[-1]
    verify_ms = fill_tree(measured[1], verify[:, :, 0] + rise * tree.size)
    return TreeCosts(
        num_steps=tree.depth,
        num_draft_tokens=tree.size,
        draft_ms=_as_cells(draft_ms),
        verify_ms=_as_cells(verify_ms),
    )


def _as_cells(ms: Milliseconds) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(max(_LEAST_MS, round(float(cell), 6)) for cell in cells) for cells in ms)


def _as_grid(ms: Milliseconds) -> Grid:
    return tuple(
        tuple(tuple(round(float(cell), 6) for cell in cells) for cells in rows) for rows in ms
    )
