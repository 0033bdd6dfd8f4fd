"""Measuring costs: what is run, within which time, and from which pages."""

import itertools
import re
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest

from serve_spec.adaptive.curves import StepCurves
from serve_spec.config.root import leaf_sections
from serve_spec.core.draft import DraftShape
from serve_spec.core.plan import BatchResult
from serve_spec.profile.measure import CostGrid, ProfileLimits, TimeBudget, finish, measure_costs
from serve_spec.profile.plans import Point, SyntheticPlans
from tests.helpers.costs import KEY

SAMPLED_ROW_MS = 0.3


class FakeWorker:
    """Takes the time of a formula, on a clock of its own, and keeps its plans."""

    vocab_size = 50
    has_constant_draft = False

    def __init__(self, depths=range(8), noise=(1.0,)):
        self.states = dict.fromkeys(map(DraftShape.chain, depths))
        self.now = 1000.0
        self.plans = []
        self._noise = itertools.cycle(noise)

    def clock(self):
        return self.now

    def slots_past(self, shape):
        return shape.size + 3 * (shape.depth > 0)

    def execute(self, plan):
        self.plans.append(plan)
        context = mean_context(plan)
        factor = next(self._noise)
        draft = factor * true_draft_ms(len(plan.requests), plan.shape.depth, context)
        verify = factor * true_verify_ms(len(plan.requests), plan.shape.depth, context)
        if not plan.requests[0].params.is_greedy:
            verify += SAMPLED_ROW_MS * sum(row.query_len for row in plan.requests)
        self.now += (draft + verify + 0.5) / 1e3
        return BatchResult([[1]] * len(plan.requests), draft, verify)


def true_draft_ms(batch_size, num_steps, context=128):
    return num_steps * (1 + 0.1 * batch_size + 0.0002 * batch_size * (context - 128))


def true_verify_ms(batch_size, num_steps, context=128):
    return 5 + (0.5 * (num_steps + 1) + 0.001 * context) * batch_size


def begun(worker, **changes):
    settings = {
        "page_size": 16,
        "num_pages": 2048,
        "max_batch_size": 32,
        "max_steps": 7,
        "max_num_tokens": 512,
        "max_model_len": 1024,
        "budget_s": 60.0,
        "clock": worker.clock,
        **changes,
    }
    grid, limits, budget = (
        kind(**{x.name: settings.pop(x.name) for x in fields(kind) if x.name in settings})
        for kind in (CostGrid, ProfileLimits, TimeBudget)
    )
    return measure_costs(KEY, worker, grid, limits, budget, **settings)


def measured(worker, **changes):
    return finish(begun(worker, **changes)).table


def cells_of(plans):
    return [Point(mean_context(plan), len(plan.requests), plan.shape) for plan in plans]


def mean_context(plan):
    return round(sum(row.length for row in plan.requests) / len(plan.requests))


def predicted(costs, size, steps, context=128):
    """Return the ms of drafting and of verification by a table."""
    found = StepCurves(costs)
    verify = found.verify_ms(size, context, size * (steps + 1))
    return found.draft_ms(size, context)[steps], float(verify)


def test_with_time_enough_every_cell_is_the_truth():
    costs = measured(FakeWorker())
    assert costs.batch_sizes == (1, 2, 4, 8, 16, 32)
    assert costs.num_steps == (1, 2, 3, 5, 7)
    assert (costs.context, costs.extrapolated) == (128, ())
    assert costs.sampled_token_ms == pytest.approx(SAMPLED_ROW_MS)
    for size, steps in itertools.product(costs.batch_sizes, (0, *costs.num_steps)):
        for context in (128, 512, 2048):
            truth = true_draft_ms(size, steps, context), true_verify_ms(size, steps, context)
            assert predicted(costs, size, steps, context) == pytest.approx(truth, rel=1e-3)


class BlockWorker(FakeWorker):
    """Drafts all depths in one time, which is measured with noise."""

    has_constant_draft = True

    def execute(self, plan):
        result = super().execute(plan)
        return replace(result, draft_ms=bool(plan.shape.depth) * (2.0 + 0.1 * plan.shape.depth))


def test_a_draft_that_costs_the_same_at_all_depths_gets_one_time_for_them():
    costs = measured(BlockWorker())
    assert costs.num_steps == (1, 2, 3, 5, 7)
    assert np.array(costs.draft_ms) == pytest.approx(np.full((len(costs.batch_sizes), 5), 2.3))


class Disturbed(FakeWorker):
    """Rounds take a multiple of their time that depends on the cells run so far, the own last."""

    def __init__(self, slowness, pause_s):
        super().__init__()
        self._slowness, self._pause_s = slowness, pause_s

    def execute(self, plan):
        slow = self._slowness(cells_of([*self.plans, plan]))
        result = super().execute(plan)
        self.now += self._pause_s
        return BatchResult(result.token_ids, slow * result.draft_ms, slow * result.verify_ms)


@pytest.mark.parametrize(
    ("slowness", "pause_s", "sizes"),
    [
        # The first runs of a cell, and a later one.
        (lambda cells: 4.0 if cells.count(cells[-1]) in (1, 2, 3, 6) else 1.0, 0.01, {}),
        # There is time for two runs only.
        (
            lambda cells: 1.5 if cells.count(cells[-1]) == 1 else 1.0,
            0.3,
            {"max_batch_size": 1, "budget_s": 11.0},
        ),
        # Another batch size left caches cold.
        (
            lambda cells: 1.5 if cells[-1].batch_size != cells[-2:][0].batch_size else 1.0,
            0.0,
            {"max_batch_size": 8},
        ),
    ],
)
def test_slow_first_runs_and_rare_disturbances_do_not_show(slowness, pause_s, sizes):
    costs = measured(Disturbed(slowness, pause_s), **{"max_batch_size": 4, **sizes})
    for size in costs.batch_sizes:
        truth = [(true_draft_ms(size, k), true_verify_ms(size, k)) for k in costs.num_steps]
        found = [predicted(costs, size, k) for k in costs.num_steps]
        assert found == [pytest.approx(each, rel=1e-3) for each in truth]


@pytest.mark.parametrize("budget_s", [0.1, 0.5, 1.0])
def test_with_trees_too_the_budget_is_kept(budget_s):
    worker = BranchingWorker()
    measured(worker, trees=dict.fromkeys(TREES), budget_s=budget_s)
    assert worker.now - 1000.0 <= budget_s


@pytest.mark.parametrize(("budget_s", "is_short"), [(0.2, True), (1.0, True), (10.0, False)])
def test_the_budget_holds_and_what_it_did_not_reach_is_extrapolated_by_name(budget_s, is_short):
    worker = FakeWorker()
    costs = measured(worker, budget_s=budget_s)
    assert worker.now - 1000.0 <= budget_s
    assert costs.measured_s == pytest.approx(worker.now - 1000.0, abs=1e-3)
    ran = set(cells_of(worker.plans))
    missing = {
        (size, steps)
        for size in costs.batch_sizes
        for steps in (0, *costs.num_steps)
        if Point(128, size, DraftShape.chain(steps)) not in ran
    }
    assert set(costs.extrapolated) == missing
    assert bool(missing) == is_short
    # Linear costs continue exactly, except for a context whose slope was not measured.
    error = 0.02 if costs.verify_context_ms else 0.25
    for size, steps in itertools.product(costs.batch_sizes, costs.num_steps):
        draft_ms, verify_ms = predicted(costs, size, steps)
        assert verify_ms == pytest.approx(true_verify_ms(size, steps), rel=error)
        if any(cell.batch_size == size and cell.shape.depth for cell in ran):
            assert draft_ms == pytest.approx(true_draft_ms(size, steps), rel=0.01)


def test_small_batches_come_first_but_plain_rounds_of_every_size_before_them():
    worker = FakeWorker()
    measured(worker, budget_s=0.6)
    ran = set(cells_of(worker.plans))
    assert {Point(128, size, DraftShape.chain(0)) for size in (1, 2, 4, 8, 16, 32)} <= ran
    assert {Point(128, 1, DraftShape.chain(k)) for k in (0, 1, 2, 3, 5, 7)} <= ran
    assert {Point(512, 1, DraftShape.chain(k)) for k in (0, 7)} <= ran
    assert Point(512, 32, DraftShape.chain(7)) not in ran


@pytest.mark.parametrize(("num_slow", "num_fast"), [(40, 60), (30, 70), (45, 60), (20, 30)])
def test_a_noisy_moment_does_not_set_one_number_of_steps_apart(num_slow, num_fast):
    """The machine is half as fast for long stretches; neighbours differ by what is true of them."""
    slow_then_fast = [2.0] * num_slow + [1.0] * num_fast
    costs = measured(FakeWorker(noise=slow_then_fast), max_batch_size=8)
    for size in costs.batch_sizes:
        found = [predicted(costs, size, k)[0] for k in costs.num_steps]
        factors = np.array(found) / [true_draft_ms(size, k) for k in costs.num_steps]
        assert np.ptp(factors) == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(("batch_size", "num_steps"), [(1, 1), (2, 7), (4, 4), (16, 7), (64, 3)])
def test_requests_of_a_profile_miss_about_half_of_the_possible_entries(batch_size, num_steps):
    cell = Point(128, batch_size, DraftShape.chain(num_steps))
    num_missing_entries = [cell.num_missing(row) for row in range(batch_size)]
    assert all(1 <= num_missing <= num_steps + 1 for num_missing in num_missing_entries)
    middle = (1 + num_steps + 1) / 2
    assert np.mean(num_missing_entries) == pytest.approx(middle, rel=0.4)
    assert batch_size < 16 or set(num_missing_entries) == set(range(1, num_steps + 2))


@pytest.mark.parametrize(
    ("limit", "largest", "too_large"),
    [
        ({"max_num_tokens": 64}, Point(128, 8, DraftShape.chain(7)), (16, 5)),
        # 28 ms, and 103 ms.
        ({"longest_run_s": 0.05}, Point(128, 16, DraftShape.chain(1)), (16, 7)),
    ],
)
def test_rounds_beyond_a_limit_are_extrapolated_and_never_run(limit, largest, too_large):
    worker = FakeWorker()
    costs, is_rough = finish(begun(worker, **limit))
    assert not is_rough
    ran = cells_of(worker.plans)
    assert largest in ran
    assert too_large not in {(cell.batch_size, cell.shape.depth) for cell in ran}
    assert too_large in costs.extrapolated


def test_batches_that_do_not_fit_the_pages_are_left_out_or_extrapolated():
    worker = FakeWorker()
    costs = measured(worker, num_pages=96)
    assert costs.batch_sizes == (1, 2, 4, 8)
    assert max(page for p in worker.plans for row in p.requests for page in row.page_ids) < 96
    contexts = {size: [] for size in costs.batch_sizes}
    for cell in cells_of(worker.plans):
        contexts[cell.batch_size].append(cell.context)
    assert max(contexts[2]) == 512
    assert max(contexts[8]) == 128, "8 texts of 512 tokens take 256 pages"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 24}, "max_model_len=24, num_pages=2048 .* too short for 7 steps"),
        ({"num_pages": 1}, "num_pages=1 of page_size=16: too short"),
        ({"max_num_tokens": 1}, "max_num_batched_tokens=1: no step with drafts fits; raise it"),
        ({"budget_s": 1e-3}, "within 0.003 s: the machine is too busy; .* speculative_cost_table"),
    ],
)
def test_too_little_room_or_time_is_refused_by_keys_that_exist(changes, message):
    with pytest.raises(ValueError, match=message) as refusal:
        measured(FakeWorker(), **changes)
    named = re.findall(r"(\w+_\w+)=", str(refusal.value))
    assert set(named) <= set(leaf_sections())


def test_on_a_busy_machine_short_rounds_are_measured_even_beyond_the_budget():
    """A start that has time for nothing else still has costs, which are marked as rough."""
    costs, is_rough = finish(begun(FakeWorker(noise=[50.0]), budget_s=1.0))
    assert costs.measured_s > 1.0
    assert is_rough
    assert (2, 0) in costs.extrapolated
    assert costs.draft_ms[0][0] == pytest.approx(50 * true_draft_ms(1, 1))
    assert costs.verify_ms[0] == pytest.approx(50 * true_verify_ms(1, 0))
    assert not finish(begun(FakeWorker(), budget_s=1.0)).is_rough


def test_a_measurement_may_pause_after_every_round_and_finds_the_same():
    """On pages it is given, by a clock that stands still meanwhile."""
    worker, asked, shares = FakeWorker(), [0], []
    paused_s = 0.0

    def pages(count):
        asked.append(count)
        return range(1000, 1000 + count)

    def pause(share):
        nonlocal paused_s
        shares.append(share)
        worker.now += 100.0
        paused_s += 100.0

    measurement = begun(worker, clock=lambda: worker.now - paused_s, pages=pages)
    costs = finish(measurement, pause).table
    assert paused_s > 100.0 * len(worker.plans)
    assert costs == measured(FakeWorker())
    used = {page for plan in worker.plans for row in plan.requests for page in row.page_ids}
    assert used == set(range(1000, 1000 + max(asked)))
    assert shares == sorted(shares), "progress grows to one"
    assert 0 < shares[0] < 0.5
    assert shares[-1] == 1.0


@pytest.mark.parametrize(
    "cell",
    [
        Point(32, 1, DraftShape.chain(0)),
        Point(33, 3, DraftShape.chain(7)),
        Point(128, 4, DraftShape.chain(1)),
    ],
)
def test_plans_look_like_those_of_a_scheduler(cell):
    slots_past = FakeWorker().slots_past
    plan = SyntheticPlans(16, vocab_size=50, slots_past=slots_past).plan(cell, temperature=0.8)
    pages = [page for row in plan.requests for page in row.page_ids]
    every = list(range(cell.num_pages(16, slots_past)))
    assert sorted(pages) == every, "every request has pages of its own"
    assert plan.batch_size == len(plan.requests) == cell.batch_size
    assert sum(req.query_len for req in plan.requests) == cell.num_tokens
    for req in plan.requests:
        assert req.is_decode
        assert req.samples
        assert 0.75 * cell.context - 1 <= req.length <= 1.25 * cell.context + 1
        assert req.shape == cell.shape
        assert 16 * len(req.page_ids) >= req.length + slots_past(cell.shape)
        assert all(0 <= token < 50 for token in (*req.token_ids, *req.extend_ids))
        assert bool(req.extend_ids) == bool(cell.shape.depth)
        assert not cell.shape.depth or req.draft_start + len(req.extend_ids) == req.start


TOPK = 4
TREES = (DraftShape(2, 6, TOPK), DraftShape(3, 15, TOPK))


class BranchingWorker(FakeWorker):
    """Also drafts trees: a level costs twice a step."""

    def execute(self, plan):
        result = super().execute(plan)
        if plan.shape.is_chain:
            return result
        size, context = len(plan.requests), mean_context(plan)
        verify = true_verify_ms(size, plan.shape.size, context)
        draft = 2 * true_draft_ms(size, plan.shape.depth, context)
        self.now += (draft + verify - result.draft_ms - result.verify_ms) / 1e3
        return replace(result, draft_ms=draft, verify_ms=verify)


def test_trees_are_measured_beside_chains_of_the_same_sizes():
    worker = BranchingWorker()
    costs = measured(worker, trees=dict.fromkeys(TREES))
    assert [tree.shape for tree in costs.trees] == [(2, 6), (3, 15)]
    for tree in costs.trees:
        draft = [2 * true_draft_ms(size, tree.num_steps) for size in costs.batch_sizes]
        assert tree.draft_ms == pytest.approx(draft)
    branched = [plan for plan in worker.plans if not plan.shape.is_chain]
    assert {plan.shape for plan in branched} == set(TREES)
    for plan in branched:
        for req in plan.requests:
            assert req.shape == plan.shape
            assert req.length + worker.slots_past(req.shape) <= 16 * len(req.page_ids)
    alone = measured(FakeWorker())
    assert (alone.draft_ms, alone.verify_ms) == (costs.draft_ms, costs.verify_ms)
    assert alone.trees == ()


def test_trees_that_do_not_fit_or_are_of_few_requests_continue_what_was_measured():
    costs = measured(BranchingWorker(), trees=dict.fromkeys(TREES), max_num_tokens=200)
    (_, largest) = costs.trees
    assert costs.batch_sizes[-1] == 32, "32 rows of 16 are more than 200"
    assert all(a < b for a, b in pairwise(largest.draft_ms))
    worker = BranchingWorker()
    costs = measured(worker, trees=dict.fromkeys(TREES, 4))
    branched = [plan for plan in worker.plans if not plan.shape.is_chain]
    assert {len(plan.requests) for plan in branched} == {1, 2, 4}
    assert len(costs.trees[0].draft_ms) == len(costs.batch_sizes)
