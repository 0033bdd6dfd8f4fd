"""Requests that arrive together travel together: one call to one replica, one stream back.

    generate(request) ─┐                                    ┌─> items of that request
    generate(request) ─┼─> Submission ─> replica ─> Items ──┼─> items of that request
    generate(request) ─┘                                    └─> items of that request

Where there are several replicas, a batch is shared out first: all of it on one while another has
nothing to do would take longer.

Plain asyncio: how a submission reaches a replica is the `Transport`'s business. What is on its way
is bounded: a request has at most `max_tokens` items, and the door bounds the requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable
from contextlib import aclosing
from contextvars import Context
from typing import Any, Protocol

from serve_spec.core.request import TokenDelta
from serve_spec.serving.errors import ApiError, ReplicaLost, engine_failed
from serve_spec.serving.messages import (
    Accepted,
    Cancellation,
    Failed,
    GenerateRequest,
    Items,
    ReplicaItem,
    Submission,
    Withdrawn,
    is_last,
)
from serve_spec.serving.sizes import SizeHistogram

# Replicas come and go; histograms are kept of the newest.
_MAX_REPLICAS = 64


class Transport(Protocol):
    """The way to the replicas."""

    def send(self, submission: Submission) -> AsyncGenerator[Items, None]:
        """What one replica answers; closing the generator ends all its requests there.

        Raises:
            ApiError: no replica can take them, or the one that had them is gone.
        """
        ...

    async def cancel(self, cancellation: Cancellation) -> None:
        """Ends requests where they run; harmless if they, or the replica, are gone."""
        ...


class _Mailbox:
    """One request's items on their way to whoever asked."""

    def __init__(self, request: GenerateRequest, group: Hashable) -> None:
        self.request = request
        self.group = group
        self.items: asyncio.Queue[ReplicaItem | ApiError] = asyncio.Queue()
        self.courier: _Courier | None = None
        self.sent_at = 0.0
        """When it was handed over, in seconds of the event loop's clock."""
        self.has_begun = False
        """Whether tokens have come."""


class Batcher:
    """Collects requests for `batch_wait_s` and hands them over, `max_batch_size` at most.

    num_shares: how many submissions a batch may become, of sizes that differ by one at most; which
    replica each goes to is decided elsewhere.
    group_of: requests of different groups do not travel together.
    """

    def __init__(
        self,
        transport: Transport,
        sender: str,
        *,
        batch_wait_s: float,
        max_batch_size: int,
        num_shares: int = 1,
        group_of: Callable[[GenerateRequest], Hashable] = lambda request: None,
    ) -> None:
        self._transport = transport
        self._sender = sender
        self._batch_wait_s = batch_wait_s
        self._max_batch_size = max_batch_size
        self._num_shares = num_shares
        self._group_of = group_of
        self._waiting: dict[Hashable, list[_Mailbox]] = {}
        self._timers: dict[Hashable, asyncio.TimerHandle] = {}
        self._couriers: set[_Courier] = set()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._submission_sizes = SizeHistogram()
        self._replica_sizes: dict[str, SizeHistogram] = {}
        self.num_interrupted = 0
        """Requests whose submission broke off before they had ended."""
        self.num_resumed = 0
        """Requests that a replica took over from one that had failed them."""
        self.num_withdrawn = 0
        """Requests that were taken back from their replica, to go on elsewhere or later."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplicaItem, None]:
        """What a replica answers to one request; closing the generator ends the request there.

        Raises:
            ApiError: as `Transport.send`.
        """
        # Those that a replica failed travel apart from those it did not.
        group = self._group_of(request), request.avoid
        mailbox = _Mailbox(request, group)
        self._mailboxes[request.request_id] = mailbox
        self._join(group, mailbox)
        try:
            while True:
                item = await mailbox.items.get()
                if isinstance(item, ApiError):
                    raise item
                yield item
                if is_last(item):
                    return
        finally:
            self._leave(mailbox)

    def withdraw(self, request_id: str) -> None:
        """End a request where it is; its `generate` yields `Withdrawn`. Harmless if it is over."""
        mailbox = self._mailboxes.get(request_id)
        if mailbox is not None:
            self._leave(mailbox)
            self.num_withdrawn += 1
            mailbox.items.put_nowait(Withdrawn())

    def not_begun(self, for_s: float) -> dict[str, list[str]]:
        """Return the requests that replicas have had for so long without a token, oldest first."""
        before = asyncio.get_running_loop().time() - for_s
        waiting: dict[str, list[str]] = {}
        for request_id, mailbox in self._mailboxes.items():
            replica = mailbox.courier and mailbox.courier.replica
            if replica and not mailbox.has_begun and mailbox.sent_at <= before:
                waiting.setdefault(replica, []).append(request_id)
        return waiting

    def snapshot(self) -> dict[str, object]:
        """Sizes, JSON-able. Histogram keys are inclusive upper bounds, powers of two.

        `submission_size_histogram`: requests per hand-over. `replica_batch_sizes`: requests of
        this router on each replica now. `replica_batch_size_histograms`: how many there were once
        a submission had been taken, itself included.
        """
        return {
            "num_interrupted": self.num_interrupted,
            "num_resumed": self.num_resumed,
            "num_withdrawn": self.num_withdrawn,
            "submission_size": self._submission_sizes.last,
            "submission_size_histogram": self._submission_sizes.as_dict(),
            "replica_batch_sizes": {name: self._rows(name) for name in self._replica_sizes},
            "replica_batch_size_histograms": {
                name: sizes.as_dict() for name, sizes in self._replica_sizes.items()
            },
        }

    def _join(self, group: Hashable, mailbox: _Mailbox) -> None:
        waiting = self._waiting.setdefault(group, [])
        waiting.append(mailbox)
        if len(waiting) >= self._max_batch_size:
            self._submit(group)
        elif len(waiting) == 1:
            loop = asyncio.get_running_loop()
            self._timers[group] = loop.call_later(self._batch_wait_s, self._submit, group)

    def _leave(self, mailbox: _Mailbox) -> None:
        if self._mailboxes.pop(mailbox.request.request_id, None) is None:
            return  # it was withdrawn
        if mailbox.courier is not None:
            mailbox.courier.leave(mailbox)
            return
        waiting = self._waiting[mailbox.group]
        waiting.remove(mailbox)
        if not waiting:
            self._stop_waiting(mailbox.group)

    def _submit(self, group: Hashable) -> None:
        mailboxes = self._stop_waiting(group)
        num_shares = min(self._num_shares, len(mailboxes))
        for share in range(num_shares):
            self._hand_over(mailboxes[share::num_shares])

    def _hand_over(self, mailboxes: list[_Mailbox]) -> None:
        self._submission_sizes.add(len(mailboxes))
        submission = Submission(self._sender, [mailbox.request for mailbox in mailboxes])
        courier = _Courier(self, self._transport, submission, mailboxes)
        self._couriers.add(courier)
        courier.task.add_done_callback(lambda task: self._couriers.discard(courier))

    def _stop_waiting(self, group: Hashable) -> list[_Mailbox]:
        timer = self._timers.pop(group, None)
        if timer is not None:
            timer.cancel()
        return self._waiting.pop(group)

    def note_replica(self, replica: str) -> None:
        """A courier's submission has been taken."""
        sizes = self._replica_sizes.setdefault(replica, SizeHistogram())
        sizes.add(max(1, self._rows(replica)))
        if len(self._replica_sizes) > _MAX_REPLICAS:
            del self._replica_sizes[next(iter(self._replica_sizes))]

    def _rows(self, replica: str) -> int:
        return sum(c.submission.num_open for c in self._couriers if c.replica == replica)


class _Courier:
    """Carries one submission out and its items back, each to its mailbox."""

    def __init__(
        self,
        batcher: Batcher,
        transport: Transport,
        submission: Submission,
        mailboxes: list[_Mailbox],
    ) -> None:
        self.submission = submission
        self.replica: str | None = None
        self._transport = transport
        self._batcher = batcher
        self._open = {mailbox.request.request_id: mailbox for mailbox in mailboxes}
        # Gone before it is known where they run.
        self._gone: list[str] = []
        self._calls: set[asyncio.Task[None]] = set()
        now = asyncio.get_running_loop().time()
        for mailbox in mailboxes:
            mailbox.courier, mailbox.sent_at = self, now
        self.task = _of_nobody(self._carry())

    def leave(self, mailbox: _Mailbox) -> None:
        """The listener is gone: its request ends, now; harmless if it has ended."""
        if self._close(mailbox.request.request_id) is None:
            return
        if not self._open:
            self.task.cancel()
            return
        self._gone.append(mailbox.request.request_id)
        self._cancel_gone()

    async def _carry(self) -> None:
        lost: ApiError = ReplicaLost(engine_failed("the replica ended the completion early"))
        try:
            async with aclosing(self._transport.send(self.submission)) as answers:
                async for items in answers:
                    self._deliver(items)
        except ApiError as error:
            lost = error
        except Exception as error:  # whatever broke, nobody may wait for ever
            lost = engine_failed(f"the way to the replica broke ({error!r})")
        finally:
            self._batcher.num_interrupted += len(self._open)
            for request_id in list(self._open):
                self._close(request_id, lost)

    def _deliver(self, items: Items) -> None:
        if self.replica is None:
            self._learn_replica(items)
        for request_id, item in items:
            if is_last(item):
                self._close(request_id, item)
            elif request_id in self._open:
                mailbox = self._open[request_id]
                mailbox.items.put_nowait(item)
                mailbox.has_begun = isinstance(item, TokenDelta)
                is_resumed = isinstance(item, Accepted) and mailbox.request.is_resumption
                self._batcher.num_resumed += is_resumed

    def _close(
        self, request_id: str, last: ReplicaItem | ApiError | None = None
    ) -> _Mailbox | None:
        """Ends one request, with its last item if its listener is still to hear it."""
        mailbox = self._open.pop(request_id, None)
        if mailbox is not None:
            self.submission.num_open -= 1
            if last is not None:
                mailbox.items.put_nowait(last)
        return mailbox

    def _learn_replica(self, items: Items) -> None:
        named = (item.replica for _, item in items if isinstance(item, Accepted | Failed))
        self.replica = next(named, None)
        if self.replica is not None:
            self._batcher.note_replica(self.replica)
            self._cancel_gone()

    def _cancel_gone(self) -> None:
        if self.replica is None or not self._gone:
            return
        cancellation = Cancellation(self.replica, tuple(self._gone))
        self._gone.clear()
        call = _of_nobody(self._transport.cancel(cancellation))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)


def _of_nobody(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task that inherits nothing from the request that happens to start it.

    Serve and Ray find a call's parent in its context, and cancel the children with the parent: one
    client that leaves would take everybody along who travelled with it.
    """
    return asyncio.create_task(work, context=Context())
