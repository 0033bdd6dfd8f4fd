"""The replica's contract, without Serve around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from serve_spec.config import ServeSpecConfig
from serve_spec.core.request import FinishReason, TokenDelta
from serve_spec.serving import replica as module
from serve_spec.serving.messages import Accepted, Failed, Refused
from serve_spec.serving.replica import EngineReplica
from serve_spec.serving.stats_actor import StatsUnavailable
from tests.serving.fake_engine import FakeLoop
from tests.serving.fakes import request

Scenario = Callable[[EngineReplica, FakeLoop], Coroutine[Any, Any, None]]


class DeafStats:
    """A stats actor that never answers."""

    reports = 0

    def __init__(self, config: object) -> None:
        self.forgotten: list[str] = []

    async def report(self, name: str, snapshot: dict[str, Any]) -> None:
        DeafStats.reports += 1
        raise StatsUnavailable("gone")

    def forget(self, name: str) -> None:
        self.forgotten.append(name)


@pytest.fixture
def run(config: ServeSpecConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    """Runs a scenario on a replica and its fake engine."""
    context = SimpleNamespace(
        replica_id=SimpleNamespace(unique_id="r1"), rank=SimpleNamespace(rank=0)
    )
    monkeypatch.setattr(module.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(module, "StatsClient", DeafStats)
    config = ServeSpecConfig.load(config, push_interval_s=0.001)

    def go(scenario: Scenario) -> None:
        async def play() -> None:
            replica = EngineReplica(config, "tests.serving.fake_engine:FakeLoop")
            await scenario(replica, replica._loop)
            replica.__del__()

        asyncio.run(play())

    return go


async def items(replica: EngineReplica, prompt: str, **params: Any) -> list[Any]:
    return [item async for item in replica.generate(request(prompt, **params))]


def test_a_request_is_accepted_then_answered_round_by_round(run: Any) -> None:
    async def scenario(replica: EngineReplica, loop: FakeLoop) -> None:
        accepted, *deltas = await items(replica, "a b c", max_tokens=5)
        assert accepted == Accepted(3, "r1")
        assert all(isinstance(d, TokenDelta) for d in deltas)
        assert [d.finish_reason for d in deltas] == [None, None, FinishReason.LENGTH]

    run(scenario)


def test_refusals_and_failures_are_values_and_end_the_request(run: Any) -> None:
    async def scenario(replica: EngineReplica, loop: FakeLoop) -> None:
        (refused,) = await items(replica, "a " * 100)
        assert isinstance(refused, Refused)
        assert refused.error.too_long
        (failed,) = await items(replica, "fail")
        assert failed == Failed("the engine thread died: boom")
        (full,) = await items(replica, "full")
        assert full.overloaded
        *_, broken = await items(replica, "break", max_tokens=9)
        assert isinstance(broken, Failed)
        assert not loop.streams

    run(scenario)


def test_closing_the_answer_cancels_the_request_in_the_engine(run: Any) -> None:
    async def scenario(replica: EngineReplica, loop: FakeLoop) -> None:
        async with aclosing(replica.generate(request("hold on", max_tokens=9))) as answer:
            await anext(answer)
            await anext(answer)
            assert len(loop.streams) == 1
        assert not loop.streams

    run(scenario)


def test_cancelling_the_listener_cancels_the_request_in_the_engine(run: Any) -> None:
    async def scenario(replica: EngineReplica, loop: FakeLoop) -> None:
        listener = asyncio.create_task(items(replica, "hold on", max_tokens=9))
        while not loop.streams:
            await asyncio.sleep(0)
        listener.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listener
        assert not loop.streams

    run(scenario)


def test_health_is_the_engine_s_health_and_knobs_reach_the_engine(run: Any) -> None:
    async def scenario(replica: EngineReplica, loop: FakeLoop) -> None:
        await replica.check_health()
        await replica.reconfigure({"sick": True})
        with pytest.raises(RuntimeError, match="sick"):
            await replica.check_health()

    run(scenario)


def test_a_lost_stats_actor_stops_neither_reports_nor_requests(run: Any) -> None:
    async def scenario(replica: EngineReplica, loop: FakeLoop) -> None:
        before = DeafStats.reports
        while DeafStats.reports < before + 3:
            await asyncio.sleep(0.001)
        assert len(await items(replica, "a", max_tokens=2)) == 2

    run(scenario)


def test_routing_stats_and_snapshot_are_plain_data(run: Any) -> None:
    async def scenario(replica: EngineReplica, loop: FakeLoop) -> None:
        assert (await replica.snapshot())["replica"] == "r1"
        stats = replica.record_routing_stats()
        assert stats["speculative_num_steps"] == 3
        assert stats["kv"] == {"free_pages": 100, "total_pages": 100}

    run(scenario)
