"""HTTP routes."""

# No `from __future__ import annotations` here: FastAPI reads the annotations of the routes.

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import Response

from serve_spec import __version__
from serve_spec.adaptive.reasons import MEANINGS
from serve_spec.config import ServeSpecConfig
from serve_spec.metrics import Reading
from serve_spec.serving.errors import AsciiJSON, error_answer, unknown_model
from serve_spec.serving.events import STREAM_TYPE
from serve_spec.serving.protocols import answers
from serve_spec.serving.protocols.frontend import Frontend
from serve_spec.serving.protocols.json_body import LargeBodyRoute
from serve_spec.serving.protocols.middleware import Arrival, BodyLimits, add_error_answers
from serve_spec.serving.protocols.native_api import add_generate, add_state, add_tokens
from serve_spec.serving.protocols.openai import ChatRequest, CompletionRequest
from serve_spec.serving.protocols.responses import add_responses
from serve_spec.serving.router.admission import Admission
from serve_spec.serving.statistics.aliases import Aliases
from serve_spec.serving.statistics.recent import RecentRequests
from serve_spec.serving.statistics.status_page import add_pages, ray_dashboard
from serve_spec.serving.statistics.telemetry import fleet_metrics

if TYPE_CHECKING:
    from serve_spec.serving.router.fleet import RayFleet

_ERRORS = {
    400: "A field is wrong; `param` names it.",
    401: "No valid API key.",
    404: "The model is not served here.",
    408: "The answer took longer than `request_timeout_s`, or the body than `body_timeout_s`.",
    413: "The prompt is longer than the context, or the body than the server reads.",
    429: "The queue is full; see Retry-After.",
    500: "The engine failed.",
    503: "The model is being loaded, or no replica is healthy; see Retry-After.",
}


def create_api(
    config: ServeSpecConfig,
    fleet: "RayFleet",
    admission: Admission,
    record: Callable[[Reading], None] = lambda reading: None,
    application: str = "default",
) -> FastAPI:
    """Return the ASGI app with all endpoints. record: receives the metrics of requests.

    application: its name in Serve, to find its metrics.
    """
    api = FastAPI(
        title="serve_spec",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": answers.ErrorAnswer}, "5XX": {"model": answers.ErrorAnswer}},
    )
    api.router.route_class = LargeBodyRoute
    api.add_middleware(
        BodyLimits, max_bytes=config.router.max_body_bytes, timeout_s=config.router.body_timeout_s
    )
    api.add_middleware(Arrival, keys=config.router.api_keys)
    add_error_answers(api)
    recent = RecentRequests(record)
    frontend = Frontend(config, fleet, admission, recent.record)
    _add_completions(api, frontend)
    add_responses(api, frontend)
    add_generate(api, frontend)
    add_tokens(api, frontend)
    add_state(api, config, fleet, admission)
    _add_models(api, config.model.names)
    _add_operations(api, config, fleet, admission, recent)
    _add_metrics(api, Aliases(config, application))
    add_pages(api)
    return api


def _add_completions(api: FastAPI, frontend: Frontend) -> None:
    @api.post(
        "/v1/completions", response_model=answers.Completion, responses=_answers("completion")
    )
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Complete prompts; with `stream`, as server-sent events."""
        frontend.admit(body, len(body.prompt))
        params = await frontend.text.params(body)
        head = frontend.head("cmpl", body)
        prompts = await frontend.prompts(body, params.max_tokens)
        echoes = await frontend.echoes(body, prompts)
        choices = frontend.choices(head, request, prompts, params, body.num_candidates)
        before = [echo for echo in echoes for _ in range(body.num_choices)]
        token_bytes = await frontend.token_bytes(body, is_wanted=body.logprobs is not None)
        form = answers.CompletionFormat(head, before, token_bytes, body.num_candidates)
        form.details = await frontend.details(body, prompts)
        return frontend.answer(
            choices,
            form,
            num_prompts=len(prompts),
            is_prompt_only=body.is_prompt_only,
            stream=bool(body.stream),
        )

    @api.post(
        "/v1/chat/completions",
        response_model=answers.ChatCompletion,
        responses=_answers("chat completion"),
    )
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation; with `stream`, as server-sent events."""
        frontend.admit(body, 1)
        head = frontend.head("chatcmpl", body)
        choices, form = await frontend.chat(body, head, request)
        return frontend.answer(choices, form, stream=bool(body.stream))


def _answers(kind: str) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses of the completions or chat endpoint."""
    event = {
        "type": "object",
        "properties": {"data": {"type": "string"}},
        "required": ["data"],
        "description": "One event; its data is a chunk as JSON, or [DONE].",
    }
    stream = {"schema": event, "example": "data: {...}\n\ndata: [DONE]\n\n"}
    described = f"The {kind}; with `stream`, server-sent events of chunks, then [DONE]."
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": answers.ErrorAnswer, "description": description}
        for status, description in _ERRORS.items()
    }
    return {200: {"description": described, "content": {STREAM_TYPE: stream}}, **errors}


def _add_models(api: FastAPI, names: Sequence[str]) -> None:
    created = int(time.time())
    by_name: dict[str, answers.Model] = {
        name: {"id": name, "object": "model", "created": created, "owned_by": "serve_spec"}
        for name in names
    }

    @api.get("/v1/models")
    async def models() -> answers.ModelList:
        """List the names of the served model."""
        return {"object": "list", "data": list(by_name.values())}

    # `:path` because model names may hold slashes.
    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> answers.Model:
        """Return one model by name."""
        if name not in by_name:
            raise unknown_model(name, names[0])
        return by_name[name]


def _add_operations(
    api: FastAPI,
    config: ServeSpecConfig,
    fleet: "RayFleet",
    admission: Admission,
    recent: RecentRequests,
) -> None:
    @api.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
    @api.get("/health_generate", include_in_schema=False)
    @api.get("/health", response_model=None)
    async def health() -> Response:
        """Return 200 while a replica takes requests, else 503; `costs` as in `RayFleet.costs`."""
        num_healthy = await fleet.num_healthy()
        if num_healthy == 0:  # returned, not raised: probes would fill the log
            return error_answer(fleet.unavailable("none is running"))
        answer = {"status": "ok", "healthy_replicas": num_healthy, "costs": await fleet.costs()}
        return AsciiJSON(answer)

    @api.get("/get_server_info", include_in_schema=False)
    @api.get("/server_info")
    async def server_info() -> dict[str, object]:
        """Return the current state of replicas, router and fleet."""
        return {
            "version": __version__,
            "model": config.model.names[0],
            **await fleet.stats(),
            "router": {**admission.snapshot(), **fleet.batching(), **recent.snapshot()},
        }

    ray_address = functools.cache(ray_dashboard)

    @api.get("/status.json", include_in_schema=False)
    async def status() -> dict[str, object]:
        """Return the data of the status page."""
        return {
            "model": config.model.names[0],
            **await fleet.status(),
            "router": {**admission.snapshot(), **recent.snapshot()},
            "reasons": MEANINGS,
            "ray_dashboard": ray_address(),
        }


def _add_metrics(api: FastAPI, aliases: Aliases) -> None:
    @api.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        """Return the fleet's metrics in Prometheus' text format, also by other servers' names."""
        ours = await fleet_metrics()
        return Response(ours + aliases.render(ours), media_type="text/plain; version=0.0.4")
