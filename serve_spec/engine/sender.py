"""Send messages without waiting for their reader. Messages that do not fit yet are merged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from select import POLLOUT, poll
from typing import Generic, TypeVar

from serve_spec.engine.messages import hang_up
from serve_spec.log import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

_MOST_BYTES = 32 * 2**10
"""Longest message for which a socket that polls as writable surely has room."""


class Sender(Generic[T]):
    """The sending half of one end of a connection; its reader notices when the other end is gone.

    merge: adds a message to one that waits.
    """

    def __init__(
        self,
        connection: Connection,
        encode: Callable[[T], bytes],
        merge: Callable[[T, T], None],
    ) -> None:
        self._connection = connection
        self._encode = encode
        self._merge = merge
        self._poll = poll()
        self._poll.register(connection.fileno(), POLLOUT)
        self._changed = threading.Condition()
        self._waiting: T | None = None
        self._is_sending = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._send_waiting, name="send", daemon=True)
        self._thread.start()

    def put(self, message: T) -> None:
        """Send a message at once if there is room for it, else leave it to a thread. Never waits.

        The thread would take a while to wake up, above all while the caller is busy.
        """
        with self._changed:
            if self._waiting is not None:
                self._merge(self._waiting, message)
            elif self._is_sending or not self._send_at_once(message):
                self._waiting = message
                self._changed.notify()

    def close(self) -> None:
        """Return once all that waits is sent, or the other end is gone."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _send_at_once(self, message: T) -> bool:
        """Send a message unless that might take a while."""
        if not self._poll.poll(0):
            return False
        data = self._encode(message)
        if len(data) > _MOST_BYTES:
            return False
        with suppress(OSError):
            self._connection.send_bytes(data)
        return True

    def _send_waiting(self) -> None:
        try:
            while (message := self._take()) is not None:
                self._connection.send_bytes(self._encode(message))
        except OSError:
            logger.info("the other end does not listen any more")
        except Exception:
            logger.exception("a message cannot be sent")
            hang_up(self._connection)

    def _take(self) -> T | None:
        """Return all that waits; wait for it. None: nothing will come any more."""
        with self._changed:
            self._is_sending = False
            self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
            message, self._waiting = self._waiting, None
            self._is_sending = message is not None
            return message
