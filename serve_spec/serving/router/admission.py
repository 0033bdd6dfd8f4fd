"""Admission control: decide which requests are sent to replicas, which wait and which are rejected.

It uses plain asyncio on one event loop. Ray Serve's own queue limit is checked only at entry and
would reject bursts that fit.

Slots are shared fairly between clients. A free slot goes to the waiting client that holds the
fewest. While others wait, a client above its limit gives slots back: its newest requests are
withdrawn from their replicas, wait again and later continue from their last token.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from serve_spec.serving.errors import queue_full
from serve_spec.serving.router.batching import SizeHistogram

_MAX_RETRY_AFTER_S = 60
# Weight of the newest request in the mean service time behind Retry-After.
_SERVICE_EMA_ALPHA = 0.1
# Waiting this long first is cheaper than withdrawing a request: most slots free up sooner.
_PATIENCE_S = 0.5


class AdmissionSlot:
    """One request's slot at the replicas, or its wait for one.

    order: priority and number of arrival; the lowest is served first.
    withdraw: takes the request back from its replica; None while no replica has it.
    has_tokens: whether tokens have arrived, so the request is running.
    """

    def __init__(self, admission: Admission, client: str, order: tuple[int, int]) -> None:
        self.client = client
        self.order = order
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.withdraw: Callable[[], None] | None = None
        self.has_tokens = False
        self.is_withdrawn = False
        """Whether its slot is reserved for another client."""
        self._admission = admission

    async def ensure_slot(self) -> None:
        """If the request was withdrawn, release its slot and wait for another one."""
        self.withdraw, self.has_tokens = None, False
        if self.is_withdrawn:
            await self._admission.wait_again(self)


class Admission:
    """Limits requests at the replicas to `max_in_flight`; up to `max_queued` more wait.

    max_in_flight: for one replica; `resize` sets it for several.
    max_client_fraction: fraction of both limits that one client may hold while others wait; that of
    the queue applies at all times.
    """

    def __init__(
        self, *, max_in_flight: int, max_queued: int, max_client_fraction: float = 1.0
    ) -> None:
        self._of_one_replica = max_in_flight
        self._max_client_fraction = max_client_fraction
        self.max_queued = max_queued
        self.max_client_queued = max(1, int(max_client_fraction * max_queued))
        self.in_flight = 0
        self.num_rejected = 0
        self.num_withdrawn = 0
        """Requests withdrawn to make room for other clients."""
        # By client; oldest first.
        self._waiting: defaultdict[str, list[AdmissionSlot]] = defaultdict(list)
        self._holding: defaultdict[str, list[AdmissionSlot]] = defaultdict(list)
        self._num_slots = 0
        self._withdrawal: asyncio.TimerHandle | None = None
        self._mean_service_s = 0.0
        self._in_flight_sizes = SizeHistogram()
        self.resize(1)

    def resize(self, num_replicas: int) -> None:
        """Set the number of replicas. Requests above a lower limit run to their end."""
        self.max_in_flight = max(1, num_replicas) * self._of_one_replica
        self.max_client_in_flight = max(1, int(self._max_client_fraction * self.max_in_flight))
        self._grant()

    @property
    def queue_len(self) -> int:
        """Number of waiting requests."""
        return sum(map(len, self._waiting.values()))

    def refuse_if_full(self, client: str, num_requests: int = 1) -> None:
        """Raise ApiError (429) unless `num_requests` (choices) more of a client can run or wait."""
        to_wait = num_requests - (self.max_in_flight - self.in_flight)
        if to_wait <= 0:
            return
        of_client = len(self._waiting.get(client, ()))
        if (excess := self.queue_len + to_wait - self.max_queued) > 0:
            why, num_running = f"{self.queue_len} requests are waiting", self.in_flight
        elif (excess := of_client + to_wait - self.max_client_queued) > 0:
            why = f"{of_client} requests of this client are waiting"
            num_running = len(self._holding.get(client, ()))
        else:
            return
        self.num_rejected += 1
        raise queue_full(why, self._retry_after_s(excess, num_running))

    @asynccontextmanager
    async def slot(
        self, deadline: float, client: str = "", priority: int = 0
    ) -> AsyncIterator[AdmissionSlot]:
        """Wait for a slot and hold it; raise ApiError (429) for a full queue, or TimeoutError.

        deadline: in seconds of the event loop's clock. priority: a client's requests, lower first.
        """
        loop = asyncio.get_running_loop()
        self.refuse_if_full(client)
        self._num_slots += 1
        slot = AdmissionSlot(self, client, (priority, self._num_slots))
        async with asyncio.timeout_at(deadline):
            await self._wait(slot)
        started = loop.time()
        try:
            yield slot
        finally:
            self._mean_service_s += _SERVICE_EMA_ALPHA * (
                loop.time() - started - self._mean_service_s
            )
            self._give_back(slot)

    async def wait_again(self, slot: AdmissionSlot) -> None:
        """Release a slot and wait for another one, ahead of the client's later requests."""
        self._give_back(slot)
        slot.is_withdrawn = False
        slot.granted = asyncio.get_running_loop().create_future()
        await self._wait(slot)

    def snapshot(self) -> dict[str, object]:
        """Return the state of the queue for the `router` section of `/server_info`.

        `batch_size_histogram`: requests by the number in flight at their admission; keys are
        inclusive upper bounds.
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

    async def _wait(self, slot: AdmissionSlot) -> None:
        waiting = self._waiting[slot.client]
        waiting.append(slot)
        waiting.sort(key=lambda other: other.order)
        self._grant()
        try:
            await slot.granted
        except asyncio.CancelledError:
            if slot.granted.cancelled():
                _remove(self._waiting, slot)
            else:
                self._give_back(slot)  # granted and cancelled in the same iteration of the loop
            raise

    def _give_back(self, slot: AdmissionSlot) -> None:
        if _remove(self._holding, slot):
            self.in_flight -= 1
            self._grant()

    def _grant(self) -> None:
        while self._waiting and self.in_flight < self.max_in_flight:
            # The client with the fewest slots comes first; its requests by priority and arrival.
            slot = min(
                (slots[0] for slots in self._waiting.values()),
                key=lambda slot: (len(self._holding.get(slot.client, ())), slot.order),
            )
            _remove(self._waiting, slot)
            # A cancelled request may still be in the queue.
            if not slot.granted.cancelled():
                slot.granted.set_result(None)
                self._holding[slot.client].append(slot)
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
        """Withdraw one request of clients above their limit for each waiting request of others."""
        self._withdrawal = None
        promised = [slot for slots in self._holding.values() for slot in slots if slot.is_withdrawn]
        num_promised = sum(slot.has_tokens for slot in promised)
        while self._waiting and self._may_withdraw():
            largest = max(self._holding, key=self._num_kept)
            num_wanted = sum(len(slots) for c, slots in self._waiting.items() if c != largest)
            slot = self._newest_kept(largest)
            if slot is None or slot.withdraw is None:
                return
            if slot.has_tokens and num_promised >= num_wanted:
                return
            slot.is_withdrawn = True
            slot.withdraw()
            num_promised += slot.has_tokens
            self.num_withdrawn += 1

    def _newest_kept(self, client: str) -> AdmissionSlot | None:
        """Return the client's cheapest request to withdraw: one without tokens, else the newest."""
        kept = [
            slot
            for slot in reversed(self._holding[client])
            if slot.withdraw is not None and not slot.is_withdrawn
        ]
        return min(kept, key=lambda slot: slot.has_tokens, default=None)

    def _num_kept(self, client: str) -> int:
        return sum(not slot.is_withdrawn for slot in self._holding[client])

    def _retry_after_s(self, num_places: int, num_running: int) -> int:
        """Estimate the seconds until so many requests have ended, rounded up."""
        wait_s = self._mean_service_s * num_places / max(1, num_running)
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s)))


def _remove(by_client: dict[str, list[AdmissionSlot]], slot: AdmissionSlot) -> bool:
    """Remove a slot from its client's list; return whether it was there."""
    slots = by_client.get(slot.client, [])
    if slot not in slots:
        return False
    slots.remove(slot)
    if not slots:
        del by_client[slot.client]
    return True
