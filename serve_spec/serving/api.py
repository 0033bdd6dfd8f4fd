"""HTTP routes."""

# No `from __future__ import annotations` here: FastAPI reads the annotations of the routes.

import asyncio
import hmac
import html
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from serve_spec import __version__
from serve_spec.config import ServeSpecConfig
from serve_spec.config.serving import RouterConfig
from serve_spec.core.request import SamplingParams
from serve_spec.log import get_logger
from serve_spec.metrics import IGNORED_FIELDS, Reading
from serve_spec.serving import answers
from serve_spec.serving.admission import Admission
from serve_spec.serving.completions import CompletionRunner, choices_of, stream_frames, whole_answer
from serve_spec.serving.errors import (
    CLIENT,
    Arrival,
    AsciiJSON,
    BodyLimits,
    add_error_answers,
    encode_by_items,
    error_answer,
    key_client,
    too_many_choices,
    trace_id,
    unknown_model,
)
from serve_spec.serving.fields import Prompt, ignored_fields
from serve_spec.serving.json_body import LargeBodyRoute
from serve_spec.serving.logprobs import TokenBytesLookup, labelled
from serve_spec.serving.messages import GenerateRequest
from serve_spec.serving.model_text import ModelText
from serve_spec.serving.native_api import add_generate, add_state, add_tokens
from serve_spec.serving.openai import BaseRequest, ChatRequest, CompletionRequest, unknown_field
from serve_spec.serving.responses import add_responses
from serve_spec.serving.telemetry import fleet_metrics
from serve_spec.serving.tools import ParsedChatFormat

if TYPE_CHECKING:
    from serve_spec.serving.fleet import RayFleet

logger = get_logger(__name__)

_SLICE_BYTES = 2**20
_MOST_ID_CHARS = 64
# Time for the error of a timed-out request to reach its client.
_ERROR_MARGIN_S = 1.0

# Of the status page. No other host is allowed.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)
# Of the page of the API: FastAPI's scripts and icon come from these hosts.
_DOCS_POLICY = (
    "default-src 'none'; script-src https://cdn.jsdelivr.net 'unsafe-inline'; "
    "style-src https://cdn.jsdelivr.net 'unsafe-inline'; connect-src 'self'; "
    "img-src https://fastapi.tiangolo.com data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
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


class CompletionAnswer(Response):
    """A response that runs its request: when the client disconnects, both are cancelled."""

    def __init__(
        self,
        runner: CompletionRunner,
        choices: Sequence[GenerateRequest],
        form: answers.AnswerFormat,
        *,
        num_prompts: int = 1,
        is_prompt_only: bool = False,
        stream: bool,
    ) -> None:
        super().__init__()
        self._run = partial(
            runner.run,
            choices,
            num_prompts,
            is_prompt_only=is_prompt_only,
            end_finder=form.end_finder,
        )
        self._trace_id = choices[0].trace_id
        self._form = form
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; raise errors before the first tokens, so that they set the status."""
        async with self._run(client=CLIENT.get()) as running:
            answer: Response
            if self._stream:
                frames = stream_frames(running, self._form, self._trace_id)
                answer = StreamingResponse(
                    frames, media_type=answers.STREAM_TYPE, headers=answers.STREAM_HEADERS
                )
            else:
                answer = await _json_answer(await whole_answer(running, self._form))
            try:
                # A client that does not read must not hold its slots forever.
                async with asyncio.timeout_at(running.deadline.at + _ERROR_MARGIN_S):
                    await answer(scope, receive, send)
            except TimeoutError:
                logger.warning("request %s: the client does not read", self._trace_id)


def create_api(
    config: ServeSpecConfig,
    fleet: "RayFleet",
    admission: Admission,
    record: Callable[[Reading], None] = lambda reading: None,
) -> FastAPI:
    """Return the ASGI app with all endpoints. record: receives the metrics of requests."""
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
    frontend = Frontend(config, fleet, admission, record)
    _add_completions(api, frontend)
    add_responses(api, frontend)
    add_generate(api, frontend)
    add_tokens(api, frontend)
    add_state(api, config, fleet, admission)
    _add_models(api, config.model.names)
    _add_operations(api, config, fleet, admission)
    _add_status_page(api)
    _add_docs(api)
    return api


class Frontend:
    """Code shared by the endpoints that generate text; `answer` returns a `CompletionAnswer`."""

    def __init__(
        self,
        config: ServeSpecConfig,
        fleet: "RayFleet",
        admission: Admission,
        record: Callable[[Reading], None],
    ) -> None:
        self.text = ModelText(config.model, config.router)
        self._names = config.model.names
        self._is_strict = config.router.strict_fields
        self._salts = _salts(config.router)
        self._record = record
        self._fingerprint = answers.fingerprint(__version__, config.model.model_dump(mode="json"))
        self._synthetic_acceptance = config.speculative.synthetic_acceptance is not None
        self._runner = CompletionRunner(
            fleet,
            admission,
            timeout_s=config.router.request_timeout_s,
            resume_timeout_s=config.router.resume_timeout_s,
            record=record,
        )
        self.answer = partial(CompletionAnswer, self._runner)

    def admit(self, body: BaseRequest, num_prompts: int) -> None:
        """Raise ApiError for another model, too many choices, or an unknown field if strict."""
        if ignored := [*ignored_fields(body)]:
            if self._is_strict:
                raise unknown_field(ignored[0], type(body))
            self._record(Reading(IGNORED_FIELDS, len(ignored)))
        self.check_model(body.model)
        most = self._runner.max_choices
        if num_prompts * body.num_candidates > most:
            raise too_many_choices(num_prompts, body.num_candidates, most)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names another model."""
        if name is not None and name not in self._names:
            raise unknown_model(name, self._names[0])

    def head(self, kind: str, body: BaseRequest, separator: str = "-") -> answers.AnswerHead:
        """Return the shared fields. The id is not x-request-id, which need not be unique."""
        return answers.AnswerHead(
            f"{kind}{separator}{body.request_id or uuid.uuid4().hex}",
            self._names[0],
            int(time.time()),
            self._fingerprint,
            include_usage=body.include_usage,
            has_continuous_usage=body.has_continuous_usage,
            synthetic_acceptance=self._synthetic_acceptance,
        )

    async def token_bytes(self, body: BaseRequest, *, is_wanted: bool) -> TokenBytesLookup | None:
        """Return the lookup of token bytes; None unless log-probabilities are requested."""
        if not is_wanted:
            return None
        token_bytes = await self.text.token_bytes()
        return labelled(token_bytes) if body.return_tokens_as_token_ids else token_bytes

    async def details(self, body: BaseRequest, prompts: Sequence[Prompt]) -> answers.Details:
        """Return what the answer holds in addition to the text."""
        is_scored = body.prompt_logprobs is not None
        ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
        return answers.Details(
            body.num_choices,
            ids if body.return_token_ids else None,
            body.prompt_logprobs,
            await self.text.token_bytes() if is_scored else None,
        )

    async def prompts(self, body: CompletionRequest, max_tokens: int) -> list[Prompt]:
        """Return the prompts for the replica; as token ids if the answer or a limit needs them."""
        prompts = body.prompt
        if body.needs_token_ids:
            prompts = [*await self.text.token_ids(body, max_tokens)]
        await self.text.refuse_long(prompts)
        return prompts

    async def echoes(
        self, body: CompletionRequest, prompts: Sequence[Prompt]
    ) -> list[answers.Echo]:
        """Return the prompts to repeat before their choices; empty unless `echo` is set."""
        if not body.echo:
            return []
        is_cut = body.truncate_prompt_tokens is not None
        texts = await self.text.texts(prompts if is_cut else body.prompt)
        ids = [[] if isinstance(prompt, str) else prompt for prompt in prompts]
        return [answers.Echo(*echo) for echo in zip(texts, ids, strict=True)]

    async def chat(
        self, body: ChatRequest, head: answers.AnswerHead, request: Request
    ) -> tuple[list[GenerateRequest], answers.ChatFormat]:
        """Return the choices of a chat and the format of its answer."""
        prompt, params, syntax = await self.text.conversation(body, await self.text.params(body))
        choices = self.choices(head, request, [prompt], params, body.num_choices)
        token_bytes = await self.token_bytes(body, is_wanted=bool(body.logprobs))
        form = answers.ChatFormat(head, token_bytes)
        if syntax is not None:
            form = ParsedChatFormat(head, syntax, token_bytes)
        form.details = await self.details(body, [prompt])
        return choices, form

    def choices(
        self,
        head: answers.AnswerHead,
        request: Request,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        count: int,
    ) -> list[GenerateRequest]:
        """Return `count` requests per prompt; their ids are unique, unlike those of clients."""
        key = f"{head.id[:_MOST_ID_CHARS]}-{uuid.uuid4().hex}"
        if (salt := self._salts.get(CLIENT.get())) is not None:
            params = replace(params, cache_salt=f"{salt} {params.cache_salt or ''}")
        return choices_of(key, trace_id(request), prompts, params, count)


def _salts(router: RouterConfig) -> dict[str, str]:
    """Return the cache salt of each client with an API key, the same in every router.

    Without one, a client could find out what others have sent.
    """
    if len(set(router.api_keys)) < 2 or router.share_prefix_cache:
        return {}
    return {
        key_client(index): hmac.digest(key.encode(), b"cache_salt", "sha256").hex()
        for index, key in enumerate(router.api_keys)
    }


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


async def _json_answer(content: answers.JSONAnswer) -> Response:
    """Return a whole answer as a response; encode it in a thread, as it may be long."""
    body = await asyncio.to_thread(encode_by_items, content)
    headers = {"content-length": str(len(body))}
    return StreamingResponse(_slices(body), media_type="application/json", headers=headers)


async def _slices(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _SLICE_BYTES):
        yield body[start : start + _SLICE_BYTES]


def _answers(kind: str) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI responses of the completions or chat endpoint."""
    event = {
        "type": "object",
        "properties": {"data": {"type": "string"}},
        "required": ["data"],
        "description": "One event; its data is a chunk as JSON, or [DONE].",
    }
    stream = {"schema": event, "example": "data: {...}\n\ndata: [DONE]\n\n"}
    whole = f"The {kind}; with `stream`, server-sent events of chunks, then [DONE]."
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": answers.ErrorAnswer, "description": description}
        for status, description in _ERRORS.items()
    }
    return {200: {"description": whole, "content": {answers.STREAM_TYPE: stream}}, **errors}


def _add_models(api: FastAPI, names: Sequence[str]) -> None:
    created = int(time.time())
    entries: dict[str, answers.Model] = {
        name: {"id": name, "object": "model", "created": created, "owned_by": "serve_spec"}
        for name in names
    }

    @api.get("/v1/models")
    async def models() -> answers.ModelList:
        """List the names of the served model."""
        return {"object": "list", "data": list(entries.values())}

    # `:path` because model names may hold slashes.
    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> answers.Model:
        """Return one model by name."""
        if name not in entries:
            raise unknown_model(name, names[0])
        return entries[name]


def _add_operations(
    api: FastAPI, config: ServeSpecConfig, fleet: "RayFleet", admission: Admission
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
            "router": {**admission.snapshot(), **fleet.batching()},
        }

    @api.get("/status.json", include_in_schema=False)
    async def status() -> dict[str, object]:
        """Return the data of the status page."""
        return {
            "model": config.model.names[0],
            **await fleet.status(),
            "router": admission.snapshot(),
        }

    @api.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        """Return the fleet's metrics in Prometheus' text format."""
        return Response(await fleet_metrics(), media_type="text/plain; version=0.0.4")


def _add_docs(api: FastAPI) -> None:
    """Add FastAPI's page of the API, whose scripts the browser loads from another host."""

    @api.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        """Return the page."""
        schema = request.scope.get("root_path", "").rstrip("/") + "/openapi.json"
        page = get_swagger_ui_html(openapi_url=schema, title="serve_spec")
        page.headers["content-security-policy"] = _DOCS_POLICY
        return page


def _add_status_page(api: FastAPI) -> None:
    """Add the live status page: an HTML file, its script and a charting library."""
    files = resources.files("serve_spec.serving") / "static"
    page = (files / "status.html").read_text()

    @api.get("/", include_in_schema=False)
    async def status_page(request: Request) -> Response:
        """Return the page, with the application's route prefix as base URL."""
        base = html.escape(request.scope.get("root_path", "").rstrip("/") + "/")
        headers = {"content-security-policy": _POLICY}
        return HTMLResponse(page.replace("{{base}}", base), headers=headers)

    def add_asset(name: str, media_type: str) -> None:
        content = (files / name).read_bytes()

        @api.get(f"/static/{name}", include_in_schema=False)
        async def asset() -> Response:
            """Return one file."""
            return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})

    for name in ("status", "uplot.min"):
        add_asset(f"{name}.css", "text/css")
        add_asset(f"{name}.js", "text/javascript")
