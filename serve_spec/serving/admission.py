"""The door: who may go to the replicas now, who waits, who is sent away.

Plain asyncio, one event loop, no Ray: Serve's own queue limit is checked only at entry and rejects
bursts that would fit.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from serve_spec.serving.errors import queue_full

_MAX_RETRY_AFTER_S = 60
# Weight of the newest request in the mean service time behind Retry-After.
_SERVICE_EMA_ALPHA = 0.1


@dataclass(frozen=True, eq=False)
class _Waiter:
    arrived: float
    turn: asyncio.Future[None]


class Admission:
    """Lets at most `max_in_flight` requests through, in order of arrival; `max_queued` may wait.

    A request waits up to `batch_wait_s` for company, so that requests that arrive together reach
    the replicas together, in batches of at most `max_batch_size`.
    """

    def __init__(
        self,
        *,
        max_in_flight: int,
        max_queued: int,
        batch_wait_s: float = 0.0,
        max_batch_size: int = 64,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.max_queued = max_queued
        self.batch_wait_s = batch_wait_s
        self.max_batch_size = max_batch_size
        self.in_flight = 0
        self.num_rejected = 0
        self._waiting: deque[_Waiter] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._mean_service_s = 0.0
        self._in_flight_sizes: Counter[int] = Counter()
        self._submission_sizes: Counter[int] = Counter()

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
        """Queue, requests in flight and batch sizes: the router's part of `/server_info`.

        Histogram keys are inclusive upper bounds, powers of two. `batch_size_histogram` says, per
        request, how many were in flight once it was handed over (itself included);
        `submission_size_histogram` says, per hand-over, how many requests went together.
        """
        return {
            "queue_len": self.queue_len,
            "in_flight": self.in_flight,
            "max_in_flight": self.max_in_flight,
            "max_queued_requests": self.max_queued,
            "num_rejected": self.num_rejected,
            "batch_size_histogram": _histogram(self._in_flight_sizes),
            "submission_size_histogram": _histogram(self._submission_sizes),
        }

    async def _take_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        # Those for whom there is room wait for company only: they do not count as queued.
        if self.queue_len >= self.max_queued + self._room:
            self.num_rejected += 1
            raise queue_full(f"{self.queue_len} wait already", self._retry_after_s())
        waiter = _Waiter(loop.time(), loop.create_future())
        self._waiting.append(waiter)
        self._submit_ready()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if not waiter.turn.cancelled():
                self._give_back()  # the turn came in the very moment the caller left
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            raise

    @property
    def _room(self) -> int:
        return max(0, self.max_in_flight - self.in_flight)

    def _give_back(self) -> None:
        self.in_flight -= 1
        self._submit_ready()

    def _submit_ready(self) -> None:
        """Hands over every batch that is full, or whose first member has waited long enough."""
        loop = asyncio.get_running_loop()
        while ready := min(self.queue_len, self._room, self.max_batch_size):
            leaves_at = self._waiting[0].arrived + self.batch_wait_s
            if ready < self.max_batch_size and loop.time() < leaves_at:
                self._wake_at(leaves_at, loop)
                return
            batch = [self._waiting.popleft().turn for _ in range(ready)]
            # A caller that has just left may not have taken itself out of the queue yet.
            batch = [turn for turn in batch if not turn.cancelled()]
            if batch:
                self._submit(batch)

    def _submit(self, batch: list[asyncio.Future[None]]) -> None:
        for turn in batch:
            turn.set_result(None)
            self.in_flight += 1
            self._in_flight_sizes[_bucket(self.in_flight)] += 1
        self._submission_sizes[_bucket(len(batch))] += 1

    def _wake_at(self, when: float, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = loop.call_at(when, self._window_over)

    def _window_over(self) -> None:
        self._timer = None
        self._submit_ready()

    def _retry_after_s(self) -> int:
        """Whole seconds until the queue has moved by one, as far as past requests tell."""
        wait_s = self._mean_service_s * (self.queue_len + 1) / self.max_in_flight
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s)))


def _bucket(size: int) -> int:
    """The smallest power of two that is not below `size` (at least 1)."""
    return 1 << (size - 1).bit_length()


def _histogram(sizes: Counter[int]) -> dict[str, int]:
    return {str(bound): count for bound, count in sorted(sizes.items())}
