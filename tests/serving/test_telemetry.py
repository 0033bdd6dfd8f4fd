"""What the door exports, and that whatever breaks there stays there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from serve_spec.config import ServeSpecConfig
from serve_spec.serving import telemetry
from serve_spec.serving.telemetry import RouterTelemetry, pair_name, start_warm
from tests.serving.fake_engine import FakeLoop

CONTEXT = SimpleNamespace(app_name="app", deployment="Router", rank=None)


def exports(*doors):
    """What is exported at each look at the door, by name and size."""
    looks = iter(doors)
    found: list[dict[str, float]] = []

    async def scenario():
        door = RouterTelemetry(CONTEXT, lambda: next(looks))

        def keep(reading):
            key = " ".join(
                [reading.metric.name.removeprefix("serve_spec_"), *reading.labels.values()]
            )
            found[-1][key] = reading.value

        door._metrics.record = keep
        for _ in doors:
            found.append({})
            await door.export()

    asyncio.run(scenario())
    return found


def door(queue_len=0, rejected=0, resumed=0, **sizes):
    histogram = {size.removeprefix("s"): count for size, count in sizes.items()}
    return {
        "queue_len": queue_len,
        "in_flight": 3,
        "num_rejected": rejected,
        "num_resumed": resumed,
        "submission_size_histogram": histogram,
    }


def test_gauges_are_set_and_counters_grow_by_what_is_new():
    first, second, third = exports(
        door(queue_len=2, rejected=5, s1=3),
        door(rejected=5, s1=3),
        door(rejected=6, resumed=2, s1=4, s8=1),
    )
    assert first == {
        "queue_len": 2, "in_flight_requests": 3, "rejected_requests": 5, "submissions 1": 3,
    }  # fmt: skip
    assert second == {"queue_len": 0, "in_flight_requests": 3}
    assert third == {
        "queue_len": 0, "in_flight_requests": 3, "rejected_requests": 1, "resumed_requests": 2,
        "submissions 1": 1, "submissions 8": 1,
    }  # fmt: skip


async def test_an_export_that_fails_is_tried_again(monkeypatch):
    monkeypatch.setattr(telemetry, "_EXPORT_INTERVAL_S", 0.001)
    looks = 0

    def broken():
        nonlocal looks
        looks += 1
        raise RuntimeError("boom")

    RouterTelemetry(CONTEXT, broken)
    while looks < 3:
        await asyncio.sleep(0.001)


def test_replicas_of_one_pair_have_one_name_but_where_a_load_test_forces_acceptance(config):
    other = ServeSpecConfig.load(config, num_replicas=4, max_num_seqs=3)
    assert pair_name(config) == pair_name(other)
    names = {
        pair_name(ServeSpecConfig.load("configs/tiny.yaml", synthetic_acceptance=forced))
        for forced in (None, 2.5, [0.9, 0.5])
    }
    assert len(names) == 3


def knowing(prior):
    """A stats actor that has an answer."""
    return SimpleNamespace(prior=lambda pair, max_steps: prior)


class Choosy(FakeLoop):
    """An engine that cannot start from anything."""

    def start_from(self, accept_rates):
        raise ValueError("not one rate per position")


def test_a_prior_that_the_engine_refuses_is_a_cold_start_not_a_failure(config, monkeypatch):
    monkeypatch.setattr(telemetry.PolicySettings, "max_depth", 1)
    start_warm(config, Choosy(), knowing([2.0]))


def test_an_engine_that_never_drafts_asks_nobody(config):
    engine = FakeLoop()
    start_warm(config, engine, knowing([0.5]))
    assert engine.accept_rates is None
