"""Collect the messages of a replica for each router into one stream.

    request ─┐                                 ┌─ one message per round ─> router 1
    request ─┼─ put ─> Outbox of their router ─┤
    request ─┘                                 └─ ...

No request waits for a slow router: deltas that it has not taken yet become one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count

from serve_spec.log import get_logger
from serve_spec.serving.messages import Items, ReplicaItem, is_last, merged_items

logger = get_logger(__name__)

# One question to Ray's control service per router with requests here.
_LOOK_EVERY_S = 1.0
# A router opens its stream within milliseconds of its first request.
_MAX_UNREAD_LOOKS = 30


async def end_orphaned(
    outboxes: Outboxes, is_there: Callable[[str], bool], look_every_s: float = _LOOK_EVERY_S
) -> None:
    """Close outboxes whose router is gone, or does not read them; never return.

    is_there: whether a router lives; may block.
    """
    while True:
        await asyncio.sleep(look_every_s)
        for outbox in outboxes:
            outbox.num_unread_looks = 0 if outbox.has_reader else outbox.num_unread_looks + 1
            is_read = outbox.num_unread_looks < _MAX_UNREAD_LOOKS
            if is_read and await asyncio.to_thread(is_there, outbox.sender):
                continue
            why = "is gone" if is_read else "does not read its stream"
            logger.warning("router %s %s: %d requests end", outbox.sender, why, len(outbox.answers))
            outboxes.close(outbox)


# An outbox without requests ends at this beat, so that a replica that is to go is not kept by it.
_NUM_IDLE_BEATS = 2


class Outbox:
    """Items of one router's requests; iterating gives lists of what has come since the last one.

    session: see `News.session`.
    """

    def __init__(self, sender: str, session: int) -> None:
        self.sender = sender
        self.session = session
        self.answers: dict[str, asyncio.Task[None]] = {}
        """The requests whose last item has not been handed out, and what works on each."""
        self.has_reader = False
        self.num_unread_looks = 0
        """How often in a row it was found without a reader."""
        self.is_closed = False
        self._items: Items = []
        self._has_news = asyncio.Event()
        self._num_idle_beats = 0

    def put(self, request_id: str, item: ReplicaItem) -> None:
        """Add an item of a request."""
        self._items.append((request_id, item))
        self._has_news.set()

    def beat(self) -> None:
        """Let the reader have a list, if need be an empty one: the replica is alive."""
        self._num_idle_beats = 0 if self.answers else self._num_idle_beats + 1
        self._has_news.set()

    def close(self) -> None:
        """End the iteration; what has not been read is lost."""
        self.is_closed = True
        self._has_news.set()

    async def __aiter__(self) -> AsyncIterator[Items]:
        yield []  # the reader learns the session
        while True:
            await self._has_news.wait()
            # The requests of a round put their items one by one: let all of them do so.
            await asyncio.sleep(0)
            self._has_news.clear()
            if self.is_closed:
                return
            items, self._items = self._items, []
            if not items and not self.answers and self._num_idle_beats >= _NUM_IDLE_BEATS:
                return
            if len(items) > len(self.answers):
                items = merged_items(items)
            for request_id, item in items:
                if is_last(item):
                    self.answers.pop(request_id, None)
            yield items


class Outboxes:
    """The outboxes of all routers that have requests here.

    cancel: ends a request in the engine; harmless if it has ended.
    """

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self._cancel = cancel
        self._by_sender: dict[str, Outbox] = {}
        self._sessions = count(1)

    def __iter__(self) -> Iterator[Outbox]:
        return iter(list(self._by_sender.values()))

    def of(self, sender: str) -> Outbox:
        """Return the outbox of a router, a new one if it has none."""
        outbox = self._by_sender.get(sender)
        if outbox is None:
            outbox = self._by_sender[sender] = Outbox(sender, next(self._sessions))
        return outbox

    def attach(self, sender: str) -> Outbox:
        """Return the outbox that a router reads from now on.

        A router that reads another stream has given up the first one, and the requests with it.
        """
        outbox = self.of(sender)
        if outbox.has_reader:
            self.close(outbox)
            outbox = self.of(sender)
        outbox.has_reader = True
        return outbox

    def close(self, outbox: Outbox) -> None:
        """Forget an outbox and end its requests."""
        if self._by_sender.get(outbox.sender) is outbox:
            del self._by_sender[outbox.sender]
        outbox.close()
        for request_id, answer in outbox.answers.items():
            self._cancel(request_id)
            answer.cancel()
        outbox.answers.clear()

    def num_requests(self) -> dict[str, int]:
        """Return how many requests are here, by router."""
        return {
            sender: len(outbox.answers)
            for sender, outbox in self._by_sender.items()
            if outbox.answers
        }
