"""The replica's side of its connections to routers.

    request ─┐                               ┌─ one message per round ─> router 1
    request ─┼─ put ─> ResponseQueue of its ─┤
    request ─┘         router                └─ ...

A slow router does not delay generation: its unsent deltas are merged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from serve_spec.log import get_logger
from serve_spec.serving.connection import RouterAddress, configure, read_message, write_message
from serve_spec.serving.messages import (
    Failed,
    GenerateRequest,
    Items,
    ReplicaItem,
    ReplicaMessage,
    RouterMessage,
    decode_router_message,
    encode_replica_message,
    is_last,
    merge_items,
)

logger = get_logger(__name__)

_CONNECT_WITHIN_S = 5.0
_DRAIN_POLL_S = 0.02


class ResponseQueue:
    """Items for one router; iteration yields lists of the items added since the last one."""

    def __init__(self) -> None:
        self.answers: dict[str, asyncio.Task[None]] = {}
        """Tasks of the requests whose last item has not been sent."""
        self.is_load_due = False
        """Whether the next message reports the load."""
        self._items: Items = []
        self._changed = asyncio.Event()
        self._is_closed = False

    def put(self, request_id: str, item: ReplicaItem) -> None:
        """Add an item of a request."""
        self._items.append((request_id, item))
        self._changed.set()

    def report_load(self) -> None:
        """Make the iteration yield, even without items, so that the load is sent."""
        self.is_load_due = True
        self._changed.set()

    def close(self) -> None:
        """End the iteration after the queued items."""
        self._is_closed = True
        self._changed.set()

    async def __aiter__(self) -> AsyncIterator[Items]:
        while not self._is_closed or self._items:
            await self._changed.wait()
            # Let all requests of the round add their items first.
            await asyncio.sleep(0)
            self._changed.clear()
            items, self._items = self._items, []
            if len(items) > len(self.answers):
                items = merge_items(items)
            for request_id, item in items:
                if is_last(item):
                    self.answers.pop(request_id, None)
            yield items


class RouterConnections:
    """The connections to all routers.

    If a connection breaks, the requests of its router are cancelled.

    name: this replica's name.
    answer: puts all items of a request into a queue, the last one included.
    cancel: cancels a request in the engine; no-op if it has ended.
    load: returns `ReplicaMessage.load`.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[[GenerateRequest, ResponseQueue], Coroutine[Any, Any, None]],
        cancel: Callable[[str], None],
        load: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._name = name
        self._answer = answer
        self._cancel = cancel
        self._load = load
        self._queues: dict[str, ResponseQueue] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def connect(self, router: RouterAddress) -> None:
        """Connect to a router and serve its requests; no-op if it is connected.

        Raises:
            OSError: it no longer listens.
        """
        if router.name in self._queues or self._is_closing:
            return
        self._queues[router.name] = queue = ResponseQueue()
        try:
            async with asyncio.timeout(_CONNECT_WITHIN_S):
                reader, writer = await asyncio.open_connection(router.host, router.port)
        except BaseException:
            del self._queues[router.name]
            raise
        configure(writer)
        write_message(writer, router.secret + self._name.encode())
        self.report_load()
        self._start(self._send(queue, writer))
        self._start(self._serve(router.name, queue, reader, writer))

    def report_load(self) -> None:
        """Send the load to all routers; this also serves as a heartbeat."""
        for queue in self._queues.values():
            queue.report_load()

    def num_requests(self) -> dict[str, int]:
        """Return the number of requests by router."""
        return {name: len(box.answers) for name, box in self._queues.items() if box.answers}

    async def drain(self) -> None:
        """Stop accepting requests; return once all have ended."""
        self._is_closing = True
        self.report_load()
        while self.num_requests():
            await asyncio.sleep(_DRAIN_POLL_S)
        self.close()

    def close(self) -> None:
        """Close all connections after their queued items."""
        self._is_closing = True
        for queue in self._queues.values():
            queue.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, router: str, queue: ResponseQueue, reader: asyncio.StreamReader, writer: Any
    ) -> None:
        """Handle messages of a router until the connection closes; then cancel its requests."""
        try:
            while True:
                self._handle(decode_router_message(await read_message(reader)), queue)
        except (EOFError, OSError) as error:
            logger.info(
                "router %s is gone, %d requests cancelled: %r", router, len(queue.answers), error
            )
        except Exception:
            logger.exception("unreadable message of router %s", router)
        finally:
            del self._queues[router]
            for request_id, answer in queue.answers.items():
                self._cancel(request_id)
                answer.cancel()
            queue.answers.clear()
            queue.close()
            writer.close()

    def _handle(self, message: RouterMessage, queue: ResponseQueue) -> None:
        for request_id, request in message.requests:
            if isinstance(request, Failed):
                queue.put(request_id, request)
            else:
                answer = asyncio.create_task(self._answer(request, queue))
                queue.answers[request_id] = answer
        for request_id in message.cancelled:
            self._cancel(request_id)

    async def _send(self, queue: ResponseQueue, writer: asyncio.StreamWriter) -> None:
        """Send items and load reports until the queue is closed."""
        try:
            async for items in queue:
                load = self._load() if queue.is_load_due else None
                queue.is_load_due = False
                message = ReplicaMessage(items, self.num_requests(), load, self._is_closing)
                write_message(writer, encode_replica_message(message))
                await writer.drain()
        except OSError as error:
            logger.debug("connection closed: %r", error)
        finally:
            writer.close()
