"""Texts by a grammar over HTTP: what comes is of the grammar; a bad one is a 400, nothing more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serve_spec.config import ServeSpecConfig
from serve_spec.engine.loop import EngineLoop
from serve_spec.serving.admission import Admission
from serve_spec.serving.api import create_api
from tests.helpers.checkpoints import make_target
from tests.helpers.grammars import is_valid
from tests.serving.asgi import CHAT, COMPLETIONS, chunks_of, send
from tests.serving.fakes import LoopFleet

# Random models like space.
SAID = {"max_tokens": 60, "seed": 3, "bad_token_ids": [*b"\t\n "]}
SANE: dict[str, dict[str, Any]] = {
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
def config(tmp_path_factory: pytest.TempPathFactory) -> ServeSpecConfig:
    target = make_target(tmp_path_factory.mktemp("model"), "llama2", layer_scale=0.3)
    model = {"path": str(target), "device": "cpu", "dtype": "float32", "max_model_len": 128}
    speculative = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3}
    return ServeSpecConfig.load(
        {"model": model, "speculative": speculative, "cache": {"num_pages": 64}}
    )


@pytest.fixture(scope="module")
def loop(config: ServeSpecConfig) -> Iterator[EngineLoop]:
    engine_loop = EngineLoop(config)
    yield engine_loop
    engine_loop.shutdown()


def ask(config: ServeSpecConfig, loop: EngineLoop, path: str, **fields: Any) -> httpx.Response:
    app = create_api(config, LoopFleet(loop), Admission(max_in_flight=8, max_queued=8))
    # Not `json=`: half a surrogate pair is no UTF-8.
    body = json.dumps({**SANE[path], **fields})
    return send(app, "POST", path, content=body, headers=JSON)


def in_format(schema: object) -> dict[str, Any]:
    given = {"name": "n", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": given}}


def said(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", SANE)
@pytest.mark.parametrize(
    "fields",
    [
        in_format(SCHEMA),
        {"guided_json": SCHEMA},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_choice_is_json_of_the_schema(
    config: ServeSpecConfig, loop: EngineLoop, path: str, fields: dict[str, Any]
) -> None:
    answer = ask(config, loop, path, n=2, **fields)
    assert answer.status_code == 200
    for choice in answer.json()["choices"]:
        assert is_valid(said(choice), SCHEMA)
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("path", SANE)
def test_a_stream_says_the_same(config: ServeSpecConfig, loop: EngineLoop, path: str) -> None:
    whole = ask(config, loop, path, guided_json=SCHEMA).json()["choices"][0]
    chunks = chunks_of(ask(config, loop, path, guided_json=SCHEMA, stream=True))
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    assert said(whole) == "".join(
        piece["text"] if "text" in piece else piece["delta"].get("content", "") for piece in pieces
    )
    assert pieces[-1]["finish_reason"] == "stop"


SCHEMA_FIELD = "response_format.json_schema.schema"
HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("guided_json", {"guided_json": "{"}),
    ("guided_json", {"guided_json": "[]"}),
    ("guided_json", {"guided_json": {"type": "text"}}),
    ("guided_json", {"guided_json": {"$ref": "#"}}),
    ("guided_json", {"guided_json": {"$ref": "file:///etc/hosts"}}),
    ("guided_json", {"guided_json": {"const": "\ud800"}}),
    ("guided_json", {"guided_json": {"type": "integer", "multipleOf": 999_983}}),
    (SCHEMA_FIELD, in_format({"enum": []})),
    (SCHEMA_FIELD, in_format({"type": "array", "uniqueItems": True})),
    (SCHEMA_FIELD, in_format({"pattern": "(", "type": "string"})),
    ("guided_regex", {"guided_regex": "(a"}),
    ("guided_regex", {"guided_regex": "(?<=a)b"}),
    ("guided_regex", {"guided_regex": r"[^\s\S]"}),
    ("guided_grammar", {"guided_grammar": "a"}),
    ("guided_grammar", {"guided_grammar": "start: b"}),
    ("guided_choice", {"guided_choice": []}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "["}}),
]


@pytest.mark.parametrize("path", SANE)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_grammar_is_a_400_that_names_the_field_and_harms_nobody(
    config: ServeSpecConfig, loop: EngineLoop, path: str, stream: bool
) -> None:
    for field, fields in HOSTILE:
        answer = ask(config, loop, path, stream=stream, **fields)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["type"]) == (field, "invalid_request_error")
        assert len(error["message"]) < 600
    loop.check_health()
    assert loop.snapshot()["num_running"] == 0
    assert ask(config, loop, path, guided_choice=["yes"]).json()["usage"]["completion_tokens"] == 4
