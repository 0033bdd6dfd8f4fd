"""Figures over time stay small, in order, and in step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve_spec.serving.series import Series


def filled(gaps: list[float]) -> tuple[Series, list[float]]:
    series = Series(["a", "b"], history_s=100, max_points=10)
    now, times = 0.0, []
    for gap in gaps:
        now += gap
        times.append(now)
        series.add(now, (2 * now, -now))
    return series, times


@given(st.lists(st.floats(0, 50), min_size=1, max_size=60))
def test_columns_stay_in_step_in_order_and_within_bounds(gaps: list[float]) -> None:
    series, times = filled(gaps)
    view = series.view(times[-1])
    assert view["time_s"] == sorted(view["time_s"])
    assert view["a"] == [2 * t for t in view["time_s"]]
    assert view["b"] == [-t for t in view["time_s"]]
    assert len(view["time_s"]) <= 11
    assert all(times[-1] - 100 <= t <= times[-1] for t in view["time_s"])
    assert set(view["time_s"]) <= set(times)


@given(st.lists(st.floats(10.001, 50), min_size=1, max_size=10))
def test_points_that_are_far_enough_apart_are_all_kept(gaps: list[float]) -> None:
    series, times = filled(gaps)
    assert series.view(times[-1])["time_s"] == [t for t in times if t >= times[-1] - 100]


def test_an_empty_series_has_its_columns() -> None:
    assert Series(["a"], history_s=10, max_points=5).view(3.0) == {"time_s": [], "a": []}
