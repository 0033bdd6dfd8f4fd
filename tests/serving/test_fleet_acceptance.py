"""New replicas start from what their kind has learned, and from nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from serve_spec.adaptive.survival import SurvivalEstimator
from serve_spec.serving.fleet_acceptance import FleetAcceptance

PAIR = "target+draft"


def snapshot(
    rates: list[float], trials: float = 100.0, pair: str = PAIR, **fields: Any
) -> dict[str, Any]:
    positions = [
        {"position": position, "accept_rate": rate, "trials": trials}
        for position, rate in enumerate(rates, start=1)
    ]
    return {
        "pair": pair,
        "candidate_steps": list(range(len(rates) + 1)),
        "acceptance": {"positions": positions},
        **fields,
    }


@pytest.fixture
def known() -> FleetAcceptance:
    return FleetAcceptance(stale_after_s=10, memory_s=600)


def test_a_prior_weighs_replicas_by_their_trials(known: FleetAcceptance) -> None:
    known.report("a", snapshot([0.8, 0.6], trials=300), 0)
    known.report("b", snapshot([0.4, 0.2], trials=100), 0)
    assert known.prior(PAIR, 2, 1) == pytest.approx([0.7, 0.5])


def test_an_estimator_can_start_from_every_prior(known: FleetAcceptance) -> None:
    known.report("a", snapshot([1.0, 0.0, 0.5]), 0)
    prior = known.prior(PAIR, 3, 0)
    rates = SurvivalEstimator(3, prior).pooled_rates
    assert rates[0] > 0.99
    assert rates[1] < 0.01


def test_other_models_and_other_depths_say_nothing(known: FleetAcceptance) -> None:
    known.report("a", snapshot([0.8, 0.6]), 0)
    assert known.prior("other pair", 2, 0) is None
    assert known.prior(PAIR, 3, 0) is None


def test_a_prior_outlives_its_replicas_for_a_while(known: FleetAcceptance) -> None:
    known.report("a", snapshot([0.8]), 0)
    known.forget("a")
    assert known.prior(PAIR, 1, 300) == pytest.approx([0.8])
    assert known.prior(PAIR, 1, 601) is None


def test_a_policy_without_estimates_gives_its_counts(known: FleetAcceptance) -> None:
    counted = [{"position": 1, "drafted": 10, "reached": 10, "accepted": 9, "accept_rate": 0.9}]
    known.report("a", {"pair": PAIR, "candidate_steps": [1, 3], "positions": counted}, 0)
    assert known.prior(PAIR, 3, 0) == pytest.approx([0.9] * 3)


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"candidate_steps": "all", "acceptance": 3, "positions": [None]},
        {"candidate_steps": [0], "positions": []},
        {"candidate_steps": [10**12], "positions": []},
        snapshot([float("nan")]),
        snapshot([0.5], trials=-1),
    ],
    ids=str,
)
def test_what_no_replica_would_send_teaches_nothing(
    known: FleetAcceptance, odd: dict[str, Any]
) -> None:
    known.report("odd", odd, 0)
    assert known.prior(str(odd.get("pair", "")), 1, 0) is None
    known.report("a", snapshot([0.8]), 0)
    assert known.prior(PAIR, 1, 0) == pytest.approx([0.8])


def test_speeds_of_the_fleet_come_with_the_speedup_over_plain_decoding(
    known: FleetAcceptance,
) -> None:
    buckets = {"4": {"effective_speedup": 1.5, "tokens_per_ms": {"0": 2.0, "3": 3.1}}}
    known.report("a", snapshot([0.8], speculation={"by_batch_size": buckets}), 0)
    (entry,) = known.view(0)
    assert entry["tokens_per_ms"] == {"4": {"off": 2.0, "speculating": 3.0, "speedup": 1.5}}


def test_ever_new_pairs_take_no_more_memory(known: FleetAcceptance) -> None:
    for number in range(100):
        known.report("a", snapshot([0.8], pair=f"pair {number}"), number)
    assert len(known.view(100)) <= 16
    assert known.prior("pair 99", 1, 100) == pytest.approx([0.8])
