"""What all requests of a router say becomes one stream, round by round."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serve_spec.core.request import FinishReason, TokenDelta
from serve_spec.serving.messages import Accepted, Failed, Items
from serve_spec.serving.outbox import Outbox, Outboxes
from tests.serving.fakes import settle


def say(outbox: Outbox, name: str, token: int, *, last: bool = False) -> None:
    outbox.put(name, TokenDelta(name, (token,), "x", FinishReason.LENGTH if last else None))


def ask(outbox: Outbox, *names: str) -> None:
    for name in names:
        outbox.answers[name] = asyncio.create_task(asyncio.Event().wait(), name=name)  # type: ignore[arg-type]


async def reading(outbox: Outbox) -> AsyncIterator[Items]:
    """Return its lists, from the first one that may hold items on."""
    lists = aiter(outbox)
    assert await anext(lists) == []
    return lists


@pytest.fixture
def cancelled() -> list[str]:
    return []


@pytest.fixture
def outboxes(cancelled: list[str]) -> Outboxes:
    return Outboxes(cancelled.append)


async def test_what_one_round_brings_is_one_list_and_leaves_at_once(outboxes: Outboxes) -> None:
    outbox = outboxes.attach("router")
    ask(outbox, "a", "b")
    lists = await reading(outbox)
    for last in (False, True):
        for name in ("a", "b"):
            say(outbox, name, 1, last=last)
        items = await anext(lists)
        assert [name for name, _ in items] == ["a", "b"]
    assert outboxes.num_requests() == {}


async def test_rounds_that_a_slow_router_misses_are_one_delta_of_each_request(
    outboxes: Outboxes,
) -> None:
    outbox = outboxes.attach("router")
    ask(outbox, "a", "b")
    lists = await reading(outbox)
    outbox.put("a", Accepted(3, "r1"))
    for token in range(4):
        say(outbox, "a", token)
        say(outbox, "b", token)
    outbox.put("b", Failed("boom"))
    delta = TokenDelta("a", (0, 1, 2, 3), "xxxx")
    assert await anext(lists) == [
        ("a", Accepted(3, "r1")),
        ("a", delta),
        ("b", delta._replace(request_id="b")),
        ("b", Failed("boom")),
    ]
    assert outboxes.num_requests() == {"router": 1}


async def test_a_stream_without_requests_ends_after_a_while_and_the_next_one_is_another(
    outboxes: Outboxes,
) -> None:
    outbox = outboxes.attach("router")
    ask(outbox, "a")
    lists = await reading(outbox)
    for _ in range(5):
        outbox.beat()
        assert await anext(lists) == [], "it waits for its request"
    say(outbox, "a", 1, last=True)
    assert await anext(lists)
    outbox.beat()
    assert await anext(lists) == []
    outbox.beat()
    assert await anext(lists, None) is None
    assert not outbox.is_closed
    outboxes.close(outbox)
    assert outboxes.attach("router").session > outbox.session


async def test_a_router_that_opens_another_stream_has_given_up_what_it_had(
    outboxes: Outboxes, cancelled: list[str]
) -> None:
    early = outboxes.of("router")
    ask(early, "a")
    first = outboxes.attach("router")
    assert first is early, "a request may be here before the stream is"
    answer = first.answers["a"]
    second = outboxes.attach("router")
    await settle()
    assert cancelled == ["a"]
    assert answer.cancelled()
    assert (first.is_closed, second.is_closed) == (True, False)
    assert second.session > first.session
    outboxes.close(first)  # late
    assert outboxes.of("router") is second


async def test_a_closed_outbox_ends_its_stream(outboxes: Outboxes) -> None:
    outbox = outboxes.attach("router")
    lists: Any = await reading(outbox)
    say(outbox, "a", 1)
    outbox.close()
    assert await anext(lists, None) is None
