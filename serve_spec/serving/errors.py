"""HTTP errors in OpenAI's form."""

from __future__ import annotations

import json

from fastapi import Response
from fastapi.responses import JSONResponse

from serve_spec.core.errors import InvalidRequest

# The start of a replica takes from half a minute to several.
_START_S = 5
MAX_NAME_CHARS = 256
"""Maximum length of a name in a request, and of what an error repeats of it."""


class ApiError(Exception):
    """An HTTP error response: the fields of OpenAI's error object, and Retry-After in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, object]:
        """Return the JSON body; also sent as the error event of a stream."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Return the headers of this error."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


class ReplicaLost(ApiError):
    """The request's replica or its engine died. Another replica may succeed.

    replica: its name, if the request had not been accepted yet. is_orderly: whether the replica was
    shutting down, so the request is not the cause.
    """

    def __init__(
        self, error: ApiError, *, replica: str | None = None, is_orderly: bool = False
    ) -> None:
        self.replica = replica
        self.is_orderly = is_orderly
        super().__init__(
            error.status,
            error.message,
            kind=error.kind,
            code=error.code,
            retry_after_s=error.retry_after_s,
        )


class ClientTooSlow(ApiError):
    """The client reads its stream too slowly; no replica has failed."""


def refused(error: InvalidRequest) -> ApiError:
    """Return 400 with the name of the field, or 413 for a prompt that is too long."""
    if error.too_long:
        return ApiError(413, str(error), param=error.field, code="context_length_exceeded")
    return ApiError(400, str(error), param=error.field)


def body_too_large(max_bytes: int) -> ApiError:
    """Return 413: the body is larger than `max_body_bytes`."""
    message = f"The body is larger than {max_bytes} bytes; send fewer or shorter prompts"
    return ApiError(413, message, code="request_too_large")


def body_timed_out(timeout_s: float) -> ApiError:
    """Return 408: the body did not arrive in time."""
    message = (
        f"The body did not arrive within body_timeout_s={timeout_s:g} seconds; send it faster or "
        "raise router.body_timeout_s"
    )
    return ApiError(408, message, kind="timeout_error", code="body_timeout")


def broken_off() -> ApiError:
    """Return 400: HAProxy cannot read the rest of a body."""
    return ApiError(400, "The body breaks off or is not valid HTTP; send the request again")


def unknown_model(asked: str, served: str) -> ApiError:
    """Return 404: the model is not served here."""
    message = f"The model {asked!r} does not exist; this server serves {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def too_many_choices(num_prompts: int, num_choices: int, most: int) -> ApiError:
    """Return 400: one request has more choices than the queue holds."""
    several = ("prompt", f"<{num_prompts} prompts>")
    field, value = ("n", num_choices) if num_prompts == 1 else several
    asked = num_prompts * num_choices
    fix = f"{asked} choices are more than the {most} that fit at once; send several requests"
    return ApiError(400, f"{field}={value!r}: {fix}", param=field)


def queue_full(why: str, retry_after_s: int) -> ApiError:
    """Return 429: a queue is full."""
    message = f"Too many requests: {why}; try again in {retry_after_s} s"
    kind, code = "rate_limit_error", "queue_full"
    return ApiError(429, message, kind=kind, code=code, retry_after_s=retry_after_s)


def _unavailable(message: str, code: str, after_s: int = 1) -> ApiError:
    kind = "service_unavailable_error"
    return ApiError(503, message, kind=kind, code=code, retry_after_s=after_s)


def no_replica(why: str) -> ApiError:
    """Return 503: no engine replica can take the request."""
    message = f"No healthy engine replica: {why}; try again shortly"
    return _unavailable(message, "no_healthy_replica")


def starting() -> ApiError:
    """Return 503: the first replica is not ready yet."""
    message = "The model is being loaded; try again when /health answers 200"
    return _unavailable(message, "starting", _START_S)


def server_lost() -> ApiError:
    """Return 503: the router process that handled the request was killed."""
    message = "The server process that had the request is gone; send the request again"
    return _unavailable(message, "server_lost")


def no_router() -> ApiError:
    """Return 503: no router takes requests."""
    return _unavailable("No router takes requests; try again shortly", "no_healthy_router")


def timed_out(timeout_s: float) -> ApiError:
    """Return 408: the request did not finish within its deadline."""
    message = (
        f"The request did not finish within request_timeout_s={timeout_s:g} seconds; "
        "ask for fewer tokens or raise router.request_timeout_s"
    )
    return ApiError(408, message, kind="timeout_error", code="request_timeout")


def client_too_slow(max_unread_bytes: int) -> ClientTooSlow:
    """Return 408: the client reads its stream too slowly."""
    message = (
        f"The client reads too slowly: more than router.max_unread_bytes={max_unread_bytes} bytes "
        "are unread; read faster or raise router.max_unread_bytes"
    )
    return ClientTooSlow(408, message, kind="timeout_error", code="client_too_slow")


def defect(error: Exception) -> ApiError:
    """Return 500: an unexpected exception, whose details are only in the log."""
    message = f"Internal error ({type(error).__name__}); see the server's log"
    return ApiError(500, message, kind="server_error")


def engine_failed(message: str) -> ApiError:
    """Return 500: the engine failed this request."""
    return ApiError(500, message, kind="server_error", code="engine_error")


def replicas_lost(num_replicas: int, error: ApiError) -> ApiError:
    """Return 500: several replicas died with this request; `error` is the last failure."""
    message = (
        f"{num_replicas} replicas were lost while running this request; it is not retried "
        f"({error.message})"
    )
    return ApiError(500, message, kind="server_error", code="replicas_lost")


class AsciiJSON(JSONResponse):
    """JSON response in ASCII, as an error may quote a lone surrogate, which UTF-8 cannot encode."""

    def render(self, content: object) -> bytes:
        """Return the body."""
        return ascii_json(content).encode("ascii")


def ascii_json(value: object) -> str:
    """Return a value as compact JSON in ASCII."""
    return json.dumps(value, separators=(",", ":"))


def error_answer(error: ApiError) -> Response:
    """Return the response for `error`."""
    return AsciiJSON(error.body(), status_code=error.status, headers=error.headers())
