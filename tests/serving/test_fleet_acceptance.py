"""Laws of a fleet's acceptance: what replicas teach, and what a new one starts from."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive.goodput import AllowedShapes, GoodputPolicy
from serve_spec.serving.fleet_stats import FleetStats
from tests.helpers.simulated_costs import GPU_8B, recorded_table

PAIR = "target+draft"
GONE_AFTER_S, MEMORY_S = 10, 600

columns = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1e6)), min_size=3, max_size=3)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
figures = st.floats(0, 1) | json_values
entries = st.fixed_dictionaries(
    {
        "position": st.integers(1, 3) | json_values,
        "accept_rate": figures,
        "trials": figures,
        "reached": figures,
    }
)
buckets = st.fixed_dictionaries(
    {"effective_speedup": figures, "tokens_per_ms": st.fixed_dictionaries({"0": figures})}
)
sizes = st.dictionaries(st.sampled_from(["1", "8"]) | st.text(max_size=5), buckets | json_values)


def snapshot(*columns, pair=PAIR, by_batch_size=None):
    """Return a replica's snapshot of accept rates and trials by position."""
    entries = [
        {"position": position, "accept_rate": rate, "trials": trials}
        for position, (rate, trials) in enumerate(columns, start=1)
    ]
    return {
        "pair": pair,
        "candidate_steps": list(range(len(columns) + 1)),
        "acceptance": {"positions": entries},
        "speculation": {"by_batch_size": {} if by_batch_size is None else by_batch_size},
    }


def speed(off, speedup):
    return {"effective_speedup": speedup, "tokens_per_ms": {"0": off, "3": 3.1}}


def fleet(**replicas):
    """Return what a fleet knows whose replicas reported at second 0."""
    known = FleetStats(stale_after_s=GONE_AFTER_S / 4, history_s=MEMORY_S)
    for name, told in replicas.items():
        known.report(name, told, 0)
    return known


def acceptance(known, now_s=0):
    return known.view(now_s)["fleet"]["acceptance"]


def test_replicas_weigh_as_much_as_they_tried():
    known = fleet(
        much=snapshot((0.9, 300), (0.8, 100), (0.5, 0)),
        little=snapshot((0.5, 100), (0.4, 100), (0.1, 0)),
    )
    untried = 0.6  # the third position continues the second
    assert known.prior(PAIR, 3, 0) == pytest.approx([0.8, 0.6, untried])


def test_without_trials_nothing_is_known():
    known = fleet(new=snapshot((0.7, 0), (0.7, 0)))
    assert known.prior(PAIR, 2, 0) is None
    (entry,) = acceptance(known)
    assert entry["positions"] == [
        {"position": position, "accept_rate": None, "trials": 0.0} for position in (1, 2)
    ]


def test_trials_without_a_rate_teach_nothing():
    known = fleet(a=snapshot((0.8, 100), (None, 100)))
    assert known.prior(PAIR, 2, 0) == pytest.approx([0.8, 0.8])


@given(st.lists(columns, max_size=6))
def test_a_prior_lies_between_the_extremes_of_the_replicas(replicas):
    known = fleet(**{f"r{i}": snapshot(*columns) for i, columns in enumerate(replicas)})
    prior = known.prior(PAIR, 3, 0)
    if sum(columns[0][1] for columns in replicas) < 1:
        assert prior is None
        return
    assert prior is not None
    assert all(0 < rate < 1 for rate in prior)
    for position, rate in enumerate(prior):
        tried = [columns[position] for columns in replicas if columns[position][1] > 0]
        if sum(trials for _, trials in tried) >= 1:
            rates = [rate for rate, _ in tried]
            assert min(rates) - 0.00101 <= rate <= max(rates) + 0.00101
        else:
            assert rate == prior[position - 1]


def test_a_report_replaces_the_last_one_of_its_replica():
    known = fleet(a=snapshot((0.9, 300)), b=snapshot((0.5, 100)))
    known.report("a", snapshot((0.7, 100)), 1)
    assert known.prior(PAIR, 1, 1) == pytest.approx([0.6])


def test_a_replica_counts_only_for_the_depth_it_reported_last():
    known = fleet(a=snapshot((0.9, 300)), b=snapshot((0.5, 100)))
    known.report("a", snapshot((0.9, 300), (0.9, 300)), 1)
    assert known.prior(PAIR, 1, 1) == pytest.approx([0.5])
    assert known.prior(PAIR, 2, 1) == pytest.approx([0.9, 0.9])


def test_other_models_and_other_depths_say_nothing():
    known = fleet(a=snapshot((0.8, 100), (0.6, 100)))
    assert known.prior("other pair", 2, 0) is None
    assert known.prior(PAIR, 3, 0) is None


def test_a_forgotten_replica_does_not_count():
    known = fleet(a=snapshot((0.9, 100)), b=snapshot((0.5, 100)))
    known.forget("a")
    known.forget("unknown")
    assert known.prior(PAIR, 1, 0) == pytest.approx([0.5])
    assert [entry["num_replicas"] for entry in acceptance(known)] == [1]


def test_replicas_silent_for_long_do_not_count_until_they_report_again():
    known = fleet(silent=snapshot((0.9, 100)))
    known.report("alive", snapshot((0.5, 100)), 8)
    (entry,) = acceptance(known, GONE_AFTER_S)
    assert (entry["num_replicas"], entry["num_stale"]) == (2, 1)
    assert known.prior(PAIR, 1, GONE_AFTER_S) == pytest.approx([0.7])
    assert known.prior(PAIR, 1, GONE_AFTER_S + 1) == pytest.approx([0.5])
    known.report("silent", snapshot((0.9, 100)), 12)
    assert known.prior(PAIR, 1, 12) == pytest.approx([0.7])


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_prior_outlives_its_replicas_for_a_while(is_forgotten):
    known = fleet(a=snapshot((0.9, 100)))
    known.report("b", snapshot((0.7, 100)), 6)
    if is_forgotten:
        known.forget("a")
        known.forget("b")
    assert known.prior(PAIR, 1, 6 + MEMORY_S) == pytest.approx([0.8])
    assert known.prior(PAIR, 1, 7 + MEMORY_S) is None


def test_a_restarted_replica_without_trials_does_not_erase_the_prior():
    known = fleet(a=snapshot((0.9, 100)))
    known.forget("a")
    known.report("b", snapshot((0.7, 0)), 20)
    assert known.prior(PAIR, 1, 20) == pytest.approx([0.9])


def test_counts_stand_in_where_a_policy_keeps_no_estimate():
    counted = [
        {"position": 1, "verified": 10, "reached": 10, "accepted": 9, "accept_rate": 0.9},
        {"position": 2, "verified": 10, "reached": 0, "accepted": 0, "accept_rate": None},
    ]
    since_start = {"since_start": {"positions": counted}}
    known = fleet(a={"pair": PAIR, "candidate_steps": [1, 3], "speculation": since_start})
    assert known.prior(PAIR, 3, 0) == pytest.approx([0.9] * 3)


@pytest.mark.parametrize(
    "steps", [None, "all", [], [0], [-1], [65], [10**400], ["3"]], ids=lambda value: str(value)[:9]
)
def test_a_replica_that_cannot_draft_is_passed_over(steps):
    assert acceptance(fleet(a={**snapshot((0.5, 1)), "candidate_steps": steps})) == []


MALFORMED = {
    "no positions": {"pair": PAIR, "candidate_steps": [1]},
    "rate above one": snapshot((1.5, 1)),
    "rate below zero": snapshot((-0.1, 1)),
    "rate not a number": snapshot((math.nan, 1)),
    "rate as text": snapshot(("0.5", 1)),
    "trials below zero": snapshot((0.5, -1)),
    "trials without end": snapshot((0.5, math.inf)),
    "trials no float holds": snapshot((0.5, 10**400)),
    "position without end": {
        **snapshot((0.5, 1)),
        "acceptance": {"positions": [{"position": math.inf, "accept_rate": 0.5, "trials": 1}]},
    },
    "size as a word": snapshot((0.5, 1), by_batch_size={"eight": speed(1.0, 1.0)}),
    "speed below zero": snapshot((0.5, 1), by_batch_size={"8": speed(-1.0, 1.0)}),
    "speed not a number": snapshot((0.5, 1), by_batch_size={"8": speed(math.nan, 1.0)}),
    "speedup without end": snapshot((0.5, 1), by_batch_size={"8": speed(1.0, math.inf)}),
    "too many sizes": snapshot((0.5, 1), by_batch_size={str(i): speed(1, 1) for i in range(65)}),
}


@pytest.mark.parametrize("malformed", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_summary_is_counted_and_changes_nothing(malformed):
    known = fleet(a=snapshot((0.8, 100)))
    (before,) = acceptance(known)
    known.report("a", malformed, 0)
    known.report("b", malformed, 0)
    assert acceptance(known) == [{**before, "num_malformed": 2}]


@given(st.lists(entries | json_values), sizes | json_values, st.booleans())
def test_whatever_a_replica_sends_the_fleet_still_answers(positions, by_batch_size, is_estimate):
    odd = snapshot((0.5, 1), (0.5, 1), (0.5, 1), by_batch_size=by_batch_size)
    odd["acceptance"] = {"positions": positions if is_estimate else None}
    odd["speculation"] |= {"since_start": {"positions": positions}}
    known = fleet(good=snapshot((0.8, 9), (0.6, 9), (0.5, 9)), odd=odd)
    prior = known.prior(PAIR, 3, 0)
    assert prior is not None
    assert all(0 < rate < 1 for rate in prior)
    json.dumps(acceptance(known), allow_nan=False)


def test_the_view_shows_rates_trials_and_speeds():
    fast = {"1": speed(2.0, 1.5), "8": speed(5.0, None)}
    slow = {"1": speed(1.0, 2.5), "8": speed(None, 1.2)}
    known = fleet(
        fast=snapshot((0.7, 6), (0.5, 3), by_batch_size=fast),
        slow=snapshot((0.7, 4), (0.5, 0), by_batch_size=slow),
    )
    known.report("other", snapshot((1.0, 2), pair="another pair"), 0)
    other, entry = acceptance(known)
    assert (other["pair"], other["max_steps"], other["num_replicas"]) == ("another pair", 1, 1)
    assert entry == {
        "pair": PAIR,
        "max_steps": 2,
        "num_replicas": 2,
        "num_stale": 0,
        "num_malformed": 0,
        "positions": [
            {"position": 1, "accept_rate": 0.7, "trials": 10.0},
            {"position": 2, "accept_rate": 0.5, "trials": 3.0},
        ],
        "tokens_per_ms": {
            "1": {"off": 1.5, "speculating": 2.75, "speedup": 1.8333},
            "8": {"off": 5.0, "speculating": None, "speedup": None},
        },
    }


def test_a_new_pair_takes_the_place_of_one_without_replicas():
    known = fleet()
    for number in range(100):
        known.report("a", snapshot((0.8, 100), pair=f"pair {number}"), number)
    assert len(acceptance(known, 100)) == 16
    assert known.prior("pair 99", 1, 100) == pytest.approx([0.8])


def test_a_pair_in_use_keeps_its_place():
    known = fleet(**{f"r{i}": snapshot((0.8, 100), pair=f"pair {i}") for i in range(17)})
    assert [known.prior(f"pair {i}", 1, 0) is None for i in range(17)] == [False] * 16 + [True]
    known.forget("r3")
    known.report("r16", snapshot((0.8, 100), pair="pair 16"), 1)
    assert [i for i in range(17) if known.prior(f"pair {i}", 1, 1) is None] == [3]


def test_a_new_policy_starts_from_the_prior_even_from_certainty():
    prior = fleet(a=snapshot((1.0, 100), (0.6, 100), (0.0, 100))).prior(PAIR, 3, 0)
    policy = GoodputPolicy(recorded_table(GPU_8B, (1, 8)), AllowedShapes(3), accept_rates=prior)
    shown = policy.snapshot()["acceptance"]
    rates = [entry["accept_rate"] for entry in shown["positions"]]
    assert rates == pytest.approx([1.0, 0.6, 0.0], abs=0.002)
