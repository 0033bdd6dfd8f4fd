"""Rows begin to draft where what they must make up for first pays in the rounds they have left."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.entries import Entries
from serve_spec.adaptive.goodput import GoodputPolicy
from serve_spec.adaptive.objective import Floats, RoundCosts
from serve_spec.adaptive.policy import Reason
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.record import StepTimes
from serve_spec.core.round import DecodeBatch
from tests.helpers.rounds import decode_batch, verified_round
from tests.helpers.simulated_costs import TWO_CPU_CORES, recorded_table

OFF_MS = 10.0
COSTS = RoundCosts(2, np.ones((3, 3)), np.full(4, OFF_MS), np.ones(7), 0.0)
"""Every step of a draft takes a millisecond."""


def worth(*accept_rates: float) -> Floats:
    """Survival of three drafts, a row for each rate."""
    return np.array([[rate, rate**2, rate**3] for rate in accept_rates])


def rows(backlogs: list[int], num_remaining: list[int]) -> DecodeBatch:
    return replace(decode_batch(len(backlogs)), backlogs=backlogs, num_remaining=num_remaining)


@pytest.mark.parametrize("entry_ms", [0.0, 5.0])
def test_where_backlogs_are_unknown_or_cost_nothing_every_row_may_begin(entry_ms: float) -> None:
    batch = rows([1000, 1000], [1, 1]) if not entry_ms else decode_batch(2)
    survival = worth(0.5, 0.5)
    entries = Entries.of(batch, survival, COSTS, entry_ms)
    assert entries.all_pay
    assert entries.ms == 0
    assert entries.of_rows_that_pay(survival) is survival
    assert entries.of_rows_to_come(survival) is survival
    assert entries.pays_for_another(batch, 0)


@given(
    st.lists(st.integers(0, 4000), min_size=1, max_size=6),
    st.integers(1, 4000),
    st.floats(0.0, 0.99),
    st.floats(1e-4, 10),
)
def test_nobody_begins_who_would_lose_by_it(
    backlogs: list[int], num_remaining: int, rate: float, entry_ms: float
) -> None:
    batch = rows(backlogs, [num_remaining] * len(backlogs))
    survival = worth(*[rate] * len(backlogs))
    entries = Entries.of(batch, survival, COSTS, entry_ms)
    begin = entries.of_rows_that_pay(survival).any(axis=1)
    for backlog, begins in zip(backlogs, begin, strict=True):
        if begins and backlog > 4:
            lost = [
                entry_ms * (backlog - 4) / max(1.0, num_remaining / (1 + kept))
                - (kept * OFF_MS - taken) / batch.size
                for kept, taken in zip(np.cumsum(survival[0]), COSTS.added, strict=True)
            ]
            assert min(lost) <= 1e-9


def test_a_row_that_joins_begins_where_one_of_the_batch_would() -> None:
    entries = Entries.of(rows([0, 0], [100, 100]), worth(0.7, 0.7), COSTS, 0.1)
    joined = rows([0, 0, 40, 4000], [100] * 4)
    assert [entries.pays_for_another(joined, row) for row in (2, 3)] == [True, False]


def policy_that_knows_entries(entry_ms: float) -> GoodputPolicy:
    policy = GoodputPolicy(
        CostModel(recorded_table(TWO_CPU_CORES)), min_dwell_rounds=0, initial_steps=3
    )
    policy.costs.entry_ms = entry_ms
    return policy


def test_the_policy_leaves_prompts_alone_that_cost_more_than_drafts_can_bring() -> None:
    for num_remaining, drafts in ((5000, True), (4, False)):
        policy = policy_that_knows_entries(0.5)
        batch = rows([500] * 2, [num_remaining] * 2)
        steps = policy.choose(batch).row_steps
        assert steps is not None
        assert any(steps) == drafts


def test_what_an_entry_takes_is_learned_from_rounds_that_catch_up() -> None:
    policy = policy_that_knows_entries(0.0)
    table = recorded_table(TWO_CPU_CORES)
    usual = CostModel(table)
    for _ in range(40):
        draft_ms = float(usual.draft_curve(2, 128)[3]) + 0.2 * 100
        times = StepTimes(draft_ms, 20.0, draft_ms + 20.0)
        policy.observe(verified_round([1, 1], 2, 3, times=times, num_catch_up=100))
    assert policy.costs.entry_ms == pytest.approx(0.2, rel=0.05)
    assert policy.costs.snapshot()["draft_factors"] == {}, "of other rounds it says nothing"


def test_a_probe_pays_for_the_prompt_it_makes_up_for() -> None:
    policy = policy_that_knows_entries(0.5)
    batch = rows([200] * 4, [30] * 4)
    plain = StepTimes(0.0, 20.0, 20.0)
    for _ in range(4000):
        steps = policy.choose(batch)
        if any(steps.row_steps or ()):
            assert policy.last_reason is Reason.PROBE
            assert policy.budget.spent_ms >= 0.5 * 200 * sum(k > 0 for k in steps.row_steps or ())
            assert policy.budget.spent_share <= 0.005
            return
        policy.observe(verified_round([0] * 4, 4, 0, times=plain))
    pytest.fail("there was no probe")


def test_a_broken_clock_teaches_nothing_about_entries() -> None:
    costs = CostModel(recorded_table(TWO_CPU_CORES))
    shape = {
        "batch_size": 2,
        "shape": DraftShape.chain(3),
        "num_rows": 8,
        "num_drafting": 2,
        "num_sampled": 0,
    }
    for draft_ms in (float("nan"), float("inf"), -1.0, 1e6):
        times = {"draft_ms": draft_ms, "verify_ms": 20.0, "round_ms": draft_ms + 20.0}
        assert not costs.observe(**shape, **times, context=128.0, num_entries=100)
    assert costs.entry_ms == 0
    assert costs.snapshot()["num_refused"] == 4
