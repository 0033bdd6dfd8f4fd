"""What Ray raises becomes an answer in OpenAI's words; a stand-in handle raises it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from serve_spec.config import StatsConfig
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import FinishReason
from serve_spec.serving import fleet as module
from serve_spec.serving.errors import ApiError
from serve_spec.serving.fleet import RayFleet
from serve_spec.serving.messages import Accepted, Failed, Refused
from tests.serving.fakes import delta, request

ACCEPTED = Accepted(1, "there")


class Responses:
    """A streaming response of a Serve handle; exceptions among `items` are raised."""

    def __init__(self, items: list[Any], silent: bool = False) -> None:
        self.items = list(items)
        self.silent = silent
        self.num_cancels = 0

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self.silent:
            await asyncio.Event().wait()
        if not self.items:
            raise StopAsyncIteration
        item = self.items.pop(0)
        if isinstance(item, Exception):
            self.items.insert(0, item)
            raise item
        return item

    def cancel(self) -> None:
        self.num_cancels += 1
        if self.items and isinstance(self.items[0], Exception):
            raise self.items[0]


class Handle:
    """The part of a `DeploymentHandle` that the fleet uses."""

    deployment_name = "EngineReplica"

    def __init__(self, responses: Responses) -> None:
        self.responses = responses

    def options(self, **options: object) -> Handle:
        return self

    def remote(self, request: object) -> Responses:
        return self.responses


def play(responses: Responses) -> list[Any]:
    async def scenario() -> list[Any]:
        fleet = RayFleet(Handle(responses), "app", StatsConfig())
        return [item async for item in fleet.generate(request())]

    return asyncio.run(scenario())


@pytest.mark.parametrize("before", [[], [ACCEPTED], [ACCEPTED, delta("a", 1)]], ids=len)
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ActorDiedError(), 503),
        (DeploymentUnavailableError(DeploymentID("EngineReplica")), 503),
        (BackPressureError(1, 1), 429),
        (RayError("odd"), 500),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whenever_ray_fails_the_caller_gets_an_api_error(
    before: list[Any], error: Exception, status: int
) -> None:
    responses = Responses([*before, error])
    with pytest.raises(ApiError) as caught:
        play(responses)
    assert caught.value.status == status
    assert responses.num_cancels == 1


@pytest.mark.parametrize(
    "items",
    [
        [ACCEPTED, delta("a", 1), delta("b", 2, finish=FinishReason.STOP)],
        [Refused(InvalidRequest("top_k", -3, "no"))],
        [ACCEPTED, Failed("boom")],
    ],
    ids=len,
)
def test_an_answer_that_is_complete_is_not_cancelled(items: list[Any]) -> None:
    responses = Responses(items)
    assert play(responses) == items
    assert responses.num_cancels == 0


@pytest.mark.parametrize("num_read", [1, 2])
def test_an_answer_that_nobody_waits_for_is_cancelled(num_read: int) -> None:
    responses = Responses([ACCEPTED, delta("a", 1), delta("b", 2, finish=FinishReason.STOP)])

    async def scenario() -> None:
        fleet = RayFleet(Handle(responses), "app", StatsConfig())
        async with aclosing(fleet.generate(request())) as items:
            for _ in range(num_read):
                await anext(items)

    asyncio.run(scenario())
    assert responses.num_cancels == 1


def test_waiting_ends_when_no_replica_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def none_healthy(self: RayFleet) -> int:
        return 0

    monkeypatch.setattr(RayFleet, "num_healthy", none_healthy)
    monkeypatch.setattr(module, "_LOOK_AFTER_S", 0.001)
    responses = Responses([], silent=True)
    with pytest.raises(ApiError, match="none is running"):
        play(responses)
    assert responses.num_cancels == 1
