"""The router's side of its connections to replicas.

Replicas connect to the router's address and report their load every second. If a connection breaks
or a replica becomes unresponsive, its requests fail here.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Mapping
from typing import Any, Protocol

from serve_spec.log import get_logger
from serve_spec.serving.connection import RouterAddress, configure, read_message, write_message
from serve_spec.serving.errors import ApiError, ReplicaLost, engine_failed, no_replica
from serve_spec.serving.messages import ReplicaMessage, decode_replica_message

logger = get_logger(__name__)

_NUM_SECRET_BYTES = 32
_MAX_HANDSHAKE_BYTES = 1024
_HANDSHAKE_WITHIN_S = 10.0


class MessageHandler(Protocol):
    """Handles messages and failures of replicas."""

    def receive(self, replica: str, message: ReplicaMessage) -> None:
        """Handle a message of a replica."""
        ...

    def fail_replica(self, replica: str, error: ApiError) -> None:
        """Fail the requests of a replica."""
        ...


class ReplicaConnection:
    """One connection and the latest load report of its replica."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.rows: Mapping[str, int] = {}
        """Requests at the replica by router."""
        self.load: Mapping[str, Any] = {}
        """`EngineReplica.record_routing_stats`; empty before the first report."""
        self.is_closing = False
        """Whether the replica is shutting down."""
        self.num_quiet_checks = 0
        self.is_unresponsive = False

    @property
    def is_usable(self) -> bool:
        """Whether requests may be sent to the replica."""
        return bool(self.load) and not (self.is_closing or self.is_unresponsive)


class ReplicaConnections:
    """The connections of all replicas.

    name: this router's name. host: the address at which replicas reach it.
    max_quiet_checks: number of `check` calls without a message after which a replica counts as
    unresponsive.
    """

    def __init__(
        self, name: str, host: str, handler: MessageHandler, max_quiet_checks: int
    ) -> None:
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
            write_message(self._connections[replica].writer, message)

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
        await server.serve_forever()

    async def _serve_replica(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        replica = await self._authenticate(reader)
        if replica is None:
            writer.close()
            return
        configure(writer)
        connection = self._connections[replica] = ReplicaConnection(writer)
        end = no_replica("the replica that had this request is gone")
        try:
            while True:
                self._handle(
                    replica, connection, decode_replica_message(await read_message(reader))
                )
        except (EOFError, OSError) as error:
            logger.info("replica %s is gone: %r", replica, error)
        except Exception as error:  # no request may wait forever
            end = engine_failed(f"unreadable message of the replica ({error!r})")
            logger.exception("unreadable message of replica %s", replica)
        finally:
            writer.close()
            if self._connections.get(replica) is connection:
                del self._connections[replica]
                self._handler.fail_replica(replica, ReplicaLost(end, replica=replica))

    async def _authenticate(self, reader: asyncio.StreamReader) -> str | None:
        """Return the name of the connecting replica; None if its key is wrong."""
        try:
            async with asyncio.timeout(_HANDSHAKE_WITHIN_S):
                handshake = await read_message(reader, _MAX_HANDSHAKE_BYTES)
        except (EOFError, OSError, TimeoutError) as error:
            logger.info("connection closed without a handshake: %r", error)
            return None
        secret, name = handshake[:_NUM_SECRET_BYTES], handshake[_NUM_SECRET_BYTES:]
        if not hmac.compare_digest(secret, self.address.secret):
            logger.warning("connection rejected: wrong key")
            return None
        return name.decode()

    def _handle(self, replica: str, connection: ReplicaConnection, message: ReplicaMessage) -> None:
        was_usable = connection.is_usable
        connection.num_quiet_checks = 0
        connection.is_unresponsive = False
        connection.rows = message.rows
        connection.load = message.load or connection.load
        connection.is_closing = message.is_closing
        if connection.is_usable and not was_usable:
            self._changed.set()
        self._handler.receive(replica, message)
