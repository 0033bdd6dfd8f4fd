"""Costs of simulated rounds."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.simulated_costs import (
    GPU_8B,
    TWO_CPU_CORES,
    GridCosts,
    RoundShape,
    interpolate,
    noisy,
)

KNOTS = [
    (size, steps, TWO_CPU_CORES.draft_ms[i][j], TWO_CPU_CORES.verify_ms[i][j])
    for i, size in enumerate(TWO_CPU_CORES.batch_sizes)
    for j, steps in enumerate(TWO_CPU_CORES.num_steps)
]


def round_of(batch_size: int, drafting: tuple[int, ...], num_sampled: int = 0) -> RoundShape:
    return RoundShape(batch_size, drafting, 128 * batch_size, num_sampled, 0, 0)


@pytest.mark.parametrize(("batch_size", "num_steps", "draft_ms", "verify_ms"), KNOTS)
def test_a_grid_returns_what_was_measured_at_its_knots(
    batch_size: int, num_steps: int, draft_ms: float, verify_ms: float
) -> None:
    times = TWO_CPU_CORES(round_of(batch_size, (batch_size,) * num_steps))
    assert times.draft_ms == pytest.approx(draft_ms)
    assert times.verify_ms == pytest.approx(verify_ms)
    assert times.step_ms == times.draft_ms + times.verify_ms


@given(
    st.lists(st.integers(0, 100), min_size=2, max_size=6, unique=True).map(sorted),
    st.floats(-5, 5),
    st.floats(-5, 5),
    st.floats(-200, 200),
)
def test_a_line_is_interpolated_and_continued_exactly(
    xs: list[int], slope: float, offset: float, x: float
) -> None:
    ys = [offset + slope * knot for knot in xs]
    assert interpolate(xs, ys, x) == pytest.approx(offset + slope * x, abs=1e-6)


def test_rows_that_stop_early_cost_the_steps_they_take() -> None:
    costs = GridCosts((1, 2), (0, 1), ((1.0, 1.0), (1.0, 1.0)), ((0.0, 1.0), (0.0, 3.0)))
    assert costs(round_of(2, (2, 1))).draft_ms == pytest.approx(3.0 + 1.0)


def test_noise_repeats_and_is_unbiased() -> None:
    shape = round_of(4, (4, 4))
    first, second = noisy(GPU_8B, 0.2, seed=3), noisy(GPU_8B, 0.2, seed=3)
    times = [first(shape).step_ms for _ in range(400)]
    assert times == [second(shape).step_ms for _ in range(400)]
    assert any(a != b for a, b in pairwise(times))
    exact = GPU_8B(shape).step_ms
    assert sorted(times)[200] == pytest.approx(exact, rel=0.05)
