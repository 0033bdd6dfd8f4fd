"""What the requests of one submission say, collected into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from serve_spec.serving.messages import Items, ReplicaItem, is_last


class Outbox:
    """Items of `num_open` requests; iterating gives them in lists until each has said its last.

    A list holds everything since the one before, as a rule one engine round. Nobody waits for a
    slow reader: what it misses is in its next list.
    """

    def __init__(self, num_open: int) -> None:
        self.num_open = num_open
        """Requests whose last item has not been handed out."""
        self._items: Items = []
        self._news = asyncio.Event()
        self._is_closed = False

    def put(self, request_id: str, item: ReplicaItem) -> None:
        """Adds an item of one request."""
        self._items.append((request_id, item))
        self._news.set()

    def beat(self) -> None:
        """Let the reader know that the replica is alive: it gets a list, be it an empty one."""
        self._news.set()

    def close(self) -> None:
        """Nobody listens any more: iterating ends, whatever has not been said."""
        self._is_closed = True
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[Items]:
        while self.num_open:
            await self._news.wait()
            # The engine says what a round brought request by request: let all of them arrive.
            await asyncio.sleep(0)
            if self._is_closed:
                return
            items, self._items = self._items, []
            self._news.clear()
            self.num_open -= sum(is_last(item) for _, item in items)
            yield items
