"""Length-prefixed messages over a socket between two ends that share a secret."""

from __future__ import annotations

import asyncio
import socket

from serve_spec.core.handshake import NUM_BYTES, MessageTags, challenge, is_proof, proof
from serve_spec.log import get_logger

logger = get_logger(__name__)

_MAX_HANDSHAKE_BYTES = 1024
_NUM_LENGTH_BYTES = 4
# Small, because items that wait in the queues before the socket are merged.
_MAX_BUFFERED_BYTES = 64 * 2**10


class MessageStream:
    """One end of a connection. Once it is authenticated, every message has a tag.

    The tag proves that the other end has sent this message after those before it.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._sent: MessageTags | None = None
        self._received: MessageTags | None = None

    async def read(self, max_bytes: int | None = None) -> bytes:
        """Return the next message; raise EOFError, or OSError for a long or forged one."""
        num_bytes = int.from_bytes(await self._reader.readexactly(_NUM_LENGTH_BYTES), "little")
        if max_bytes is not None and num_bytes > max_bytes:
            raise OSError(f"a message of {num_bytes} bytes; at most {max_bytes} are allowed")
        message = await self._reader.readexactly(num_bytes)
        if self._received is None:
            return message
        return self._received.opened(message)

    def write(self, message: bytes) -> None:
        """Send a message, buffered until the other end reads; no error on a broken connection."""
        tag = b"" if self._sent is None else self._sent.next(message)
        num_bytes = (len(tag) + len(message)).to_bytes(_NUM_LENGTH_BYTES, "little")
        self._writer.write(num_bytes + tag + message)

    async def drain(self) -> None:
        """Return when the other end has read most of what was sent; raise OSError if it is gone."""
        await self._writer.drain()

    def close(self) -> None:
        """Close the connection once what was sent is read."""
        self._writer.close()

    def abort(self) -> None:
        """Break the connection."""
        self._writer.transport.abort()

    async def authenticate(
        self, secret: bytes, mine: bytes, theirs: bytes, name: bytes = b""
    ) -> bytes | None:
        """Return the other end's `name`; None if it does not know the secret.

        mine, theirs: kinds of the two ends. Raises as `read`, before anything is unpickled.
        """
        asked = challenge()
        self.write(asked + name)
        greeting = await self.read(_MAX_HANDSHAKE_BYTES)
        self.write(proof(secret, mine, greeting))
        answer = await self.read(_MAX_HANDSHAKE_BYTES)
        if not is_proof(answer, secret, theirs, asked + name):
            logger.warning("connection rejected: the other end does not know the secret")
            return None
        was_asked = greeting[:NUM_BYTES]
        self._sent = MessageTags(secret, mine, asked + was_asked)
        self._received = MessageTags(secret, theirs, was_asked + asked)
        self._configure()
        return greeting[NUM_BYTES:]

    def _configure(self) -> None:
        """Send small messages immediately, limit the buffer, and notice a lost host in 20 s."""
        self._writer.transport.set_write_buffer_limits(high=_MAX_BUFFERED_BYTES)
        connection: socket.socket = self._writer.get_extra_info("socket")
        # asyncio does not set it for sockets of a listener without a protocol number.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
