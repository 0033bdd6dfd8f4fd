"""The replica's ends of its connections to routers.

    request ─┐                                 ┌─ one message per round ─> router 1
    request ─┼─ put ─> Outbox of their router ─┤
    request ─┘                                 └─ ...

No request waits for a slow router: deltas that it has not taken yet become one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from serve_spec.log import get_logger
from serve_spec.serving.connection import RouterAddress, configure, read_message, write_message
from serve_spec.serving.messages import (
    Commands,
    Failed,
    GenerateRequest,
    Items,
    News,
    ReplicaItem,
    decode_commands,
    encode,
    is_last,
    merged_items,
)

logger = get_logger(__name__)

_CONNECT_WITHIN_S = 5.0
_DRAIN_LOOK_S = 0.02


class Outbox:
    """Items of one router's requests; iterating gives lists of what has come since the last one."""

    def __init__(self) -> None:
        self.answers: dict[str, asyncio.Task[None]] = {}
        """The requests whose last item has not been handed out, and what works on each."""
        self.is_load_due = False
        """Whether the router is to hear how busy the replica is."""
        self._items: Items = []
        self._has_news = asyncio.Event()
        self._is_closed = False

    def put(self, request_id: str, item: ReplicaItem) -> None:
        """Add an item of a request."""
        self._items.append((request_id, item))
        self._has_news.set()

    def beat(self) -> None:
        """Let the reader have a list, if need be an empty one, and the load with it."""
        self.is_load_due = True
        self._has_news.set()

    def close(self) -> None:
        """End the iteration once everything is handed out."""
        self._is_closed = True
        self._has_news.set()

    async def __aiter__(self) -> AsyncIterator[Items]:
        while not self._is_closed or self._items:
            await self._has_news.wait()
            # The requests of a round put their items one by one: let all of them do so.
            await asyncio.sleep(0)
            self._has_news.clear()
            items, self._items = self._items, []
            if len(items) > len(self.answers):
                items = merged_items(items)
            for request_id, item in items:
                if is_last(item):
                    self.answers.pop(request_id, None)
            yield items


class RouterConnections:
    """The connections to all routers that have called for this replica.

    A connection that breaks ends the requests of its router.

    name: of this replica.
    answer: puts everything that a request says into an outbox, the last item included.
    cancel: ends a request in the engine; harmless if it has ended.
    load: how busy the replica is, for `News.load`.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[[GenerateRequest, Outbox], Coroutine[Any, Any, None]],
        cancel: Callable[[str], None],
        load: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._name = name
        self._answer = answer
        self._cancel = cancel
        self._load = load
        self._outboxes: dict[str, Outbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    async def connect(self, router: RouterAddress) -> None:
        """Connect to a router unless there is a connection, and serve it from now on.

        Raises:
            OSError: it does not listen any more.
        """
        if router.name in self._outboxes or self._is_closing:
            return
        self._outboxes[router.name] = outbox = Outbox()
        try:
            async with asyncio.timeout(_CONNECT_WITHIN_S):
                reader, writer = await asyncio.open_connection(router.host, router.port)
        except BaseException:
            del self._outboxes[router.name]
            raise
        configure(writer)
        write_message(writer, router.secret + self._name.encode())
        self.beat()
        self._start(self._send(outbox, writer))
        self._start(self._serve(router.name, outbox, reader, writer))

    def beat(self) -> None:
        """Tell all routers how busy the replica is, which shows them that it is alive, too."""
        for outbox in self._outboxes.values():
            outbox.beat()

    def num_requests(self) -> dict[str, int]:
        """Return how many requests are here, by router."""
        return {name: len(box.answers) for name, box in self._outboxes.items() if box.answers}

    async def drain(self) -> None:
        """Return once all requests have ended. Routers are told to send no more."""
        self._is_closing = True
        self.beat()
        while self.num_requests():
            await asyncio.sleep(_DRAIN_LOOK_S)
        self.close()

    def close(self) -> None:
        """Close all connections once what their requests said has left."""
        self._is_closing = True
        for outbox in self._outboxes.values():
            outbox.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(
        self, router: str, outbox: Outbox, reader: asyncio.StreamReader, writer: Any
    ) -> None:
        """Do what a router wants until the connection ends; then end its requests."""
        try:
            while True:
                self._take(decode_commands(await read_message(reader)), outbox)
        except (EOFError, OSError) as error:
            logger.info(
                "router %s is gone, %d requests end: %r", router, len(outbox.answers), error
            )
        except Exception:
            logger.exception("a message of router %s cannot be read", router)
        finally:
            del self._outboxes[router]
            for request_id, answer in outbox.answers.items():
                self._cancel(request_id)
                answer.cancel()
            outbox.answers.clear()
            outbox.close()
            writer.close()

    def _take(self, commands: Commands, outbox: Outbox) -> None:
        for request_id, request in commands.requests:
            if isinstance(request, Failed):
                outbox.put(request_id, request)
            else:
                answer = asyncio.create_task(self._answer(request, outbox))
                outbox.answers[request_id] = answer
        for request_id in commands.cancelled:
            self._cancel(request_id)

    async def _send(self, outbox: Outbox, writer: asyncio.StreamWriter) -> None:
        """Send what requests say until the outbox is closed."""
        try:
            async for items in outbox:
                load = self._load() if outbox.is_load_due else None
                outbox.is_load_due = False
                news = News(items, self.num_requests(), load, self._is_closing)
                write_message(writer, encode(news))
                await writer.drain()
        except OSError as error:
            logger.debug("`_serve` notices it as well: %r", error)
        finally:
            writer.close()
