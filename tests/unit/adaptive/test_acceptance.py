"""Counts by position: the same sums as row by row, and nothing impossible is counted."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive.acceptance import PositionCounters, SlotAverages
from serve_spec.config.adaptive_file import load_slots

MAX_STEPS = 5
ROW = st.integers(0, MAX_STEPS).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k)))
ROUNDS = st.lists(st.lists(ROW, max_size=100), max_size=4)


@given(ROUNDS)
def test_sums_by_position_are_the_sums_over_rows(rounds: list[list[tuple[int, int]]]) -> None:
    counters = PositionCounters(MAX_STEPS)
    for rows in rounds:
        counters.observe([m for _, m in rows], [k for k, _ in rows])
    rows = list(chain.from_iterable(rounds))
    shown = [tuple(entry.values()) for entry in counters.snapshot()]
    for j, (position, drafted, reached, accepted, rate) in enumerate(shown):
        assert position == j + 1
        assert drafted == sum(k > j for k, _ in rows)
        assert reached == sum(k > j and m >= j for k, m in rows)
        assert accepted == sum(m > j for _, m in rows)
        assert rate == (round(accepted / reached, 4) if reached else None)
    assert len(shown) == max((k for k, _ in rows), default=0)
    assert counters.num_rows == sum(k > 0 for k, _ in rows)


@given(ROUNDS)
def test_totals_are_the_sums_over_rows(rounds: list[list[tuple[int, int]]]) -> None:
    counters = PositionCounters(MAX_STEPS)
    for rows in rounds:
        counters.observe([m for _, m in rows], [k for k, _ in rows])
    drafted, correct = (sum(row[i] for row in chain.from_iterable(rounds)) for i in (0, 1))
    assert counters.totals() == {
        "learned_draft_tokens": drafted,
        "learned_correct_drafts": correct,
        "learned_accept_length": round(1 + correct / max(1, counters.num_rows), 4),
        "accept_rate": round(correct / drafted, 4) if drafted else None,
    }


@pytest.mark.parametrize(
    ("row_steps", "correct"),
    [
        ([2], [3]),
        ([2], [-1]),
        ([2], [0.5]),
        ([6], [0]),
        ([300], [0]),
        ([None], [0]),
        ([1.0], [1]),
    ],
)
def test_an_impossible_row_is_refused_and_nothing_is_counted(
    row_steps: list[int], correct: list[int]
) -> None:
    counters = PositionCounters(MAX_STEPS)
    with pytest.raises(ValueError, match=rf"=\[{row_steps[0]}, 2\], .* ≤ 5 in every row"):
        counters.observe([*correct, 1], [*row_steps, 2])
    assert counters.num_rows == 0


@pytest.mark.parametrize("correct", [[1], [1, 1, 1]])
def test_columns_of_different_lengths_are_refused(correct: list[int]) -> None:
    with pytest.raises(ValueError, match=r"=\[2, 2\], num_correct_drafts=\[1"):
        PositionCounters(MAX_STEPS).observe(correct, [2, 2])


def test_a_reader_keeps_what_it_read_while_a_round_is_counted() -> None:
    counters = PositionCounters(MAX_STEPS)
    counters.observe([1], [2])
    rows = counters._rows
    before = [list(each) for each in rows]
    counters.observe([2], [2])
    assert rows == before


def test_slots_average_rows_that_drafted() -> None:
    averages = SlotAverages(
        load_slots({"ema_alpha": 0.5, **{k: {"candidate_steps": [3]} for k in "48"}})
    )
    averages.observe(1, [3, 0], [3, 0])
    averages.observe(7, [1], [3])
    averages.observe(8, [0], [0])
    assert averages.snapshot() == {"4": {"ema_accept_len": 2.0}}
