"""Which rounds are measured, and what is made of those that were not."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.config.cost_table import monotone
from serve_spec.engine.cost_grid import (
    batch_grid,
    context_grid,
    even_steps,
    fill_missing,
    fill_tree,
    step_grid,
)

SIZES, STEPS = [1, 2, 4, 8], [0, 1, 2, 3, 5, 7]


def test_batch_sizes_double_depths_are_closer_where_small_and_texts_are_a_short_and_a_long_one():
    assert [batch_grid(1), batch_grid(6), batch_grid(8)] == [[1], [1, 2, 4, 6], [1, 2, 4, 8]]
    assert step_grid(range(15), 14) == [0, 1, 2, 3, 5, 7, 10, 14]
    assert step_grid({3, 0, 1, 7}, 7) == [0, 1, 3, 7]
    assert step_grid(range(8), 4) == [0, 1, 2, 3, 4]
    assert step_grid({0}, 7) == [0]
    found = [context_grid(longest) for longest in (1017, 121, 32_000, 300)]
    assert found == [(128, 512), (30, 121), (128, 4096), (75, 300)]


def linear_verify():
    """Verification that is linear in its rows, and in the rows' contexts."""
    rows = np.outer(SIZES, np.array(STEPS) + 1.0)
    return np.stack([5 + 0.5 * rows, 5 + 0.5 * rows + 0.25 * rows])


def linear_draft():
    """Drafting that is linear in its rows and steps."""
    return np.stack([c * np.outer(SIZES, STEPS) for c in (0.5, 0.75)])


def corner(ms, b, k):
    """The table without what is as large as [b, k] in both directions, or one of them."""
    gaps = ms.copy()
    gaps[:, b:, k:] = np.nan
    return gaps


@pytest.mark.parametrize(("b", "k"), [(0, 5), (1, 2), (2, 3), (3, 4)])
def test_costs_linear_in_rows_are_continued_exactly(b, k):
    for ms in (linear_verify(), linear_draft()):
        gaps = corner(ms, b, k)
        gaps[1, b] = ms[1, b]  # a neighbour at the longer context
        filled = fill_missing(gaps, SIZES, STEPS)
        assert filled[0] == pytest.approx(ms[0])
        assert filled[1, b] == pytest.approx(ms[1, b])
        # Of two batch sizes only the plain round ran.
        assert fill_missing(corner(ms, 2, 1), SIZES, STEPS) == pytest.approx(ms)
        gaps = ms.copy()
        gaps[1] = np.nan
        assert np.array_equal(fill_missing(gaps, SIZES, STEPS)[1], ms[0]), "no second context"


@given(st.data())
def test_what_was_measured_is_kept_and_what_was_not_is_no_cheaper_than_anything_smaller(data):
    ms = np.array(data.draw(st.lists(st.floats(1, 50), min_size=48, max_size=48)))
    ms = ms.reshape(2, 4, 6)
    gone = data.draw(st.lists(st.booleans(), min_size=48, max_size=48))
    gaps = np.where(np.array(gone).reshape(ms.shape), np.nan, ms)
    gaps[0, 0, :2] = ms[0, 0, :2]
    filled = fill_missing(gaps, SIZES, STEPS)
    known = ~np.isnan(gaps)
    assert np.array_equal(filled[known], gaps[known])
    assert np.all(np.isfinite(filled))
    smooth = monotone(np.where(known, filled, np.inf))
    for cell in np.argwhere(~known):
        smaller = tuple(slice(0, i + 1) for i in cell)
        assert filled[tuple(cell)] >= smooth[smaller][known[smaller]].max(initial=0)


def test_one_disturbed_cell_does_not_tilt_the_line_that_starts_behind_it():
    calm = linear_verify()
    disturbed = calm.copy()
    disturbed[0, 3, 0] = 25.0  # dearer than four times its rows
    gaps = disturbed.copy()
    gaps[0, 3, 4:] = np.nan
    filled = fill_missing(gaps, SIZES, STEPS)
    assert all(a <= b for a, b in pairwise(filled[0, 3, 3:]))
    assert filled[0, 3, 5] >= 0.8 * calm[0, 3, 5]


@given(st.data())
def test_a_tree_s_gaps_take_the_multiple_its_neighbours_took_and_what_is_known_stays(data):
    expected = np.array([[1.0, 2.0, 4.0], [2.0, 4.0, 9.0]])
    factor = data.draw(st.floats(0.5, 2))
    truth = factor * expected
    known = np.array(data.draw(st.lists(st.booleans(), min_size=6, max_size=6))).reshape(2, 3)
    found = fill_tree(np.where(known, truth, np.nan), expected)
    assert (found[known] == truth[known]).all()
    if known[0, 0]:
        assert found == pytest.approx(truth)
    if not known.any():
        assert (found == expected).all()


def begun_and_stepped(begin_ms, step_ms):
    """[1, 1, steps]; nothing is drafted in no steps."""
    ms = begin_ms + step_ms * np.array(STEPS, dtype=np.float64)
    ms[0] = 0.0
    return ms[None, None]


@given(st.lists(st.floats(-0.08, 0.08), min_size=5, max_size=5))
def test_what_single_depths_were_off_by_is_spread_over_all(errors):
    """In the square sum it never grows, so that no table is the worse for it."""
    true = begun_and_stepped(0.8, 0.8)
    measured = true * (1.0 + np.array([0.0, *errors]))
    found = measured, even_steps(measured, STEPS)
    off = [ms[..., 1:] / true[..., 1:] - 1.0 for ms in found]
    before, after = (float((each**2).sum()) for each in off)
    assert after <= 1.05 * before + 1e-12, "weighed by what was measured, not by the truth"


def test_a_depth_measured_too_cheap_no_longer_looks_better_and_steps_that_differ_stay():
    """As on a machine that copied files meanwhile; drafting really took 0.8 and 0.8 a step."""
    measured = np.array([[[0.0, 1.45, 2.74, 3.65, 4.76, 6.53]]])
    by_step = np.diff(even_steps(measured, STEPS)[0, 0, 1:]) / np.diff(STEPS[1:])
    assert by_step == pytest.approx(np.full(4, by_step[0]))
    assert by_step[0] == pytest.approx(0.85, abs=0.05)
    stairs = np.array([[[0.0, 1.0, 5.0, 5.0, 5.0, 5.0]]])
    assert (even_steps(stairs, STEPS) == stairs).all()
    few = np.array([[[0.0, 1.0, np.nan, 3.5, np.nan, np.nan]]])
    assert np.array_equal(even_steps(few, STEPS), few, equal_nan=True)
