"""Admission: which requests go to the replicas now, which wait, and which are refused.

Plain asyncio, one event loop, no Ray: Serve's own queue limit is checked only at entry and rejects
bursts that would fit.

Places are shared between clients. A free place goes to the waiting client that holds the fewest.
While others wait, a client that holds more than its share gives places back: its newest requests
are withdrawn from their replicas, wait again, and go on later where they stopped.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from serve_spec.serving.batching import SizeHistogram
from serve_spec.serving.errors import queue_full

_MAX_RETRY_AFTER_S = 60
# Weight of the newest request in the mean service time behind Retry-After.
_SERVICE_EMA_ALPHA = 0.1
# Most places come free sooner than this, which is cheaper than to withdraw a request.
_PATIENCE_S = 0.5


class Turn:
    """One request's place at the replicas, or its wait for one.

    withdraw: takes the request back from its replica; None while no replica has it.
    has_begun: whether its tokens have come, so that a replica runs it now.
    """

    def __init__(self, admission: Admission, client: str, order: int) -> None:
        self.client = client
        self.order = order
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.withdraw: Callable[[], None] | None = None
        self.has_begun = False
        self.is_withdrawn = False
        """Whether its place is promised to another client."""
        self._admission = admission

    async def regain(self) -> None:
        """Give a promised place back and wait for another one; otherwise return at once."""
        self.withdraw, self.has_begun = None, False
        if self.is_withdrawn:
            await self._admission.wait_again(self)


class Admission:
    """Grants at most `max_in_flight` places to requests; others wait, or are refused.

    Args:
        max_in_flight: most requests at the replicas.
        max_queued: most requests that wait.
        max_client_share: share of both that one client may hold while others wait. Of the queue
            it never has more, so that others find room in it.
    """

    def __init__(
        self, *, max_in_flight: int, max_queued: int, max_client_share: float = 1.0
    ) -> None:
        self.max_in_flight = max_in_flight
        self.max_queued = max_queued
        self.max_client_in_flight = max(1, int(max_client_share * max_in_flight))
        self.max_client_queued = max(1, int(max_client_share * max_queued))
        self.in_flight = 0
        self.num_rejected = 0
        self.num_withdrawn = 0
        """Places that clients had to give back."""
        # By client; turns in order of their grants, newest last.
        self._waiting: defaultdict[str, list[Turn]] = defaultdict(list)
        self._holding: defaultdict[str, list[Turn]] = defaultdict(list)
        self._num_turns = 0
        self._withdrawal: asyncio.TimerHandle | None = None
        self._mean_service_s = 0.0
        self._in_flight_sizes = SizeHistogram()

    @property
    def queue_len(self) -> int:
        """Number of requests that wait."""
        return sum(map(len, self._waiting.values()))

    def refuse_if_full(self, client: str, num_requests: int = 1) -> None:
        """Raise ApiError (429) unless so many more requests of a client find a place or may wait.

        A request with several choices counts as that many.
        """
        to_wait = num_requests - (self.max_in_flight - self.in_flight)
        if to_wait <= 0:
            return
        of_client = len(self._waiting.get(client, ()))
        if self.queue_len + to_wait > self.max_queued:
            why = f"{self.queue_len} wait already"
        elif of_client + to_wait > self.max_client_queued:
            why = f"{of_client} of this client wait already"
        else:
            return
        self.num_rejected += 1
        raise queue_full(why, self._retry_after_s())

    @asynccontextmanager
    async def slot(self, deadline: float, client: str = "") -> AsyncIterator[Turn]:
        """Wait for a place and hold it; `deadline` is in seconds of the event loop's clock.

        Raises:
            ApiError: 429, the queue is full.
            TimeoutError: the deadline passed while waiting.
        """
        loop = asyncio.get_running_loop()
        self.refuse_if_full(client)
        self._num_turns += 1
        turn = Turn(self, client, self._num_turns)
        async with asyncio.timeout_at(deadline):
            await self._wait(turn)
        started = loop.time()
        try:
            yield turn
        finally:
            self._mean_service_s += _SERVICE_EMA_ALPHA * (
                loop.time() - started - self._mean_service_s
            )
            self._give_back(turn)

    async def wait_again(self, turn: Turn) -> None:
        """Give a turn's place back and wait for another one, ahead of the client's later turns."""
        self._give_back(turn)
        turn.is_withdrawn = False
        turn.granted = asyncio.get_running_loop().create_future()
        await self._wait(turn)

    def snapshot(self) -> dict[str, object]:
        """Return the queue and what is in flight: a part of `router` in `/server_info`.

        `batch_size_histogram` says, per request, how many were in flight once it was let through
        (itself included); keys are inclusive upper bounds, powers of two.
        """
        return {
            "queue_len": self.queue_len,
            "in_flight": self.in_flight,
            "num_clients": len({*self._waiting, *self._holding}),
            "max_in_flight": self.max_in_flight,
            "max_queued_requests": self.max_queued,
            "num_rejected": self.num_rejected,
            "batch_size_histogram": self._in_flight_sizes.as_dict(),
        }

    async def _wait(self, turn: Turn) -> None:
        waiting = self._waiting[turn.client]
        waiting.append(turn)
        waiting.sort(key=lambda other: other.order)
        self._grant()
        try:
            await turn.granted
        except asyncio.CancelledError:
            if turn.granted.cancelled():
                _remove(self._waiting, turn)
            else:
                self._give_back(turn)  # the place came in the very moment the caller left
            raise

    def _give_back(self, turn: Turn) -> None:
        if _remove(self._holding, turn):
            self.in_flight -= 1
            self._grant()

    def _grant(self) -> None:
        while self._waiting and self.in_flight < self.max_in_flight:
            # Clients with the fewest places come first; each client's turns in order of arrival.
            turn = min(
                (turns[0] for turns in self._waiting.values()),
                key=lambda turn: (len(self._holding.get(turn.client, ())), turn.order),
            )
            _remove(self._waiting, turn)
            # A caller that has just left may not have taken itself out of the queue yet.
            if not turn.granted.cancelled():
                turn.granted.set_result(None)
                self._holding[turn.client].append(turn)
                self.in_flight += 1
                self._in_flight_sizes.add(self.in_flight)
        if self._waiting and self._withdrawal is None and self._may_withdraw():
            loop = asyncio.get_running_loop()
            self._withdrawal = loop.call_later(_PATIENCE_S, self._withdraw)

    def _may_withdraw(self) -> bool:
        largest = max(self._holding, key=self._num_kept)
        return self._num_kept(largest) > self.max_client_in_flight and any(
            client != largest for client in self._waiting
        )

    def _withdraw(self) -> None:
        """Take places from clients above their share, one for each request of others that waits.

        Requests that wait inside a replica leave it, too, and come back behind those of others.
        """
        self._withdrawal = None
        promised = [turn for turns in self._holding.values() for turn in turns if turn.is_withdrawn]
        num_promised = sum(turn.has_begun for turn in promised)
        while self._waiting and self._may_withdraw():
            largest = max(self._holding, key=self._num_kept)
            num_wanted = sum(len(turns) for c, turns in self._waiting.items() if c != largest)
            turn = self._newest_kept(largest)
            if turn is None or turn.withdraw is None:
                return
            if turn.has_begun and num_promised >= num_wanted:
                return
            turn.is_withdrawn = True
            turn.withdraw()
            num_promised += turn.has_begun
            self.num_withdrawn += 1

    def _newest_kept(self, client: str) -> Turn | None:
        """Return the client's turn that loses least: one that has not begun, else the newest."""
        kept = [
            turn
            for turn in reversed(self._holding[client])
            if turn.withdraw is not None and not turn.is_withdrawn
        ]
        return min(kept, key=lambda turn: turn.has_begun, default=None)

    def _num_kept(self, client: str) -> int:
        return sum(not turn.is_withdrawn for turn in self._holding[client])

    def _retry_after_s(self) -> int:
        """Whole seconds until the queue has moved by one, as far as past requests tell."""
        wait_s = self._mean_service_s * (self.queue_len + 1) / self.max_in_flight
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s)))


def _remove(by_client: dict[str, list[Turn]], turn: Turn) -> bool:
    """Take a turn out of its client's list, and out with an empty list; whether it was there."""
    turns = by_client.get(turn.client, [])
    if turn not in turns:
        return False
    turns.remove(turn)
    if not turns:
        del by_client[turn.client]
    return True
