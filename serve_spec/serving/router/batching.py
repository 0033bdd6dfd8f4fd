"""Send requests that arrive together in one message, and distribute the items of replicas.

    generate(request) ─┐                                        ┌─> items of that request
    generate(request) ─┼─> one message ─> replica ─> messages ──┼─> items of that request
    generate(request) ─┘                (one message per round) └─> items of that request

With several replicas, a batch is split among them, so that none stays idle.

Plain asyncio. A subclass sends requests to replicas; `receive` takes their messages.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Hashable, Iterable, Sequence
from contextvars import Context
from dataclasses import dataclass

from serve_spec.core.request import TokenDelta
from serve_spec.serving import messages
from serve_spec.serving.errors import ApiError, client_too_slow, engine_failed


class SizeHistogram:
    """Histogram of sizes ≥ 1 by powers of two."""

    def __init__(self) -> None:
        self.last = 0
        """The last size counted; 0 before the first."""
        self._counts: Counter[int] = Counter()

    def add(self, size: int) -> None:
        """Count one size."""
        self.last = size
        self._counts[1 << (size - 1).bit_length()] += 1

    def as_dict(self) -> dict[str, int]:
        """Return the counts; keys are inclusive upper bounds, ascending."""
        return {str(bound): count for bound, count in sorted(self._counts.items())}


# Estimated memory of objects.
_DELTA_BYTES = 200
_TOKEN_BYTES = 40
_LOGPROB_BYTES = 100


class ItemStream:
    """A queue with one reader, limited to about `max_unread_bytes` of memory."""

    def __init__(self, max_unread_bytes: int) -> None:
        self._max_unread_bytes = max_unread_bytes
        self._num_unread_bytes = 0
        self._items: deque[messages.ReplicaItem | ApiError] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, item: messages.ReplicaItem | ApiError) -> bool:
        """Add an item and return True; if the queue is full, replace all items by an error."""
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

    async def get(self) -> messages.ReplicaItem:
        """Return the next item, or raise it; consecutive deltas are merged into one."""
        if not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        item = self._items.popleft()
        if isinstance(item, ApiError):
            raise item
        if not self._items:
            self._num_unread_bytes = 0
        elif isinstance(item, TokenDelta):
            return messages.merge_deltas([item, *self._next_deltas()])
        return item

    def _next_deltas(self) -> list[TokenDelta]:
        deltas = []
        while self._items and isinstance(delta := self._items[0], TokenDelta):
            deltas.append(delta)
            self._items.popleft()
        self._num_unread_bytes = 0
        return deltas


def _num_bytes(delta: TokenDelta) -> int:
    num_logprobs = sum(1 + len(token.top) for token in delta.logprobs or ())
    return (
        _DELTA_BYTES
        + len(delta.text)
        + _TOKEN_BYTES * len(delta.token_ids)
        + _LOGPROB_BYTES * num_logprobs
    )


# Histograms are kept for this many of the newest replicas.
_MAX_REPLICAS = 64


@dataclass(eq=False)
class _PendingRequest:
    request: messages.GenerateRequest
    group: Hashable
    items: ItemStream
    sent_at: float = 0.0
    """Time of sending, in seconds of the event loop's clock."""
    replica: str | None = None
    """The replica it was sent to."""
    is_open: bool = True
    """Whether its last item has not arrived yet."""
    has_tokens: bool = False

    def close(self, last: messages.ReplicaItem | ApiError | None = None) -> None:
        """Close the request, with `last` as its last item if it is open."""
        if self.is_open and last is not None:
            self.items.put(last)
        self.is_open = False


class Batcher(ABC):
    """Collects requests for `batch_wait_s` and sends them in batches of up to `max_batch_size`.

    num_parts: maximum number of equal parts of a batch, each of which goes to one replica.
    group_of: requests of different groups are sent separately.
    max_unread_bytes: approximate memory limit for the unread items of one request.
    """

    def __init__(
        self,
        *,
        batch_wait_s: float,
        max_batch_size: int,
        num_parts: int = 1,
        group_of: Callable[[messages.GenerateRequest], Hashable] = lambda request: None,
        max_unread_bytes: int = 2**20,
    ) -> None:
        self._batch_wait_s = batch_wait_s
        self._max_batch_size = max_batch_size
        self.num_parts = num_parts
        self._group_of = group_of
        self._max_unread_bytes = max_unread_bytes
        self._waiting: dict[Hashable, list[_PendingRequest]] = {}
        self._timers: dict[Hashable, asyncio.TimerHandle] = {}
        self._requests: dict[str, _PendingRequest] = {}
        self._by_replica: dict[str, dict[str, _PendingRequest]] = {}
        """Requests sent to each replica, open or not yet left by their reader."""
        self._to_cancel: dict[str, list[str]] = {}
        self._submissions: set[asyncio.Task[None]] = set()
        self._submission_sizes = SizeHistogram()
        self._replica_sizes: dict[str, SizeHistogram] = {}
        self.num_interrupted = 0
        """Requests whose replica was lost before they ended."""
        self.num_resumed = 0
        """Requests that were resumed on another replica after a failure."""
        self.num_withdrawn = 0
        """Requests that were taken back from their replica to continue elsewhere or later."""

    @abstractmethod
    async def ready(self) -> None:
        """Wait until there is a replica for `send`; raise ApiError if none is expected."""

    @abstractmethod
    async def refuse_if_closing(self) -> None:
        """Raise ApiError if all replicas shut down, and only end what they and this router have."""

    @abstractmethod
    def send(self, requests: Sequence[messages.GenerateRequest]) -> str:
        """Send requests to one replica and return its name; `receive` gets its messages."""

    @abstractmethod
    def cancel(self, replica: str, request_ids: Sequence[str]) -> None:
        """Cancel requests at a replica; no-op if they or the replica are gone."""

    async def generate(
        self, request: messages.GenerateRequest
    ) -> AsyncGenerator[messages.ReplicaItem, None]:
        """Yield a replica's items for a request; closing the generator cancels the request.

        Deltas that arrive while the caller is busy are merged. Raises ApiError: no replica is
        available, the replica is lost, or the caller reads too slowly.
        """
        # Requests that avoid different replicas cannot share a message.
        group = self._group_of(request), request.avoid
        pending = _PendingRequest(request, group, ItemStream(self._max_unread_bytes))
        self._requests[request.request_id] = pending
        self._join(group, pending)
        try:
            while True:
                item = await pending.items.get()
                yield item
                if messages.is_last(item):
                    return
        finally:
            self._leave(pending)

    def withdraw(self, request_id: str) -> None:
        """Cancel a request; its `generate` yields `Withdrawn`. No-op if it has ended."""
        pending = self._requests.get(request_id)
        if pending is not None and pending.is_open:
            self._leave(pending)
            self.num_withdrawn += 1
            pending.items.put(messages.Withdrawn())

    def not_started(self, for_s: float) -> dict[str, list[str]]:
        """Return, by replica, requests without a token for `for_s` seconds, oldest first."""
        before = asyncio.get_running_loop().time() - for_s
        waiting: dict[str, list[str]] = {}
        for request_id, pending in self._requests.items():
            is_waiting = pending.is_open and not pending.has_tokens
            if pending.replica and is_waiting and pending.sent_at <= before:
                waiting.setdefault(pending.replica, []).append(request_id)
        return waiting

    def batching(self) -> dict[str, object]:
        """Return counters and sizes for the `router` section of `/server_info`.

        Histograms, by inclusive upper bounds: requests per batch sent, and requests of this router
        on each replica after each batch.
        """
        return {
            "num_interrupted": self.num_interrupted,
            "num_resumed": self.num_resumed,
            "num_withdrawn": self.num_withdrawn,
            "submission_size": self._submission_sizes.last,
            "submission_size_histogram": self._submission_sizes.as_dict(),
            "replica_batch_size_histograms": {
                name: sizes.as_dict() for name, sizes in self._replica_sizes.items()
            },
        }

    def receive(self, replica: str, message: messages.ReplicaMessage) -> None:
        """Pass each item of a message to its request."""
        for request_id, item in message.items:
            pending = self._requests.get(request_id)
            if pending is None or not pending.is_open:
                continue
            if messages.is_last(item):
                pending.close(item)
                continue
            pending.has_tokens = isinstance(item, TokenDelta)
            self.num_resumed += pending.request.is_resumption and not pending.has_tokens
            if not pending.items.put(item):  # the client does not read
                pending.close()
                self._cancel(replica, request_id)

    def fail_replica(self, replica: str, error: ApiError) -> None:
        """Fail all open requests of a replica."""
        self._fail([self._requests[name] for name in self._open_requests(replica)], error)

    def num_open(self, replica: str) -> int:
        """Return the number of open requests at a replica."""
        sent = self._by_replica.get(replica)
        return sum([pending.is_open for pending in sent.values()]) if sent else 0

    def known_requests(self, replica: str) -> list[str]:
        """Return the ids of the open requests at a replica, and of those about to be cancelled."""
        return self._open_requests(replica) + self._to_cancel.get(replica, [])

    def _open_requests(self, replica: str) -> list[str]:
        sent = self._by_replica.get(replica, {})
        return [request_id for request_id, pending in sent.items() if pending.is_open]

    def _join(self, group: Hashable, pending: _PendingRequest) -> None:
        waiting = self._waiting.setdefault(group, [])
        waiting.append(pending)
        if len(waiting) >= self._max_batch_size:
            self._submit_group(group)
        elif len(waiting) == 1:
            loop = asyncio.get_running_loop()
            self._timers[group] = loop.call_later(self._batch_wait_s, self._submit_group, group)

    def _leave(self, pending: _PendingRequest) -> None:
        """Remove a request and cancel it at its replica; no-op if it has ended."""
        request_id = pending.request.request_id
        is_known = self._requests.pop(request_id, None) is not None
        self._forget_sent(pending)
        if not is_known or not pending.is_open:
            return
        pending.close()
        if pending.replica is not None:
            self._cancel(pending.replica, request_id)
        elif pending in (waiting := self._waiting.get(pending.group, [])):
            waiting.remove(pending)
            if not waiting:
                self._stop_waiting(pending.group)

    def _forget_sent(self, pending: _PendingRequest) -> None:
        """Remove a request from those of its replica; no-op if it was not sent."""
        replica, request_id = pending.replica, pending.request.request_id
        if replica is not None and (sent := self._by_replica.get(replica)) is not None:
            if sent.get(request_id) is pending:
                del sent[request_id]
            if not sent:
                del self._by_replica[replica]

    def _submit_group(self, group: Hashable) -> None:
        requests = self._stop_waiting(group)
        num_parts = min(self.num_parts, len(requests))
        for part in range(num_parts):
            # An inherited context would let Ray cancel the task with its request.
            work = self._submit(requests[part::num_parts])
            task = asyncio.create_task(work, context=Context())
            self._submissions.add(task)
            task.add_done_callback(self._submissions.discard)

    def _stop_waiting(self, group: Hashable) -> list[_PendingRequest]:
        timer = self._timers.pop(group, None)
        if timer is not None:
            timer.cancel()
        return self._waiting.pop(group)

    async def _submit(self, requests: list[_PendingRequest]) -> None:
        self._submission_sizes.add(len(requests))
        lost: ApiError = engine_failed("sending to the replica was cancelled")
        try:
            await self.ready()
            requests = [pending for pending in requests if pending.is_open]
            if requests:
                self._bind(requests, self.send([pending.request for pending in requests]))
        except ApiError as error:
            lost = error
        except Exception as error:  # no request may wait forever
            lost = engine_failed(f"sending to the replica failed ({error!r})")
        finally:
            self._fail([pending for pending in requests if pending.replica is None], lost)

    def _bind(self, requests: list[_PendingRequest], replica: str) -> None:
        now = asyncio.get_running_loop().time()
        for pending in requests:
            pending.replica, pending.sent_at = replica, now
            self._by_replica.setdefault(replica, {})[pending.request.request_id] = pending
        sizes = self._replica_sizes.setdefault(replica, SizeHistogram())
        sizes.add(self.num_open(replica))
        if len(self._replica_sizes) > _MAX_REPLICAS:
            del self._replica_sizes[next(iter(self._replica_sizes))]

    def _fail(self, requests: Iterable[_PendingRequest], error: ApiError) -> None:
        """Fail the open requests, and cancel them at their replicas."""
        for pending in requests:
            if pending.is_open:
                self.num_interrupted += 1
                pending.close(error)
                if pending.replica is not None:
                    self._cancel(pending.replica, pending.request.request_id)

    def _cancel(self, replica: str, request_id: str) -> None:
        """Cancel a request at a replica; cancellations of one loop iteration share a message."""
        if not self._to_cancel:
            asyncio.get_running_loop().call_soon(self._send_cancellations)
        self._to_cancel.setdefault(replica, []).append(request_id)

    def _send_cancellations(self) -> None:
        to_cancel, self._to_cancel = self._to_cancel, {}
        for replica, request_ids in to_cancel.items():
            self.cancel(replica, request_ids)
