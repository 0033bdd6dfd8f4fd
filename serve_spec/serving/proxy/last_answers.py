"""Error objects for the clients of an HTTP server that is killed or hangs.

A child process (`last_answers_child.py`) holds a duplicate of each connection's socket, so that the
connection outlives the server's process. When that process is gone, the child ends every answer:

- no answer has begun: 503 with an error object. Connections without a request get it as well,
  because a request may be on its way; clients drop such a connection.
- a stream of events has begun: an event with the error object, and the end of the stream.
- another answer has begun: the connection is closed, because nothing can be added to it.

A byte of shared memory for each connection says which case it is, so a request costs no message.
Another one changes while the event loop runs. The child kills a server whose event loop stands
still for ten seconds, and then ends its answers.
An answer still breaks off if the server dies while a part of it waits for a client that reads
slowly. WebSockets, TLS and systems other than Linux are left alone.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from weakref import WeakSet

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_spec.log import get_logger
from serve_spec.serving.errors import error_answer, server_lost
from serve_spec.serving.events import STREAM_TYPE, event

logger = get_logger(__name__)

# States of a connection; the child has an answer for the first two.
UNANSWERED, STREAM, OTHER = range(3)

_CHILD = Path(__file__).with_name("last_answers_child.py")
_NUM_SLOTS = 2**16
_CHANNEL_BYTES = 2**20  # the kernel may give less; some hundred new connections fit in any case
# A child that always ends immediately would cost a start with every connection.
_MAX_STARTS, _STARTS_WITHIN_S = 5, 5.0
_BEAT_EVERY_S = 1.0
_SCOPE_KEY = "serve_spec.connection"


class Connection:
    """A connection that the child holds too.

    sock: a duplicate; its descriptor is the slot in `states`, which the child shares.
    """

    def __init__(self, sock: socket.socket, states: mmap.mmap) -> None:
        self.sock = sock
        self._states = states
        self.note(UNANSWERED)

    def note(self, state: int) -> None:
        """Set the state, unless the connection is closed."""
        slot = self.sock.fileno()
        if slot >= 0:
            self._states[slot] = state

    def close(self) -> None:
        """End the connection, whether or not the child still holds it; the child drops it."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class AnsweringChild:
    """The child process, started with the first connection and again if it is gone."""

    def __init__(self) -> None:
        self._memory = os.memfd_create("last_answers")
        os.ftruncate(self._memory, _NUM_SLOTS + 1)
        self._states = mmap.mmap(self._memory, _NUM_SLOTS + 1)
        self._is_beating = False
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starts_s: deque[float] = deque([-math.inf] * _MAX_STARTS, maxlen=_MAX_STARTS)
        self._held: WeakSet[Connection] = WeakSet()
        self._unsent: WeakSet[Connection] = WeakSet()

    def hold(self, transport: asyncio.BaseTransport) -> Connection | None:
        """Hand the child a connection, now or with a later one; return None if it cannot be."""
        sock = transport.get_extra_info("socket")
        if sock is None or transport.get_extra_info("sslcontext"):
            return None
        duplicate = socket.socket(fileno=os.dup(sock.fileno()))
        if duplicate.fileno() >= _NUM_SLOTS:
            duplicate.close()
            return None
        if not self._is_beating:
            self._is_beating = True
            self._beat(asyncio.get_running_loop())
        connection = Connection(duplicate, self._states)
        self._held.add(connection)
        self._unsent.add(connection)
        if self._ensure_running():
            self._unsent -= {each for each in self._unsent if self._send(each)}
        return connection

    def give_back(self, connection: Connection) -> None:
        """Stop holding a connection that goes on."""
        slot = connection.sock.fileno().to_bytes(4, "little")
        connection.sock.close()
        try:
            if self._channel is not None:
                self._channel.send(slot)
        except OSError:
            self._stop()  # or the peer would wait for the end of a connection that has ended

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        """Show the child that the event loop runs, from now on."""
        self._states[_NUM_SLOTS] = (self._states[_NUM_SLOTS] + 1) % 256
        loop.call_later(_BEAT_EVERY_S, self._beat, loop)

    def _ensure_running(self) -> bool:
        """Start the child if there is none; return whether there is one."""
        if self._process is not None and self._process.poll() is None:
            return True
        if time.monotonic() - self._starts_s[0] < _STARTS_WITHIN_S:
            return False
        if self._process is not None:
            status = self._process.returncode
            logger.warning(
                "the child process for last answers ended (%s); starting another", status
            )
        self._stop()
        self._starts_s.append(time.monotonic())
        try:
            self._start()
        except OSError as error:
            logger.warning("no child process for last answers: %r", error)
            return False
        self._unsent |= self._held
        return True

    def _start(self) -> None:
        self._channel, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with others:
            self._channel.setblocking(False)
            self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CHANNEL_BYTES)
            fds = others.fileno(), self._memory
            self._process = subprocess.Popen(
                # Without site-packages and variables of the environment: 10 MB, 20 ms.
                [sys.executable, "-I", "-S", str(_CHILD), *map(str, fds), str(_BEAT_EVERY_S)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=fds,
                # A signal to the server's process group is not for the child.
                start_new_session=True,
            )
        for answer in _answers():
            self._channel.send(answer)

    def _stop(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._channel = self._process = None

    def _send(self, connection: Connection) -> bool:
        """Send a connection if it is open; return False if the child is gone or too far behind."""
        fd = connection.sock.fileno()
        try:
            if self._channel is not None and fd >= 0:
                socket.send_fds(self._channel, [fd.to_bytes(4, "little")], [fd])
        except OSError:
            return False
        return True


def _answers() -> tuple[bytes, bytes]:
    """Return what ends a connection that is `UNANSWERED`, and one in a `STREAM`."""
    error = server_lost()
    answer = error_answer(error)
    answer.headers["connection"] = "close"
    status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()
    lines = [status, *(b"%b: %b" % header for header in answer.raw_headers), b"", b""]
    last = event(error.body())
    return b"\r\n".join(lines) + bytes(answer.body), b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last)


def with_child(protocol: Any) -> type[asyncio.Protocol]:
    """Return `protocol`, an HTTP protocol of uvicorn, whose connections a child holds as well."""
    if sys.platform != "linux":
        return protocol  # type: ignore[no-any-return]
    child = AnsweringChild()

    class HeldProtocol(protocol):  # type: ignore[misc]
        app_state: dict[str, Any]
        _connection: Connection | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._connection = child.hold(transport)
            # uvicorn copies this into the scope of each request. `scope["client"]` does not tell
            # connections apart: it comes from HAProxy's header.
            self.app_state = {**self.app_state, _SCOPE_KEY: self._connection}

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # A WebSocket is a new protocol, which will not tell when the connection is over.
            if self._connection is not None and self.transport.get_protocol() is not self:
                child.give_back(self._connection)
                self._connection = None

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    return HeldProtocol


class LastAnswers:
    """Note how far the answer of each request has come, for the child."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on. Headers wait for the body unless the answer is a stream of events."""
        connection: Connection | None = scope.get("state", {}).pop(_SCOPE_KEY, None)
        if connection is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_chunked = scope["http_version"] == "1.1" and scope["method"] != "HEAD"
        head: Message | None = None

        def note(message: Message) -> Awaitable[None]:
            if head is None and message.get("more_body", False):
                return send(message)  # as if this middleware were not there
            return note_edge(message)

        async def note_edge(message: Message) -> None:
            nonlocal head
            if message["type"] == "http.response.start":
                if is_chunked and _is_stream(message):
                    connection.note(STREAM)
                    await send(message)
                else:
                    head = message
                return
            if head is not None:
                connection.note(OTHER)
                await send(head)
                head = None
            await send(message)
            if not message.get("more_body", False):
                connection.note(UNANSWERED)

        await self._app(scope, receive, note)


def _is_stream(message: Message) -> bool:
    """Return whether headers are those of server-sent events of unknown length."""
    headers = {name.lower(): value for name, value in message["headers"]}
    media_type = headers.get(b"content-type", b"").decode("latin-1")
    return media_type.startswith(STREAM_TYPE) and b"content-length" not in headers
