"""Laws of regret."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.regret import best_arms, phase_regrets, relative_rates, trace_regret

STATICS = ("K=0", "K=3")
SPEEDS = st.floats(0.01, 1000)
PHASES = st.integers(1, 6).flatmap(
    lambda n: st.fixed_dictionaries(
        {arm: st.lists(SPEEDS, min_size=n, max_size=n) for arm in (*STATICS, "x")}
    )
)


@given(PHASES)
def test_the_best_arm_regrets_nothing_and_the_others_something(
    rates: dict[str, list[float]],
) -> None:
    best = best_arms(rates, STATICS)
    assert set(best) <= set(STATICS)
    for arm in STATICS:
        for name, regret in zip(best, phase_regrets(rates, arm, best), strict=True):
            assert regret is not None
            assert regret == 0.0 if arm == name else regret >= 0.0


@given(PHASES, st.data())
def test_regret_of_the_trace_lies_between_those_of_its_phases(
    rates: dict[str, list[float]], data: st.DataObject
) -> None:
    num_phases = len(rates["x"])
    tokens = data.draw(st.lists(st.integers(1, 1000), min_size=num_phases, max_size=num_phases))
    best = best_arms(rates, STATICS)
    by_phase = [regret for regret in phase_regrets(rates, "x", best) if regret is not None]
    whole = trace_regret(rates, "x", best, tokens)
    assert whole is not None
    slack = 1e-9 * (1 + max(by_phase))
    assert min(by_phase) - slack <= whole <= max(by_phase) + slack


def test_long_phases_weigh_more() -> None:
    rates = {"K=0": [1.0, 1.0], "x": [0.5, 1.0]}
    best = ["K=0", "K=0"]
    assert trace_regret(rates, "x", best, [1, 1]) == pytest.approx(0.5)
    assert trace_regret(rates, "x", best, [1, 3]) == pytest.approx(0.25)


def test_cells_that_were_not_run_are_left_out_not_guessed() -> None:
    rates = {"K=0": [1.0, 2.0], "K=3": [None, 4.0], "x": [2.0, None]}
    best = best_arms(rates, STATICS)
    assert best == ["K=0", "K=3"]
    assert phase_regrets(rates, "x", best) == [-0.5, None]
    assert trace_regret(rates, "x", best, [10, 10]) is None
    assert relative_rates(rates, "K=3", "K=0") == [None, 2.0]
