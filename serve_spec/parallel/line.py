"""A line between rank 0 and one that follows it: messages, and news of the other end."""

from __future__ import annotations

import hmac
import os
import pickle
import select
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

LOOPBACK = "127.0.0.1"
"""Where ranks of one host meet. By number: a host's own name may resolve to anything."""

_PROOF_S = 5
"""Seconds that a caller gets to prove that it is a rank."""
_SILENCE_MS = 10_000
"""Milliseconds after which a host that answers nothing counts as gone."""
_NO_TIMEOUT, _PROOF_TIMEOUT = struct.pack("ll", 0, 0), struct.pack("ll", _PROOF_S, 0)


@dataclass(frozen=True)
class Address:
    """Where rank 0 is reached, and the secret that only its ranks know.

    port: where followers call. store_port: where ranks find each other before they compute.
    """

    host: str
    port: int
    store_port: int
    secret: bytes = field(repr=False)


class Line:
    """One end of a TCP connection. Whatever ends a process, the other end knows at once."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._connection = Connection(os.dup(end.fileno()))
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that is switched off says nothing.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)

    @property
    def host(self) -> str:
        """This end's address."""
        return str(self._end.getsockname()[0])

    def send(self, message: object) -> None:
        """Raise OSError if nothing listens there."""
        self.send_pickled(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def send_pickled(self, message: bytes) -> None:
        """As `send`."""
        self._connection.send_bytes(message)

    def receive(self) -> object:
        """The next message; waits for it. Raises EOFError when the other end has none left."""
        try:
            return pickle.loads(self._connection.recv_bytes())
        except OSError as error:
            raise EOFError from error

    def has_message(self) -> bool:
        """Return whether `receive` would not wait."""
        with suppress(OSError):
            return self._connection.poll()
        return False

    def is_broken(self, within_s: float = 0.0) -> bool:
        """Return whether the other end is gone, or goes within that time."""
        return bool(_wait_for_end([self], within_s))

    def hang_up(self) -> None:
        """Breaks the line; the other end can read what was said before."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back. Nothing may wait for its end then."""
        self._connection.close()
        self._end.close()

    def fileno(self) -> int:
        """The socket's number."""
        return self._end.fileno()

    def agree(self, secret: bytes, mine: bytes, theirs: bytes) -> None:
        """Each end proves that it knows the secret, before anything of the other's is unpickled.

        mine, theirs: names of the two ends, so that a proof cannot be sent back as one's own.

        Raises:
            EOFError: the other end does not know it, or says nothing.
        """
        self._limit_silence(_PROOF_TIMEOUT)
        challenge = os.urandom(32)
        try:
            self._connection.send_bytes(challenge)
            answer = _proof(secret, mine, self._connection.recv_bytes(32))
            self._connection.send_bytes(answer)
            given = self._connection.recv_bytes(32)
        except OSError as error:
            raise EOFError from error
        if not hmac.compare_digest(given, _proof(secret, theirs, challenge)):
            raise EOFError("the other end does not know the secret")
        self._limit_silence(_NO_TIMEOUT)

    def _limit_silence(self, limit: bytes) -> None:
        self._end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def wait_for_end(lines: Sequence[Line]) -> None:
    """Wait until one of them is broken, at either end."""
    _wait_for_end(lines, None)


def _wait_for_end(lines: Sequence[Line], within_s: float | None) -> list[tuple[int, int]]:
    poll = select.poll()
    for line in lines:
        # Ends and errors alone: what was said waits for `receive`.
        poll.register(line.fileno(), select.POLLRDHUP)
    return poll.poll(None if within_s is None else within_s * 1e3)


def listen(host: str) -> socket.socket:
    """Where followers call, on a port of its own."""
    return socket.create_server((host, 0), backlog=64)


def answer(listener: socket.socket, secret: bytes) -> Line | None:
    """A line to the next one that calls; None: it was a stranger.

    Raises:
        TimeoutError: no rank called within the listener's time limit.
    """
    end, _ = listener.accept()
    end.setblocking(True)
    return _agreed(Line(end), secret, b"rank 0", b"follower")


def call(address: Address) -> Line:
    """A line to rank 0.

    Raises:
        OSError: nothing listens there, or it is not rank 0.
    """
    line = Line(socket.create_connection((address.host, address.port)))
    agreed = _agreed(line, address.secret, b"follower", b"rank 0")
    if agreed is None:
        raise ConnectionRefusedError(f"{address.host}:{address.port} is not rank 0's")
    return agreed


def _agreed(line: Line, secret: bytes, mine: bytes, theirs: bytes) -> Line | None:
    try:
        line.agree(secret, mine, theirs)
    except EOFError:
        line.close()
        return None
    return line


def _proof(secret: bytes, name: bytes, challenge: bytes) -> bytes:
    return hmac.digest(secret, name + challenge, "sha256")
