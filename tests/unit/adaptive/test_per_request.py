"""The article's rule for one sequence: the share kept so far moves the steps, one at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive import AdaptiveSpeculator
from serve_spec.adaptive.per_request import PerRequestPolicy
from serve_spec.core.draft import DraftShape
from tests.helpers.rounds import decode_batch

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
    "bounds",
    [{"min_steps": 0}, {"min_steps": 6, "max_steps": 4}, {"initial_steps": 9}],
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
