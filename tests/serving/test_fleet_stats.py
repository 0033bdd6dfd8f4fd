"""What the fleet's figures mean, with the clock as a number."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_spec.serving.fleet_stats import FleetStats


def snapshot(rows: int = 0, tokens: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "speculative_num_steps": 3,
        "batch_size": 1,
        "kv": {"free_pages": 10, "total_pages": 20},
        "counters": {"decode_rows": rows, "decode_tokens": tokens},
        **fields,
    }


@pytest.fixture
def stats() -> FleetStats:
    return FleetStats(stale_after_s=10, history_s=60)


def fleet(stats: FleetStats, now_s: float = 0) -> dict[str, Any]:
    result = stats.view(now_s)["fleet"]
    assert isinstance(result, dict)
    return result


def states(stats: FleetStats, now_s: float = 0) -> list[dict[str, Any]]:
    result = stats.view(now_s)["internal_states"]
    assert isinstance(result, list)
    return result


def test_sizes_and_counts_are_sums_over_replicas(stats: FleetStats) -> None:
    stats.report("b", snapshot(batch_size=5, speculative_num_steps=1), 0)
    stats.report("a", snapshot(batch_size=2), 0)
    view = fleet(stats)
    assert (view["num_replicas"], view["batch_size"]) == (2, 7)
    assert view["kv"] == {"free_pages": 20, "total_pages": 40}
    assert view["replicas_by_num_steps"] == {"1": 1, "3": 1}
    assert [state["replica"] for state in states(stats)] == ["a", "b"]


def test_acceptance_weighs_replicas_by_the_rows_they_decoded(stats: FleetStats) -> None:
    stats.report("busy", snapshot(rows=90, tokens=360), 0)
    stats.report("idle", snapshot(rows=10, tokens=10), 0)
    assert fleet(stats)["avg_spec_accept_length"] == pytest.approx(3.7)


def test_without_decoding_acceptance_is_one_token_per_round(stats: FleetStats) -> None:
    stats.report("new", snapshot(speculative_num_steps=None), 0)
    assert fleet(stats)["avg_spec_accept_length"] == 1.0
    assert fleet(stats)["replicas_by_num_steps"] == {}


def test_a_newer_report_replaces_the_older_one(stats: FleetStats) -> None:
    stats.report("a", snapshot(batch_size=2), 0)
    stats.report("a", snapshot(batch_size=4), 1)
    assert fleet(stats, 1)["batch_size"] == 4
    assert states(stats, 3)[0]["age_s"] == 2


def test_a_silent_replica_is_shown_as_stale_and_left_out_of_the_sums(stats: FleetStats) -> None:
    stats.report("a", snapshot(), 0)
    stats.report("b", snapshot(), 5)
    assert [state["stale"] for state in states(stats, 11)] == [True, False]
    assert (fleet(stats, 11)["batch_size"], fleet(stats, 11)["num_stale"]) == (1, 1)


def test_a_replica_silent_for_long_is_forgotten(stats: FleetStats) -> None:
    stats.report("a", snapshot(), 0)
    assert states(stats, 40)
    assert not states(stats, 41)


def test_a_replica_that_says_goodbye_is_gone_at_once(stats: FleetStats) -> None:
    stats.report("a", snapshot(), 0)
    stats.forget("a")
    stats.forget("never seen")
    assert not states(stats)


def test_a_snapshot_without_the_known_fields_counts_as_zero(stats: FleetStats) -> None:
    stats.report("a", {"kv": None, "batch_size": "many"}, 0)
    assert fleet(stats)["batch_size"] == 0
    assert states(stats)[0]["kv"] is None


def test_history_is_bounded_in_time_and_in_number(stats: FleetStats) -> None:
    for tick in range(5000):
        stats.report("a", snapshot(batch_size=tick), tick * 0.05)
    history = stats.history(now_s=250)
    times = [point["time_s"] for point in history]
    assert times == sorted(times)
    assert all(isinstance(t, float) and 190 <= t <= 250 for t in times)
    assert 300 <= len(times) <= 600


def test_everything_shown_is_json(stats: FleetStats) -> None:
    stats.report("a", snapshot(rows=3, tokens=7), 0)
    assert json.loads(json.dumps(stats.view(1.0))) == stats.view(1.0)
    assert json.loads(json.dumps(stats.history(1.0))) == stats.history(1.0)
