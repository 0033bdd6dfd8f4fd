"""The router's ends of its connections to replicas.

Plain asyncio. A replica that is told this router's address calls it, and says every second how busy
it is. A connection that breaks, or is silent for too long, loses the requests of its replica.
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
from serve_spec.serving.messages import News, decode

logger = get_logger(__name__)

_NUM_SECRET_BYTES = 32
_MAX_HELLO_BYTES = 1024
_HELLO_WITHIN_S = 10.0


class Listener(Protocol):
    """What takes the news."""

    def hear(self, replica: str, news: News) -> None:
        """Take one message of a replica."""
        ...

    def lose(self, replica: str, error: ApiError) -> None:
        """Take note that the requests of a replica are lost."""
        ...


class Link:
    """One connection; how busy its replica was when it last said so."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.rows: Mapping[str, int] = {}
        """Requests there by router."""
        self.load: Mapping[str, Any] = {}
        """`EngineReplica.record_routing_stats`; empty before it has said anything."""
        self.is_closing = False
        """Whether it takes no more requests."""
        self.num_silent_looks = 0
        self.is_silent = False

    @property
    def is_usable(self) -> bool:
        """Whether requests may be sent there."""
        return bool(self.load) and not (self.is_closing or self.is_silent)


class Links:
    """The connections of all replicas.

    name: of this router. host: the address at which replicas reach it.
    max_silent_looks: looks (`look`) without a message after which a replica is silent.
    """

    def __init__(self, name: str, host: str, listener: Listener, max_silent_looks: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        secret = secrets.token_bytes(_NUM_SECRET_BYTES)
        self.address = RouterAddress(name, host, self._socket.getsockname()[1], secret)
        self._listener = listener
        self._max_silent_looks = max_silent_looks
        self._links: dict[str, Link] = {}
        self._changed = asyncio.Event()

    def usable(self) -> dict[str, Link]:
        """Return the replicas to which requests may be sent."""
        return {name: link for name, link in self._links.items() if link.is_usable}

    async def changed(self, within_s: float) -> None:
        """Return when a replica becomes usable, at the latest after so many seconds."""
        self._changed.clear()
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def send(self, replica: str, message: bytes) -> None:
        """Send a message to a replica; harmless if it is gone."""
        if replica in self._links:
            write_message(self._links[replica].writer, message)

    def look(self) -> None:
        """Take the requests from replicas that have been silent for too long.

        It counts looks, not seconds: while this process itself is held up there are none.
        """
        for replica, link in self._links.items():
            link.num_silent_looks += 1
            if link.num_silent_looks >= self._max_silent_looks and not link.is_silent:
                link.is_silent = True
                logger.error("replica %s is silent, its requests go on elsewhere", replica)
                why = no_replica(f"replica {replica} does not answer")
                self._listener.lose(replica, ReplicaLost(why, replica=replica))

    async def serve(self) -> None:
        """Take calls of replicas; never return."""
        server = await asyncio.start_server(self._serve_replica, sock=self._socket)
        await server.serve_forever()

    async def _serve_replica(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        replica = await self._greet(reader)
        if replica is None:
            writer.close()
            return
        configure(writer)
        link = self._links[replica] = Link(writer)
        end = no_replica("the replica that had this request is gone")
        try:
            while True:
                self._take(replica, link, decode(await read_message(reader)))
        except (EOFError, OSError) as error:
            logger.info("replica %s is gone: %r", replica, error)
        except Exception as error:  # whatever broke, no request may wait for ever
            end = engine_failed(f"a message of the replica cannot be read ({error!r})")
            logger.exception("a message of replica %s cannot be read", replica)
        finally:
            writer.close()
            if self._links.get(replica) is link:
                del self._links[replica]
                self._listener.lose(replica, ReplicaLost(end, replica=replica))

    async def _greet(self, reader: asyncio.StreamReader) -> str | None:
        """Return the name of the replica that calls; None: it is none."""
        try:
            async with asyncio.timeout(_HELLO_WITHIN_S):
                hello = await read_message(reader, _MAX_HELLO_BYTES)
        except (EOFError, OSError, TimeoutError) as error:
            logger.info("a call that is no replica's: %r", error)
            return None
        secret, name = hello[:_NUM_SECRET_BYTES], hello[_NUM_SECRET_BYTES:]
        if not hmac.compare_digest(secret, self.address.secret):
            logger.warning("a call with a wrong key is refused")
            return None
        return name.decode()

    def _take(self, replica: str, link: Link, news: News) -> None:
        was_usable = link.is_usable
        link.num_silent_looks = 0
        link.is_silent = False
        link.rows = news.rows
        link.load = news.load or link.load
        link.is_closing = news.is_closing
        if link.is_usable and not was_usable:
            self._changed.set()
        self._listener.hear(replica, news)
