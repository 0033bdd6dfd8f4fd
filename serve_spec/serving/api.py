"""The HTTP face: routes, API keys, errors. It answers through a `Fleet`, Ray or not."""

# No `from __future__ import annotations` here: FastAPI reads the annotations of the routes.

import hmac
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Collection

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from serve_spec import __version__
from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import InvalidRequest
from serve_spec.log import TRACE_ID, get_logger
from serve_spec.metrics import Reading
from serve_spec.serving import sse
from serve_spec.serving.admission import Admission
from serve_spec.serving.answers import (
    Completion,
    CompletionFormat,
    ErrorAnswer,
    model_entry,
)
from serve_spec.serving.completions import (
    CompletionRunner,
    Fleet,
    stream_frames,
    whole_answer,
)
from serve_spec.serving.errors import ApiError, no_replica, refused, unknown_model
from serve_spec.serving.latency import ARRIVED
from serve_spec.serving.messages import GenerateRequest
from serve_spec.serving.openai import CompletionRequest, invalid_body
from serve_spec.serving.status_page import OPEN_PATHS as _PAGE_PATHS
from serve_spec.serving.status_page import add_status_page

logger = get_logger(__name__)

# Probes carry no key; the status page asks for one.
_OPEN_PATHS = frozenset({"/health"}) | _PAGE_PATHS
_TRACE_HEADER = "x-request-id"


class AsciiJSON(JSONResponse):
    """JSON in ASCII: an error may quote half a surrogate pair, which has no UTF-8."""

    def render(self, content: object) -> bytes:
        """The body."""
        return json.dumps(content, separators=(",", ":")).encode("ascii")


class CompletionAnswer(Response):
    """Runs one completion inside the response, so that whatever ends the one frees the other.

    A client that leaves cancels the response: at any point the turn at the door and the request at
    the replica are given back.
    """

    def __init__(
        self,
        runner: CompletionRunner,
        request: GenerateRequest,
        form: CompletionFormat,
        *,
        stream: bool,
    ) -> None:
        super().__init__()
        self._runner = runner
        self._request = request
        self._form = form
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers; errors before the first token are raised, so that they set the status."""
        async with self._runner.run(self._request) as completion:
            answer: Response
            if self._stream:
                frames = stream_frames(completion, self._form, self._request.trace_id)
                answer = StreamingResponse(frames, media_type=sse.MEDIA_TYPE, headers=sse.HEADERS)
            else:
                answer = AsciiJSON(await whole_answer(completion, self._form))
            await answer(scope, receive, send)


class ApiKeyCheck:
    """ASGI middleware: 401 unless the request carries one of `keys` as bearer token."""

    def __init__(self, app: ASGIApp, keys: Collection[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what may pass."""
        app = self._app
        if scope["type"] == "http" and not (_is_open(scope) or self._has_key(scope)):
            message = "Give one of the server's API keys: Authorization: Bearer KEY"
            app = _error_answer(ApiError(401, message, code="invalid_api_key"))
        await app(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, token = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        # Every key is compared in constant time, whichever matches.
        matches = [hmac.compare_digest(token.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


class Arrival:
    """ASGI middleware: notes when a request arrived, and under which id logs speak of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything on."""
        if scope["type"] == "http":
            ARRIVED.set(time.perf_counter())
            TRACE_ID.set(_trace_id(Request(scope)))
        await self._app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    """Whether the path, without the route prefix of the application, needs no key."""
    return scope["path"].removeprefix(scope.get("root_path", "")) in _OPEN_PATHS


def create_api(
    config: ServeSpecConfig,
    fleet: Fleet,
    admission: Admission,
    record: Callable[[Reading], None] = lambda reading: None,
    metrics: Callable[[], Awaitable[str]] | None = None,
) -> FastAPI:
    """The ASGI app: completions, models, health, server_info, status page.

    record: gets what requests report of themselves.
    metrics: gives the text of `/metrics`; None: there is no such route.
    """
    # The documentation pages would load scripts from another host.
    api = FastAPI(
        title="serve_spec",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}},
    )
    if config.router.api_keys:
        api.add_middleware(ApiKeyCheck, keys=config.router.api_keys)
    api.add_middleware(Arrival)
    _add_error_answers(api)
    _add_completions(api, config, fleet, admission, record)
    _add_models(api, config.model.served_model_name)
    _add_operations(api, config, fleet, admission)
    add_status_page(api)
    if metrics is not None:
        _add_metrics(api, metrics)
    return api


def _add_completions(
    api: FastAPI,
    config: ServeSpecConfig,
    fleet: Fleet,
    admission: Admission,
    record: Callable[[Reading], None],
) -> None:
    served = config.model.served_model_name
    router = config.router
    runner = CompletionRunner(
        fleet,
        admission,
        timeout_s=router.request_timeout_s,
        resume_timeout_s=router.resume_timeout_s,
        record=record,
    )

    @api.post("/v1/completions", response_model=Completion)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Completes a prompt; with `stream`, as server-sent events."""
        if body.model is not None and body.model != served:
            raise unknown_model(body.model, served)
        params = body.sampling_params()
        # Not the caller's x-request-id: two callers may send the same one.
        completion_id = f"cmpl-{uuid.uuid4().hex}"
        form = CompletionFormat(
            completion_id,
            served,
            int(time.time()),
            include_usage=body.include_usage,
            synthetic_acceptance=config.speculative.synthetic_acceptance is not None,
        )
        generate = GenerateRequest(completion_id, _trace_id(request), body.prompt, params)
        return CompletionAnswer(runner, generate, form, stream=bool(body.stream))


def _add_models(api: FastAPI, served: str) -> None:
    entry = model_entry(served, int(time.time()))

    @api.get("/v1/models")
    async def models() -> dict[str, object]:
        """The one model that is served."""
        return {"object": "list", "data": [entry]}

    # `:path` because model names may hold slashes.
    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, object]:
        """One model by name."""
        if name != served:
            raise unknown_model(name, served)
        return {**entry}


def _add_operations(
    api: FastAPI, config: ServeSpecConfig, fleet: Fleet, admission: Admission
) -> None:
    @api.get("/health", response_model=None)
    async def health() -> Response:
        """200 while a replica takes requests, else 503."""
        num_healthy = await fleet.num_healthy()
        if num_healthy == 0:  # not raised: a probe asks every few seconds, and would fill the log
            return _error_answer(no_replica("none is running"))
        return AsciiJSON({"status": "ok", "healthy_replicas": num_healthy})

    @api.get("/server_info")
    async def server_info() -> dict[str, object]:
        """Replicas, router and fleet as they are now."""
        return {
            "version": __version__,
            "model": config.model.served_model_name,
            **await fleet.stats(),
            "router": {**admission.snapshot(), **fleet.batching()},
        }

    @api.get("/status.json", include_in_schema=False)
    async def status() -> dict[str, object]:
        """What the status page shows."""
        return {
            "model": config.model.served_model_name,
            **await fleet.status(),
            "router": admission.snapshot(),
        }


def _add_metrics(api: FastAPI, metrics: Callable[[], Awaitable[str]]) -> None:
    @api.get("/metrics", include_in_schema=False)
    async def exposition() -> Response:
        """The fleet's metrics as Prometheus reads them."""
        return Response(await metrics(), media_type="text/plain; version=0.0.4")


def _add_error_answers(api: FastAPI) -> None:
    """Every error as OpenAI's error object, unknown routes and broken JSON included."""

    @api.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        if error.status >= 500 or error.status == 408:
            logger.warning("request %s: %d %s", _trace_id(request), error.status, error.message)
        return _error_answer(error)

    @api.exception_handler(InvalidRequest)
    async def invalid_request(request: Request, error: InvalidRequest) -> Response:
        return _error_answer(refused(error))

    @api.exception_handler(RequestValidationError)
    async def validation(request: Request, error: RequestValidationError) -> Response:
        return _error_answer(invalid_body(error.errors()))

    @api.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        what = f"{request.method} {request.url.path}"
        message = {404: f"Unknown URL ({what})", 405: f"Not allowed: {what}"}
        answer = _error_answer(
            ApiError(error.status_code, message.get(error.status_code, str(error.detail)))
        )
        answer.headers.update(error.headers or {})
        return answer

    @api.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        message = f"Internal error ({type(error).__name__}); see the server's log"
        return _error_answer(ApiError(500, message, kind="server_error"))


def _error_answer(error: ApiError) -> Response:
    return AsciiJSON(error.body(), status_code=error.status, headers=error.headers())


def _trace_id(request: Request) -> str:
    """The request's x-request-id. Serve makes one where the client sent none, and sends it back."""
    return request.headers.get(_TRACE_HEADER, "-")
