"""Sockets between routers and replicas, with length-prefixed messages.

A router listens; replicas connect when Serve passes them its address. A Ray Serve call takes
milliseconds, which would add to the time to first token.
"""

from __future__ import annotations

import asyncio
import socket
from typing import NamedTuple

_NUM_LENGTH_BYTES = 4
# Small, because items that wait in the queues before the socket are merged.
_MAX_BUFFERED_BYTES = 64 * 2**10


class RouterAddress(NamedTuple):
    """The address of a router and the key that authenticates replicas."""

    name: str
    """Unique among routers."""
    host: str
    port: int
    secret: bytes


async def read_message(reader: asyncio.StreamReader, max_bytes: int | None = None) -> bytes:
    """Return the next message.

    Raises:
        EOFError: the other end is gone.
        OSError: the connection is broken, or the message has more than `max_bytes`.
    """
    num_bytes = int.from_bytes(await reader.readexactly(_NUM_LENGTH_BYTES), "little")
    if max_bytes is not None and num_bytes > max_bytes:
        raise OSError(f"a message of {num_bytes} bytes; at most {max_bytes} are allowed")
    return await reader.readexactly(num_bytes)


def write_message(writer: asyncio.StreamWriter, message: bytes) -> None:
    """Send a message, buffered until the other end reads; no error if the connection is broken."""
    writer.write(len(message).to_bytes(_NUM_LENGTH_BYTES, "little") + message)


def configure(writer: asyncio.StreamWriter) -> None:
    """Limit the write buffer and enable keep-alive, which detects a lost host within 20 s."""
    writer.transport.set_write_buffer_limits(high=_MAX_BUFFERED_BYTES)
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
