"""What a router asked for ends when the router does, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from ray.exceptions import RaySystemError

from serve_spec.serving import replica_actors
from serve_spec.serving.messages import Items
from serve_spec.serving.outbox import Outbox, Outboxes, end_orphaned
from serve_spec.serving.replica_actors import ReplicaActors


async def test_the_requests_of_a_router_that_is_gone_end_and_no_others() -> None:
    outboxes = Outboxes(lambda request_id: None)
    lost, here = outboxes.attach("lost"), outboxes.attach("here")
    living = {"lost", "here"}
    looks: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def is_there(sender: str) -> bool:
        loop.call_soon_threadsafe(looks.put_nowait, sender)
        return sender in living

    async def listen(outbox: Outbox) -> list[Items]:
        return [items async for items in outbox]

    watch = asyncio.create_task(end_orphaned(outboxes, is_there, look_every_s=0))
    listeners = [asyncio.create_task(listen(outbox)) for outbox in (lost, here)]
    for _ in range(4):
        await looks.get()
    assert not any(listener.done() for listener in listeners)
    living.remove("lost")
    assert await listeners[0] == [[]], "nothing has been said"
    for _ in range(4):
        await looks.get()
    assert not listeners[1].done()
    assert list(outboxes) == [here]
    for task in (watch, listeners[1]):
        task.cancel()


async def test_requests_whose_router_never_opens_its_stream_end() -> None:
    cancelled: list[str] = []
    outboxes = Outboxes(cancelled.append)
    unread = outboxes.of("router")
    unread.answers["a"] = asyncio.create_task(asyncio.Event().wait())  # type: ignore[assignment]
    watch = asyncio.create_task(end_orphaned(outboxes, lambda sender: True, look_every_s=0))
    while list(outboxes):
        await asyncio.sleep(0.001)
    assert cancelled == ["a"]
    watch.cancel()


def raiser(error: Exception | None) -> Callable[..., object]:
    def get_actor(name: str, namespace: str) -> object:
        assert (name, namespace) == ("SERVE_REPLICA::app#Router#r1", "serve")
        if error is not None:
            raise error
        return object()

    return get_actor


@pytest.mark.parametrize(
    ("error", "is_there"),
    [(None, True), (ValueError("no such actor"), False), (RaySystemError("busy"), True)],
    ids=repr,
)
def test_a_router_is_gone_only_when_ray_says_so(
    error: Exception | None, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_actors.ray, "get_actor", raiser(error))
    assert ReplicaActors("app", "Router").is_there("r1") is is_there
