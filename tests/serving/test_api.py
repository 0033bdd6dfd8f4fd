"""The HTTP face without Ray: every answer has OpenAI's shape, errors above all."""

from __future__ import annotations

import asyncio
import json
from functools import cached_property
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from serve_spec.config import ServeSpecConfig
from serve_spec.serving.admission import Admission
from serve_spec.serving.api import create_api
from serve_spec.serving.openai import CompletionRequest
from tests.serving.conftest import MODEL
from tests.serving.fake_engine import FakeLoop
from tests.serving.fakes import LoopFleet, ScriptedFleet

COMPLETIONS = "/v1/completions"


class Server:
    """The app in this process, a fake engine behind it."""

    def __init__(self, config: ServeSpecConfig, max_in_flight: int = 8) -> None:
        self.loop = FakeLoop(config)
        self.fleet: Any = LoopFleet(self.loop)
        self.door = Admission(max_in_flight=max_in_flight, max_queued=1)
        self._config = config

    @cached_property
    def app(self) -> FastAPI:
        return create_api(self._config, self.fleet, self.door)

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **options)

        return asyncio.run(send())

    def complete(self, prompt: Any = "a b c", **body: Any) -> httpx.Response:
        return self.ask("POST", COMPLETIONS, json={"prompt": prompt, **body})


@pytest.fixture
def server(config: ServeSpecConfig) -> Server:
    return Server(config)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, after checking its envelope."""
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    error: dict[str, Any] = body["error"]
    return error


def test_a_completion_has_the_fields_of_the_openai_api(server: Server) -> None:
    answer = server.complete(model=MODEL, max_tokens=5)
    assert answer.status_code == 200
    body = answer.json()
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    choice = {"index": 0, "text": "a b c a b ", "logprobs": None, "finish_reason": "length"}
    assert body["choices"] == [choice]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 5)
    assert body["usage"]["speculation"]["accept_length"] > 1


def test_token_ids_are_a_prompt(server: Server) -> None:
    assert server.complete([7, 8], max_tokens=2).json()["choices"][0]["text"] == "<7> <8> "


def test_a_stream_is_server_sent_events(server: Server) -> None:
    answer = server.complete(max_tokens=5, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [line for line in answer.text.split("\n\n") if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    texts = [json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events[:-1]]
    assert "".join(texts) == "a b c a b "


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/chat/completions", "/nothing"])
def test_an_unknown_url_is_a_404_in_openai_form(server: Server, path: str) -> None:
    assert path in error_of(server.ask("GET", path), 404)["message"]


def test_a_wrong_method_is_a_405_that_says_what_is_allowed(server: Server) -> None:
    answer = server.ask("GET", COMPLETIONS)
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'"text"', b"null", b"\xff", b'{"prompt": "a"} x']
)
def test_a_body_that_is_no_json_object_is_a_400(server: Server, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    error_of(server.ask("POST", COMPLETIONS, content=content, headers=headers), 400)


def test_a_body_without_a_content_type_is_told_which_one_to_send(server: Server) -> None:
    answer = server.ask("POST", COMPLETIONS, content=b'{"prompt": "a"}')
    assert "Content-Type: application/json" in error_of(answer, 400)["message"]


def test_a_missing_prompt_is_a_400_that_names_it(server: Server) -> None:
    assert error_of(server.ask("POST", COMPLETIONS, json={}), 400)["param"] == "prompt"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_token": 5}, "max_token"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"speculative": {"max_steps": -1}}, "speculative.max_steps"),
    ],
    ids=str,
)
def test_a_bad_field_is_a_400_that_names_it(
    server: Server, body: dict[str, Any], param: str
) -> None:
    error = error_of(server.complete(**{"prompt": "a", **body}), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(alphabet=st.characters(), max_size=5)
    | st.sampled_from([10**30, -(10**30), 1e-300, "\ud800", "", [], {}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
FIELDS = st.sampled_from(sorted(CompletionRequest.model_fields)) | st.text(max_size=4)


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(body=st.dictionaries(FIELDS, VALUES, max_size=4), sane=st.booleans())
@example(body={"\ud800": 1}, sane=True)
@example(body={"model": "\ud800"}, sane=True)
def test_no_body_makes_a_5xx(server: Server, body: dict[str, Any], sane: bool) -> None:
    body = ({"prompt": "a", "max_tokens": 3} if sane else {}) | body
    answer = server.ask(
        "POST",
        COMPLETIONS,
        content=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    if answer.status_code != 200:
        error_of(answer, answer.status_code)
    assert answer.status_code < 500
    assert not server.loop.streams


def test_a_prompt_that_is_too_long_is_a_413(server: Server) -> None:
    error = error_of(server.complete("a " * 100), 413)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_an_unknown_model_is_a_404(server: Server) -> None:
    error = error_of(server.complete(model="gpt-4"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert MODEL in error["message"]


def test_the_engine_giving_up_is_a_500(server: Server) -> None:
    error = error_of(server.complete("fail"), 500)
    assert (error["type"], error["code"]) == ("server_error", "engine_error")


def test_a_bug_is_a_500_in_openai_form_too(server: Server) -> None:
    server.fleet = ScriptedFleet([ZeroDivisionError("boom")])
    assert "ZeroDivisionError" in error_of(server.complete(), 500)["message"]


def test_models_lists_the_served_model_and_finds_it_by_name(server: Server) -> None:
    (model,) = server.ask("GET", "/v1/models").json()["data"]
    assert (model["id"], model["object"]) == (MODEL, "model")
    assert server.ask("GET", f"/v1/models/{MODEL}").json() == model
    assert error_of(server.ask("GET", "/v1/models/meta/other"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(("num_replicas", "status"), [(1, 200), (None, 200), (0, 503)])
def test_health_fails_only_when_no_replica_is_known_to_serve(
    server: Server, num_replicas: int | None, status: int
) -> None:
    server.fleet = LoopFleet(server.loop, num_replicas)
    answer = server.ask("GET", "/health")
    assert answer.status_code == status
    if status == 503:
        assert error_of(answer, 503)["code"] == "no_healthy_replica"


def test_server_info_holds_replicas_fleet_and_router(server: Server) -> None:
    server.complete()
    info = server.ask("GET", "/server_info").json()
    assert info["internal_states"][0]["speculative_num_steps"] == 3
    assert info["router"]["batch_size_histogram"] == {"1": 1}
    assert (info["router"]["queue_len"], info["router"]["in_flight"]) == (0, 0)
    assert "fleet" in info


def test_the_schema_is_published_and_promises_no_422(server: Server) -> None:
    document = server.ask("GET", "/openapi.json").json()
    answers = document["paths"][COMPLETIONS]["post"]["responses"]
    assert set(answers) == {"200", "4XX", "5XX"}


class TestApiKeys:
    @pytest.fixture
    def server(self, config: ServeSpecConfig) -> Server:
        return Server(ServeSpecConfig.load(config, api_keys=["k1", "k2"]))

    @pytest.mark.parametrize("value", ["", "Bearer", "Bearer k3", "Bearer k1k2", "Basic k1", "k1"])
    @pytest.mark.parametrize("path", ["/v1/models", "/server_info", "/nothing"])
    def test_without_a_key_everything_but_health_is_a_401(
        self, server: Server, path: str, value: str
    ) -> None:
        headers = {"authorization": value} if value else {}
        error = error_of(server.ask("GET", path, headers=headers), 401)
        assert error["code"] == "invalid_api_key"
        assert server.ask("GET", "/health", headers=headers).status_code == 200

    def test_health_stays_open_below_a_route_prefix(self, server: Server) -> None:
        async def send() -> list[int]:
            transport = httpx.ASGITransport(server.app, root_path="/llm")
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                paths = ("/llm/health", "/llm/v1/models")
                return [(await client.get(path)).status_code for path in paths]

        assert asyncio.run(send()) == [200, 401]

    def test_the_key_is_asked_for_before_the_body_is_read(self, server: Server) -> None:
        error_of(server.ask("POST", COMPLETIONS, content=b"{"), 401)

    @pytest.mark.parametrize("value", ["Bearer k1", "bearer k2", "Bearer  k2"])
    def test_any_configured_key_opens(self, server: Server, value: str) -> None:
        answer = server.ask("GET", "/v1/models", headers={"authorization": value})
        assert answer.status_code == 200


def test_a_full_queue_is_a_429_with_retry_after(config: ServeSpecConfig) -> None:
    server = Server(config, max_in_flight=1)

    async def scenario() -> httpx.Response:
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            held = [
                asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "hold on"}))
                for _ in range(2)
            ]
            while server.door.in_flight + server.door.queue_len < 2:
                await asyncio.sleep(0)
            answer = await client.post(COMPLETIONS, json={"prompt": "a"})
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
        assert (server.door.in_flight, server.door.queue_len) == (0, 0)
        return answer

    answer = asyncio.run(scenario())
    assert error_of(answer, 429)["type"] == "rate_limit_error"
    assert int(answer.headers["retry-after"]) >= 1


def test_a_client_that_leaves_a_stream_frees_its_turn_and_its_engine(server: Server) -> None:
    """Speaks ASGI itself, because httpx waits for the end of a stream."""

    async def scenario() -> None:
        gone, first_chunk = asyncio.Event(), asyncio.Event()
        inbox = [json.dumps({"prompt": "hold on", "stream": True, "max_tokens": 9}).encode()]

        async def receive() -> dict[str, Any]:
            if inbox:
                return {"type": "http.request", "body": inbox.pop()}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message.get("body"):
                first_chunk.set()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.1"},
            "method": "POST",
            "path": COMPLETIONS,
            "raw_path": COMPLETIONS.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        call = asyncio.create_task(server.app(scope, receive, send))  # type: ignore[arg-type]
        await first_chunk.wait()
        assert (server.door.in_flight, len(server.loop.streams)) == (1, 1)
        gone.set()
        await call
        assert (server.door.in_flight, len(server.loop.streams)) == (0, 0)

    asyncio.run(scenario())


def test_answers_say_where_acceptance_is_forced(config: ServeSpecConfig) -> None:
    model = {"path": str(config.model.path)}
    speculative = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(config.model.path),
        "synthetic_acceptance": 2.5,
    }
    server = Server(ServeSpecConfig.load({"model": model, "speculative": speculative}))
    assert server.complete().json()["synthetic_acceptance"] is True
    frames = server.complete(stream=True).text.split("\n\n")
    chunks = [json.loads(f.removeprefix("data: ")) for f in frames if f.startswith("data: {")]
    assert chunks
    assert all(chunk["synthetic_acceptance"] is True for chunk in chunks)
    assert "synthetic_acceptance" not in Server(config).complete().json()
