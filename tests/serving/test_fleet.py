"""The fleet behind a handle of Serve; the replicas are in this process, their connections real."""

import asyncio
import gc
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import FinishReason
from serve_spec.serving import fleet as module
from serve_spec.serving.errors import ApiError, ReplicaLost
from serve_spec.serving.fleet import RayFleet
from serve_spec.serving.messages import Accepted, Failed, Refused
from serve_spec.serving.stats_actor import StatsUnavailable
from tests.serving.fakes import ReplicaEnd, delta, request, until

ACCEPTED = Accepted(1, "r1")
LAST = delta("b", 2, finish=FinishReason.STOP)
ID = request().request_id


class Handle:
    """The part of a `DeploymentHandle` that the fleet uses; its deployment has one replica.

    errors: raised, one after the other, before the replica is called.
    """

    deployment_name = "EngineReplica"

    def __init__(self, replica, *errors):
        self.replica = replica
        self.errors = list(errors)

    def broadcast(self, method, address):
        assert method == "connect"

        async def results(**options):
            if self.errors:
                raise self.errors.pop(0)
            if self.replica is not None:
                await self.replica.connect(address)
            return [None]

        return SimpleNamespace(results_async=results)


@pytest.fixture(autouse=True)
def _serve_is_away(monkeypatch):
    """Serve's controller does not answer; without a Ray, asking it would start one."""

    def status():
        raise RayServeException("away")

    monkeypatch.setattr(module.serve, "status", status)


@asynccontextmanager
async def running(config, replica=None, *errors):
    fleet = RayFleet(Handle(replica, *errors), "app", "router", "127.0.0.1", config)
    fleet.start()
    try:
        yield fleet
    finally:
        for task in fleet._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def items_of(fleet):
    return [item async for item in fleet.generate(request())]


@pytest.mark.parametrize(
    "items",
    [[ACCEPTED, LAST], [Refused(InvalidRequest("top_k", -3, "no"))], [ACCEPTED, Failed("boom")]],
    ids=lambda items: type(items[-1]).__name__,
)
async def test_a_connection_outlives_the_answers_on_it(config, items):
    async with running(config, ReplicaEnd(*items)) as fleet:
        for _ in range(2):
            said = await items_of(fleet)
            assert [type(item) for item in said] == [type(item) for item in items]
            assert all(isinstance(a, Refused) or a == b for a, b in zip(said, items, strict=True))
        assert fleet.num_interrupted == 0


async def test_a_client_that_leaves_before_the_first_answer_is_not_logged(config, caplog):
    async with running(config, ReplicaEnd()) as fleet:
        waiting = asyncio.ensure_future(anext(fleet.generate(request())))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait({waiting})
        await asyncio.sleep(0.01)
    gc.collect()  # errors that have not been read are logged here
    assert caplog.text == ""


async def test_a_replica_is_found_although_serve_is_away_for_a_moment(config, monkeypatch):
    monkeypatch.setattr(module, "_BROADCAST_EVERY_S", 0.001)
    async with running(config, ReplicaEnd(LAST), RayError("odd"), TimeoutError()) as fleet:
        assert await items_of(fleet) == [LAST]


@pytest.mark.parametrize(
    ("num_healthy", "why"), [(0, "none is running"), (1, "none responds"), (None, "none responds")]
)
async def test_waiting_ends_when_no_replica_is_left_or_none_answers(
    config, monkeypatch, num_healthy, why
):
    async def count(self):
        return num_healthy

    monkeypatch.setattr(RayFleet, "num_healthy", count)
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.001)
    async with running(ServeSpecConfig.load(config, stall_timeout_s=0.01)) as fleet:
        with pytest.raises(ApiError, match=why) as caught:
            await items_of(fleet)
        assert caught.value.status == 503


async def test_until_the_first_replica_is_ready_the_answer_is_that_it_starts(config, monkeypatch):
    states = {}

    def status():
        engines = SimpleNamespace(replica_states=states)
        return SimpleNamespace(
            applications={"app": SimpleNamespace(deployments={"EngineReplica": engines})}
        )

    monkeypatch.setattr(module.serve, "status", status)
    async with running(config) as fleet:
        for now, num_healthy, code in (
            ({}, 0, "no_healthy_replica"),
            ({"STARTING": 1}, 0, "starting"),
            ({"RUNNING": 1, "STARTING": 1}, 1, "no_healthy_replica"),
            ({"STARTING": 2}, 0, "no_healthy_replica"),
        ):
            states.clear()
            states.update(now)
            assert await fleet.num_healthy() == num_healthy
            error = fleet.unavailable("none is running")
            assert (error.status, error.code) == (503, code)
            assert "Retry-After" in error.headers()


async def test_a_silent_replica_loses_its_requests_and_serves_on_once_it_speaks(
    config, monkeypatch
):
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.001)
    replica = ReplicaEnd(ACCEPTED)
    async with running(ServeSpecConfig.load(config, stall_timeout_s=0.02)) as fleet:
        fleet._handle.replica = replica
        with pytest.raises(ReplicaLost, match="r1 does not respond"):
            await items_of(fleet)
        await until(lambda: replica.cancelled == [ID])
        replica.items = (LAST,)
        answer = asyncio.create_task(items_of(fleet))
        replica.report_load()
        assert await answer == [LAST]


async def test_how_many_replicas_know_their_costs_is_known_while_the_stats_actor_answers(
    config, monkeypatch
):
    states = [{"costs": {"state": state}} for state in ("missing", "loaded", "loaded")]
    built = RayFleet(Handle(None), "app", "router", "127.0.0.1", config)

    async def status():
        if not states:
            raise StatsUnavailable("gone")
        return {"replicas": [*states, {}]}

    monkeypatch.setattr(built._stats, "status", status)
    assert await built.costs() == {"missing": 1, "loaded": 2}
    states.clear()
    assert await built.costs() == {}
