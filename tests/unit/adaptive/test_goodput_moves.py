"""When strategy goodput moves: by how much it must gain, and how long it stays."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from serve_spec.adaptive import goodput
from serve_spec.adaptive.baseline import FIRST_CLOSED_ROUNDS
from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.exploration import EXPLORATION_SHARE
from serve_spec.adaptive.goodput import (
    LEAVE_OFF_GAIN,
    MOST_PLAN_ROUNDS,
    MOST_PROLONGED,
    MOVE_GAIN,
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
    off_ms: float = OFF_MS,
    doubt: float = 0.0,
    verify_ms: Sequence[float] | None = None,
) -> GoodputPolicy:
    """One row. speeds: tokens per ms of every depth in those of off, 0 included (1).

    verify_ms: by depth; what is beyond `off_ms` comes on top.
    doubt: of the estimates, whatever they rest on.
    """
    round_ms = [off_ms * tokens / speed for tokens, speed in zip(TOKENS, speeds, strict=True)]
    draft = [ms - off_ms for ms in round_ms]
    verify = verify_ms or [off_ms] * len(TOKENS)
    table = CostTable(
        version=FORMAT_VERSION,
        key=KEY,
        batch_sizes=(1,),
        num_steps=(0, 1, 2),
        contexts=(64, 256),
        draft_ms=((tuple(draft),),) * 2,
        verify_ms=((tuple(verify),),) * 2,
        sampled_row_ms=0.0,
        padded=False,
        extrapolated=(),
        measured_s=1.0,
    )

    class Survival(SurvivalEstimator):
        @property
        def doubt(self) -> float:
            return doubt

    return GoodputPolicy(
        CostModel(table),
        max_steps=2,
        min_dwell_rounds=dwell,
        initial_steps=initial_steps,
        survival=Survival(2, RATES),
    )


def first_tier(target: GoodputPolicy) -> int:
    return target.choose(decode_batch(1)).shape.depth


@given(st.floats(0.96, 1.10).filter(lambda gain: abs(gain - LEAVE_OFF_GAIN) > 1e-6))
def test_drafting_begins_where_it_promises_two_percent(gain: float) -> None:
    assert first_tier(policy([1.0, gain, 0.8], 0)) == (1 if gain >= LEAVE_OFF_GAIN else 0)
    assert LEAVE_OFF_GAIN == 1.02


@given(st.floats(0.96, 1.10).filter(lambda gain: abs(gain - MOVE_GAIN) > 1e-6))
def test_a_tier_is_left_for_one_that_promises_one_percent_more(gain: float) -> None:
    assert first_tier(policy([1.0, 1.2, 1.2 * gain], 1)) == (2 if gain >= MOVE_GAIN else 1)
    assert first_tier(policy([1.0, 1.2 * gain, 1.2], 2)) == (1 if gain >= MOVE_GAIN else 2)
    assert first_tier(policy([1.0, 1 / gain, 0.8], 1)) == (0 if gain >= MOVE_GAIN else 1)
    assert MOVE_GAIN == 1.01


@given(
    st.floats(1.0, 1.4),
    st.floats(0.0, 0.2),
    st.integers(1, 2),
    st.sampled_from([(1.0, 0.9), (0.9, 1.0)]),
)
def test_drafting_is_given_up_only_for_more_than_few_trials_may_err(
    gain: float, doubt: float, start: int, depths: tuple[float, float]
) -> None:
    """Until then it drafts as far as seems best."""
    assume(abs(gain - MOVE_GAIN - doubt) > 1e-6)
    target = policy([1.0, *(speed / gain for speed in depths)], start, doubt=doubt)
    best = depths.index(1.0) + 1
    assert first_tier(target) == (0 if gain > MOVE_GAIN + doubt else best)


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


@pytest.mark.parametrize(
    ("off_ms", "num_rounds"), [(20.0, PLAN_ROUNDS), (2.0, 16), (0.2, MOST_PLAN_ROUNDS)]
)
def test_the_shorter_rounds_are_the_more_of_them_follow_one_plan(
    off_ms: float, num_rounds: int
) -> None:
    """What making a plan takes the host is to be little beside what the plan lasts."""
    target = policy([1.0, 1.2, 1.1], 1, off_ms=off_ms)
    known = []
    for _ in range(3 * num_rounds):
        target.choose(decode_batch(1))
        target.observe(verified_round([1], 1, 1))
        known.append(target.survival.pooled_trials[0])
    learned = [n for n in range(1, len(known)) if known[n] != known[n - 1]]
    assert np.diff([-1, *learned]).tolist() == [num_rounds] * 3


def waits_for_a_lesson(num_rounds: int, *, turns_at: int | None = None) -> list[int]:
    """Rounds between lessons of a policy whose drafts are kept every other time, until they turn:
    from then on none is."""
    target = policy([1.0, 1.2, 1.1], 1, dwell=8)
    known = []
    for n in range(num_rounds):
        (num_steps,) = target.choose(decode_batch(1)).row_steps or [0]
        round_ms = OFF_MS * TOKENS[num_steps] / (1.0, 1.2, 1.1)[num_steps]
        times = StepTimes(round_ms - OFF_MS, OFF_MS, round_ms)
        kept = min(num_steps, n % 2 if turns_at is None or n < turns_at else 0)
        told = verified_round([kept], 1, num_steps, row_steps=[num_steps], times=times)
        target.observe(told)
        known.append(target.survival.pooled_trials[0])
    return np.diff([n for n in range(1, num_rounds) if known[n] != known[n - 1]]).tolist()


def test_a_plan_that_turns_out_as_expected_serves_up_to_several_times_as_long() -> None:
    waits = waits_for_a_lesson(1200)
    assert set(waits[:4]) == {PLAN_ROUNDS}, "not before the tier has settled"
    assert max(waits) == MOST_PROLONGED * PLAN_ROUNDS


def test_a_batch_that_varies_puts_no_lesson_off() -> None:
    """Of 64 rows a plan lasts a round longer than of 63, and they take turns."""
    target = policy([1.0, 1.2, 1.1], 1)
    known = []
    for n in range(40):
        batch = decode_batch(63 + n % 2)
        steps = target.choose(batch)
        row_steps = list(steps.row_steps or [0] * batch.size)
        told = verified_round(row_steps, batch.size, max(row_steps), row_steps=row_steps)
        target.observe(told)
        known.append(target.survival.pooled_trials[0])
    lessons = [n for n in range(1, 40) if known[n] != known[n - 1]]
    assert max(np.diff([-1, *lessons])) <= PLAN_ROUNDS + 2


def test_one_that_does_not_is_replaced_at_once() -> None:
    waits, turns_at = waits_for_a_lesson(1200, turns_at=600), 600
    ends = np.cumsum([PLAN_ROUNDS, *waits])
    first = int(np.searchsorted(ends, turns_at + PLAN_ROUNDS, side="right"))
    assert ends[first] <= turns_at + 2 * PLAN_ROUNDS


@pytest.mark.parametrize(("worth_trying", "ends_at"), [(0.9, 1), (1.0, 2)])
def test_one_draft_less_is_tried_once_as_the_table_may_have_it_too_dear(
    worth_trying: float, ends_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has 12 ms for a verification that takes 10; nothing else would ever tell."""
    monkeypatch.setattr(goodput, "WORTH_TRYING", worth_trying)
    with_plain_verification = (1.0, 1.2, 1.26)
    target = policy(with_plain_verification, 2, dwell=8, verify_ms=(10.0, 12.0, 12.0))
    chosen = []
    for n in range(1000):
        (num_steps,) = target.choose(decode_batch(1)).row_steps or [0]
        draft_ms = OFF_MS * TOKENS[num_steps] / with_plain_verification[num_steps] - OFF_MS
        verify_ms = OFF_MS + 2.0 * (num_steps == 2)
        times = StepTimes(draft_ms, verify_ms, draft_ms + verify_ms)
        kept = min(num_steps, (0, 1, 0, 2)[n % 4])
        told = verified_round([kept], 1, num_steps, row_steps=[num_steps], times=times)
        target.observe(told)
        chosen.append(num_steps)
    assert statistics.mode(chosen[:100]) == 2
    assert statistics.mode(chosen[-200:]) == ends_at
    assert target.budget.spent_share <= EXPLORATION_SHARE


def test_a_probe_of_short_rounds_is_learned_from_however_many_follow_it() -> None:
    """One that drafts, among plain ones for as long as the plan lasts."""
    target = policy([1.0, 0.6, 0.5], 0, off_ms=0.2)
    before = target.survival.pooled_trials[0]
    for n in range(MOST_PLAN_ROUNDS):
        target.choose(decode_batch(1))
        row = 1 if n == 0 else 0
        target.observe(verified_round([row], 1, row))
    assert target.survival.pooled_trials[0] > before


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


def test_a_guard_that_is_closed_for_a_size_leaves_others_alone() -> None:
    assert first_tier(policy([1.0, 1.3, 1.5], 2)) == 2
    target = policy([1.0, 1.3, 1.5], 2)
    target._range(1)[1].guard.closed_rounds_left = 1
    assert first_tier(target) == 0
    assert target.last_reason is Reason.GUARD
    assert target.choose(decode_batch(16)).shape.depth > 0
