"""Laws of strategy goodput: what it chooses, what it never does, how it comes back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulator import Simulator
from serve_spec.adaptive.costs import Costs
from serve_spec.adaptive.goodput import EXPLORED_SHARE, GoodputPolicy
from serve_spec.adaptive.planner import Load, Planner
from serve_spec.adaptive.policy import BadMeasurement, Reason, StaticPolicy
from serve_spec.adaptive.rates import PositionRates
from serve_spec.adaptive.speed_guard import SpeedGuard
from serve_spec.bench.phases import Phase
from serve_spec.bench.trace import load_traces
from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.record import StepTimes
from tests.helpers.rounds import decode_batch, verified_round
from tests.helpers.simulated_costs import GPU_8B, TWO_CPU_CORES, noisy, recorded_table

TRACES = load_traces(Path("tests/data/share_traces.json"))
SIZES = (1, 8, 32, 64, 128, 256)
COUNTS = (*range(8, 512, 8), *range(512, 2049, 64))
CHAIN = DraftShape.chain


def goodput(**fields: object) -> GoodputPolicy:
    fields = {"min_dwell_rounds": 0, "token_counts": COUNTS, **fields}
    return GoodputPolicy(recorded_table(GPU_8B, SIZES), **fields)  # type: ignore[arg-type]


def play(policy: GoodputPolicy, size: int, num: int, rate: int) -> Counter[DraftShape]:
    """Play rounds in which each request keeps up to `rate` drafts; return how often what ran."""
    ran: Counter[DraftShape] = Counter()
    for _ in range(num):
        steps = policy.choose(decode_batch(size))
        rows = steps.row_steps or [steps.shape.depth] * size
        kept = [min(rate, k) for k in rows]
        ms = 5.0 + 0.5 * steps.shape.depth
        times = StepTimes(0.0, ms, ms)
        ran[steps.shape] += 1
        record = verified_round(kept, size, steps.shape.depth, row_steps=rows, times=times)
        policy.observe(replace(record, shape=steps.shape, notes=steps.notes))
    return ran


@pytest.mark.parametrize("prompts", ["predictable", "heated", "unpredictable"])
def test_a_large_batch_is_faster_than_at_every_fixed_depth(prompts: str) -> None:
    phase = Phase(prompts, 128, 256, 64, 0.4)

    def speed(policy: GoodputPolicy | StaticPolicy) -> float:
        return Simulator(policy, TRACES, noisy(GPU_8B, 0.02)).run(phase).tokens_per_ms

    best = max(speed(StaticPolicy(CHAIN(depth))) for depth in range(8))
    assert speed(goodput()) > 1.01 * best


def test_a_small_batch_verifies_all_its_drafts() -> None:
    budgets = []
    simulator = Simulator(
        goodput(), TRACES, GPU_8B, on_round=lambda _, steps, __: budgets.append(steps.budget)
    )
    simulator.run(Phase("predictable", 1, 4, 64))
    assert set(budgets) == {None}


def test_budgets_fill_captured_graphs() -> None:
    seen = set()
    simulator = Simulator(
        goodput(), TRACES, GPU_8B, on_round=lambda b, s, _: seen.add((b.size, s.budget))
    )
    simulator.run(Phase("heated", 128, 256, 64, 0.4))
    budgets = [(size, budget) for size, budget in seen if budget is not None and size == 128]
    assert budgets
    assert all(size + budget in COUNTS for size, budget in budgets)


def test_drafts_without_shares_are_verified_whole() -> None:
    policy = goodput()
    play(policy, 128, 100, 3)
    assert policy.choose(decode_batch(128)).budget is None


def test_drafts_that_fail_are_given_up_and_tried_again_for_good() -> None:
    policy = goodput()
    play(policy, 64, 400, 0)
    assert policy.choose(decode_batch(64)).shape == PLAIN
    ran = play(policy, 64, 2000, 0)
    assert 4 <= sum(n for shape, n in ran.items() if shape != PLAIN) <= 100
    assert play(policy, 64, 2000, 7)[PLAIN] < 1000, "what drafts are worth now is found out"


def test_exploration_keeps_to_its_share_of_the_time() -> None:
    policy = goodput()
    play(policy, 8, 3000, 3)
    share = policy.snapshot()["explored_share"]
    assert isinstance(share, float)
    assert 0 < share <= EXPLORED_SHARE


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_slots_bound_the_depth(bound: int) -> None:
    policy = goodput(bounds={1: 7, 32: bound})
    assert max(shape.depth for shape in play(policy, 32, 200, 7)) <= bound


def test_nothing_is_drafted_without_room() -> None:
    policy = goodput()
    play(policy, 8, 50, 7)
    assert policy.choose(decode_batch(8, max_draft_tokens=0)).shape == PLAIN


def test_a_broken_clock_is_reported() -> None:
    policy = goodput()
    broken = verified_round([0], 1, 1, times=StepTimes(0.0, 0.0, float("nan")))
    for _ in range(7):
        policy.observe(broken)
    with pytest.raises(BadMeasurement):
        policy.observe(broken)


def test_texts_serve_requests_that_have_some_while_their_drafts_are_accepted() -> None:
    policy = goodput()
    batch = replace(decode_batch(4), text_steps=[5, 0, 2, 0])
    steps = policy.choose(batch)
    if steps.text_steps is not None:
        assert all(k <= found for k, found in zip(steps.text_steps, batch.text_steps, strict=True))


class TestCosts:
    """Times of rounds."""

    def test_the_table_is_met_at_its_points(self) -> None:
        table = recorded_table(TWO_CPU_CORES)
        costs, number = Costs(table), np.array([48.0])
        expected = table.draft_ms[0][4][3] + table.verify_ms[0][4][3]
        assert costs.ms(16, CHAIN(3), number, 128)[0] == pytest.approx(expected)

    def test_a_slower_machine_is_learned(self) -> None:
        costs, number = Costs(recorded_table(TWO_CPU_CORES)), np.array([48.0])
        before = float(costs.ms(16, CHAIN(3), number, 128)[0])
        for _ in range(50):
            costs.learn(16, CHAIN(3), 48, 128, 0.0, 1.3 * before)
        assert costs.ms(16, CHAIN(3), number, 128)[0] == pytest.approx(1.3 * before, rel=0.05)

    def test_one_spike_is_forgotten_though_the_shape_does_not_run(self) -> None:
        costs, number = Costs(recorded_table(TWO_CPU_CORES)), np.array([48.0])
        before = float(costs.ms(16, CHAIN(3), number, 128)[0])
        costs.learn(16, CHAIN(3), 48, 128, 0.0, 2.0 * before)
        costs.age(16, 5000)
        assert costs.ms(16, CHAIN(3), number, 128)[0] == pytest.approx(before, rel=0.02)

    def test_no_time_diverges(self) -> None:
        costs = Costs(recorded_table(TWO_CPU_CORES))
        rng = np.random.default_rng(0)
        for _ in range(500):
            depth = int(rng.integers(0, 8))
            costs.learn(16, CHAIN(depth), 16 * depth, 128, 0.0, float(rng.lognormal(3, 2)))
        assert abs(costs.drift) <= 2.0


def test_the_guard_closes_at_a_loss_and_opens_again() -> None:
    guard = SpeedGuard()
    guard.observe_plain(1.0)
    for _ in range(60):
        guard.observe(1.2, 1.5)
    assert guard.rounds_left
    for _ in range(200):
        guard.observe_plain(1.0)
    assert not guard.rounds_left


def test_the_guard_lets_a_gain_pass() -> None:
    guard = SpeedGuard()
    guard.observe_plain(1.0)
    for _ in range(500):
        guard.observe(2.0, 1.5)
    assert not guard.rounds_left
    assert guard.speedup == pytest.approx(4 / 3)


def test_rates_follow_the_text_and_start_from_the_fleet() -> None:
    rates = PositionRates(3, [0.9, 0.8, 0.7])
    assert rates.rates == pytest.approx([0.9, 0.8, 0.7])
    for _ in range(100):
        rates.learn([50, 25, 0], [25, 10, 0], 8)
    assert rates.rates[:2] == pytest.approx([0.5, 0.4], abs=0.03)
    assert rates.rates[2] < 0.5, "a position that does not run follows those before it"


def test_sure_drafts_are_admitted_before_doubtful_ones() -> None:
    planner = Planner(Costs(recorded_table(GPU_8B, SIZES)))
    survivals = np.array([[0.95] * 3, [0.01] * 3])
    found = planner.chains(
        Load(256, 128), survivals, np.full(3, 128.0), most_drafts=10_000, may_admit=True
    )
    best = max(found, key=lambda each: each.tokens_per_ms)
    assert best.budget is not None
    assert best.budget <= 128 * 3 + 48


def test_reasons_are_those_of_the_status_page() -> None:
    policy = goodput()
    play(policy, 8, 10, 2)
    assert policy.last_reason in set(Reason)
