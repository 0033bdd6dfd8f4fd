"""The door: who may go to the replicas now, who waits, who is sent away.

Plain asyncio, one event loop, no Ray: Serve's own queue limit is checked only at entry and rejects
bursts that would fit.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serve_spec.serving.errors import queue_full
from serve_spec.serving.sizes import SizeHistogram

_MAX_RETRY_AFTER_S = 60
# Weight of the newest request in the mean service time behind Retry-After.
_SERVICE_EMA_ALPHA = 0.1


class Admission:
    """Lets at most `max_in_flight` requests through, in order of arrival; `max_queued` may wait."""

    def __init__(self, *, max_in_flight: int, max_queued: int) -> None:
        self.max_in_flight = max_in_flight
        self.max_queued = max_queued
        self.in_flight = 0
        self.num_rejected = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._mean_service_s = 0.0
        self._in_flight_sizes = SizeHistogram()

    @property
    def queue_len(self) -> int:
        """Requests waiting for their turn."""
        return len(self._waiting)

    @asynccontextmanager
    async def slot(self, deadline: float) -> AsyncIterator[None]:
        """Waits for a turn and holds it; `deadline` is in seconds of the event loop's clock.

        Raises:
            ApiError: 429, the queue is full.
            TimeoutError: the deadline passed while waiting.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout_at(deadline):
            await self._take_turn(loop)
        started = loop.time()
        try:
            yield
        finally:
            self._mean_service_s += _SERVICE_EMA_ALPHA * (
                loop.time() - started - self._mean_service_s
            )
            self._give_back()

    def snapshot(self) -> dict[str, object]:
        """Queue and requests in flight: the door's part of `router` in `/server_info`.

        `batch_size_histogram` says, per request, how many were in flight once it was let through
        (itself included); keys are inclusive upper bounds, powers of two.
        """
        return {
            "queue_len": self.queue_len,
            "in_flight": self.in_flight,
            "max_in_flight": self.max_in_flight,
            "max_queued_requests": self.max_queued,
            "num_rejected": self.num_rejected,
            "batch_size_histogram": self._in_flight_sizes.as_dict(),
        }

    async def _take_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.in_flight >= self.max_in_flight and self.queue_len >= self.max_queued:
            self.num_rejected += 1
            raise queue_full(f"{self.queue_len} wait already", self._retry_after_s())
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._give_back()  # the turn came in the very moment the caller left
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def _give_back(self) -> None:
        self.in_flight -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self.in_flight < self.max_in_flight:
            turn = self._waiting.popleft()
            # A caller that has just left may not have taken itself out of the queue yet.
            if not turn.cancelled():
                turn.set_result(None)
                self.in_flight += 1
                self._in_flight_sizes.add(self.in_flight)

    def _retry_after_s(self) -> int:
        """Whole seconds until the queue has moved by one, as far as past requests tell."""
        wait_s = self._mean_service_s * (self.queue_len + 1) / self.max_in_flight
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s)))
