"""What the fleet's figures mean, with the clock as a number."""

import json

import pytest

from serve_spec.serving.fleet_stats import FleetStats


def snapshot(rows=0, tokens=0, **fields):
    return {
        "speculative_num_steps": 3,
        "batch_size": 1,
        "kv": {"free_pages": 10, "total_pages": 20},
        "counters": {"decode_rows": rows, "decode_tokens": tokens},
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
    for name, said in {"idle": idle, "busy": busy, "new": new}.items():
        stats.report(name, said, 0)
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


def test_without_decoding_acceptance_is_one_token_per_round(stats):
    stats.report("new", snapshot(speculative_num_steps=None), 0)
    assert fleet(stats)["avg_spec_accept_length"] == 1.0
    assert fleet(stats)["replicas_by_num_steps"] == {}
    assert fleet(stats)["effective_speedup"] is None


def test_a_silent_replica_is_shown_as_stale_and_left_out_of_the_sums(stats):
    stats.report("a", snapshot(), 0)
    stats.report("b", snapshot(), 5)
    assert [state["stale"] for state in states(stats, 11)] == [True, False]
    assert (fleet(stats, 11)["batch_size"], fleet(stats, 11)["num_stale"]) == (1, 1)


def test_a_replica_silent_for_long_is_forgotten(stats):
    stats.report("a", snapshot(), 0)
    assert states(stats, 40)
    assert not states(stats, 41)


def test_a_snapshot_without_the_known_fields_counts_as_zero(stats):
    stats.report("a", {"kv": None, "batch_size": "many"}, 0)
    assert fleet(stats)["batch_size"] == 0
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


def estimate(rate):
    positions = [{"position": 1, "accept_rate": rate, "trials": 100.0}]
    return snapshot(pair="pair", candidate_steps=[0, 1], acceptance={"positions": positions})


@pytest.mark.parametrize("look", [FleetStats.view, FleetStats.status])
def test_who_looks_sees_the_newest_acceptance(stats, look):
    stats.report("a", estimate(0.5), 0)
    stats.report("a", estimate(0.8), 0.1)
    assert look(stats, 0.1)["fleet"]["acceptance"][0]["positions"][0]["accept_rate"] == 0.8


def test_new_replicas_profit_from_the_newest_reports_even_if_nobody_looks(stats):
    for tick in range(100):
        stats.report("a", estimate(0.5 + tick / 1000), tick * 0.1)
    assert stats.prior("pair", 1, 10) == pytest.approx([0.599])
