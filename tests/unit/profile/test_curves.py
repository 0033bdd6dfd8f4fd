"""Which points are measured, and the two curves that are made of them."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.profile.curves import (
    batch_grid,
    context_grid,
    context_slope,
    draft_curve,
    step_grid,
    token_curve,
    tree_curve,
)

SIZES, STEPS = [1, 2, 4, 8], [1, 2, 3, 5, 7]
LINEAR = np.outer(0.5 + 0.1 * np.array(SIZES), np.array(STEPS, dtype=float))
"""Drafting that is linear in its requests and steps."""
GAP = np.nan


def test_batch_sizes_double_and_depths_are_closer_where_small():
    assert [batch_grid(1), batch_grid(6), batch_grid(8)] == [[1], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert step_grid(range(15), 14) == [0, 1, 2, 3, 5, 7, 10, 14]
    assert step_grid({3, 0, 1, 7}, 7) == [0, 1, 3, 7]
    assert step_grid(range(8), 4) == [0, 1, 2, 3, 4]
    assert step_grid({0}, 7) == [0]
    found = [context_grid(longest) for longest in (1017, 121, 32_000, 300)]
    assert found == [(128, 512), (30, 121), (128, 4096), (75, 300)]


@pytest.mark.parametrize("b", [1, 2, 3])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_linear_drafting_is_continued_exactly(b, k):
    """Larger batches ran to a smaller depth, and the largest ones did not run at all."""
    gaps = LINEAR.copy()
    gaps[b:, k:] = GAP
    assert draft_curve(gaps, SIZES, STEPS) == pytest.approx(LINEAR)
    gaps = LINEAR.copy()
    gaps[max(b, 2) :] = GAP
    assert draft_curve(gaps, SIZES, STEPS) == pytest.approx(LINEAR)


@given(st.data())
def test_every_gap_of_drafting_becomes_a_time(data):
    times = st.lists(st.floats(0.0, 50), min_size=20, max_size=20)
    ms = np.array(data.draw(times)).reshape(4, 5)
    gone = data.draw(st.lists(st.booleans(), min_size=20, max_size=20))
    gaps = np.where(np.array(gone).reshape(4, 5), GAP, ms)
    gaps[0, 0] = ms[0, 0]
    found = draft_curve(gaps, SIZES, STEPS)
    assert np.isfinite(found).all()
    assert (found > 0).all()


@given(st.lists(st.floats(-0.08, 0.08), min_size=5, max_size=5))
def test_errors_of_single_depths_are_spread_over_all(errors):
    """The squared sum of errors never grows, so that no table is the worse for it."""
    true = 0.8 + 0.8 * np.array([STEPS], dtype=float)
    measured = true * (1.0 + np.array(errors))
    off = [ms / true - 1.0 for ms in (measured, draft_curve(measured, [1], STEPS))]
    before, after = (float((each**2).sum()) for each in off)
    assert after <= 1.05 * before + 1e-12, "weighed by what was measured, not by the truth"


def test_a_depth_measured_too_cheap_no_longer_looks_better_and_steps_that_differ_stay():
    """As on a machine that copied files meanwhile; drafting really took 0.8 and 0.8 a step."""
    measured = np.array([[1.45, 2.74, 3.65, 4.76, 6.53]])
    by_step = np.diff(draft_curve(measured, [1], STEPS)[0]) / np.diff(STEPS)
    assert by_step == pytest.approx(np.full(4, by_step[0]))
    assert by_step[0] == pytest.approx(0.85, abs=0.05)
    stairs = np.array([[1.0, 5.0, 5.0, 5.0, 5.0]])
    assert (draft_curve(stairs, [1], STEPS) == stairs).all()


@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0.1, 100)), min_size=1))
def test_verification_never_gets_cheaper_with_tokens_and_keeps_its_mean(points):
    tokens, ms = token_curve(points)
    assert tokens == sorted({n for n, _ in points})
    assert all(a <= b for a, b in pairwise(ms))
    counts = [sum(n == each for each, _ in points) for n in tokens]
    total = sum(count * each for count, each in zip(counts, ms, strict=True))
    assert total == pytest.approx(sum(each for _, each in points))


def test_rising_verification_is_kept_and_equal_tokens_are_averaged():
    points = [(4, 3.0), (1, 1.0), (2, 1.5), (4, 5.0)]
    assert token_curve(points) == ([1, 2, 4], [1.0, 1.5, 4.0])


def test_the_slope_of_the_context_weighs_long_contexts_more_and_never_falls():
    assert context_slope([]) == 0.0
    assert context_slope([(100, -1.0, 5.0)]) == 0.0
    rows = [(tokens, 0.002 * tokens, 5.0) for tokens in (100, 400, 6400)]
    assert context_slope(rows) == pytest.approx(0.002)
    assert context_slope([(100, 5.0, 5.0), *rows]) == pytest.approx(0.002, rel=0.05)


@given(st.lists(st.booleans(), min_size=3, max_size=3), st.floats(0.5, 2))
def test_gaps_of_a_tree_take_the_multiple_of_the_batch_size_before(is_known, factor):
    expected = np.array([1.0, 2.0, 4.0])
    truth, known = factor * expected, np.array(is_known)
    found = tree_curve(np.where(known, truth, GAP), expected)
    assert (found[known] == truth[known]).all()
    if known[0]:
        assert found == pytest.approx(truth)
    if not known.any():
        assert (found == expected).all()
