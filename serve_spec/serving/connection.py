"""A connection between a router and a replica: messages, each after its length.

The router listens, and replicas call when Serve tells them the router's address. Ray Serve's own
calls take milliseconds, which every first token would wait for.
"""

from __future__ import annotations

import asyncio
import socket
from typing import NamedTuple

_NUM_LENGTH_BYTES = 4
# What has waited for a slow reader in this process; more of it waits where it merges.
_MAX_BUFFERED_BYTES = 64 * 2**10


class RouterAddress(NamedTuple):
    """Where a router listens, and the key with which replicas prove that they may call it."""

    name: str
    """Unlike that of any other router."""
    host: str
    port: int
    secret: bytes


async def read_message(reader: asyncio.StreamReader, max_bytes: int | None = None) -> bytes:
    """Return the next message.

    Raises:
        EOFError: the other end is gone.
        OSError: the connection broke, or the message has more than `max_bytes`.
    """
    num_bytes = int.from_bytes(await reader.readexactly(_NUM_LENGTH_BYTES), "little")
    if max_bytes is not None and num_bytes > max_bytes:
        raise OSError(f"a message of {num_bytes} bytes; at most {max_bytes} are allowed")
    return await reader.readexactly(num_bytes)


def write_message(writer: asyncio.StreamWriter, message: bytes) -> None:
    """Send a message, or keep it until the other end reads. A broken connection takes it, too."""
    writer.write(len(message).to_bytes(_NUM_LENGTH_BYTES, "little") + message)


def configure(writer: asyncio.StreamWriter) -> None:
    """Bound what waits, and notice within 20 s that the machine at the other end is lost."""
    writer.transport.set_write_buffer_limits(high=_MAX_BUFFERED_BYTES)
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
