"""Extensions of Ray Serve's HTTP servers.

Serve calls `install` in every process that listens for HTTP if the environment contains
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=serve_spec.serving.proxy:install`.

If such a process is killed, its clients get error objects in place of broken connections
(`last_answers.py`).
"""

from __future__ import annotations

import asyncio
import os
from http import HTTPStatus
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http import auto

from serve_spec.config import ConfigError, RouterConfig
from serve_spec.config.base import parse_yaml
from serve_spec.serving.errors import ApiError, error_answer, no_router, starting
from serve_spec.serving.proxy.last_answers import LastAnswers, with_child
from serve_spec.serving.proxy.settings import HEADER_TIMEOUT_VARIABLE

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
