"""Connections between routers and replicas.

A router listens; replicas connect when Serve passes them its address, and report their load every
second. A Ray Serve call takes milliseconds, which would add to the time to first token.

    request ─┐                               ┌─ one message per round ─> router 1
    request ─┼─ put ─> ResponseQueue of its ─┤
    request ─┘         router                └─ ...

A slow router does not delay generation: its unsent deltas are merged.

A router answers each load report with the requests that it has at the replica. The replica cancels
the others, so that no lost cancellation keeps a request running.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from serve_spec.log import get_logger
from serve_spec.serving import messages
from serve_spec.serving.errors import ApiError, ReplicaLost, engine_failed, no_replica
from serve_spec.serving.router.stream import MessageStream

if TYPE_CHECKING:
    from serve_spec.serving.router.batching import Batcher

logger = get_logger(__name__)

_NUM_SECRET_BYTES = 32
_ROUTER, _REPLICA = b"router", b"replica"
_HANDSHAKE_WITHIN_S = 10.0
_CONNECT_WITHIN_S = 5.0
_DRAIN_POLL_S = 0.02
_QUIET_POLLS = 25


class RouterAddress(NamedTuple):
    """The address of a router and the key that authenticates replicas."""

    name: str
    """Unique among routers."""
    host: str
    port: int
    secret: bytes


@dataclass(eq=False)
class ReplicaConnection:
    """One connection and the latest load report of its replica."""

    stream: MessageStream
    num_requests: Mapping[str, int] = field(default_factory=dict)
    """Requests at the replica by router."""
    load: Mapping[str, Any] = field(default_factory=dict)
    """`EngineReplica.record_routing_stats`; empty before the first report."""
    is_closing: bool = False
    """Whether the replica is shutting down."""
    num_quiet_checks: int = 0
    is_unresponsive: bool = False

    @property
    def is_usable(self) -> bool:
        """Whether requests may be sent to the replica."""
        return bool(self.load) and not (self.is_closing or self.is_unresponsive)


class ReplicaConnections:
    """The connections of all replicas.

    name: this router's name. host: the address at which replicas reach it.
    handler: receives messages and failures of replicas.
    max_quiet_checks: `check` calls without a message that make a replica unresponsive.
    """

    def __init__(self, name: str, host: str, handler: Batcher, max_quiet_checks: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        secret = secrets.token_bytes(_NUM_SECRET_BYTES)
        self.address = RouterAddress(name, host, self._socket.getsockname()[1], secret)
        self._handler = handler
        self._max_quiet_checks = max_quiet_checks
        self._connections: dict[str, ReplicaConnection] = {}
        self._changed = asyncio.Event()

    def usable(self) -> dict[str, ReplicaConnection]:
        """Return the connections of replicas that take requests."""
        return {
            name: connection
            for name, connection in self._connections.items()
            if connection.is_usable
        }

    def reachable(self) -> dict[str, ReplicaConnection]:
        """Return `usable`, or else the replicas that shut down but still take requests."""
        return self.usable() or {
            name: connection
            for name, connection in self._connections.items()
            if connection.is_closing and not connection.is_unresponsive
        }

    async def changed(self, within_s: float) -> None:
        """Return when a replica becomes usable, or after `within_s` seconds."""
        self._changed.clear()
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def send(self, replica: str, message: bytes) -> None:
        """Send a message to a replica; no-op if it is gone."""
        if replica in self._connections:
            self._connections[replica].stream.write(message)

    def check(self) -> None:
        """Fail the requests of replicas that have become unresponsive.

        Checks are counted instead of seconds, because none happen while this process is stalled.
        """
        for replica, connection in self._connections.items():
            connection.num_quiet_checks += 1
            if (
                connection.num_quiet_checks >= self._max_quiet_checks
                and not connection.is_unresponsive
            ):
                connection.is_unresponsive = True
                logger.error("replica %s is unresponsive; its requests continue elsewhere", replica)
                why = no_replica(f"replica {replica} does not respond")
                self._handler.fail_replica(replica, ReplicaLost(why, replica=replica))

    async def serve(self) -> None:
        """Accept connections of replicas; never return."""
        server = await asyncio.start_server(self._serve_replica, sock=self._socket)
        try:
            # Not `serve_forever`: since Python 3.12, its cancellation waits for all connections.
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()

    async def _serve_replica(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        stream = MessageStream(reader, writer)
        replica = await self._authenticate(stream)
        if replica is None:
            stream.close()
            return
        self._replace(replica)
        connection = self._connections[replica] = ReplicaConnection(stream)
        end = no_replica("the replica that had this request is gone")
        try:
            while True:
                message = messages.decode_replica_message(await stream.read())
                self._handle(replica, connection, message)
        except (EOFError, OSError) as error:
            logger.info("replica %s is gone: %r", replica, error)
        except Exception as error:  # no request may wait forever
            end = engine_failed(f"unreadable message of the replica ({error!r})")
            logger.exception("unreadable message of replica %s", replica)
        finally:
            stream.close()
            if self._connections.get(replica) is connection:
                self._lose(replica, end)

    def _replace(self, replica: str) -> None:
        """Close the connection that a new one of the same replica replaces."""
        if (old := self._connections.get(replica)) is not None:
            old.stream.close()
            self._lose(replica, no_replica("the replica has connected anew"))

    def _lose(self, replica: str, why: ApiError) -> None:
        """Forget a connection and fail its requests, which the replica cancels."""
        del self._connections[replica]
        self._handler.fail_replica(replica, ReplicaLost(why, replica=replica))

    async def _authenticate(self, stream: MessageStream) -> str | None:
        """Return the name of the connecting replica; None if it does not know the secret."""
        try:
            async with asyncio.timeout(_HANDSHAKE_WITHIN_S):
                name = await stream.authenticate(self.address.secret, _ROUTER, _REPLICA)
                return None if name is None else name.decode()
        except (EOFError, OSError, TimeoutError) as error:
            logger.info("connection closed without a handshake: %r", error)
            return None

    def _handle(
        self, replica: str, connection: ReplicaConnection, message: messages.ReplicaMessage
    ) -> None:
        was_usable = connection.is_usable
        connection.num_quiet_checks = 0
        connection.is_unresponsive = False
        connection.num_requests = message.num_requests
        connection.load = message.load or connection.load
        connection.is_closing = message.is_closing
        if connection.is_usable and not was_usable:
            self._changed.set()
        self._handler.receive(replica, message)
        if message.load is not None:
            known_ids = self._handler.known_requests(replica)
            connection.stream.write(messages.encode_router_message(known_ids=known_ids))


class ResponseQueue:
    """Items for one router; iteration yields lists of the items added since the last one."""

    def __init__(self) -> None:
        self.answers: dict[str, asyncio.Task[None]] = {}
        """Tasks of the requests whose last item has not been sent."""
        self.is_load_due = False
        """Whether the next message reports the load."""
        self._items: messages.Items = []
        self._changed = asyncio.Event()
        self._is_closed = False

    def put(self, request_id: str, item: messages.ReplicaItem) -> None:
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

    async def __aiter__(self) -> AsyncIterator[messages.Items]:
        while not self._is_closed or self._items:
            await self._changed.wait()
            # Let all requests of the round add their items first.
            await asyncio.sleep(0)
            self._changed.clear()
            items, self._items = self._items, []
            if len(items) > len(self.answers):
                items = messages.merge_items(items)
            for request_id, item in items:
                if messages.is_last(item):
                    self.answers.pop(request_id, None)
            yield items


@dataclass(eq=False)
class RouterConnections:
    """The connections to all routers. If one breaks, the requests of its router are cancelled.

    name: this replica's name. load: returns `ReplicaMessage.load`.
    answer: puts all items of a request into a queue, the last one included; cancelling it cancels
    the request in the engine.
    flush_cache: drops cached prefixes.
    """

    name: str
    answer: Callable[[messages.GenerateRequest, ResponseQueue], Coroutine[Any, Any, None]]
    load: Callable[[], Mapping[str, Any]]
    flush_cache: Callable[[], None]
    _queues: dict[str, ResponseQueue] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _is_closing: bool = False

    async def connect(self, router: RouterAddress) -> None:
        """Connect to a router and serve its requests, unless it is connected; raise OSError."""
        if router.name in self._queues or self._is_closing:
            return
        self._queues[router.name] = queue = ResponseQueue()
        try:
            async with asyncio.timeout(_CONNECT_WITHIN_S):
                stream = MessageStream(*await asyncio.open_connection(router.host, router.port))
                await self._authenticate(router, stream)
        except BaseException:
            del self._queues[router.name]
            raise
        self.report_load()
        self._start(self._send(queue, stream))
        self._start(self._serve(router.name, queue, stream))

    def report_load(self) -> None:
        """Send the load to all routers; this also serves as a heartbeat."""
        for queue in self._queues.values():
            queue.report_load()

    def num_requests(self) -> dict[str, int]:
        """Return the number of requests by router."""
        return {name: len(box.answers) for name, box in self._queues.items() if box.answers}

    async def drain(self) -> None:
        """Ask routers to send no new requests; return once no request has been here for a while.

        Requests that wait in a router follow those that end, unless there is another replica.
        """
        self._is_closing = True
        self.report_load()
        num_quiet = 0
        while self._queues and num_quiet < _QUIET_POLLS:
            num_quiet = 0 if self.num_requests() else num_quiet + 1
            await asyncio.sleep(_DRAIN_POLL_S)
        self.close()

    def close(self) -> None:
        """Close all connections after their queued items."""
        self._is_closing = True
        for queue in self._queues.values():
            queue.close()

    async def _authenticate(self, router: RouterAddress, stream: MessageStream) -> None:
        """Prove each other's knowledge of the secret; raise OSError or EOFError if that fails."""
        try:
            name = self.name.encode()
            if await stream.authenticate(router.secret, _REPLICA, _ROUTER, name) is None:
                raise ConnectionRefusedError(f"{router.host}:{router.port} is not {router.name}")
        except EOFError as error:
            stream.close()
            raise ConnectionResetError(f"{router.host}:{router.port} has hung up") from error
        except BaseException:
            stream.close()
            raise

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, router: str, queue: ResponseQueue, stream: MessageStream) -> None:
        """Handle messages of a router until the connection closes; then cancel its requests."""
        try:
            while True:
                self._handle(messages.decode_router_message(await stream.read()), queue)
        except (EOFError, OSError) as error:
            logger.info(
                "router %s is gone, %d requests cancelled: %r", router, len(queue.answers), error
            )
        except Exception:
            logger.exception("unreadable message of router %s", router)
        finally:
            del self._queues[router]
            self._cancel(queue, list(queue.answers))
            queue.close()
            stream.close()

    def _handle(self, message: messages.RouterMessage, queue: ResponseQueue) -> None:
        for request_id, request in message.requests:
            if isinstance(request, messages.Failed):
                queue.put(request_id, request)
            else:
                answer = asyncio.create_task(self.answer(request, queue))
                queue.answers[request_id] = answer
        self._cancel(queue, message.cancelled)
        if message.known_ids is not None and (orphaned := queue.answers.keys() - message.known_ids):
            logger.warning("%d requests cancelled that their router has not", len(orphaned))
            self._cancel(queue, orphaned)
        if message.flushes_cache:
            self.flush_cache()

    def _cancel(self, queue: ResponseQueue, request_ids: Iterable[str]) -> None:
        """Cancel requests, also those that the engine has not got yet; no-op for ended ones."""
        for request_id in request_ids:
            if (answer := queue.answers.pop(request_id, None)) is not None:
                answer.cancel()

    async def _send(self, queue: ResponseQueue, stream: MessageStream) -> None:
        """Send items and load reports until the queue is closed."""
        try:
            async for items in queue:
                load = self.load() if queue.is_load_due else None
                queue.is_load_due = False
                message = messages.ReplicaMessage(
                    items, self.num_requests(), load, self._is_closing
                )
                stream.write(messages.encode_replica_message(message))
                await stream.drain()
        except OSError as error:
            logger.debug("connection closed: %r", error)
        finally:
            stream.close()
