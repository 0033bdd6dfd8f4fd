"""What Ray raises becomes an answer in OpenAI's words; a stand-in handle raises it."""

from __future__ import annotations

import asyncio
import gc
import pickle
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RequestCancelledError,
)

from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import FinishReason
from serve_spec.serving import fleet as module
from serve_spec.serving.errors import ApiError, ReplicaLost
from serve_spec.serving.fleet import RayFleet
from serve_spec.serving.messages import (
    Accepted,
    Cancellation,
    Failed,
    Refused,
    ReplicaRows,
    Submission,
)
from serve_spec.serving.stats_actor import StatsUnavailable
from tests.serving.fakes import delta, request

ACCEPTED = Accepted(1, "there")
ID = request().request_id


class Responses:
    """A streaming response of a Serve handle; exceptions among `items` are raised."""

    def __init__(self, items: list[Any], endless: bool = False) -> None:
        self.items = list(items)
        self.endless = endless
        self.num_cancels = 0

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if not self.items and self.endless:
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
        self.calls: list[Any] = []
        self.avoided: list[set[str]] = []

    def options(self, *, method_name: str, stream: bool = False) -> SimpleNamespace:
        async def answer() -> None:
            """A call that is no stream."""

        def remote(message: object) -> Any:
            self.calls.append((method_name, message))
            if isinstance(message, Submission):  # as `SubmissionRouter` does
                message.replica = "there"
                self.avoided.append(set(message.silent))
            return self.responses if stream else answer()

        return SimpleNamespace(remote=remote)


@pytest.fixture
def fleet(config: ServeSpecConfig) -> Callable[[Responses], RayFleet]:
    return lambda responses: RayFleet(Handle(responses), "app", "router", config)


def lists(items: list[Any]) -> list[Any]:
    """What a replica sends when each item is news of its own."""
    rows = ReplicaRows("r1", 5.0, {"router": 1})
    return [item if isinstance(item, Exception) else ([(ID, item)], rows) for item in items]


def play(fleet: RayFleet) -> list[Any]:
    async def scenario() -> list[Any]:
        items = [item async for item in fleet.generate(request())]
        await asyncio.sleep(0)  # the stream ends after the answer
        return items

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
    fleet: Any, before: list[Any], error: Exception, status: int
) -> None:
    responses = Responses(lists([*before, error]))
    with pytest.raises(ApiError) as caught:
        play(fleet(responses))
    assert caught.value.status == status
    assert isinstance(caught.value, ReplicaLost) == isinstance(error, ActorDiedError)
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
def test_an_answer_that_is_complete_is_not_cancelled(fleet: Any, items: list[Any]) -> None:
    responses = Responses(lists(items))
    assert play(fleet(responses)) == items
    assert responses.num_cancels == 0


def test_the_next_submission_knows_what_replicas_said_with_their_answers(
    config: ServeSpecConfig,
) -> None:
    handle = Handle(Responses(lists([ACCEPTED, delta("a", 1, finish=FinishReason.STOP)])))
    fleet = RayFleet(handle, "app", "router", config)
    play(fleet)
    handle.responses.items = lists([ACCEPTED, delta("b", 1, finish=FinishReason.STOP)])
    play(fleet)
    sent = [message for method, message in handle.calls if method == "generate"]
    assert sent[1].heard == {"r1": ReplicaRows("r1", 5.0, {"router": 1})}
    assert pickle.loads(pickle.dumps(sent[1])).heard == {}, "it is the sender's alone"


@pytest.mark.parametrize("num_read", [1, 2])
async def test_an_answer_that_nobody_waits_for_is_cancelled(fleet: Any, num_read: int) -> None:
    responses = Responses(lists([ACCEPTED, delta("a", 1)]), endless=True)
    async with aclosing(fleet(responses).generate(request())) as items:
        for _ in range(num_read):
            await anext(items)
    await asyncio.sleep(0)
    assert responses.num_cancels == 1


async def test_a_client_that_leaves_before_the_first_answer_is_not_logged(
    fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class CancelledByServe(Responses):
        async def __anext__(self) -> Any:
            try:
                return await super().__anext__()
            except asyncio.CancelledError:
                raise RequestCancelledError("id") from None

    built = fleet(CancelledByServe([], endless=True))
    waiting = asyncio.ensure_future(anext(built.generate(request())))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait({waiting})
    await asyncio.sleep(0.01)
    gc.collect()  # what nobody has read is logged here
    assert caplog.text == ""


def test_waiting_ends_when_no_replica_is_left(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def none_healthy(self: RayFleet) -> int:
        return 0

    monkeypatch.setattr(RayFleet, "num_healthy", none_healthy)
    monkeypatch.setattr(module, "_LOOK_AFTER_S", 0.001)
    responses = Responses([], endless=True)
    with pytest.raises(ApiError, match="none is running"):
        play(fleet(responses))
    assert responses.num_cancels == 1


async def test_a_submission_and_the_end_of_one_request_are_calls_of_the_replica(fleet: Any) -> None:
    built = fleet(Responses(lists([ACCEPTED])))
    assert [items async for items in built.send(Submission("router", [request()]))] == [
        [(ID, ACCEPTED)]
    ]
    await built.cancel(Cancellation("there", (ID,)))
    (first, submission), (second, cancellation) = built._handle.calls
    assert (first, submission.requests) == ("generate", [request()])
    assert (second, cancellation) == ("cancel", Cancellation("there", (ID,)))


async def test_a_silent_replica_loses_its_requests_and_is_avoided_until_it_speaks(
    config: ServeSpecConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.001)
    config = ServeSpecConfig.load(config, stall_timeout_s=0.01)
    handle = Handle(Responses(lists([ACCEPTED]), endless=True))
    fleet = RayFleet(handle, "app", "router", config)
    fleet.start()
    items = fleet.generate(request())
    assert await anext(items) == ACCEPTED
    with pytest.raises(ReplicaLost, match="there does not answer") as caught:
        await anext(items)
    assert caught.value.replica == "there"
    assert handle.responses.num_cancels == 1
    for _ in range(2):
        handle.responses.items = lists([ACCEPTED, delta("b", 1, finish=FinishReason.STOP)])
        assert [item async for item in fleet.generate(request())]
    assert handle.avoided == [set(), {"there"}, set()], "the last one after it has spoken"


def test_how_many_replicas_know_their_costs_is_known_unless_nobody_answers(
    fleet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [{"costs": {"state": state}} for state in ("missing", "loaded", "loaded")]
    built = fleet(Responses([]))

    async def status() -> dict[str, object]:
        if not states:
            raise StatsUnavailable("gone")
        return {"replicas": [*states, {}]}

    monkeypatch.setattr(built._stats, "status", status)
    assert asyncio.run(built.costs()) == {"missing": 1, "loaded": 2}
    states.clear()
    assert asyncio.run(built.costs()) == {}
