"""Measure the costs of steps by running synthetic plans on the real worker.

The plans write garbage to the KV cache, so they may only use pages that no sequence holds; a
sequence writes a page before it reads it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from statistics import median
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from serve_spec.adaptive.curves import Floats
from serve_spec.config.cost_table import FORMAT_VERSION, CostKey, CostTable, TreeCosts
from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.profile import curves
from serve_spec.profile.plans import Point, SlotsPast, SyntheticPlans
from serve_spec.worker.worker import SpecWorker

WARM_UP_RUNS = 3
MEASURED_RUNS = 5

_TABLE_PART = 0.85
"""Fraction of the budget for the table; the rest measures the cost of sampling."""
_SAMPLED_POINTS = 3
_SAMPLED_PAIRS = 5
_TEMPERATURE = 0.8
_LEAST_MS = 1e-6
_SHORTEST = 8
"""Tokens of context of the shortest step."""
_ESSENTIAL_BUDGETS = 3.0
"""Budgets that the points which every table needs may take on a busy machine."""


class MeasuredCosts(NamedTuple):
    """A cost table, and whether time ran out before every batch size was measured."""

    table: CostTable
    is_rough: bool


Measurement: TypeAlias = Generator[float, None, MeasuredCosts]
"""Runs a step each time it is advanced; yields the fraction of the budget that is spent."""


@dataclass(frozen=True)
class CostGrid:
    """The steps that are measured.

    `every_step`: measure every depth, not a selection. `trees`: shapes besides chains, ascending,
    each up to a batch size; None: all.
    """

    max_batch_size: int
    max_steps: int
    trees: Mapping[DraftShape, int | None] = field(default_factory=dict)
    every_step: bool = False


@dataclass(frozen=True)
class ProfileLimits:
    """Limits of the engine: tokens of one target forward and of a sequence, and its KV pages."""

    page_size: int
    num_pages: int
    max_num_tokens: int
    max_model_len: int

    def contexts(self, max_steps: int) -> tuple[int, int]:
        """Return a short and a long context with room for drafts. Raise ValueError if none fits."""
        longest = min(self.max_model_len, self.num_pages * self.page_size) - max_steps
        # Requests are up to a quarter longer.
        short, long = curves.context_grid(longest * 4 // 5)
        if short * 3 // 4 <= max_steps + 1:
            raise ValueError(
                f"max_model_len={self.max_model_len}, num_pages={self.num_pages} of "
                f"page_size={self.page_size}: too short for {max_steps} steps; raise them, or "
                "name fewer candidate_steps in speculative_adaptive_config"
            )
        return short, long

    def fits(self, point: Point, slots_past: SlotsPast) -> bool:
        """Return whether a point fits. slots_past: see `SpecWorker`."""
        pages = point.num_pages(self.page_size, slots_past)
        return pages <= self.num_pages and point.num_tokens <= self.max_num_tokens


@dataclass(frozen=True)
class TimeBudget:
    """Time for a measurement, in seconds.

    `clock` may stop while the measurement is not advanced. Steps expected to take longer than
    `longest_run_s` are extrapolated, except the smallest.
    """

    budget_s: float
    clock: Callable[[], float] = time.perf_counter
    longest_run_s: float = math.inf


def measure_costs(
    key: CostKey,
    worker: SpecWorker,
    grid: CostGrid,
    limits: ProfileLimits,
    budget: TimeBudget,
    pages: Callable[[int], Sequence[int]] = range,
) -> Measurement:
    """Run steps of every size within the time and take medians; see `finish`.

    All run with a short context, plain rounds and the deepest also with a long one, for the slopes
    of the context. Batch sizes that do not fit even without drafts are left out. Other points that
    do not fit the limits or the time are extrapolated. Batch size 1 without and with drafts is
    measured even if that takes a few budgets. pages: returns ids of so many pages that no sequence
    holds. Raises ValueError: lengths, pages or time leave nothing to measure.
    """
    started = budget.clock()
    chains = [shape.depth for shape in worker.states if shape.is_chain]
    steps = curves.step_grid(chains, grid.max_steps, every=grid.every_step)
    shapes = [*map(DraftShape.chain, steps), *grid.trees]
    contexts = limits.contexts(steps[-1])

    def fits(point: Point) -> bool:
        return limits.fits(point, worker.slots_past)

    sizes = curves.batch_grid(grid.max_batch_size)
    sizes = [b for b in sizes if fits(Point(contexts[0], b, PLAIN))]
    essential = [Point(contexts[0], 1, shape) for shape in shapes[: len(steps[:2])]]
    if not all(map(fits, essential)):
        raise ValueError(
            f"max_num_batched_tokens={limits.max_num_tokens}: no step with drafts fits; raise it"
        )
    every = [Point(*place) for place in product(contexts[:1], sizes, shapes)]
    deepest = PLAIN, DraftShape.chain(steps[-1])
    every += [Point(*place) for place in product(contexts[1:], sizes, deepest)]
    points = [p for p in every if p.batch_size <= (grid.trees.get(p.shape) or p.batch_size)]
    plans = SyntheticPlans(limits.page_size, worker.vocab_size, worker.slots_past, pages)
    profiler = _Profiler(worker, plans, budget)
    yield from profiler.sweeps(essential, list(filter(fits, points)))
    profiler.check_ran(essential)
    sampled_token_ms = yield from profiler.sampled_token_ms()
    yield 1.0
    table = CostTable(
        version=FORMAT_VERSION,
        key=key,
        sampled_token_ms=round(sampled_token_ms, 6),
        measured_s=round(budget.clock() - started, 3),
        **profiler.costs(contexts, sizes, steps, grid.trees),
    )
    return MeasuredCosts(table, profiler.is_rough(contexts[0], sizes))


def plain_step_ms(worker: SpecWorker, page_size: int) -> float:
    """Return the median milliseconds of a step of one request without drafts or prompts.

    It writes to page 0 and the next, which no sequence may hold.
    """
    plans = SyntheticPlans(page_size, worker.vocab_size, worker.slots_past)
    plan = plans.plan(Point(_SHORTEST, 1, PLAIN), 0.0)
    times = []
    for _ in range(WARM_UP_RUNS + MEASURED_RUNS):
        started = time.perf_counter()
        worker.execute(plan)
        times.append((time.perf_counter() - started) * 1e3)
    return median(times[WARM_UP_RUNS:])


def finish(
    measurement: Measurement, progress: Callable[[float], None] = lambda part: None
) -> MeasuredCosts:
    """Run a measurement to its end. progress: called with the fraction of the budget spent."""
    while True:
        try:
            progress(next(measurement))
        except StopIteration as end:
            measured: MeasuredCosts = end.value
            return measured


Outcome = TypeVar("Outcome")
_Part: TypeAlias = Generator[float, None, Outcome]
"""Part of a `Measurement`."""


class _Run(NamedTuple):
    draft_ms: float
    verify_ms: float
    wall_s: float
    sweep: int
    """Number of the sweep it was part of."""


class _Profiler:
    """Runs points while there is time, and keeps the times of every run."""

    def __init__(self, worker: SpecWorker, plans: SyntheticPlans, budget: TimeBudget) -> None:
        self._worker = worker
        self._plans = plans
        self._clock = budget.clock
        self._started = budget.clock()
        self._budget_s = budget.budget_s
        self._longest_run_s = budget.longest_run_s
        self._runs: dict[Point, list[_Run]] = {}
        self._shortest_s: dict[Point, float] = {}
        """Shortest run of every point that ran."""
        self._num_sweeps = 0

    def sweeps(self, essential: list[Point], points: list[Point]) -> _Part[None]:
        """Measure the points in sweeps.

        A sweep runs all points of one batch size once, so that noise affects all depths alike,
        after an uncounted run, because another size has left the caches cold. First come the
        essential points, until they are warm, then the plain steps of all sizes. Then every batch
        size gets about the same time: small ones many sweeps, large ones few, or a part of one.
        """
        by_size: dict[int, list[Point]] = {}
        for point in points:
            by_size.setdefault(point.batch_size, []).append(point)
        # The first runs include the start of libraries.
        for _ in range(WARM_UP_RUNS + 1):
            yield from self._sweep(essential, _ESSENTIAL_BUDGETS, math.inf)
        # These count only if there is no time for sweeps of all steps.
        essential_runs, self._runs = self._runs, {}
        plain = [same_size[0] for same_size in by_size.values()]
        yield from self._sweep(plain[1:], _TABLE_PART)
        while by_size:
            size = min(by_size, key=lambda size: self._priority_s(by_size[size]))
            if self._has_time_for(by_size[size][0], 2, _TABLE_PART):
                yield from self._run(by_size[size][0], temperature=0.0)  # not counted
            if not (yield from self._sweep(by_size[size], _TABLE_PART)):
                del by_size[size]
        self._runs = essential_runs | self._runs

    def check_ran(self, essential: Collection[Point]) -> None:
        """Raise ValueError unless every essential point ran."""
        if not self._runs.keys() >= {*essential}:
            raise ValueError(
                f"no step with drafts ended within {_ESSENTIAL_BUDGETS * self._budget_s:.3g} s: "
                "the machine is too busy; free some of it, or give a table of `serve-spec tune` as "
                "speculative_cost_table"
            )

    def costs(
        self,
        contexts: tuple[int, int],
        sizes: Sequence[int],
        steps: Sequence[int],
        trees: Iterable[DraftShape],
    ) -> dict[str, Any]:
        """Return the fields of a table: both curves, and extrapolated points where nothing ran."""
        chains = [self._shape_ms(DraftShape.chain(k), contexts[0], sizes) for k in steps]
        draft, verify = np.stack(chains, axis=-1)
        draft_slope, verify_slope = self._context_slopes(contexts)
        # The context takes at most half of a forward, whatever a noisy slope says.
        context_ms = verify_slope * contexts[0] * np.array(sizes)
        verify = np.maximum(verify - context_ms[:, None], verify / 2)
        num_tokens = np.outer(sizes, np.array(steps) + 1)
        known = np.isfinite(verify)
        tokens, verify_ms = curves.token_curve(zip(num_tokens[known], verify[known], strict=True))
        draft = draft[:, 1:]
        if self._worker.has_constant_draft:
            draft = curves.same_at_all_depths(draft)
        draft = curves.draft_curve(draft, sizes, steps[1:])
        return {
            "context": contexts[0],
            "batch_sizes": tuple(sizes),
            "num_steps": tuple(steps[1:]),
            "draft_ms": tuple(map(_times, draft)),
            "draft_context_ms": round(draft_slope, 9),
            "num_tokens": tuple(map(int, tokens)),
            "verify_ms": _times(verify_ms),
            "verify_context_ms": round(verify_slope, 9),
            "extrapolated": tuple((sizes[b], steps[k]) for b, k in np.argwhere(~known)),
            "trees": tuple(
                TreeCosts(
                    num_steps=tree.depth,
                    num_draft_tokens=tree.size,
                    draft_ms=_times(
                        curves.tree_curve(
                            self._shape_ms(tree, contexts[0], sizes)[0],
                            expected=draft[:, -1] / steps[-1] * tree.depth,
                        )
                    ),
                )
                for tree in trees
            ),
        }

    def _context_slopes(self, contexts: tuple[int, int]) -> tuple[float, float]:
        """Return the ms per context token, of a draft step and of verification."""
        draft, verify = [], []
        for point, (draft_ms, verify_ms) in self._medians.items():
            short = self._medians.get(point._replace(context=contexts[0]))
            if point.context == contexts[0] or short is None:
                continue
            tokens = point.batch_size * (point.context - contexts[0])
            verify.append((tokens, verify_ms - short[1], short[1]))
            if depth := point.shape.depth:
                draft.append((depth * tokens, draft_ms - short[0], short[0]))
        return curves.context_slope(draft), curves.context_slope(verify)

    def is_rough(self, context: int, sizes: Iterable[int]) -> bool:
        """Return whether the plain step of a batch size did not run for lack of time."""
        points = [Point(context, size, PLAIN) for size in sizes]
        missing = [point for point in points if point not in self._runs]
        return any(self._expected_s(point) <= self._longest_run_s for point in missing)

    def _sweep(
        self, points: list[Point], part: float, longest_run_s: float | None = None
    ) -> _Part[bool]:
        """Run every unfinished point once if there is time. Return whether any ran."""
        self._num_sweeps += 1
        before = sum(map(len, self._runs.values()))
        for point in points:
            is_done = len(self._runs.get(point, ())) >= WARM_UP_RUNS + MEASURED_RUNS
            if not is_done and self._has_time_for(point, 1, part, longest_run_s):
                run = yield from self._run(point, temperature=0.0)
                self._runs.setdefault(point, []).append(run)
        return sum(map(len, self._runs.values())) > before

    def _has_time_for(
        self, point: Point, count: int, part: float, longest_run_s: float | None = None
    ) -> bool:
        """Return whether `count` runs fit a fraction of the budget, none of them too long."""
        expected_s = self._expected_s(point)
        if expected_s > (self._longest_run_s if longest_run_s is None else longest_run_s):
            return False
        return self._clock() + count * expected_s <= self._started + part * self._budget_s

    def _priority_s(self, points: list[Point]) -> float:
        """Return the time spent and a quarter of the next sweep's; the lowest is next."""
        spent = sum(run.wall_s for point in points for run in self._runs.get(point, ()))
        return spent + sum(map(self._expected_s, points)) / 4

    def _expected_s(self, point: Point) -> float:
        """Return a run's expected time, scaled from a smaller point if needed; 0: unknown."""
        if point in self._shortest_s:
            return self._shortest_s[point]
        bounds = [
            wall_s * (point.num_tokens / known.num_tokens) * (point.context / known.context)
            for known, wall_s in self._shortest_s.items()
            if point.covers(known)
        ]
        return min(bounds, default=0.0)

    def _run(self, point: Point, temperature: float) -> _Part[_Run]:
        plan = self._plans.plan(point, temperature)
        started = self._clock()
        result = self._worker.execute(plan)
        wall_s = self._clock() - started
        self._shortest_s[point] = min(wall_s, self._shortest_s.get(point, wall_s))
        yield min(1.0, (self._clock() - self._started) / self._budget_s)
        return _Run(result.draft_ms, result.verify_ms, wall_s, self._num_sweeps)

    def _shape_ms(self, shape: DraftShape, context: int, sizes: Sequence[int]) -> Floats:
        """Return the medians of drafting and verifying a shape, [2, sizes]; NaN: none."""
        points = [Point(context, size, shape) for size in sizes]
        gap = math.nan, math.nan
        return np.array([self._medians.get(point, gap) for point in points]).T

    @cached_property
    def _medians(self) -> dict[Point, tuple[float, float]]:
        """Drafting and verification times of every point, over warm runs; after all sweeps."""
        medians: dict[Point, tuple[float, float]] = {}
        for size in {point.batch_size for point in self._runs}:
            runs = {p: _warm_runs(self._runs[p]) for p in self._runs if p.batch_size == size}
            draft_ms = _median_polish(
                # Plain steps take no time to draft, so they do not tell how fast a sweep was.
                {
                    p: {r.sweep: r.draft_ms for r in same}
                    for p, same in runs.items()
                    if p.shape.depth
                }
            )
            verify_ms = _median_polish(
                {p: {r.sweep: r.verify_ms for r in same} for p, same in runs.items()}
            )
            medians |= {p: (draft_ms.get(p, 0.0), verify_ms[p]) for p in runs}
        return medians

    def sampled_token_ms(self) -> _Part[float]:
        """Return the median cost of sampling a verified token; 0 without time for it."""
        # Noise grows with a run's time, the effect with its tokens, and long runs leave time for
        # fewer pairs: these points are the most informative.
        points = sorted(self._runs, key=lambda p: self._expected_s(p) ** 1.5 / p.num_tokens)
        greedy: dict[Point, float] = {}
        sampled: dict[Point, float] = {}
        for point in points[:_SAMPLED_POINTS] * _SAMPLED_PAIRS:
            # A sampled step may take twice as long as a greedy one.
            if self._has_time_for(point, 3, 1.0):
                for best, temperature in ((greedy, 0.0), (sampled, _TEMPERATURE)):
                    verify_ms = (yield from self._run(point, temperature)).verify_ms
                    best[point] = min(verify_ms, best.get(point, verify_ms))
        extra = [(sampled[point] - greedy[point]) / point.num_tokens for point in sampled]
        return max(0.0, median(extra)) if extra else 0.0


def _warm_runs(runs: Sequence[_Run]) -> Sequence[_Run]:
    """Return all but the first runs, or the later half if there are few."""
    return runs[min(WARM_UP_RUNS, (len(runs) - 1) // 2) :]


def _median_polish(ms_by_sweep: Mapping[Point, Mapping[int, float]]) -> dict[Point, float]:
    """Return one time per point, from times by sweep; sweeps differ in pace.

    Tukey's median polish in two iterations, with lower medians, because noise only adds time.
    """
    if not ms_by_sweep:
        return {}
    sweeps = sorted(set().union(*ms_by_sweep.values()))
    columns = ms_by_sweep.values()
    ms = np.array([[column.get(sweep, np.nan) for column in columns] for sweep in sweeps])
    usual = _median_low(ms)
    for _ in range(2):
        ratios = ms / np.maximum(usual, _LEAST_MS)
        pace = np.maximum(_median_low(ratios.T), _LEAST_MS)
        usual = _median_low(ms / pace[:, None])
    return dict(zip(ms_by_sweep, (usual * _median_low(pace)).tolist(), strict=True))


def _median_low(values: Floats) -> Floats:
    """Return the lower median of every column without gaps (NaN)."""
    found: Floats = np.nanquantile(values, 0.5, axis=0, method="lower")
    return found


def _times(ms: Iterable[float]) -> tuple[float, ...]:
    return tuple(max(_LEAST_MS, round(float(each), 6)) for each in ms)
