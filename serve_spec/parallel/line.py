"""A line between rank 0 and one that follows it: messages, and news of the other end."""

from __future__ import annotations

import os
import pickle
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

_NAME = "line"


class Line:
    """One end of a Unix socket. Whatever ends a process, the other end knows at once."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._connection = Connection(os.dup(end.fileno()))

    def send(self, message: object) -> None:
        """Raises OSError when nobody is there."""
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
        """Whether `receive` would not wait."""
        with suppress(OSError):
            return self._connection.poll()
        return False

    def is_broken(self, within_s: float = 0.0) -> bool:
        """Whether the other end is gone, or goes within that time."""
        return bool(_wait_for_end([self], within_s))

    def hang_up(self) -> None:
        """Breaks the line; the other end can read what was said before."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the socket back. Nobody may wait for its end then."""
        self._connection.close()
        self._end.close()

    def fileno(self) -> int:
        """The socket's number."""
        return self._end.fileno()


def wait_for_end(lines: Sequence[Line]) -> None:
    """Waits until one of them is broken, at either end."""
    _wait_for_end(lines, None)


def _wait_for_end(lines: Sequence[Line], within_s: float | None) -> list[tuple[int, int]]:
    poll = select.poll()
    for line in lines:
        # Ends and errors alone: what was said waits for `receive`.
        poll.register(line.fileno(), select.POLLRDHUP)
    return poll.poll(None if within_s is None else within_s * 1e3)


def listen(folder: Path) -> socket.socket:
    """Where followers call."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / _NAME))
    listener.listen()
    return listener


def call(folder: Path) -> Line:
    """A line to whoever listens in `folder`."""
    end = socket.socket(socket.AF_UNIX)
    end.connect(str(folder / _NAME))
    return Line(end)
