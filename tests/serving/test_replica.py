"""The replica's contract, without Serve around it."""

import asyncio
import random
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from serve_spec.adaptive import PolicySettings
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.core.request import SamplingParams, TokenDelta
from serve_spec.serving.autoscaling import NUM_REQUESTS
from serve_spec.serving.deployment import replica as module
from serve_spec.serving.deployment.replica import EngineReplica
from serve_spec.serving.messages import Accepted, Failed, encode_router_message, is_last
from serve_spec.serving.router.admission import Admission
from serve_spec.serving.router.completions import CompletionRunner, choices_of
from serve_spec.serving.statistics.stats_actor import StatsUnavailable
from tests.serving.fakes import listening, request, running, until


class DeafStats:
    """A stats actor that never answers."""

    reports = 0
    known = None

    def __init__(self, config, app_name):
        self.forgotten = []

    async def report(self, name, snapshot):
        DeafStats.reports += 1
        raise StatsUnavailable("gone")

    def prior(self, pair, max_steps):
        return DeafStats.known

    def forget(self, name):
        self.forgotten.append(name)


@pytest.fixture
def start(config, monkeypatch):
    """Starts a replica with a fake engine in the event loop that runs."""
    context = SimpleNamespace(
        replica_id=SimpleNamespace(unique_id="r1"),
        rank=SimpleNamespace(rank=0),
        app_name="app",
        deployment="EngineReplica",
    )
    monkeypatch.setattr(module.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(module, "StatsClient", DeafStats)
    config = ServeSpecConfig.load(config, push_interval_s=0.001, routing_stats_period_s=0.001)

    def start_one():
        replica = EngineReplica(config, "tests.serving.fake_engine:FakeLoop")
        return replica, replica._loop

    return start_one


async def ask(router, *prompts, **params):
    """Send requests r0, r1, ... in one message."""
    await until(router.connections.usable)
    asked = [replace(request(p, **params), request_id=f"r{i}") for i, p in enumerate(prompts)]
    router.ask(*asked)


@asynccontextmanager
async def called(replica):
    async with listening(max_quiet_checks=1) as router:
        await replica.connect(router.connections.address)
        yield router
    for connection in router.connections.usable().values():
        connection.stream.close()
    await until(lambda: not replica._routers._queues)


async def items(replica, prompt, **params):
    async with called(replica) as router:
        await ask(router, prompt, **params)
        await until(lambda: router.has_ended("r0"))
    await until(lambda: not replica.record_routing_stats()["num_requests"])
    return router.items_of("r0")


async def test_a_replica_without_an_engine_ends_and_lets_its_requests_go(start, monkeypatch):
    monkeypatch.setattr(module, "_LAST_ITEMS_S", 0.0)
    has_ended = asyncio.Event()
    monkeypatch.setattr(module, "end_process", has_ended.set)
    replica, loop = start()
    async with called(replica) as router:
        await ask(router, "hold a")
        await until(lambda: sum(not message.items for message in router.heard) > 3)
        loop.knobs["sick"] = True
        await until(lambda: router.lost)
        assert not router.has_ended("r0")
        await has_ended.wait()


async def test_refusals_and_failures_are_values_and_end_the_request(start):
    replica, loop = start()
    (refused,) = await items(replica, "a " * 100)
    assert refused.error.too_long
    (failed,) = await items(replica, "fail")
    assert failed == Failed("the engine thread died: boom", replica="r1")
    (final,) = await items(replica, "nothing")
    assert final == Failed("NaN logits", replica="r1", is_final=True)
    (full,) = await items(replica, "full")
    assert full.overloaded
    *_, broken = await items(replica, "break", max_tokens=9)
    assert isinstance(broken, Failed)
    assert not loop.streams


async def test_requests_count_while_they_run_and_end_with_their_router(start):
    replica, loop = start()
    async with called(replica) as router:
        await ask(router, "hold on", "hold it", max_tokens=9)
        await until(lambda: router.items_of("r0") and router.items_of("r1"))
        assert replica.record_routing_stats()["num_requests"] == {"router": 2}
        assert replica.record_autoscaling_stats() == {NUM_REQUESTS: 2}, "not calls"
    await until(lambda: not loop.streams)
    assert replica.record_routing_stats()["num_requests"] == {}


@pytest.mark.parametrize("num_routers", [1, 2])
async def test_a_storm_of_clients_that_leave_leaves_no_request_in_the_engine(
    start, config, num_routers
):
    """Two storms of 100 clients each, `n` from 1 to 8, while the event loop is kept busy."""
    replica, loop = start()
    draw = random.Random(num_routers)

    async def visit(runner, client):
        choices = choices_of(f"c{client}", "trace", ["hold on"], SamplingParams(max_tokens=9), 8)
        async with runner.run(choices[: 1 + client % 8]):
            await asyncio.Event().wait()

    async def storm(runner, first):
        clients = [asyncio.create_task(visit(runner, first + i)) for i in range(100)]
        for client in draw.sample(clients, len(clients)):
            if draw.random() < 0.2:
                time.sleep(0.002)
                await asyncio.sleep(0)
            client.cancel()
        await asyncio.wait(clients)

    async with AsyncExitStack() as routers:
        for i in range(num_routers):
            fleet = await routers.enter_async_context(running(config, replica, name=f"router{i}"))
            admission = Admission(max_in_flight=40, max_queued=1000)
            runner = CompletionRunner(fleet, admission, timeout_s=3600, resume_timeout_s=0)
            await until(fleet._connections.usable)
            await storm(runner, first=1000 * i)
            await storm(runner, first=1000 * i + 500)
            assert (admission.in_flight, admission.queue_len) == (0, 0)
        await until(lambda: not replica.record_routing_stats()["num_requests"])
        assert loop.tokens > 0, "requests have reached the engine"
        await until(lambda: not loop.streams)


async def test_requests_of_one_message_answer_side_by_side_and_end_alone(start):
    replica, loop = start()
    async with called(replica) as router:
        await ask(router, "a b c", "hold on", "full", "x", max_tokens=5)
        await until(lambda: router.has_ended("r0", "r2", "r3"))
        assert replica.record_routing_stats()["num_requests"] == {"router": 1}
        router.connections.send("r1", encode_router_message(cancelled=["r1"]))
        await until(lambda: not loop.streams)
        assert replica.record_routing_stats()["num_requests"] == {}
    received = {name: router.items_of(name) for name in ("r0", "r1", "r2", "r3")}
    texts = {
        name: "".join(d.text for d in items if isinstance(d, TokenDelta))
        for name, items in received.items()
    }
    assert texts == {"r0": "a b c a b ", "r1": "hold on ", "r2": "", "r3": "x x x x x "}
    assert received["r0"][0] == Accepted(3, "r1")
    assert [is_last(item) for item in received["r0"]] == [False] * (len(received["r0"]) - 1) + [
        True
    ]
    assert not is_last(received["r1"][-1]), "its router has forgotten it"
    assert received["r2"][-1].overloaded


async def test_before_a_replica_ends_it_lets_its_requests_finish(start):
    replica, loop = start()
    async with called(replica) as router:
        await ask(router, "hold on", max_tokens=9)
        await until(lambda: router.items_of("r0"))
        end = replica.__del__()
        assert end is not None
        ending = asyncio.ensure_future(end)
        await until(lambda: not router.connections.usable())
        assert not ending.done()
        loop.cancel("r0")
        await ending
        await until(lambda: router.lost)
    assert router.has_ended("r0")
    assert replica._stats.forgotten == ["r1"]
    assert replica.__del__() is None, "once is enough"


async def test_a_wrong_user_config_is_refused_at_the_start_and_changes_nothing_later(start):
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


async def test_routing_stats_and_snapshot_are_plain_data(start):
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
async def test_a_replica_starts_from_what_the_fleet_knows_and_serves_on_without_the_stats_actor(
    start, monkeypatch, known
):
    monkeypatch.setattr(PolicySettings, "max_depth", 2)
    monkeypatch.setattr(DeafStats, "known", known)
    before = DeafStats.reports
    replica, loop = start()
    assert loop.accept_rates == known
    await until(lambda: DeafStats.reports >= before + 3)
    assert len(await items(replica, "a", max_tokens=2)) == 2
