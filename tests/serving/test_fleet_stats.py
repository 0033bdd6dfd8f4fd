"""What the fleet's figures mean, and what its replicas teach a new one; the clock is a number."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive.candidates import AllowedShapes
from serve_spec.adaptive.goodput import GoodputPolicy
from serve_spec.serving.statistics.fleet_stats import FleetStats
from tests.helpers.simulated_costs import GPU_8B, recorded_table


def snapshot(rows=0, tokens=0, **fields):
    return {
        "speculative_num_steps": 3,
        "batch_size": 1,
        "kv": {"free_pages": 10, "total_pages": 20},
        "counters": {
            "decode_rows": rows,
            "decode_tokens": tokens + 5,  # by grammar drafts
            "correct_drafts": tokens - rows,
        },
        **fields,
    }


@pytest.fixture
def stats():
    return FleetStats(stale_after_s=10, history_s=60)


def fleet(stats, now_s=0):
    return stats.view(now_s)["fleet"]


def states(stats, now_s=0):
    return stats.view(now_s)["internal_states"]


def measured(speedup, busy_s):
    return {"effective_speedup": speedup, "window": {"busy_s": busy_s}}


def test_the_fleet_is_the_sum_of_its_replicas_or_their_mean_by_rows_time_or_number(stats):
    busy = snapshot(
        rows=90,
        tokens=360,
        batch_size=5,
        speculative_num_steps=1,
        switches={"gain": 2, "kv": 1},
        last_reason="kv",
        slots={"1": {"ema_accept_len": 1.0}},
        speculation=measured(2.0, 30),
    )
    idle = snapshot(
        rows=10,
        tokens=10,
        batch_size=2,
        switches={"gain": 3},
        last_reason="steady",
        slots={"1": {"ema_accept_len": 2.0}, "8": {"speedup": 1.2}},
        speculation=measured(1.0, 10),
    )
    new = snapshot(batch_size=0, speculative_num_steps=None, speculation=measured(None, 50))
    for name, report in {"idle": idle, "busy": busy, "new": new}.items():
        stats.report(name, report, 0)
    expected = {
        "num_replicas": 3,
        "batch_size": 7,
        "kv": {"free_pages": 30, "total_pages": 60},
        "replicas_by_num_steps": {"1": 1, "3": 1},
        "avg_spec_accept_length": pytest.approx(3.7),
        "switches": {"gain": 5, "kv": 1},
        "replicas_by_last_reason": {"kv": 1, "steady": 1},
        "slots": {"1": {"ema_accept_len": 1.5, "num_replicas": 2}},
        "effective_speedup": pytest.approx(1.75),
    }
    view = fleet(stats)
    assert {name: view[name] for name in expected} == expected
    assert [state["replica"] for state in states(stats)] == ["busy", "idle", "new"]


def test_a_silent_replica_is_shown_as_stale_and_left_out_of_the_sums(stats):
    stats.report("a", snapshot(), 0)
    stats.report("b", snapshot(), 5)
    assert [state["stale"] for state in states(stats, 11)] == [True, False]
    assert (fleet(stats, 11)["batch_size"], fleet(stats, 11)["num_stale"]) == (1, 1)
    assert [len(states(stats, now)) for now in (40, 41, 46)] == [2, 1, 0], "forgotten"


def test_what_a_snapshot_lacks_counts_as_zero_and_acceptance_as_one_token_per_round(stats):
    stats.report("a", {"kv": None, "batch_size": "many"}, 0)
    view = fleet(stats)
    assert (view["batch_size"], view["avg_spec_accept_length"]) == (0, 1.0)
    assert (view["replicas_by_num_steps"], view["effective_speedup"]) == ({}, None)
    assert states(stats)[0]["kv"] is None


def test_history_is_bounded_in_time_and_in_number(stats):
    for tick in range(5000):
        stats.report("a", snapshot(batch_size=tick), tick * 0.05)
    history = stats.status(250)["history"]
    times = history["time_s"]
    assert times == sorted(times)
    assert all(190 <= t <= 250 for t in times)
    assert 200 <= len(times) <= 301
    assert {len(column) for column in history.values()} == {len(times)}


def test_the_status_of_a_large_fleet_is_no_larger_than_that_of_a_small_one():
    def size(num_replicas):
        stats = FleetStats(stale_after_s=10, history_s=60)
        for replica in range(num_replicas):
            stats.report(f"r{replica:04}", snapshot(), 0)
        return len(json.dumps(stats.status(0)))

    assert size(1000) <= size(100) + 100


def test_the_status_shows_each_replica_s_own_course(stats):
    costs = {"state": "missing", "detail": "ValueError: the machine is too busy"}
    for tick in range(3):
        stats.report("a", snapshot(batch_size=tick), tick)
        stats.report("b", snapshot(batch_size=9, speculative_num_steps=5, costs=costs), tick)
    status = stats.status(2)
    a, b = status["replicas"]
    assert a["history"]["batch_size"] == [0, 1, 2]
    assert b["history"]["num_steps"] == [5, 5, 5]
    assert b["costs"] == costs
    assert status["history"]["batch_size"][-1] == status["fleet"]["batch_size"] == 11


@pytest.mark.parametrize("look", [FleetStats.view, FleetStats.status])
def test_who_looks_sees_the_newest_acceptance(stats, look):
    stats.report("a", rated((0.5, 100)), 0)
    stats.report("a", rated((0.8, 100)), 0.1)
    assert look(stats, 0.1)["fleet"]["acceptance"][0]["positions"][0]["accept_rate"] == 0.8


def test_new_replicas_profit_from_the_newest_reports_even_if_nobody_looks(stats):
    for tick in range(100):
        stats.report("a", rated((0.5 + tick / 1000, 100)), tick * 0.1)
    assert stats.prior(PAIR, 1, 10) == pytest.approx([0.599])


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


def rated(*columns, pair=PAIR, by_batch_size=None):
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


def fleet_of(**replicas):
    """Return what a fleet knows whose replicas reported at second 0."""
    known = FleetStats(stale_after_s=GONE_AFTER_S / 4, history_s=MEMORY_S)
    for name, told in replicas.items():
        known.report(name, told, 0)
    return known


def acceptance(known, now_s=0):
    return known.view(now_s)["fleet"]["acceptance"]


def test_replicas_weigh_as_much_as_they_tried():
    known = fleet_of(
        much=rated((0.9, 300), (0.8, 100), (0.5, 0)), little=rated((0.5, 100), (0.4, 100), (0.1, 0))
    )
    untried = 0.6  # the third position continues the second
    assert known.prior(PAIR, 3, 0) == pytest.approx([0.8, 0.6, untried])
    assert known.prior("other pair", 3, 0) is None
    assert known.prior(PAIR, 2, 0) is None
    assert fleet_of(a=rated((0.8, 100), (None, 100))).prior(PAIR, 2, 0) == pytest.approx([0.8] * 2)


def test_without_trials_nothing_is_known():
    known = fleet_of(new=rated((0.7, 0), (0.7, 0)))
    assert known.prior(PAIR, 2, 0) is None
    (row,) = acceptance(known)
    assert row["positions"] == [
        {"position": position, "accept_rate": None, "trials": 0.0} for position in (1, 2)
    ]


@given(st.lists(columns, max_size=6))
def test_a_prior_lies_between_the_extremes_of_the_replicas(replicas):
    known = fleet_of(**{f"r{i}": rated(*columns) for i, columns in enumerate(replicas)})
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


def test_a_replica_counts_with_its_last_report_for_the_depth_of_that():
    known = fleet_of(a=rated((0.9, 300)), b=rated((0.5, 100)))
    known.report("a", rated((0.7, 100)), 1)
    assert known.prior(PAIR, 1, 1) == pytest.approx([0.6])
    known.report("a", rated((0.9, 300), (0.9, 300)), 1)
    assert known.prior(PAIR, 1, 1) == pytest.approx([0.5])
    assert known.prior(PAIR, 2, 1) == pytest.approx([0.9, 0.9])


def test_a_forgotten_replica_does_not_count():
    known = fleet_of(a=rated((0.9, 100)), b=rated((0.5, 100)))
    known.forget("a")
    known.forget("unknown")
    assert known.prior(PAIR, 1, 0) == pytest.approx([0.5])
    assert [row["num_replicas"] for row in acceptance(known)] == [1]


def test_replicas_silent_for_long_do_not_count_until_they_report_again():
    known = fleet_of(silent=rated((0.9, 100)))
    known.report("alive", rated((0.5, 100)), 8)
    (row,) = acceptance(known, GONE_AFTER_S)
    assert (row["num_replicas"], row["num_stale"]) == (2, 1)
    assert known.prior(PAIR, 1, GONE_AFTER_S) == pytest.approx([0.7])
    assert known.prior(PAIR, 1, GONE_AFTER_S + 1) == pytest.approx([0.5])
    known.report("silent", rated((0.9, 100)), 12)
    assert known.prior(PAIR, 1, 12) == pytest.approx([0.7])


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_prior_outlives_its_replicas_for_a_while(is_forgotten):
    known = fleet_of(a=rated((0.9, 100)))
    known.report("b", rated((0.7, 100)), 6)
    if is_forgotten:
        known.forget("a")
        known.forget("b")
        known.report("new", rated((0.7, 0)), 20)  # without trials it teaches nothing
        assert known.prior(PAIR, 1, 20) == pytest.approx([0.8]), "nor erases what is known"
    assert known.prior(PAIR, 1, 6 + MEMORY_S) == pytest.approx([0.8])
    assert known.prior(PAIR, 1, 7 + MEMORY_S) is None


def test_counts_stand_in_where_a_policy_keeps_no_estimate():
    counted = [
        {"position": 1, "verified": 10, "reached": 10, "accepted": 9, "accept_rate": 0.9},
        {"position": 2, "verified": 10, "reached": 0, "accepted": 0, "accept_rate": None},
    ]
    since_start = {"since_start": {"positions": counted}}
    known = fleet_of(a={"pair": PAIR, "candidate_steps": [1, 3], "speculation": since_start})
    assert known.prior(PAIR, 3, 0) == pytest.approx([0.9] * 3)


@pytest.mark.parametrize(
    "steps", [None, "all", [], [0], [-1], [65], [10**400], ["3"]], ids=lambda value: str(value)[:9]
)
def test_a_replica_that_cannot_draft_is_passed_over(steps):
    assert acceptance(fleet_of(a={**rated((0.5, 1)), "candidate_steps": steps})) == []


MALFORMED = {
    "no positions": {"pair": PAIR, "candidate_steps": [1]},
    "rate above one": rated((1.5, 1)),
    "rate not a number": rated((math.nan, 1)),
    "rate as text": rated(("0.5", 1)),
    "trials without end": rated((0.5, math.inf)),
    "position without end": {
        **rated((0.5, 1)),
        "acceptance": {"positions": [{"position": math.inf, "accept_rate": 0.5, "trials": 1}]},
    },
    "size as a word": rated((0.5, 1), by_batch_size={"eight": speed(1.0, 1.0)}),
    "speed below zero": rated((0.5, 1), by_batch_size={"8": speed(-1.0, 1.0)}),
    "speedup without end": rated((0.5, 1), by_batch_size={"8": speed(1.0, math.inf)}),
    "too many sizes": rated((0.5, 1), by_batch_size={str(i): speed(1, 1) for i in range(65)}),
}


@pytest.mark.parametrize("malformed", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_summary_is_counted_and_changes_nothing(malformed):
    known = fleet_of(a=rated((0.8, 100)))
    (before,) = acceptance(known)
    known.report("a", malformed, 0)
    known.report("b", malformed, 0)
    assert acceptance(known) == [{**before, "num_malformed": 2}]


@given(st.lists(entries | json_values), sizes | json_values, st.booleans())
def test_whatever_a_replica_sends_the_fleet_still_answers(positions, by_batch_size, is_estimate):
    odd = rated((0.5, 1), (0.5, 1), (0.5, 1), by_batch_size=by_batch_size)
    odd["acceptance"] = {"positions": positions if is_estimate else None}
    odd["speculation"] |= {"since_start": {"positions": positions}}
    known = fleet_of(good=rated((0.8, 9), (0.6, 9), (0.5, 9)), odd=odd)
    prior = known.prior(PAIR, 3, 0)
    assert prior is not None
    assert all(0 < rate < 1 for rate in prior)
    json.dumps(acceptance(known), allow_nan=False)


def test_the_view_shows_rates_trials_and_speeds():
    fast = {"1": speed(2.0, 1.5), "8": speed(5.0, None)}
    slow = {"1": speed(1.0, 2.5), "8": speed(None, 1.2)}
    known = fleet_of(
        fast=rated((0.7, 6), (0.5, 3), by_batch_size=fast),
        slow=rated((0.7, 4), (0.5, 0), by_batch_size=slow),
    )
    known.report("other", rated((1.0, 2), pair="another pair"), 0)
    other, row = acceptance(known)
    assert (other["pair"], other["max_steps"], other["num_replicas"]) == ("another pair", 1, 1)
    assert row == {
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
    known = fleet_of()
    for number in range(100):
        known.report("a", rated((0.8, 100), pair=f"pair {number}"), number)
    assert len(acceptance(known, 100)) == 16
    assert known.prior("pair 99", 1, 100) == pytest.approx([0.8])


def test_a_pair_in_use_keeps_its_place():
    known = fleet_of(**{f"r{i}": rated((0.8, 100), pair=f"pair {i}") for i in range(17)})
    assert [known.prior(f"pair {i}", 1, 0) is None for i in range(17)] == [False] * 16 + [True]
    known.forget("r3")
    known.report("r16", rated((0.8, 100), pair="pair 16"), 1)
    assert [i for i in range(17) if known.prior(f"pair {i}", 1, 1) is None] == [3]


def test_a_new_policy_starts_from_the_prior_even_from_certainty():
    prior = fleet_of(a=rated((1.0, 100), (0.6, 100), (0.0, 100))).prior(PAIR, 3, 0)
    policy = GoodputPolicy(recorded_table(GPU_8B, (1, 8)), AllowedShapes(3), accept_rates=prior)
    shown = policy.snapshot()["acceptance"]
    rates = [row["accept_rate"] for row in shown["positions"]]
    assert rates == pytest.approx([1.0, 0.6, 0.0], abs=0.002)


def test_decisions_are_the_rounds_since_the_point_before_by_depth_and_reason(stats):
    def report(now_s, depths, reasons, budget):
        counts = {"rounds_by_num_steps": depths, "rounds_by_reason": reasons}
        speculation = {"draft_budget": budget}
        stats.report("a", snapshot(**counts, speculation=speculation), now_s)

    report(0, {"2": 100}, {"steady": 100}, None)
    report(1, {"2": 130, "0": 10}, {"steady": 130, "guard": 10}, 61)
    report(2, {"2": 130, "0": 10}, {"steady": 130, "guard": 10}, 61)
    report(3, {"0": 4}, {"guard": 4}, 0)  # it has restarted
    (replica,) = stats.status(3)["replicas"]
    assert replica["decisions"] == {
        "time_s": [1, 2, 3],
        "budget": [61, 61, None],
        "by_num_steps": {"0": [0.25, None, 1.0], "2": [0.75, None, 0.0]},
        "by_reason": {"guard": [0.25, None, 1.0], "steady": [0.75, None, 0.0]},
    }
