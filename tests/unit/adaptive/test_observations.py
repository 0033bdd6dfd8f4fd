"""Rows by code: the same sums as row by row, and nothing impossible gets a code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive.observations import Observations

MAX_STEPS = 5
ROW = st.integers(0, MAX_STEPS).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))


@given(st.lists(ROW, max_size=300))
def test_sums_by_code_are_the_sums_over_rows(rows: list[tuple[int, int]]) -> None:
    shown = Observations(MAX_STEPS)
    row_steps, correct = [k for k, _ in rows], [m for _, m in rows]
    codes = shown.codes(row_steps, correct)
    drafted, accepted, reached = (
        table[codes].sum(axis=0) for table in (shown.drafted, shown.accepted, shown.reached)
    )
    for position in range(MAX_STEPS):
        assert drafted[position] == sum(k > position for k in row_steps)
        assert accepted[position] == sum(m > position for m in correct)
        assert reached[position] == sum(k > position and m >= position for k, m in rows)


@given(ROW, ROW)
def test_rows_share_a_code_if_and_only_if_they_show_the_same(
    one: tuple[int, int], other: tuple[int, int]
) -> None:
    a, b = Observations(MAX_STEPS).codes([one[0], other[0]], [one[1], other[1]])
    assert (a == b) == (one == other)


@pytest.mark.parametrize(
    ("row_steps", "correct", "message"),
    [
        ([2, 2], [0, 3], r"num_correct_drafts=3: must be an integer in 0\.\.2"),
        ([2], [-1], r"num_correct_drafts=-1: must be an integer in 0\.\.2"),
        ([2], [0.5], r"num_correct_drafts=0\.5: must be an integer in 0\.\.2"),
        ([6], [0], r"row_steps=6: must be an integer in 0\.\.5"),
        ([300], [0], r"row_steps=300: must be an integer in 0\.\.5"),
        ([None], [0], r"row_steps=None: must be an integer in 0\.\.5"),
        ([2, 2], [1], "shorter"),
        ([2], [1, 1], "longer"),
    ],
)
def test_an_impossible_row_is_refused_by_field_and_value(
    row_steps: list[int], correct: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Observations(MAX_STEPS).codes(row_steps, correct)


def test_rows_that_never_draft_are_fine() -> None:
    shown = Observations(0)
    assert shown.codes([0, 0, 0], [0, 0, 0]).tolist() == [0, 0, 0]
    assert shown.codes([], []).tolist() == []
