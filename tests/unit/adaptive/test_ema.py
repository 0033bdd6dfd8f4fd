"""The rules of a slot (ema) and of a request (per_request), with routing, dwell and back-off."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive import AdaptiveSpeculativeParams, AdaptiveSpeculator, AdaptiveStepSlot
from serve_spec.adaptive.ema import LAST_PROBE_WAIT_ROUNDS
from serve_spec.adaptive.per_request import PerRequestPolicy
from serve_spec.core.draft import DraftShape
from serve_spec.core.round import Reason
from tests.helpers.rounds import decode_batch

DWELL = 8
AT_ONCE = {"ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1}


def slot(initial_steps, candidate_steps, **config):
    return AdaptiveStepSlot(initial_steps, {"candidate_steps": candidate_steps, **config})


def feed(target, mean, rounds=1):
    """Rounds of ten rows that keep `mean` drafts on average, clipped to the depth; depths after."""
    depths = []
    for _ in range(rounds):
        tenths = round(10 * min(mean, target.current_steps))
        target.update([tenths // 10 + (row < tenths % 10) for row in range(10)])
        depths.append(target.current_steps)
    return depths


def test_a_slot_starts_at_the_nearest_candidate_and_at_the_smaller_of_two():
    fresh = [slot(initial, [1, 3, 7]) for initial in (0, 1, 2, 3, 5, 6, 99)]
    assert [each.current_steps for each in fresh] == [1, 1, 1, 3, 3, 7, 7]
    assert all(each.ema_accept_len == each.current_steps - 1 for each in fresh)


def test_the_average_moves_by_alpha_towards_the_mean_of_the_requests():
    s = slot(3, [1, 3, 7])
    s.update([3, 0, 3, 0])
    assert not s.update([]), "an empty round does not count"
    assert s.ema_accept_len == pytest.approx(0.8 * 2.0 + 0.2 * 1.5)
    assert s.batch_count == 1


@pytest.mark.parametrize(("warmup", "interval"), [(0, 1), (0, 4), (3, 1), (7, 5)])
def test_decisions_are_due_every_interval_after_the_warm_up(warmup, interval):
    s = slot(1, [0, 1], ema_alpha=1.0, warmup_batches=warmup, update_interval=interval)
    due = [n for n in range(1, 30) if s.update([0])]
    assert due == list(range(warmup + interval, 30, interval))


@pytest.mark.parametrize(
    ("config", "ladder", "start", "mean", "end"),
    [
        # The default thresholds.
        *(
            ({}, [1, 3, 7], start, mean, end)
            for start, mean, end in (
                *((1, 0.5, 1), (1, 0.6, 3), (3, 2.5, 3), (3, 2.6, 7), (7, 2.3, 7)),
                *((7, 2.2, 3), (7, 0.0, 1), (3, 0.3, 3), (3, 0.2, 1)),
            )
        ),
        # A drop is inclusive.
        ({"down_hysteresis": 0.0, "up_hysteresis": 0.5}, [1, 3, 7], 3, 0.5, 1),
        # The drop to no drafts compares with one half, here less 0.25.
        ({}, [0, 1], 1, 0.2, 0),
        ({}, [0, 1], 1, 0.3, 1),
        # The thresholds keep 7; ceil(2.4 * 1.2) = 3 does not.
        ({"ceiling_coeff": 0.0}, [1, 3, 7], 7, 2.4, 7),
        ({"ceiling_coeff": 1.2}, [1, 3, 7], 7, 2.4, 3),
        ({"ceiling_coeff": 3.0}, [1, 3, 7], 7, 2.4, 7),
        ({"ceiling_coeff": -1.0}, [1, 3, 7], 7, 2.4, 7),
        # It never goes below 1, though ceil(0 * 3) = 0, and never blocks a rise.
        ({"ceiling_coeff": 3.0, "down_hysteresis": -9.0}, [0, 1, 3], 3, 0.0, 1),
        ({"ceiling_coeff": 1.0}, [1, 3], 1, 1.0, 3),
    ],
)
def test_thresholds_hysteresis_and_ceiling(config, ladder, start, mean, end):
    assert feed(slot(start, ladder, **AT_ONCE, **config), mean) == [end]


def test_a_rise_takes_several_levels_at_once():
    # Only a stale result can show more than the depth drafted; the rule itself does not ask.
    s = slot(1, [1, 3, 7], **AT_ONCE)
    s.update([3, 3])
    assert s.current_steps == 7


def test_at_zero_the_average_is_frozen_or_neutral_and_the_next_decision_moves_up():
    """It is neutral for a slot that has never drafted."""
    s = slot(3, [0, 3], **AT_ONCE)
    feed(s, 0.1)
    assert (s.current_steps, s.ema_accept_len) == (0, pytest.approx(0.1))
    assert s.update([0, 0])
    assert (s.current_steps, s.ema_accept_len) == (3, pytest.approx(0.1))
    for ladder, steps, average in (([0, 3], 3, 2.0), ([0], 0, -1.0)):
        s = slot(0, ladder, **AT_ONCE)
        assert s.ema_accept_len == -1
        s.update([0, 0])
        assert (s.current_steps, s.ema_accept_len) == (steps, average)


@given(
    ladder=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    initial=st.integers(0, 15),
    alpha=st.floats(0.05, 1.0),
    down=st.floats(-3, 3),
    gap=st.floats(0, 3),
    rows=st.lists(st.integers(0, 12), min_size=1, max_size=4),
)
def test_constant_input_never_makes_a_slot_oscillate(ladder, initial, alpha, down, gap, rows):
    """Where drops are not easier than rises (down ≤ up), the ceiling is off and 0 is no depth.

    Rows keep the same number of drafts round after round, as far as the depth drafts that many.
    """
    s = slot(
        initial,
        ladder,
        ema_alpha=alpha,
        warmup_batches=0,
        update_interval=1,
        down_hysteresis=down,
        up_hysteresis=down + gap,
    )
    moves = []
    for _ in range(300):
        before = s.current_steps
        s.update([min(row, before) for row in rows])
        if s.current_steps != before:
            moves.append(s.current_steps > before)
    turns = sum(first != second for first, second in pairwise(moves))
    assert turns <= 1, "after one correction of the start it must settle"
    assert len(moves) <= 2 * len(set(ladder))


def fixed(**slots):
    """Slots with one depth each, so that the depth tells the slot: fixed(_4=2) is {"4": [2]}."""
    config = {key.strip("_"): {"candidate_steps": [step]} for key, step in slots.items()}
    return AdaptiveSpeculativeParams(1, config)


@pytest.mark.parametrize(
    ("batch_size", "alone", "padded"),
    [(0, 2, 2), (1, 2, 2), (4, 2, 2), (7, 2, 3), (8, 3, 3), (9, 3, 4), (16, 4, 4), (17, 4, 4)],
)
def test_a_batch_goes_to_the_largest_slot_not_above_its_captured_size_or_to_the_first(
    batch_size, alone, padded
):
    params = fixed(_16=4, _4=2, _8=3)
    assert params.get_steps_for_batch(batch_size) == alone
    params.set_cuda_graph_bs([16, 4, 8])
    assert params.get_steps_for_batch(batch_size) == padded
    params.set_cuda_graph_bs(None)
    assert params.get_steps_for_batch(batch_size) == alone


def test_the_captured_sizes_of_a_step_are_those_whose_slot_can_reach_it():
    params = AdaptiveSpeculativeParams(3)
    assert params.cuda_graph_bs_for_step(3) is None
    params.set_cuda_graph_bs([1, 2, 4, 8, 16, 32, 64])
    assert params.cuda_graph_bs_for_step(7) == [1, 2, 4]
    assert params.cuda_graph_bs_for_step(3) == [1, 2, 4, 8, 16]
    assert params.cuda_graph_bs_for_step(1) == [1, 2, 4, 8, 16, 32, 64]
    assert params.cuda_graph_bs_for_step(5) == []


def guarded(candidate_steps, initial_steps, min_dwell_rounds=DWELL, **config):
    given = {"candidate_steps": candidate_steps, **config}
    return AdaptiveStepSlot(initial_steps, given, min_dwell_rounds)


def waits_at_zero(target, num_probes):
    """Return the rounds at depth 0 before each of the next probes, all of whose drafts fail."""
    waits = []
    rounds = 0
    while len(waits) < num_probes:
        at_zero = target.current_steps == 0
        rounds = rounds + 1 if at_zero else 0
        target.update([0, 0])
        if at_zero and target.current_steps > 0:
            waits.append(rounds)
    return waits


@pytest.mark.parametrize(
    ("dwell", "waits"),
    [
        (0, [5] * 9),  # the published rule
        (1, [5, 10, 20, 40, 80, 160, 320, 640, 640]),
        # Decisions fall on every fifth round: the first after both waits is the tenth.
        (DWELL, [10, 10, 20, 40, 80, 160, 320, 640, 640]),
    ],
)
def test_each_bad_probe_doubles_the_wait_and_a_good_one_resets_it(dwell, waits):
    slot = guarded([0, 1], 1, dwell)
    assert waits_at_zero(slot, num_probes=9) == waits
    while slot.is_probing:
        slot.update([1, 1])
    assert slot.current_steps == 1
    assert waits_at_zero(slot, num_probes=2) == waits[:2], "a good probe resets the wait"


@given(
    ladder=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    dwell=st.integers(0, 12),
    shares=st.lists(st.lists(st.floats(0, 1), max_size=3), max_size=120),
)
def test_the_guard_withholds_decisions_and_never_adds_one(ladder, dwell, shares):
    slot = guarded(ladder, 3, dwell, warmup_batches=2, update_interval=3)
    rounds_here = 0
    for row in shares:
        before = slot.current_steps
        rounds_here += bool(row)
        changed = slot.update([round(share * before) for share in row])
        assert changed == (slot.current_steps != before)
        is_due = (slot.batch_count - 2) % 3 == 0 and slot.batch_count > 2
        assert not changed or (is_due and rounds_here >= dwell)
        rounds_here = 0 if changed else rounds_here
        assert slot.current_steps in ladder
        assert -1 <= slot.ema_accept_len <= max(ladder)
        wait = slot.snapshot()["probe_wait_rounds"]
        assert isinstance(wait, int)
        assert wait <= LAST_PROBE_WAIT_ROUNDS


def test_every_decision_has_a_reason():
    slot = guarded([0, 1, 3], 1, min_dwell_rounds=8)
    reasons = [slot.reason]
    for n in range(200):
        slot.update([slot.current_steps if n < 20 else 0] * 2)
        if slot.reason != reasons[-1]:
            reasons.append(slot.reason)
    assert reasons[:7] == [
        Reason.WARM_UP,
        Reason.GAIN,  # everything is kept: 1→3
        Reason.DWELL,
        Reason.STEADY,
        Reason.LOSS,  # nothing is kept: down to 0
        Reason.BACK_OFF,
        Reason.PROBE,
    ]


verifications = st.integers(0, 8).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))


@pytest.mark.parametrize(
    ("rounds", "steps"),
    [
        ([(5, 5), (6, 6), (7, 7), (8, 8), (8, 8)], [6, 7, 8, 8, 8]),
        ([(5, 0), (4, 0), (3, 0), (2, 0), (1, 0), (1, 0)], [4, 3, 2, 1, 1, 1]),
        # 4/9: the second round was perfect, the sequence is not.
        ([(5, 0), (4, 4)], [4, 3]),
        # Near the end of a text two of two are a rate of 1, not of 2/5.
        ([(2, 2)], [6]),
        ([(0, 0), (5, 5), (0, 0)], [5, 6, 6]),
    ],
    ids=["all accepted", "all rejected", "all since the beginning", "clamped", "without drafts"],
)
def test_the_share_accepted_so_far_moves_the_depth_by_one(rounds, steps):
    speculator, found = AdaptiveSpeculator(), []
    for drafted, kept in rounds:
        before = speculator.num_steps
        assert speculator.update(drafted, kept) == (speculator.num_steps != before)
        found.append(speculator.num_steps)
    assert found == steps
    counts = speculator.num_draft_tokens, speculator.num_correct_drafts
    assert counts == tuple(map(sum, zip(*rounds, strict=True)))


# 0.85 itself is not above 0.85, and 0.55 itself is not below 0.55.
@pytest.mark.parametrize(("kept", "steps"), [(18, 11), (17, 10), (11, 10), (10, 9)])
def test_thresholds_are_strict(kept, steps):
    speculator = AdaptiveSpeculator(initial_steps=10, max_steps=20)
    assert speculator.update(20, kept) is (steps != 10)
    assert speculator.num_steps == steps


@given(st.lists(verifications), st.integers(1, 8), st.integers(0, 7), st.integers(0, 7))
def test_it_moves_by_at_most_one_within_its_bounds_and_returns_whether_it_did(
    rounds, low, room, start
):
    high = min(8, low + room)
    speculator = AdaptiveSpeculator(min(high, low + start), low, high)
    for drafted, kept in rounds:
        if drafted > high:
            continue
        before = speculator.num_steps
        changed = speculator.update(drafted, kept)
        assert low <= speculator.num_steps <= high
        assert abs(speculator.num_steps - before) == changed


@pytest.mark.parametrize(
    "bounds", [{"min_steps": 0}, {"min_steps": 6, "max_steps": 4}, {"initial_steps": 9}]
)
def test_bounds_that_leave_no_choice_are_refused(bounds):
    with pytest.raises(ValueError, match="must ascend from 1"):
        AdaptiveSpeculator(**bounds)


@pytest.mark.parametrize(("drafted", "kept"), [(9, 3), (-1, 0), (3, 4), (3, -1), (0, 1)])
def test_an_impossible_verification_is_refused_and_not_counted(drafted, kept):
    speculator = AdaptiveSpeculator()
    with pytest.raises(ValueError, match="give 0 ≤ accepted ≤ drafts ≤ 8"):
        speculator.update(drafted, kept)
    assert speculator.num_draft_tokens == 0
    assert speculator.num_steps == 5


@pytest.mark.parametrize("max_steps", range(1, 9))
def test_a_draft_that_makes_few_starts_with_as_many(max_steps):
    """Medusa heads are as many as there are, fewer than sequences usually start with."""
    policy = PerRequestPolicy(DraftShape.chain(max_steps))
    assert policy.choose(decode_batch(2)).shape.depth == min(5, max_steps)
    assert [shape.depth for shape in policy.shapes] == [*range(1, max_steps + 1)]
