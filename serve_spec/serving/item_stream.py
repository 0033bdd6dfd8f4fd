"""The items of one request on their way to its client. Deltas that wait become one."""

from __future__ import annotations

import asyncio
from collections import deque

from serve_spec.core.request import TokenDelta
from serve_spec.serving.errors import ApiError, client_too_slow
from serve_spec.serving.messages import ReplicaItem, merged

# Estimates of what objects take in memory.
_DELTA_BYTES = 200
_TOKEN_BYTES = 40
_LOGPROB_BYTES = 100


class ItemStream:
    """A queue with one reader; what waits in it takes at most about `max_unread_bytes`."""

    def __init__(self, max_unread_bytes: int) -> None:
        self._max_unread_bytes = max_unread_bytes
        self._num_unread_bytes = 0
        self._items: deque[ReplicaItem | ApiError] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: ReplicaItem | ApiError) -> bool:
        """Add an item and return whether there was room; without, an error takes all places."""
        if self._items and isinstance(item, TokenDelta):
            self._num_unread_bytes += _num_bytes(item)
            if self._num_unread_bytes > self._max_unread_bytes:
                self._items.clear()
                self._items.append(client_too_slow(self._max_unread_bytes))
                return False
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        return True

    async def get(self) -> ReplicaItem:
        """Return the next item, with all deltas that follow it if it is one.

        Raises:
            ApiError: it was put in place of an item.
        """
        if not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        item = self._items.popleft()
        if isinstance(item, ApiError):
            raise item
        if not self._items:
            self._num_unread_bytes = 0
        elif isinstance(item, TokenDelta):
            return merged([item, *self._next_deltas()])
        return item

    def _next_deltas(self) -> list[TokenDelta]:
        deltas = []
        while self._items and isinstance(delta := self._items[0], TokenDelta):
            deltas.append(delta)
            self._items.popleft()
        self._num_unread_bytes = 0
        return deltas


def _num_bytes(delta: TokenDelta) -> int:
    num_entries = sum(1 + len(entry.top) for entry in delta.logprobs or ())
    return (
        _DELTA_BYTES
        + len(delta.text)
        + _TOKEN_BYTES * len(delta.token_ids)
        + _LOGPROB_BYTES * num_entries
    )
