"""The HTTP face without Ray: every answer has OpenAI's shape, errors above all."""

import asyncio
import json
import logging
from functools import partial

import pytest

from serve_spec.config import ServeSpecConfig
from serve_spec.core.request import FinishReason, TokenLogprob
from serve_spec.metrics import IGNORED_FIELDS
from serve_spec.serving.errors import ApiError, no_replica, starting
from serve_spec.serving.messages import Accepted
from serve_spec.serving.protocols import completion_answer
from serve_spec.serving.protocols.api import create_api
from tests.serving.asgi import CHAT, COMPLETIONS, Server, chunks_of, send
from tests.serving.conftest import MODEL
from tests.serving.fakes import LoopFleet, QuietFleet, ScriptedFleet, delta
from tests.serving.texts import WORDS, drafting, word_tokenizer, write_text_files


def error_of(answer, status):
    """The error object, after checking its envelope."""
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    return body["error"]


def test_answers_have_the_fields_of_the_openai_api(server):
    text = "a b c a b "
    end = {"index": 0, "logprobs": None, "finish_reason": "length"}
    message = {"role": "assistant", "content": text, "refusal": None}
    for answer, limit, prefix, kind, content in (
        (server.complete, "max_tokens", "cmpl-", "text_completion", {"text": text}),
        (
            server.chat,
            "max_completion_tokens",
            "chatcmpl-",
            "chat.completion",
            {"message": message},
        ),
    ):
        answer = answer(model=MODEL, **{limit: 5})
        assert answer.status_code == 200
        body = answer.json()
        assert body["id"].startswith(prefix)
        assert (body["object"], body["model"]) == (kind, MODEL)
        assert body["choices"] == [{**content, **end}]
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 5)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        assert usage["speculation"]["accept_length"] > 1


def test_prompts_and_choices_are_counted_by_one_index_in_answers_and_streams(server):
    asked = {"prompt": ["a b", "c"], "n": 2, "max_tokens": 3}
    whole = server.complete(**asked).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    texts = ["a b a "] * 2 + ["c c c "] * 2
    assert [choice["text"] for choice in whole["choices"]] == texts
    usage = whole["usage"]
    counts = usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]
    assert counts == (3, 12, 15)
    assert usage["speculation"]["num_rounds"] == 8
    include = {"include_usage": True}
    *chunks, last = chunks_of(server.complete(**asked, stream=True, stream_options=include))
    streamed = [""] * 4
    for chunk in chunks:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts
    assert len({(c["id"], c["created"], c["system_fingerprint"]) for c in [*chunks, last]}) == 1
    assert last["usage"] == usage


@pytest.mark.parametrize("prompt", ["a b", ["a b"], [WORDS["a"], WORDS["b"]]], ids=str)
def test_an_echo_says_the_prompt_first(server, prompt):
    answer = server.complete(prompt, echo=True, max_tokens=2)
    assert answer.json()["choices"][0]["text"] == "a ba b "
    chunks = chunks_of(server.complete(prompt, echo=True, max_tokens=2, stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a ba b "]
    for body in ({}, {"echo": True, "logprobs": 1}):
        assert error_of(server.complete("", **body), 400)["param"] == "prompt"


def test_more_choices_than_the_queue_could_hold_are_refused(server):
    most = server.admission.max_in_flight + server.admission.max_queued
    assert error_of(server.complete(n=most + 1), 400)["param"] == "n"
    assert error_of(server.complete(["a"] * (most + 1)), 400)["param"] == "prompt"
    assert server.complete(n=most, max_tokens=1).status_code == 200


def test_a_chat_stream_is_chunks_of_a_chat(server):
    chunks = chunks_of(server.chat(max_tokens=3, stream=True, n=2))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index in range(2):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        role, *texts = [choice["delta"] for choice in mine]
        assert role == {"role": "assistant", "content": ""}
        assert texts == [{"content": "a b "}, {"content": "c "}]
        assert [choice["finish_reason"] for choice in mine] == [None, None, "length"]


@pytest.mark.parametrize("switch", ["auto", "none"])
def test_requests_take_what_they_lack_from_generation_config(config, switch):
    config = ServeSpecConfig.load(config, generation_config=switch)
    write_text_files(config.model.folder, tokenizer=word_tokenizer(), max_position_embeddings=40)
    recommended = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "do_sample": False}
    (config.model.folder / "generation_config.json").write_text(json.dumps(recommended))
    server, seen = Server(config), []
    submit = server.loop.submit

    async def watched(prompt, params, *rest, **options):
        seen.append((params.temperature, params.top_k, params.top_p, params.max_tokens))
        return await submit(prompt, params, *rest, **options)

    server.loop.submit = watched
    answers = [
        server.chat(),
        server.complete(),
        server.ask("POST", "/v1/responses", json={"input": "a b c"}),
        server.ask("POST", "/generate", json={"text": "a b c"}),
        server.chat(temperature=0.0, top_p=0.5, top_k=-1, max_tokens=12),
        server.chat(min_tokens=10),
    ]
    assert [answer.status_code for answer in answers] == [200] * 6
    lacking, (limit, least) = ((0.6, 20), (9, 10)) if switch == "auto" else ((1.0, -1), (37, 37))
    assert seen == [
        (*lacking, 1.0, limit),
        (*lacking, 1.0, 16),
        (*lacking, 1.0, limit),
        (*lacking, 1.0, seen[3][3]),
        (0.0, -1, 0.5, 12),
        (*lacking, 1.0, least),
    ]


def test_what_is_too_long_is_a_413_that_names_it(server):
    for answer, param in ((server.chat, "messages"), (server.complete, "prompt")):
        error = error_of(answer("a " * 64), 413)
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


@pytest.mark.parametrize("path", ["/v1/chat", "/nothing"])
def test_an_unknown_url_is_a_404_and_a_wrong_method_a_405_that_says_what_is_allowed(server, path):
    assert path in error_of(server.ask("GET", path), 404)["message"]
    answer = server.ask("GET", CHAT)
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"


def test_a_body_that_does_not_arrive_in_time_is_a_408(config):
    async def endless():
        yield b"{"
        await asyncio.Event().wait()

    server = Server(ServeSpecConfig.load(config, body_timeout_s=0.05))
    answer = server.ask("POST", COMPLETIONS, content=endless())
    assert error_of(answer, 408)["code"] == "body_timeout"


HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "speculative": {"max_steps": -1}}, "speculative.max_steps"),
        (CHAT, {**HI, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
    ids=str,
)
def test_a_bad_field_is_a_400_that_names_it(server, path, body, param):
    error = error_of(server.ask("POST", path, json=body), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {"prompt": "a", "frob": 1}, "frob"),
        (CHAT, {**HI, "max_token": 3}, "max_token"),
        (CHAT, {"messages": [{"role": "user", "content": "hi", "nam": 1}]}, "messages.0.nam"),
    ],
    ids=str,
)
def test_unknown_fields_are_counted_and_refused_only_if_that_is_configured(
    server, config, path, body, field
):
    server.fleet = ScriptedFleet([Accepted(1, "r"), delta("a", 1, finish=FinishReason.STOP)])
    counted = []
    app = create_api(config, server.fleet, server.admission, counted.append)
    assert send(app, "POST", path, json=body).status_code == 200
    assert [r.value for r in counted if r.metric is IGNORED_FIELDS] == [1]
    strict = Server(ServeSpecConfig.load(config, strict_fields=True), server.fleet)
    assert error_of(strict.ask("POST", path, json=body), 400)["param"] == field


def test_answers_have_the_tokens_that_are_asked_for(server):
    asked = {"max_tokens": 3, "return_token_ids": True}
    ids = [WORDS[word] for word in "abcabc"]
    choice = server.complete("a b c", **asked).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids[:3], ids[:3])
    first, last = chunks_of(server.complete("a b c", **asked, stream=True))
    assert first["choices"][0]["prompt_token_ids"] == ids[:3]
    assert "prompt_token_ids" not in last["choices"][0]
    assert first["choices"][0]["token_ids"] + last["choices"][0]["token_ids"] == ids[:3]
    chat = server.chat("a b c", **asked).json()
    assert (chat["prompt_token_ids"], chat["choices"][0]["token_ids"]) == (ids[:3], ids[:3])
    several = server.complete(["a b", "c"], **asked, n=2).json()["choices"]
    prompts = [each["prompt_token_ids"] for each in several]
    assert prompts == [ids[:2], ids[:2], ids[2:3], ids[2:3]]


def test_answers_have_the_log_probabilities_of_the_prompt(server):
    asked = {"max_tokens": 1, "prompt_logprobs": 2}
    echoed = {**asked, "echo": True, "logprobs": 5}
    (plain,), (echo,) = (server.complete("a b", **a).json()["choices"] for a in (asked, echoed))
    for answer in (plain, echo, server.chat("a b", **asked).json()):
        first, second = answer["prompt_logprobs"]
        assert first is None
        assert len(second) == 3
        assert second[str(WORDS["b"])]["decoded_token"] == "b"
        assert {scored["rank"] for scored in second.values()} >= {1, 2}
    assert error_of(server.complete("a", **asked, stream=True), 400)["param"] == "prompt_logprobs"


def test_tokens_may_be_named_by_their_ids(server):
    asked = {"max_tokens": 1, "return_tokens_as_token_ids": True}
    (choice,) = server.complete("a", **asked, logprobs=0, echo=True).json()["choices"]
    name = f"token_id:{WORDS['a']}"
    assert choice["logprobs"]["tokens"] == [name, name]
    assert choice["logprobs"]["text_offset"] == [0, 1]
    (scored,) = server.chat("a", **asked, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert (scored["token"], scored["bytes"]) == (name, [97])


def test_the_best_of_several_candidates_are_returned(server):
    """The fake engine's log-probabilities depend on the text alone, so prompts differ in them."""
    body = {"prompt": ["a b", "c"], "best_of": 3, "n": 2, "max_tokens": 2, "seed": 1}
    answer = server.ask("POST", COMPLETIONS, json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a b "] * 2 + ["c c "] * 2
    assert answer["usage"]["completion_tokens"] == 12
    assert all(choice["logprobs"] is None for choice in answer["choices"])


def test_the_best_candidate_has_the_highest_log_probability_per_token(config):
    choices = [("short", -0.9), ("long", -0.5, -0.5, -0.5, -0.5), ("likely first", -0.1, -2.0)]

    class Fleet(QuietFleet):
        async def generate(self, request):
            text, *logprobs = choices[int(request.request_id.rpartition("-")[0][-1])]
            scores = tuple(TokenLogprob(65, each, 1) for each in logprobs)
            yield Accepted(1, "r")
            last = delta(text, *[65] * len(scores), finish=FinishReason.STOP)
            yield last._replace(logprobs=scores)

    answer = Server(config, Fleet()).complete("a", best_of=3, n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["long", "short"]


def test_a_request_id_names_the_answer_and_may_be_used_twice_at_once(server):
    answer = server.complete(["a", "b"], request_id="mine").json()
    assert answer["id"] == "cmpl-mine"
    fleet = server.fleet
    names = []
    fleet.generate = lambda asked, generate=fleet.generate: names.append(asked) or generate(asked)
    for _ in range(2):
        assert server.chat("a", request_id="mine").json()["id"] == "chatcmpl-mine"
    assert len({asked.request_id for asked in names}) == 2


def test_a_stream_may_have_usage_in_every_chunk(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = chunks_of(
        server.complete("a", max_tokens=4, stream=True, stream_options=options)
    )
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [2, 4]
    assert last["usage"]["completion_tokens"] == 4


def test_a_model_is_listed_and_found_by_its_names_and_answers_have_the_first(config):
    write_text_files(config.model.folder, tokenizer=word_tokenizer())
    server = Server(ServeSpecConfig.load(config, served_model_name=["first", "second"]))
    names = [server.complete(model=name).json()["model"] for name in ("second", "first", None)]
    assert names == ["first", "first", "first"]
    listed = server.ask("GET", "/v1/models").json()["data"]
    assert [(model["id"], model["object"]) for model in listed] == [
        ("first", "model"),
        ("second", "model"),
    ]
    assert server.ask("GET", "/v1/models/second").json() == listed[1]
    assert error_of(server.ask("GET", "/v1/models/meta/other"), 404)["code"] == "model_not_found"


def test_an_unknown_model_is_a_404_and_an_engine_that_gives_up_or_a_bug_a_500(server, config):
    error = error_of(server.complete(model="gpt-4"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert MODEL in error["message"]
    error = error_of(server.complete("fail"), 500)
    assert (error["type"], error["code"]) == ("server_error", "replicas_lost")
    assert "boom" in error["message"]
    buggy = Server(config, ScriptedFleet([ZeroDivisionError("boom")]))
    assert "ZeroDivisionError" in error_of(buggy.complete(), 500)["message"]


@pytest.fixture
def our_log(caplog):
    """What we log: it does not reach the root logger, where pytest listens."""
    ours = logging.getLogger("serve_spec")
    ours.addHandler(caplog.handler)
    yield caplog
    ours.removeHandler(caplog.handler)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", [ZeroDivisionError("boom"), ApiError(500, "gone")], ids=repr)
def test_a_failure_is_one_line_in_the_log_and_names_the_request(server, our_log, end, stream):
    server.fleet = ScriptedFleet([Accepted(1, "r"), delta("a", 1), end])
    body = {"prompt": "a", "stream": stream, "max_tokens": 9}
    server.ask("POST", COMPLETIONS, json=body, headers={"x-request-id": "id-7"})
    # Every retry on another replica is logged as well.
    (failure,) = (line for line in our_log.messages if "continues on another replica" not in line)
    assert "id-7" in failure


@pytest.mark.parametrize(("error", "is_logged"), [(starting(), False), (no_replica("lost"), True)])
def test_requests_before_the_first_replica_is_ready_are_no_warnings(
    server, our_log, error, is_logged
):
    server.fleet = ScriptedFleet([error])
    assert server.complete().status_code == 503
    assert bool(our_log.messages) == is_logged


@pytest.mark.parametrize(("num_replicas", "status"), [(1, 200), (None, 200), (0, 503)])
def test_health_fails_only_when_no_replica_is_known_to_serve(server, num_replicas, status):
    server.fleet = LoopFleet(server.loop, num_replicas)
    answer = server.ask("GET", "/health")
    assert answer.status_code == status
    if status == 503:
        assert error_of(answer, 503)["code"] == "no_healthy_replica"
    else:
        assert answer.json()["costs"] == {"missing": 1}


def test_server_info_holds_replicas_fleet_and_router(server):
    server.complete()
    info = server.ask("GET", "/server_info").json()
    assert info["internal_states"][0]["speculative_num_steps"] == 3
    assert info["router"]["batch_size_histogram"] == {"1": 1}
    assert (info["router"]["queue_len"], info["router"]["in_flight"]) == (0, 0)
    assert "fleet" in info


def test_the_schema_is_published_and_promises_no_422(server):
    document = server.ask("GET", "/openapi.json").json()
    for path in (COMPLETIONS, CHAT):
        answers = document["paths"][path]["post"]["responses"]
        promised = {"400", "401", "404", "408", "413", "429", "500", "503", "4XX", "5XX"}
        assert set(answers) == {"200"} | promised
        assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
        errors = [answers[status]["content"]["application/json"]["schema"] for status in promised]
        assert all(schema == {"$ref": "#/components/schemas/ErrorAnswer"} for schema in errors)


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer  ", "Bearer k3", "Bearer k1k2", "Basic k1", "k1"]
)
def test_without_a_key_everything_but_health_is_a_401_before_the_body_is_read(config, value):
    server = Server(ServeSpecConfig.load(config, api_keys=["k1", "k2\n"]))
    headers = {"authorization": value} if value else {}
    for path in ("/v1/models", "/server_info", "/nothing"):
        answer = server.ask("GET", path, headers=headers)
        assert error_of(answer, 401)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    error_of(server.ask("POST", COMPLETIONS, content=b"{", headers=headers), 401)
    assert server.ask("GET", "/health", headers=headers).status_code == 200
    for path, status in (("/llm/health", 200), ("/llm/v1/models", 401)):
        assert send(server.app, "GET", path, root_path="/llm").status_code == status
    for right in ("Bearer k1", "bearer k2", "Bearer  k2"):
        answer = server.ask("GET", "/v1/models", headers={"authorization": right})
        assert answer.status_code == 200


@pytest.mark.parametrize("level", ["none", "summary", "detailed"])
def test_answers_have_the_speculation_that_the_server_is_told_to_add(config, monkeypatch, level):
    server = Server(ServeSpecConfig.load(config, per_request_spec_decode_metrics=level))
    submit, listed = server.loop.submit, []

    def noted(prompt, params, *rest):
        listed.append(params.speculative.lists_rounds)
        return submit(prompt, params, *rest)

    monkeypatch.setattr(server.loop, "submit", noted)
    answer = server.ask("POST", COMPLETIONS, json={"prompt": "a", "max_tokens": 9}).json()
    assert listed == [level == "detailed"]
    assert ("metrics" in answer) == (level != "none")


def salts_of(config, monkeypatch, key, own=None, **keys):
    """Return the cache salts with which requests of a key reach the engine, on each endpoint."""
    server, salts = Server(ServeSpecConfig.load(config, **keys)), []
    submit = server.loop.submit

    def noted(prompt, params, *rest):
        salts.append(params.cache_salt)
        return submit(prompt, params, *rest)

    monkeypatch.setattr(server.loop, "submit", noted)
    more = {} if own is None else {"cache_salt": own}
    for path, body in (
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}),
    ):
        headers = {"authorization": f"Bearer {key}"}
        assert server.ask("POST", path, json={**body, **more}, headers=headers).status_code == 200
    assert len(salts) == 4
    assert len(set(salts)) == 1
    return salts[0]


def test_keys_do_not_share_cached_prefixes_unless_it_is_wanted(config, monkeypatch):
    """A client that guesses a prompt would see whether another one has sent it."""
    write_text_files(config.model.folder, tokenizer=word_tokenizer())
    salt_of = partial(salts_of, config, monkeypatch, api_keys=["k1", "k2", "k2"])
    first, second = salt_of("k1"), salt_of("k2")
    assert first != second
    assert "k1" not in first
    reordered = salts_of(config, monkeypatch, "k1", api_keys=["k3", "k1"])
    assert reordered == first, "routers agree, also while keys change"
    mine, other = salt_of("k1", own="s"), salt_of("k2", own=first)
    assert len({first, second, mine, other, "s"}) == 5
    for keys in ({"share_prefix_cache": True, "api_keys": ["k1", "k2"]}, {"api_keys": ["k1"]}):
        assert salts_of(config, monkeypatch, "k1", **keys) is None
        assert salts_of(config, monkeypatch, "k1", own="s", **keys) == "s"


async def test_a_full_queue_is_a_429_with_retry_after(config):
    server = Server(config, max_in_flight=1)
    async with server.admission.slot(asyncio.get_running_loop().time() + 3600):
        answer = await asyncio.to_thread(server.complete, n=2)
    assert error_of(answer, 429)["type"] == "rate_limit_error"
    assert int(answer.headers["retry-after"]) >= 1


def test_answers_say_where_acceptance_is_forced(config):
    forced = drafting(config.model.folder, synthetic_acceptance=2.5)
    server = Server(ServeSpecConfig.load(forced))
    assert server.complete().json()["synthetic_acceptance"] is True
    chunks = chunks_of(server.complete(stream=True))
    assert chunks
    assert all(chunk["synthetic_acceptance"] is True for chunk in chunks)
    assert "synthetic_acceptance" not in Server(config).complete().json()


async def test_a_client_that_never_reads_gives_its_place_back_at_the_deadline(config, monkeypatch):
    monkeypatch.setattr(completion_answer, "_ERROR_MARGIN_S", 0.0)
    server = Server(ServeSpecConfig.load(config, request_timeout_s=0.3))
    body = json.dumps({"prompt": "a b", "max_tokens": 4, "stream": True}).encode()
    messages = [{"type": "http.request", "body": body}]

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers}
    await server.app({**scope, "query_string": b"", "asgi": {}}, receive, send)
    assert server.admission.in_flight == 0
    assert not server.loop.streams
