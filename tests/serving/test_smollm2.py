"""Chats with `asset:smollm2`, a published model, in float32.

`tests/data/smollm2.json` has the greedy answers of transformers to chats of several categories. The
best token leads the second by at least 0.02 everywhere, so that no machine rounds to another.
"""

import json
from pathlib import Path

import pytest

from serve_spec.config import ServeSpecConfig
from serve_spec.config.base import ASSETS, PACKAGED, Refusal, locate
from tests.helpers.local_engine import LocalEngine
from tests.serving.asgi import CHAT, Server, chunks_of
from tests.serving.fakes import LoopFleet

CHATS = json.loads((Path(__file__).parents[1] / "data/smollm2.json").read_text())
# Characters of two, three and four bytes.
WIDE = "(é|語|🎉){8}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    try:
        locate("path", "asset:smollm2", ASSETS)
        pytest.importorskip("gguf")
    except Refusal:
        pytest.skip(f"{PACKAGED['smollm2'][0]} is not installed: make demo")
    config = ServeSpecConfig.load(
        "asset:smollm2",
        device="cpu",
        dtype="float32",
        max_model_len=512,
        num_pages=64,
        speculative_adaptive=False,
    )
    loop = LocalEngine(config)
    yield Server(config, LoopFleet(loop))
    loop.shutdown()


def chat(server, messages, **fields):
    body = {"messages": messages, "temperature": 0, **fields}
    answer = server.ask("POST", CHAT, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("golden", CHATS, ids=lambda golden: golden["category"])
def test_answers_are_those_of_transformers_with_and_without_drafts(server, golden):
    """They end where the model ends its turn, and depend on system prompts and earlier turns."""
    for options in ({}, {"speculative": {"enabled": False}}):
        answer = chat(server, golden["messages"], max_tokens=golden["num_tokens"], **options).json()
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == golden["text"]
        assert choice["finish_reason"] == ("length" if golden["category"] == "code" else "stop")
        assert answer["usage"]["completion_tokens"] == golden["num_tokens"]


def test_a_stream_has_whole_characters_only(server):
    fields = {"max_tokens": 64, "guided_regex": WIDE, "temperature": 1, "seed": 4}
    messages = [{"role": "user", "content": "Say something in many languages."}]
    answer = chat(server, messages, **fields).json()
    text = answer["choices"][0]["message"]["content"]
    assert len(text) == 8
    assert answer["usage"]["completion_tokens"] > 8, "characters are spread over several tokens"
    chunks = chunks_of(chat(server, messages, stream=True, **fields))
    parts = [choice["delta"].get("content") or "" for c in chunks for choice in c["choices"]]
    assert "".join(parts) == text
    assert set("".join(parts)) <= set("é語🎉")
    assert sum(map(bool, parts)) > 1
