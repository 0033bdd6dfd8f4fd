"""Laws of the throughput equation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.bench.throughput import (
    BreakEven,
    best_num_steps,
    break_even,
    break_even_rate,
    round_times,
    speedup,
    tokens_per_round,
)

RATES = st.floats(0, 1)
STEPS = st.integers(0, 12)
ROUND_MS = st.lists(st.floats(0.01, 1000), min_size=2, max_size=10)
LINEAR = st.builds(
    round_times,
    draft_ms=st.floats(1e-3, 100),
    target_ms=st.floats(1e-2, 1000),
    verify_ms_per_row=st.floats(0, 10),
    batch_size=st.integers(1, 256),
    max_steps=st.integers(1, 12),
)


@given(RATES, STEPS)
def test_tokens_per_round_are_the_mean_over_every_outcome_of_a_round(
    rate: float, num_steps: int
) -> None:
    """m drafts kept, then a miss or the end: m + 1 tokens."""
    chances = [rate**m * (1 - rate) for m in range(num_steps)] + [rate**num_steps]
    mean = sum((m + 1) * chance for m, chance in enumerate(chances))
    assert tokens_per_round(rate, num_steps) == pytest.approx(mean)


@given(RATES, ROUND_MS)
def test_the_best_depth_emits_most_per_time_and_is_the_smallest_of_equals(
    rate: float, round_ms: list[float]
) -> None:
    best = best_num_steps(rate, round_ms)
    fastest = speedup(rate, best, round_ms)
    rivals = [speedup(rate, k, round_ms) for k in range(len(round_ms))]
    assert fastest == max(rivals)
    assert best == rivals.index(fastest)


@given(ROUND_MS, st.integers(1, 9))
def test_at_its_break_even_rate_a_depth_is_as_fast_as_off(
    round_ms: list[float], num_steps: int
) -> None:
    num_steps = min(num_steps, len(round_ms) - 1)
    rate = break_even_rate(num_steps, round_ms)
    if rate is None:
        assert speedup(1.0, num_steps, round_ms) < 1
    elif rate == 0:
        assert speedup(0.0, num_steps, round_ms) >= 1
    else:
        assert speedup(rate, num_steps, round_ms) == pytest.approx(1, abs=1e-6)


@given(LINEAR, RATES)
def test_speculation_pays_exactly_above_the_overall_break_even_rate(
    round_ms: list[float], rate: float
) -> None:
    point = break_even(round_ms)
    best = best_num_steps(rate, round_ms)
    if point is None:
        assert best == 0
    elif abs(rate - point.accept_rate) > 1e-9:
        assert (best > 0) == (rate > point.accept_rate)


def test_a_worked_case() -> None:
    """A draft step costs a tenth of the target: 1 + .8 + .64 + .512 tokens in 1.3 of its time."""
    round_ms = round_times(draft_ms=1, target_ms=10, verify_ms_per_row=0, batch_size=1, max_steps=3)
    assert round_ms == [10, 11, 12, 13]
    assert speedup(0.8, 3, round_ms) == pytest.approx(2.952 / 1.3)
    assert best_num_steps(0.8, round_ms) == 3
    assert break_even(round_ms) == BreakEven(pytest.approx(0.1), 1)
    assert break_even_rate(1, [1.0, 2.1]) is None, "dearer than all its tokens"
    rows = {"verify_ms_per_row": 0.5, "batch_size": 4}  # those beyond the first, of every sequence
    assert round_times(draft_ms=1, target_ms=10, max_steps=2, **rows) == [10, 13, 16]
