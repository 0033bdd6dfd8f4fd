"""The replica's contract, without Serve around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from serve_spec.adaptive import PolicySettings
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.core.request import FinishReason, TokenDelta
from serve_spec.serving import replica as module
from serve_spec.serving.autoscaling import NUM_REQUESTS
from serve_spec.serving.messages import (
    Accepted,
    Attachment,
    Cancellation,
    Failed,
    News,
    Submission,
    decode,
    is_last,
)
from serve_spec.serving.replica import EngineReplica
from serve_spec.serving.stats_actor import StatsUnavailable
from tests.serving.fake_engine import FakeLoop
from tests.serving.fakes import request

Start = Callable[[], tuple[EngineReplica, FakeLoop]]


class DeafStats:
    """A stats actor that never answers."""

    reports = 0
    known: ClassVar[list[float] | None] = None

    def __init__(self, config: object, app_name: str) -> None:
        self.forgotten: list[str] = []

    async def report(self, name: str, snapshot: dict[str, Any]) -> None:
        DeafStats.reports += 1
        raise StatsUnavailable("gone")

    def prior(self, pair: str, max_steps: int) -> list[float] | None:
        return DeafStats.known

    def forget(self, name: str) -> None:
        self.forgotten.append(name)


@pytest.fixture
def start(config: ServeSpecConfig, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts a replica with a fake engine in the event loop that runs."""
    context = SimpleNamespace(
        replica_id=SimpleNamespace(unique_id="r1"),
        rank=SimpleNamespace(rank=0),
        app_name="app",
        deployment="EngineReplica",
    )
    monkeypatch.setattr(module.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(module, "StatsClient", DeafStats)
    routers = SimpleNamespace(is_there=lambda sender: True)
    monkeypatch.setattr(module, "ReplicaActors", lambda app_name, deployment: routers)
    config = ServeSpecConfig.load(config, push_interval_s=0.001)

    def start_one() -> tuple[EngineReplica, FakeLoop]:
        replica = EngineReplica(config, "tests.serving.fake_engine:FakeLoop")
        return replica, replica._loop

    return start_one


def submission(*prompts: str, **params: Any) -> Submission:
    """Requests r0, r1, ... of one router."""
    requests = [
        replace(request(prompt, **params), request_id=f"r{i}") for i, prompt in enumerate(prompts)
    ]
    return Submission("router", requests)


async def stream_of(
    replica: EngineReplica, asked: Submission | None = None, sender: str = "router"
) -> AsyncGenerator[News, None]:
    """Open the stream of a router, which has sent a submission, and read it."""
    if asked is not None:
        await replica.submit(replace(asked, sender=sender))
    async with aclosing(replica.attach(Attachment("r1", sender))) as messages:
        async for message in messages:
            yield decode(message)


async def until_all_have_ended(news: AsyncGenerator[News, None], num_requests: int) -> list[News]:
    """Return what is said until so many requests have said their last."""
    said: list[News] = []
    async with aclosing(news):
        async for each in news:
            said.append(each)
            num_requests -= sum(is_last(item) for _, item in each.items)
            if num_requests == 0:
                break
    return said


async def items(replica: EngineReplica, prompt: str, **params: Any) -> list[Any]:
    said = await until_all_have_ended(stream_of(replica, submission(prompt, **params)), 1)
    return [item for news in said for _, item in news.items]


async def test_a_replica_without_an_engine_ends_and_lets_its_requests_go(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BEAT_S", 0.001)
    monkeypatch.setattr(module, "_FAREWELL_S", 0.0)
    has_ended = asyncio.Event()
    monkeypatch.setattr(module, "_end_process", has_ended.set)
    replica, loop = start()
    news = stream_of(replica, submission("hold a"))
    said = [await anext(news) for _ in range(5)]
    assert [not each.items for each in said].count(True) > 1, "it says that it is alive"
    loop.knobs["sick"] = True
    rest = [each async for each in news]
    assert not any(each.is_over for each in rest), "the stream breaks off"
    await has_ended.wait()


async def test_refusals_and_failures_are_values_and_end_the_request(start: Start) -> None:
    replica, loop = start()
    (refused,) = await items(replica, "a " * 100)
    assert refused.error.too_long
    (failed,) = await items(replica, "fail")
    assert failed == Failed("the engine thread died: boom", replica="r1")
    (full,) = await items(replica, "full")
    assert full.overloaded
    *_, broken = await items(replica, "break", max_tokens=9)
    assert isinstance(broken, Failed)
    assert not loop.streams


async def test_closing_the_stream_cancels_its_requests_in_the_engine(start: Start) -> None:
    replica, loop = start()
    answer = stream_of(replica, submission("hold on", "hold it", max_tokens=9))
    async with aclosing(answer):
        while len(loop.streams) < 2:
            await anext(answer)
        assert replica.record_routing_stats()["rows"] == {"router": 2}
        assert replica.record_autoscaling_stats() == {NUM_REQUESTS: 2}, "not calls"
    assert not loop.streams
    assert replica.record_routing_stats()["rows"] == {}
    assert replica.record_autoscaling_stats() == {NUM_REQUESTS: 0}


async def test_a_stream_is_for_all_submissions_of_a_router_and_ends_when_it_is_idle(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BEAT_S", 0.001)
    replica, _ = start()
    first, second = submission("a", max_tokens=2), submission("b", "c", max_tokens=2)
    second = replace(second, requests=[replace(r, request_id=r.prompt) for r in second.requests])
    taken = await replica.submit(first)
    assert await replica.submit(second) == taken
    said = [news async for news in stream_of(replica)]
    assert {name for news in said for name, _ in news.items} == {"r0", "b", "c"}
    assert {news.session for news in said} == {taken.session}
    assert [news.is_over for news in said] == [False] * (len(said) - 1) + [True]
    assert (await replica.submit(first)).session > taken.session


async def test_a_stream_of_another_replica_is_none(start: Start) -> None:
    replica, _ = start()
    assert [m async for m in replica.attach(Attachment("gone", "router"))] == []


async def test_a_router_hears_how_many_requests_of_whom_are_there_if_it_is_news(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, _ = start()
    monkeypatch.setattr(module, "_NEWS_AGE_S", 1e9)
    answer = stream_of(replica, submission("hold on", "hold it", max_tokens=9))
    async with aclosing(answer):
        rows = (await anext(answer)).rows
        assert rows is not None
        assert (rows.replica, rows.by_sender) == ("r1", {"router": 2})
        assert rows.time_s <= replica.record_routing_stats()["time_s"]
        asked = submission("a b c", max_tokens=5)
        first, *rest = await until_all_have_ended(stream_of(replica, asked, "other"), 1)
        assert first.rows is not None
        assert first.rows.by_sender == {"router": 2, "other": 1}
        assert rest
        assert all(news.rows is None for news in rest), "it has just been told"
        monkeypatch.setattr(module, "_NEWS_AGE_S", 0.0)
        again = await until_all_have_ended(stream_of(replica, asked, "other"), 1)
        assert all(news.rows is not None for news in again)


async def test_requests_of_a_submission_answer_side_by_side_and_end_alone(start: Start) -> None:
    replica, loop = start()
    prompts = "a b c", "hold on", "full", "x"
    said: dict[str, list[Any]] = {f"r{i}": [] for i in range(4)}
    num_ended = 0
    news = stream_of(replica, submission(*prompts, max_tokens=5))
    while num_ended < len(prompts):
        for request_id, item in (await anext(news)).items:
            said[request_id].append(item)
            num_ended += is_last(item)
        if all(is_last(said[name][-1]) for name in ("r0", "r2", "r3") if said[name]) and (
            replica.record_routing_stats()["rows"] == {"router": 1}
        ):
            await replica.cancel(Cancellation("r1", ("r1",)))
    texts = {
        name: "".join(d.text for d in items if isinstance(d, TokenDelta))
        for name, items in said.items()
    }
    assert texts == {"r0": "a b c a b ", "r1": "hold on ", "r2": "", "r3": "x x x x x "}
    assert said["r0"][0] == Accepted(3, "r1")
    assert [is_last(item) for item in said["r0"]] == [False] * (len(said["r0"]) - 1) + [True]
    assert said["r1"][-1].finish_reason is FinishReason.ABORT
    assert said["r2"][-1].overloaded
    assert not loop.streams


async def test_a_wrong_user_config_is_refused_at_the_start_and_changes_nothing_later(
    start: Start,
) -> None:
    replica, loop = start()
    with pytest.raises(ConfigError, match="typo: unknown key"):
        await replica.reconfigure({"typo": True})
    await replica.reconfigure({"min_dwell_rounds": 3})
    await replica.check_health()
    await replica.reconfigure({"typo": True})
    assert loop.knobs == {"min_dwell_rounds": 3}
    assert (await replica.snapshot())["refused_user_config"] == "typo: unknown key"
    await replica.check_health()
    await replica.reconfigure({"min_dwell_rounds": 4})
    assert loop.knobs == {"min_dwell_rounds": 4}
    assert (await replica.snapshot())["refused_user_config"] is None


async def test_a_lost_stats_actor_stops_neither_reports_nor_requests(start: Start) -> None:
    replica, _ = start()
    before = DeafStats.reports
    while DeafStats.reports < before + 3:
        await asyncio.sleep(0.001)
    assert len(await items(replica, "a", max_tokens=2)) == 2


async def test_routing_stats_and_snapshot_are_plain_data(start: Start) -> None:
    replica, _ = start()
    assert (await replica.snapshot())["replica"] == "r1"
    stats = replica.record_routing_stats()
    assert stats["speculative_num_steps"] == 3
    assert stats["kv"] == {"free_pages": 100, "total_pages": 100}
    assert stats["is_healthy"]
    await replica.reconfigure({"sick": True})
    assert not replica.record_routing_stats()["is_healthy"]
    with pytest.raises(RuntimeError, match="sick"):
        await replica.check_health()


@pytest.mark.parametrize("known", [[0.8, 0.7], None])
async def test_a_new_replica_starts_from_what_the_fleet_knows_if_anything(
    start: Start, monkeypatch: pytest.MonkeyPatch, known: list[float] | None
) -> None:
    monkeypatch.setattr(PolicySettings, "max_depth", 2)
    monkeypatch.setattr(DeafStats, "known", known)
    replica, loop = start()
    assert loop.accept_rates == known
    assert len(await items(replica, "a", max_tokens=2)) == 2
