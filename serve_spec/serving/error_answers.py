"""Error responses: every error of the app becomes an OpenAI error object."""

from __future__ import annotations

import json
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from serve_spec.core.errors import InvalidRequest
from serve_spec.log import get_logger
from serve_spec.serving.errors import ApiError, defect, refused
from serve_spec.serving.openai import ChatRequest, CompletionRequest, invalid_body

logger = get_logger(__name__)

CHAT_PATH = "/v1/chat/completions"
_TRACE_HEADER = "x-request-id"


class AsciiJSON(JSONResponse):
    """JSON response in ASCII, as an error may quote a lone surrogate, which UTF-8 cannot encode."""

    def render(self, content: object) -> bytes:
        """Return the body."""
        return _encode(content).encode("ascii")


def encode_by_items(content: Mapping[str, object]) -> bytes:
    """Return JSON in ASCII; list items are encoded separately so that other threads can run."""

    def encode(value: object) -> str:
        if isinstance(value, list):
            return f"[{','.join(map(_encode, value))}]"
        return _encode(value)

    fields = (f"{_encode(name)}:{encode(value)}" for name, value in content.items())
    return f"{{{','.join(fields)}}}".encode("ascii")


def _encode(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def error_answer(error: ApiError) -> Response:
    """Return the response for `error`."""
    return AsciiJSON(error.body(), status_code=error.status, headers=error.headers())


def trace_id(request: Request) -> str:
    """Return x-request-id. Serve adds one if the client sends none, and returns it."""
    return request.headers.get(_TRACE_HEADER, "-")


def add_error_answers(api: FastAPI) -> None:
    """Answer all errors with OpenAI error objects, also unknown routes and invalid JSON."""

    @api.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        if error.status >= 500 or error.status == 408:
            logger.warning("request %s: %d %s", trace_id(request), error.status, error.message)
        return error_answer(error)

    @api.exception_handler(InvalidRequest)
    async def invalid_request(request: Request, error: InvalidRequest) -> Response:
        return error_answer(refused(error))

    @api.exception_handler(RequestValidationError)
    async def validation(request: Request, error: RequestValidationError) -> Response:
        is_chat = request.url.path.endswith(CHAT_PATH)
        schema = ChatRequest if is_chat else CompletionRequest
        return error_answer(invalid_body(error.errors(), schema))

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
    """Convert an error of FastAPI or Starlette."""
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
