"""Laws of the acceptance ledger: what a fleet knows, and what it hands to a new replica."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.adaptive.ledger import AcceptanceLedger, DecodeSpeed, summarise
from serve_spec.adaptive.survival import SurvivalEstimator

MAX_STEPS = 3
STALE_AFTER_S = 10.0

columns = st.tuples(
    st.lists(st.floats(0.001, 0.999), min_size=MAX_STEPS, max_size=MAX_STEPS),
    st.lists(st.floats(0, 1e6), min_size=MAX_STEPS, max_size=MAX_STEPS),
)
fleets = st.dictionaries(st.text(max_size=3), columns, max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def ledger() -> AcceptanceLedger:
    return AcceptanceLedger(MAX_STEPS, stale_after_s=STALE_AFTER_S)


def summary(
    accept_rates: object = (0.8, 0.6, 0.5), trials: object = (300, 200, 100), **speeds: object
) -> dict[str, Any]:
    """A summary of given figures; tuples become the lists that JSON makes of them."""
    made = {"accept_rates": accept_rates, "trials": trials, "tokens_per_ms": {}, **speeds}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in made.items()}


def told(fleet: dict[str, tuple[list[float], list[float]]]) -> AcceptanceLedger:
    filled = ledger()
    for replica, (rates, trials) in fleet.items():
        filled.report(replica, summary(rates, trials), 0.0)
    return filled


def test_a_new_replica_starts_where_the_only_other_one_is() -> None:
    survival = SurvivalEstimator(MAX_STEPS)
    for _ in range(50):
        survival.observe(["a", "b"], [3, 2], [3, 0])
    filled = ledger()
    filled.report("old", json.loads(json.dumps(summarise(survival))), 0.0)
    new = SurvivalEstimator(MAX_STEPS, filled.prior(0.0))
    assert new.pooled_rates == pytest.approx(survival.pooled_rates)


def test_replicas_weigh_as_much_as_they_tried() -> None:
    filled = ledger()
    filled.report("much", summary((0.9, 0.8, 0.5), (300, 100, 0)), 0.0)
    filled.report("little", summary((0.5, 0.4, 0.1), (100, 100, 0)), 0.0)
    assert filled.prior(0.0) == pytest.approx([0.8, 0.6, 0.6])


@given(fleets)
def test_the_prior_lies_between_the_extremes_of_the_replicas(
    fleet: dict[str, tuple[list[float], list[float]]],
) -> None:
    prior = told(fleet).prior(0.0)
    trials = np.array([trials for _, trials in fleet.values()]).reshape(-1, MAX_STEPS)
    if trials[:, 0].sum() < 1:
        assert prior is None
        return
    assert prior is not None
    rates = np.array([rates for rates, _ in fleet.values()])
    for position, rate in enumerate(prior):
        if trials[:, position].sum() >= 1:
            here = rates[trials[:, position] > 0, position]
            assert here.min() - 1e-9 <= rate <= here.max() + 1e-9
        else:
            assert rate == prior[position - 1]
    SurvivalEstimator(MAX_STEPS, prior)


@given(fleets, columns)
def test_a_report_replaces_the_last_one_of_its_replica(
    fleet: dict[str, tuple[list[float], list[float]]], update: tuple[list[float], list[float]]
) -> None:
    filled = told({**fleet, "again": ([0.5] * 3, [7.0] * 3)})
    filled.report("again", summary(*update), 0.0)
    prior = told({**fleet, "again": update}).prior(0.0)
    assert filled.prior(0.0) == (None if prior is None else pytest.approx(prior))


@given(fleets)
def test_forgetting_every_replica_leaves_nothing(
    fleet: dict[str, tuple[list[float], list[float]]],
) -> None:
    filled = told(fleet)
    for replica in fleet:
        filled.forget(replica)
        filled.forget(replica)
    assert filled.prior(0.0) is None
    assert filled.view(0.0) == ledger().view(0.0)


def test_silent_replicas_do_not_count_until_they_speak_again() -> None:
    filled = ledger()
    filled.report("silent", summary((0.9, 0.9, 0.9)), 0.0)
    filled.report("alive", summary((0.5, 0.5, 0.5)), 5.0)
    assert filled.prior(10.0) == pytest.approx([0.7] * 3)
    assert filled.prior(12.0) == pytest.approx([0.5] * 3)
    assert filled.prior(16.0) is None
    filled.report("silent", summary((0.9, 0.9, 0.9)), 20.0)
    assert filled.prior(20.0) == pytest.approx([0.9] * 3)


def test_replicas_that_come_and_go_do_not_pile_up() -> None:
    filled = ledger()
    for second in range(1000):
        filled.report(f"replica-{second}", summary(), float(second))
        view = filled.view(float(second))
        # Fresh for 10 s, known for 40, and swept out every 10.
        assert view["num_replicas"] <= 11
        assert view["num_replicas"] + view["num_stale"] <= 51  # type: ignore[operator]


MALFORMED = [
    None,
    "summary",
    {"accept_rates": [0.5] * 3, "tokens_per_ms": {}},
    {"trials": [1.0] * 3, "tokens_per_ms": {}},
    {"accept_rates": [0.5] * 3, "trials": [1.0] * 3},
    summary(accept_rates=(0.5, 0.5)),
    summary(accept_rates=0.5),
    summary(accept_rates=(0.5, math.nan, 0.5)),
    summary(accept_rates=(0.0, 0.5, 0.5)),
    summary(accept_rates=(0.5, "0.5", 0.5)),
    summary(trials=(1.0, -1.0, 1.0)),
    summary(trials=(1.0, math.inf, 1.0)),
    summary(trials=(1.0, 10**400, 1.0)),
    summary(trials=(1.0, True, 1.0)),
    summary(tokens_per_ms=None),
    summary(tokens_per_ms={"8": {"off": 1.0}}),
    summary(tokens_per_ms={"8": {"off": 0.0, "speculating": None}}),
    summary(tokens_per_ms={"8": {"off": math.nan, "speculating": None}}),
    summary(tokens_per_ms={"eight": {"off": None, "speculating": None}}),
    summary(tokens_per_ms={8: {"off": None, "speculating": None}}),
    summary(tokens_per_ms={str(size): {"off": 1.0, "speculating": 1.0} for size in range(99)}),
]


@pytest.mark.parametrize("malformed", MALFORMED, ids=lambda value: repr(value)[:60])
def test_a_malformed_summary_is_counted_and_changes_nothing(malformed: Any) -> None:
    filled = ledger()
    filled.report("a", summary(), 0.0)
    before = filled.view(0.0)
    filled.report("a", malformed, 0.0)
    filled.report("b", malformed, 0.0)
    assert filled.view(0.0) == {**before, "num_malformed": 2}


@given(json_values | st.fixed_dictionaries(dict.fromkeys(summary(), json_values)))
@settings(max_examples=200)
def test_no_summary_whatever_raises_or_spoils_the_prior(anything: Any) -> None:
    filled = ledger()
    filled.report("good", summary(), 0.0)
    filled.report("any", anything, 0.0)
    prior = filled.prior(0.0)
    assert prior is not None
    SurvivalEstimator(MAX_STEPS, prior)
    json.dumps(filled.view(0.0), allow_nan=False)


def test_the_view_shows_rates_trials_and_speeds() -> None:
    filled = ledger()
    survival = SurvivalEstimator(MAX_STEPS)
    fast = {1: DecodeSpeed(off=2.0, speculating=3.0), 8: DecodeSpeed(off=5.0)}
    slow = {1: DecodeSpeed(off=1.0, speculating=2.5), 8: DecodeSpeed(speculating=6.0)}
    filled.report("fast", summarise(survival, fast), 0.0)
    filled.report("slow", {**summarise(survival, slow), "trials": [10.0, 5.0, 0.0]}, 0.0)
    filled.report("late", summarise(survival, {1: DecodeSpeed(off=99.0)}), -20.0)
    assert filled.view(0.0) == {
        "num_replicas": 2,
        "num_stale": 1,
        "num_malformed": 0,
        "positions": [
            {"position": 1, "accept_rate": 0.7, "trials": 10.0},
            {"position": 2, "accept_rate": 0.7, "trials": 5.0},
            {"position": 3, "accept_rate": 0.7, "trials": 0.0},
        ],
        "tokens_per_ms": {
            "1": {"off": 1.5, "speculating": 2.75, "speedup": 1.8333},
            "8": {"off": 5.0, "speculating": 6.0, "speedup": None},
        },
    }
