"""When strategy goodput moves: by how much it must gain, and how long it stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serve_spec.adaptive.baseline import FIRST_CLOSED_ROUNDS
from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.goodput import (
    PLAN_ROUNDS,
    GoodputPolicy,
)
from serve_spec.adaptive.policy import Reason
from serve_spec.adaptive.survival import SurvivalEstimator
from serve_spec.config.cost_table import FORMAT_VERSION, CostTable
from serve_spec.core.record import StepTimes
from tests.helpers.costs import KEY
from tests.helpers.rounds import decode_batch, verified_round

RATES = (0.5, 0.5)
TOKENS = (1.0, 1.5, 1.75)
"""Of a round of so many drafts: 1, 1 + 1/2, 1 + 1/2 + 1/4."""
OFF_MS = 10.0


def policy(
    speeds: Sequence[float],
    initial_steps: int,
    dwell: int = 0,
) -> GoodputPolicy:
    """One row. speeds: tokens per ms of every depth in those of off, 0 included (1)."""
    round_ms = [OFF_MS * tokens / speed for tokens, speed in zip(TOKENS, speeds, strict=True)]
    draft = [ms - OFF_MS for ms in round_ms]
    table = CostTable(
        version=FORMAT_VERSION,
        key=KEY,
        batch_sizes=(1,),
        num_steps=(0, 1, 2),
        contexts=(64, 256),
        draft_ms=((tuple(draft),),) * 2,
        verify_ms=((tuple([OFF_MS] * len(TOKENS)),),) * 2,
        sampled_row_ms=0.0,
        padded=False,
        extrapolated=(),
        measured_s=1.0,
    )

    class Survival(SurvivalEstimator):
        doubt = 0.0
        """However few trials there were."""

    return GoodputPolicy(
        CostModel(table),
        max_steps=2,
        min_dwell_rounds=dwell,
        initial_steps=initial_steps,
        survival=Survival(2, RATES),
    )


def first_tier(target: GoodputPolicy) -> int:
    return target.choose(decode_batch(1)).shape.depth


@given(st.floats(0.96, 1.005) | st.floats(1.03, 1.10))
def test_a_tier_is_left_for_one_that_promises_a_few_percent_more(gain: float) -> None:
    """Less than one percent lies within the noise of the costs."""
    is_left = gain > 1.02
    assert first_tier(policy([1.0, gain, 0.8], 0)) == (1 if is_left else 0)
    assert first_tier(policy([1.0, 1.2, 1.2 * gain], 1)) == (2 if is_left else 1)
    assert first_tier(policy([1.0, 1.2 * gain, 1.2], 2)) == (1 if is_left else 2)
    assert first_tier(policy([1.0, 1 / gain, 0.8], 1)) == (0 if is_left else 1)


@given(st.floats(0.7, 1.4), st.floats(0.5, 1.16), st.integers(0, 2))
def test_the_best_of_all_depths_is_taken_at_once_whatever_lies_between(
    speed: float, deeper: float, start: int
) -> None:
    """Costs are a staircase: one draft may lose where two gain."""
    every = [1.0, speed, speed * deeper]  # the second draft never costs less than nothing
    *_, second, best = sorted(every)
    assume(best >= 1.03 * second)
    assert first_tier(policy(every, start)) == every.index(best)


@pytest.mark.parametrize("dwell", [8, 30])
def test_a_tier_is_kept_for_the_dwell_however_much_another_promises(dwell: int) -> None:
    """All drafts are kept until it goes deeper, and none from then on."""
    target = policy([1.0, 1.1, 1.0], 1, dwell=dwell)
    tiers: list[int] = []
    for _ in range(4 * dwell + 4 * PLAN_ROUNDS):
        steps = target.choose(decode_batch(1))
        if target.last_reason not in (Reason.PROBE, Reason.BASELINE):
            tiers.append(steps.shape.depth)
        row_steps = list(steps.row_steps or [steps.shape.depth])
        kept = [0] if 2 in tiers else row_steps
        target.observe(verified_round(kept, 1, steps.shape.depth, row_steps=row_steps))
    moves = [place for place in range(1, len(tiers)) if tiers[place] != tiers[place - 1]]
    assert [tiers[0], tiers[moves[0]]] == [1, 2]
    assert 0 in tiers, "the input must make it want to move more than once"
    assert all(later - place >= dwell for place, later in pairwise([0, *moves]))


def test_where_estimates_promise_and_measured_speed_denies_speculation_is_off_for_a_while() -> None:
    """Every draft is kept and costs are as predicted, but no more tokens come out of it."""
    target = policy([1.0, 1.3, 1.5], 2, dwell=8)
    reasons: list[Reason] = []
    for _ in range(3000):
        steps = target.choose(decode_batch(1))
        reasons.append(target.last_reason)
        row_steps = list(steps.row_steps or [steps.shape.depth])
        (num_steps,) = row_steps
        round_ms = OFF_MS * TOKENS[num_steps] / [1.0, 1.3, 1.5][num_steps]
        times = StepTimes(round_ms - OFF_MS, OFF_MS, round_ms)
        told = verified_round(row_steps, 1, num_steps, row_steps=row_steps, times=times)
        target.observe(replace(told, accept_lengths=[1]))
        assert num_steps == 0 or target.last_reason is not Reason.GUARD
    closed = [len(list(run)) for reason, run in groupby(reasons) if reason is Reason.GUARD]
    assert closed[0] >= FIRST_CLOSED_ROUNDS
    assert len(closed) >= 3, "never for good"
    assert closed[:-1] == sorted(closed[:-1]), "longer every time"
    assert sum(closed) > 0.6 * len(reasons)
