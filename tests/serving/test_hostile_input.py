"""Whatever a client sends, the answer is one that the schema promises, and never a 5xx."""

import json
import random

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from serve_spec.config import ServeSpecConfig
from serve_spec.config.serving import RouterConfig
from serve_spec.core.errors import InvalidRequest
from serve_spec.serving.protocols.openai import ChatRequest, CompletionRequest
from tests.e2e.attacks import hostile_request
from tests.serving.asgi import CHAT, COMPLETIONS, Server
from tests.serving.fake_engine import MAX_MODEL_LEN, FakeLoop
from tests.serving.fakes import LoopFleet
from tests.serving.texts import word_tokenizer, write_text_files

MAX_BODY_BYTES = RouterConfig().max_body_bytes


class GuardedLoop(FakeLoop):
    """The fake engine, but nothing is too long for its patience."""

    async def submit(self, prompt, params, *rest):
        if params.max_tokens >= MAX_MODEL_LEN:
            raise InvalidRequest("max_tokens", params.max_tokens, "ask for less")
        return await super().submit(prompt, params, *rest)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_text_files(
        tmp_path_factory.mktemp("models") / "fake", tokenizer=word_tokenizer()
    )
    config = ServeSpecConfig.load({"model": {"path": str(folder)}})
    return Server(config, LoopFleet(GuardedLoop()), max_queued=8)


def post(server, path, content, **headers):
    """Sends bytes as they are, as JSON unless told otherwise."""
    sent = {"content-type": "application/json"} | headers
    return server.ask("POST", path, content=content, headers=sent)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(server):
    yield
    assert not server.fleet.loop.streams
    assert server.admission.in_flight == 0


@pytest.fixture(scope="module")
def api(server):
    return schemathesis.openapi.from_asgi("/openapi.json", server.app)


CHECKS = [
    # Not `positive_data_acceptance`: JSON Schema cannot say what depends on two fields.
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
POSTED = (COMPLETIONS, CHAT, "/v1/responses", "/generate", "/tokenize", "/detokenize")
READ = (
    "/version", "/load", "/get_model_info", "/v1/models", "/v1/models/{name}", "/health",
    "/server_info",
)  # fmt: skip
OPERATIONS = [
    *(("POST", path, mode) for path in POSTED for mode in (POSITIVE, NEGATIVE)),
    # What has no body has no wrong one.
    *(("GET", path, POSITIVE) for path in READ),
]


def test_every_documented_operation_is_tried_below(api):
    operations = [result.ok() for result in api.get_all_operations()]
    documented = {(operation.method.upper(), operation.path) for operation in operations}
    assert documented == {(method, path) for method, path, _ in OPERATIONS}


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
def test_answers_are_those_that_the_schema_promises(api, method, path, mode):
    strategy = api[path][method].as_strategy(generation_mode=mode)

    @settings(
        max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(case=strategy)
    def answers(case):
        case.call_and_validate(checks=CHECKS)

    answers()


# A null character is text.
SANE = {
    COMPLETIONS: {"prompt": "a \0", "max_tokens": 3},
    CHAT: {"messages": [{"role": "user", "content": "a \0"}], "max_tokens": 3},
}


def checked(answer):
    """The status, after looking at an error's envelope."""
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(answer.content) < 10_000
    return answer.status_code


@pytest.mark.parametrize("seed", range(5))
def test_no_request_makes_a_5xx(server, seed):
    rng = random.Random(seed)
    for _ in range(100):
        path, content, headers = hostile_request(rng)
        checked(post(server, path, content, **headers))


NESTED = "[" * 100_000 + "]" * 100_000
DEEP = "[" * 900 + "]" * 900


@pytest.mark.parametrize("path", SANE)
@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[1]", b'"text"', b"null", b"\xff", b'{"prompt": "a"} x'),
        b"\xef\xbb\xbf{}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "a\0b"}',
        b'{"input": "\\ud800"}',
        b'{"\\ud800": 1}',
        b'{"prompt": "a", "metadata": {"\\ud800": "\\ud800"}}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 4000 + b"}",
        b'{"prompt": [' + b"9" * 4000 + b"]}",
        b'{"messages": ' + DEEP.encode() + b"}",
        b'{"prompt": ' + NESTED.encode() + b"}",
        b'{"messages": ' + NESTED.encode() + b"}",
        b'{"' + b"a" * 10**6 + b'": 1}',
        b'{"model": "' + b"a" * 10**6 + b'", "prompt": "a"}',
        b"{" + b",".join(b'"k%d": 1' % i for i in range(20_000)) + b"}",
    ],
    ids=lambda content: repr(content[:40]),
)
def test_broken_or_monstrous_json_is_a_400(server, path, content):
    assert checked(post(server, path, content)) == 400


@pytest.mark.parametrize("path", SANE)
@pytest.mark.parametrize(
    "field", ["tools", "logit_bias", "response_format", "metadata", "stop", "chat_template_kwargs"]
)
def test_values_nested_as_deep_as_json_allows_are_a_400(server, path, field):
    head = json.dumps(SANE[path])[:-1]
    schema = CompletionRequest if path == COMPLETIONS else ChatRequest
    status = 400 if field in schema.model_fields else 200
    for deep in (DEEP, '{"a":' * 900 + "1" + "}" * 900, f"[{DEEP}]"):
        assert checked(post(server, path, f'{head}, "{field}": {deep}}}'.encode())) == status


@pytest.mark.parametrize("level", ['{"items":', '{"properties":{"a":', '{"anyOf":[{"items":'])
def test_strict_schemas_nested_as_deep_as_json_allows_are_closed_or_a_400(server, level):
    ends = "".join({"{": "}", "[": "]"}.get(char, "") for char in reversed(level))
    num_levels = 900 // len(ends)
    deep = level * num_levels + "{}" + ends * num_levels
    form = f'{{"type": "json_schema", "json_schema": {{"strict": true, "schema": {deep}}}}}'
    body = f'{{"prompt": "a", "response_format": {form}}}'
    assert checked(post(server, COMPLETIONS, body.encode())) in (200, 400)


@pytest.mark.parametrize("path", SANE)
@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_another_content_type_is_told_which_one_to_send(server, path, content_type):
    content = json.dumps(SANE[path]).encode()
    answer = post(server, path, content, **{"content-type": content_type})
    assert checked(answer) == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", SANE)
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_is_read_up_to_the_limit_and_a_longer_one_is_a_413(server, path, announced):
    def sent(num_bytes):
        content = json.dumps(SANE[path]).encode().ljust(num_bytes)

        async def pieces():
            for start in range(0, num_bytes, 2**20):
                yield content[start : start + 2**20]

        return post(server, path, content if announced else pieces())

    assert checked(sent(MAX_BODY_BYTES)) == 200
    answer = sent(MAX_BODY_BYTES + 1)
    assert checked(answer) == 413
    assert answer.json()["error"]["code"] == "request_too_large"
