"""Texts by a grammar over HTTP: what comes is of the grammar; a bad one is a 400, nothing more."""

import json

import pytest

from serve_spec.config import ServeSpecConfig
from tests.helpers.checkpoints import make_target
from tests.helpers.grammars import is_valid
from tests.helpers.local_engine import LocalEngine
from tests.serving.asgi import CHAT, COMPLETIONS, Server
from tests.serving.cluster import eventually
from tests.serving.fakes import LoopFleet

# Random models like space.
SAID = {"max_tokens": 60, "seed": 3, "bad_token_ids": [*b"\t\n "]}
SANE = {
    COMPLETIONS: {"prompt": "ab", **SAID},
    CHAT: {"messages": [{"role": "user", "content": "ab"}], **SAID},
}
JSON = {"content-type": "application/json"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "é"]}, "b": {"enum": [1, 22, None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    target = make_target(tmp_path_factory.mktemp("model"), "llama2", layer_scale=0.3)
    model = {"path": str(target), "device": "cpu", "dtype": "float32", "max_model_len": 128}
    speculative = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3}
    parts = {"model": model, "speculative": speculative, "cache": {"num_pages": 64}}
    engine_loop = LocalEngine(ServeSpecConfig.load(parts))
    yield engine_loop
    engine_loop.shutdown()


@pytest.fixture(scope="module")
def server(loop):
    return Server(loop.config, LoopFleet(loop))


def ask(server, path, **fields):
    # Not `json=`: half a surrogate pair is no UTF-8.
    body = json.dumps({**SANE[path], **fields})
    return server.ask("POST", path, content=body, headers=JSON)


def text_of(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", SANE)
def test_every_choice_is_json_of_the_schema(server, path):
    answer = ask(server, path, n=2, guided_json=SCHEMA)
    assert answer.status_code == 200
    for choice in answer.json()["choices"]:
        assert is_valid(text_of(choice), SCHEMA)
        assert choice["finish_reason"] == "stop"


HOSTILE = [
    ("guided_json", {"guided_json": "{"}),
    ("guided_json", {"guided_json": {"const": "\ud800"}}),
    ("structured_outputs.json", {"structured_outputs": {"json": {"pattern": "("}}}),
    ("guided_regex", {"guided_regex": "(a"}),
    ("guided_grammar", {"guided_grammar": "start: b"}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "["}}),
    ("max_tokens", {"max_tokens": 10**6}),
    ("allowed_token_ids", {"allowed_token_ids": [10**9]}),
]


@pytest.mark.parametrize("path", SANE)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_cannot_do_is_a_400_that_names_the_field_and_harms_no_other(
    server, loop, path, stream
):
    for field, fields in HOSTILE:
        answer = ask(server, path, stream=stream, **fields)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["type"]) == (field, "invalid_request_error")
        assert len(error["message"]) < 600
    loop.check_health()
    # The engine sends a snapshot a second: this one may be of the request before.
    eventually(lambda: loop.snapshot()["num_running"], lambda num_running: num_running == 0)
    assert ask(server, path, guided_choice=["yes"]).json()["usage"]["completion_tokens"] == 4
