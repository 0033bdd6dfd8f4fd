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
)

from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import FinishReason
from serve_spec.serving import fleet as module
from serve_spec.serving.errors import ApiError, ReplicaLost
from serve_spec.serving.fleet import RayFleet
from serve_spec.serving.messages import (
    Accepted,
    Attachment,
    Cancellation,
    Failed,
    News,
    Refused,
    ReplicaRows,
    Submission,
    Submitted,
    encode,
)
from serve_spec.serving.stats_actor import StatsUnavailable
from tests.serving.fakes import delta, request, settle

ACCEPTED = Accepted(1, "there")
LAST = delta("b", 2, finish=FinishReason.STOP)
ID = request().request_id
TAKEN = Submitted("there", 1)
ROWS = ReplicaRows("there", 5.0, {"router": 1})


class Responses:
    """A streaming response of a Serve handle; exceptions among `messages` are raised."""

    def __init__(self, messages: list[Any], endless: bool = False) -> None:
        self.messages = list(messages)
        self.endless = endless
        self.num_cancels = 0

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        await asyncio.sleep(0)
        if not self.messages and self.endless:
            await asyncio.Event().wait()
        if not self.messages:
            raise StopAsyncIteration
        message = self.messages.pop(0)
        if isinstance(message, Exception):
            self.messages.insert(0, message)
            raise message
        return message

    def cancel(self) -> None:
        self.num_cancels += 1
        if self.messages and isinstance(self.messages[0], Exception):
            raise self.messages[0]


class Handle:
    """The part of a `DeploymentHandle` that the fleet uses.

    reply: what becomes of a submission; an exception is raised, None: nothing for ever.
    """

    deployment_name = "EngineReplica"

    def __init__(self, responses: Responses, reply: Submitted | Exception | None = TAKEN) -> None:
        self.responses = responses
        self.reply = reply
        self.calls: list[Any] = []
        self.avoided: list[set[str]] = []
        self.routed_to: str | None = "there"

    def options(self, *, method_name: str, stream: bool = False) -> SimpleNamespace:
        async def answer() -> Any:
            """A call that is no stream."""
            if method_name == "submit" and self.reply is None:
                await asyncio.Event().wait()
            if method_name == "submit" and isinstance(self.reply, Exception):
                raise self.reply
            return self.reply

        def remote(message: object) -> Any:
            self.calls.append((method_name, message))
            if isinstance(message, Submission):  # as `SubmissionRouter` does
                message.replica = self.routed_to
                self.avoided.append(set(message.silent))
            return self.responses if stream else answer()

        return SimpleNamespace(remote=remote)


@pytest.fixture
def fleet(config: ServeSpecConfig) -> Callable[..., RayFleet]:
    return lambda *args: RayFleet(Handle(*args), "app", "router", config)


def messages(items: list[Any], session: int = 1) -> list[Any]:
    """What a replica sends when each item is news of its own."""
    return [
        item if isinstance(item, Exception) else encode(News(session, [(ID, item)], ROWS))
        for item in items
    ]


def play(fleet: RayFleet) -> list[Any]:
    async def scenario() -> list[Any]:
        items = [item async for item in fleet.generate(request())]
        await settle()  # the stream ends after the answer
        return items

    return asyncio.run(scenario())


ERRORS = pytest.mark.parametrize(
    ("error", "status"),
    [
        (ActorDiedError(), 503),
        (DeploymentUnavailableError(DeploymentID("EngineReplica")), 503),
        (BackPressureError(1, 1), 429),
        (RayError("odd"), 500),
    ],
    ids=lambda value: type(value).__name__,
)


@ERRORS
def test_whenever_a_submission_fails_the_caller_gets_an_api_error(
    fleet: Any, error: Exception, status: int
) -> None:
    with pytest.raises(ApiError) as caught:
        play(fleet(Responses([]), error))
    assert caught.value.status == status
    assert isinstance(caught.value, ReplicaLost) == isinstance(error, ActorDiedError)


@pytest.mark.parametrize("before", [[], [ACCEPTED], [ACCEPTED, delta("a", 1)]], ids=len)
@ERRORS
def test_whenever_a_stream_fails_the_replica_is_lost(
    fleet: Any, before: list[Any], error: Exception, status: int
) -> None:
    responses = Responses(messages([*before, error]))
    with pytest.raises(ReplicaLost) as caught:
        play(fleet(responses))
    assert (caught.value.status, caught.value.replica) == (status, "there")
    assert responses.num_cancels == 1


@pytest.mark.parametrize(
    "items",
    [
        [ACCEPTED, delta("a", 1), LAST],
        [Refused(InvalidRequest("top_k", -3, "no"))],
        [ACCEPTED, Failed("boom")],
    ],
    ids=len,
)
def test_a_stream_outlives_the_answers_in_it(fleet: Any, items: list[Any]) -> None:
    responses = Responses(messages(items), endless=True)
    said = play(fleet(responses))
    assert [type(item) for item in said] == [type(item) for item in items]
    assert all(isinstance(a, Refused) or a == b for a, b in zip(said, items, strict=True))


async def test_a_stream_that_its_replica_ends_is_opened_again_with_the_next_request(
    fleet: Any,
) -> None:
    over = encode(News(1, [], is_over=True))
    built = fleet(Responses([*messages([ACCEPTED, LAST]), over]))
    for _ in range(2):
        assert [item async for item in built.generate(request())] == [ACCEPTED, LAST]
        await settle()
        built._handle.responses.messages = [*messages([ACCEPTED, LAST]), over]
    methods = [method for method, _ in built._handle.calls]
    assert methods == ["submit", "attach"] * 2
    assert built._handle.calls[1][1] == Attachment("there", "router")
    assert built._batcher.num_interrupted == 0


def test_the_next_submission_knows_what_replicas_said_with_their_answers(
    config: ServeSpecConfig,
) -> None:
    handle = Handle(Responses(messages([ACCEPTED, LAST])))
    fleet = RayFleet(handle, "app", "router", config)
    play(fleet)
    handle.responses.messages = messages([ACCEPTED, LAST])
    play(fleet)
    sent = [message for method, message in handle.calls if method == "submit"]
    assert sent[1].heard == {"there": ROWS}
    assert pickle.loads(pickle.dumps(sent[1])).heard == {}, "it is the sender's alone"


@pytest.mark.parametrize("num_read", [1, 2])
async def test_an_answer_that_its_client_leaves_is_cancelled_and_its_stream_is_not(
    fleet: Any, num_read: int
) -> None:
    responses = Responses(messages([ACCEPTED, delta("a", 1)]), endless=True)
    built = fleet(responses)
    async with aclosing(built.generate(request())) as items:
        for _ in range(num_read):
            await anext(items)
    await settle()
    assert built._handle.calls[-1] == ("cancel", Cancellation("there", (ID,)))
    assert responses.num_cancels == 0


async def test_a_client_that_leaves_before_the_first_answer_is_not_logged(
    fleet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    built = fleet(Responses([], endless=True))
    waiting = asyncio.ensure_future(anext(built.generate(request())))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait({waiting})
    await asyncio.sleep(0.01)
    gc.collect()  # errors that have not been read are logged here
    assert caplog.text == ""


def test_waiting_ends_when_no_replica_is_left(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def none_healthy(self: RayFleet) -> int:
        return 0

    monkeypatch.setattr(RayFleet, "num_healthy", none_healthy)
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.001)
    built = fleet(Responses([]), None)
    built._handle.routed_to = None
    with pytest.raises(ApiError, match="none is running"):
        play(built)


@pytest.mark.parametrize("has_accepted", [False, True])
async def test_a_silent_replica_loses_its_requests_and_is_avoided_until_it_speaks(
    config: ServeSpecConfig, monkeypatch: pytest.MonkeyPatch, has_accepted: bool
) -> None:
    monkeypatch.setattr(module, "_WATCH_EVERY_S", 0.001)
    config = ServeSpecConfig.load(config, stall_timeout_s=0.01)
    handle = Handle(Responses(messages([ACCEPTED]), endless=True))
    fleet = RayFleet(handle, "app", "router", config)
    fleet.start()
    handle.reply = TAKEN if has_accepted else None
    items = fleet.generate(request())
    if has_accepted:
        assert await anext(items) == ACCEPTED
    with pytest.raises(ReplicaLost, match="there does not answer") as caught:
        await anext(items)
    assert caught.value.replica == "there"
    assert handle.responses.num_cancels == has_accepted
    await settle()
    assert ("cancel", Cancellation("there", (ID,))) in handle.calls, "should it wake up"
    handle.reply = TAKEN
    for _ in range(2):
        handle.responses = Responses(messages([ACCEPTED, LAST]))
        assert [item async for item in fleet.generate(request())] == [ACCEPTED, LAST]
        await settle()
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
