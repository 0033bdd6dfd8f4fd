"""The stream from a replica: opened when there is a request, read until it ends, and watched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from serve_spec.serving.errors import ApiError, ReplicaLost, no_replica
from serve_spec.serving.links import Links
from serve_spec.serving.messages import Items, News, ReplicaRows, encode
from tests.serving.fakes import delta, settle

ITEMS: Items = [("cmpl-1", delta("a", 1))]


class Replicas:
    """What the test lets replicas say, and what the router hears."""

    def __init__(self, max_silent_looks: int = 3) -> None:
        self.links = Links(self.attach, self, max_silent_looks)
        self.streams: list[asyncio.Queue[bytes | Exception | None]] = []
        self.num_closed = 0
        self.heard: list[News] = []
        self.lost: list[tuple[str, ApiError]] = []
        self.open = 1

    async def attach(self, replica: str) -> AsyncGenerator[bytes, None]:
        said: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.streams.append(said)
        try:
            while (message := await said.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                yield message
        finally:
            self.num_closed += 1

    def hear(self, replica: str, news: News) -> None:
        self.heard.append(news)

    def lose(self, replica: str, error: ApiError) -> None:
        self.lost.append((replica, error))
        self.open = 0

    def num_open(self, replica: str) -> int:
        return self.open

    async def say(self, message: News | bytes | Exception | None) -> None:
        self.streams[-1].put_nowait(encode(message) if isinstance(message, News) else message)
        await settle()


async def connected(max_silent_looks: int = 3) -> Replicas:
    replicas = Replicas(max_silent_looks)
    replicas.links.open("r1")
    await settle()
    return replicas


async def test_a_replica_has_one_stream_however_many_requests_it_has() -> None:
    replicas = await connected()
    replicas.links.open("r1")
    await settle()
    assert len(replicas.streams) == 1
    rows = ReplicaRows("r1", 1.0, {"router": 1})
    await replicas.say(News(1, ITEMS, rows))
    assert replicas.heard == [News(1, ITEMS, rows)]
    assert replicas.links.rows == {"r1": rows}


@pytest.mark.parametrize("num_open", [0, 1])
async def test_a_stream_that_ends_because_it_is_idle_loses_nothing(num_open: int) -> None:
    """A request that was sent meanwhile waits in the next one."""
    replicas = await connected()
    replicas.open = num_open
    await replicas.say(News(1, [], is_over=True))
    await replicas.say(None)
    assert replicas.lost == []
    assert len(replicas.streams) == 1 + num_open


@pytest.mark.parametrize(
    "end", [None, no_replica("gone"), RuntimeError("odd"), b"no news"], ids=repr
)
async def test_a_stream_that_breaks_off_loses_the_requests_of_its_replica(
    end: bytes | Exception | None,
) -> None:
    replicas = await connected()
    await replicas.say(end)
    ((replica, error),) = replicas.lost
    assert isinstance(error, ReplicaLost)
    assert (replica, error.replica) == ("r1", "r1")
    replicas.links.open("r1")
    await settle()
    assert len(replicas.streams) == 2


async def test_a_silent_replica_loses_its_requests_once_and_is_avoided_until_it_speaks() -> None:
    replicas = await connected()
    await replicas.say(News(1, []))
    for _ in range(5):
        replicas.links.look()
        await settle()
    assert [replica for replica, _ in replicas.lost] == ["r1"]
    assert replicas.num_closed == 1
    assert replicas.links.silent == {"r1"}
    replicas.links.open("r1")
    await settle()
    await replicas.say(News(2, []))
    assert replicas.links.silent == set()


async def test_a_replica_without_requests_may_be_silent() -> None:
    replicas = await connected()
    replicas.open = 0
    for _ in range(9):
        replicas.links.look()
    replicas.open = 1
    for _ in range(2):
        replicas.links.look()
    await settle()
    assert replicas.lost == []
