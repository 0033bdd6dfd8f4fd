"""Middleware of the HTTP API, and error objects for all errors.

It checks API keys, limits request bodies, and notes client and time of arrival.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Collection
from contextvars import ContextVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_spec.core.errors import InvalidRequest
from serve_spec.log import TRACE_ID, get_logger
from serve_spec.serving.errors import (
    ApiError,
    body_timed_out,
    body_too_large,
    defect,
    error_answer,
    refused,
)
from serve_spec.serving.protocols.validation import invalid_body
from serve_spec.serving.statistics.request_timer import ARRIVED

logger = get_logger(__name__)


def trace_id(request: Request) -> str:
    """Return x-request-id. Serve adds one if the client sends none, and returns it."""
    return request.headers.get("x-request-id", "-")


def add_error_answers(api: FastAPI) -> None:
    """Answer all errors with OpenAI error objects, also unknown routes and invalid JSON."""

    @api.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        is_ours = error.status >= 500 or error.status == 408
        if is_ours and error.code != "starting":  # every client that waits for a start asks often
            logger.warning("request %s: %d %s", trace_id(request), error.status, error.message)
        return error_answer(error)

    @api.exception_handler(InvalidRequest)
    async def invalid_request(request: Request, error: InvalidRequest) -> Response:
        return error_answer(refused(error))

    @api.exception_handler(RequestValidationError)
    async def validation(request: Request, error: RequestValidationError) -> Response:
        return error_answer(invalid_body(error.errors()))

    @api.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        answer = error_answer(_of_framework(request, error))
        answer.headers.update(error.headers or {})
        return answer

    @api.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        # Serve logs the traceback.
        logger.error("request %s: 500 %r", trace_id(request), error)
        return error_answer(defect(error))


def _of_framework(request: Request, error: HTTPException) -> ApiError:
    what = f"{request.method} {request.url.path}"
    message = {404: f"Unknown URL ({what})", 405: f"Not allowed: {what}"}
    if isinstance(error.__cause__, ApiError):
        return error.__cause__
    if isinstance(error.__cause__, ClientDisconnect):  # for access logs only
        return ApiError(499, "The client closed the connection before its body was complete")
    if error.status_code == 400 and error.__cause__ is not None:
        reason = type(error.__cause__).__name__
        return ApiError(400, f"The body cannot be read as JSON in UTF-8 ({reason})")
    return ApiError(error.status_code, message.get(error.status_code, str(error.detail)))


# Health probes have no key; the status page asks for one.
_OPEN_PATHS = frozenset({"/health", "/health_generate", "/ping", "/", "/docs"})

CLIENT: ContextVar[str] = ContextVar("client", default="")
"""The client of the current request: its API key, else its address."""


def key_client(index: int) -> str:
    """Return `CLIENT` of requests with the API key of this index."""
    return f"key {index}"


class Arrival:
    """Sets time, trace id and client of a request; 401 if there are `keys` and it has none."""

    def __init__(self, app: ASGIApp, keys: Collection[str] = ()) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Set the context variables; forward requests with a valid key or to an open path."""
        app = self._app
        if scope["type"] == "http":
            ARRIVED.set(time.perf_counter())
            TRACE_ID.set(trace_id(Request(scope)))
            key = self._key(scope)
            CLIENT.set((scope.get("client") or ("",))[0] if key is None else key_client(key))
            if self._keys and key is None and not _is_open(scope):
                message = "Give one of the server's API keys: Authorization: Bearer KEY"
                app = error_answer(ApiError(401, message, code="invalid_api_key"))
        await app(scope, receive, send)

    def _key(self, scope: Scope) -> int | None:
        scheme, _, token = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        # All keys are compared, in constant time, to prevent timing attacks.
        matches = [hmac.compare_digest(token.strip(), key) for key in self._keys]
        return matches.index(True) if scheme.lower() == b"bearer" and any(matches) else None


class BodyLimits:
    """Middleware that limits the size of a body (413) and the time it takes to arrive (408)."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request; reading beyond a limit raises an exception."""
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        num_bytes, is_complete = 0, False

        async def limited() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:  # the next message is the disconnect, which has no deadline
                return await receive()
            # FastAPI passes on only HTTPException while it reads a body.
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                error = HTTPException(408, headers={"Connection": "close"})
                raise error from body_timed_out(self._timeout_s)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise HTTPException(413) from body_too_large(self._max_bytes)
            is_complete = not message.get("more_body", False)
            return message

        await self._app(scope, limited if scope["type"] == "http" else receive, send)


def _is_open(scope: Scope) -> bool:
    """Return whether the path needs no key; the application's route prefix is ignored."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path in _OPEN_PATHS or path.startswith("/static/")
