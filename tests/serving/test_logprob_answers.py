"""Log-probabilities over HTTP: of every token exactly once, whatever happens on the way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.config import ServeSpecConfig
from serve_spec.serving.logprobs import joined
from tests.helpers.checkpoints import make_tokenizer
from tests.serving.asgi import CHAT, COMPLETIONS, Server, chunks_of
from tests.serving.fake_engine import FakeLoop
from tests.serving.fakes import FleetOfMortals, LoopFleet
from tests.serving.lawful_logprobs import entries_of, prompt_entries
from tests.serving.texts import write_text_files


def ask(config, fleet, path, body):
    return Server(config, fleet, max_in_flight=64).ask("POST", path, json=body)


def put_together(answer, num_choices):
    """What a stream said, in the form of a whole answer's choices."""
    choices: list[dict[str, Any]] = [{"index": i, "text": ""} for i in range(num_choices)]
    for chunk in chunks_of(answer):
        (piece,) = chunk["choices"]
        choice = choices[piece["index"]]
        choice["text"] += piece["text"] if "text" in piece else piece["delta"].get("content", "")
        choice["finish_reason"] = piece["finish_reason"]
        before, shown = choice.get("logprobs"), piece["logprobs"]
        if before is None or shown is None:
            choice["logprobs"] = shown
        elif "content" in shown:
            choice["logprobs"] = {**shown, "content": before["content"] + shown["content"]}
        else:
            choice["logprobs"] = joined(before, shown)
    return choices


@pytest.fixture(scope="module")
def lawful(tmp_path_factory):
    """A model whose tokens are bytes, as those of the lawful engine."""
    folder = make_tokenizer(tmp_path_factory.mktemp("lawful"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 99}))
    (folder / "tokenizer_config.json").unlink()  # its chat template writes special tokens
    return ServeSpecConfig.load({"model": {"path": str(folder)}})


MESSAGES = [{"role": "user", "content": "the é prompt"}]
ANYTHING: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**63 - 1),
    "max_tokens": st.integers(1, 20),
    "n": st.integers(1, 3),
    "stop": st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2),
    "ignore_eos": st.booleans(),
}
COMPLETION_BODIES = st.fixed_dictionaries(
    {
        **ANYTHING,
        "prompt": st.sampled_from(["the é prompt", ["x", "é"], [[120, 121], [195, 169, 98]]]),
        "logprobs": st.integers(0, 20),
        "echo": st.booleans(),
    }
)
CHAT_BODIES = st.fixed_dictionaries({**ANYTHING, "top_logprobs": st.integers(0, 20)})
LAW = settings(deadline=None, max_examples=20)


def prompts_of(body):
    """The tokens of every prompt."""
    prompts = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
    return [p.encode() if isinstance(p, str) else bytes(p) for p in prompts]


@LAW
@given(body=CHAT_BODIES, life=st.integers(0, 9))
def test_a_chat_that_loses_its_replicas_shows_what_the_whole_answer_shows(lawful, body, life):
    body = {**body, "messages": MESSAGES, "logprobs": True}
    answer = ask(lawful, FleetOfMortals(), CHAT, body).json()
    streamed = put_together(
        ask(lawful, FleetOfMortals(life), CHAT, {**body, "stream": True}), body["n"]
    )
    num_tokens = 0
    for choice, pieces in zip(answer["choices"], streamed, strict=True):
        assert pieces["text"] == choice["message"]["content"]
        assert pieces["finish_reason"] == choice["finish_reason"]
        assert pieces["logprobs"] == choice["logprobs"]
        content = choice["logprobs"]["content"]
        said = bytes(byte for token in content for byte in token["bytes"])
        assert said.startswith(choice["message"]["content"].encode().rstrip("\ufffd".encode()))
        entries = entries_of("the é prompt".encode(), said, body["top_logprobs"]) or ()
        assert [token["logprob"] for token in content] == [entry.logprob for entry in entries]
        assert {len(token["top_logprobs"]) for token in content} <= {body["top_logprobs"]}
        num_tokens += len(content)
    assert num_tokens == answer["usage"]["completion_tokens"]


@LAW
@given(body=COMPLETION_BODIES, life=st.integers(0, 9), later=st.integers(0, 9))
def test_wherever_replicas_are_lost_every_token_has_its_likelihood_and_place_in_answer_and_stream(
    lawful, body, life, later
):
    answer = ask(lawful, FleetOfMortals(life), COMPLETIONS, body).json()
    num_tokens = 0
    for index, choice in enumerate(answer["choices"]):
        prompt, shown = prompts_of(body)[index // body["n"]], choice["logprobs"]
        before = list(prompt_entries(prompt, body["logprobs"]) or ()) if body["echo"] else []
        said = b"".join(_bytes(token) for token in shown["tokens"])[len(before) :]
        entries = [*before, *(entries_of(prompt, said, body["logprobs"]) or ())]
        expected = [None if entry is None else entry.logprob for entry in entries]
        assert shown["token_logprobs"] == expected
        num_tokens += len(said)
        for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
            if offset < len(choice["text"]):  # others belong to the stop string, which is cut off
                here = choice["text"][offset]
                assert here == "\ufffd" or _bytes(token) in here.encode()
    assert num_tokens == answer["usage"]["completion_tokens"]
    streamed = ask(lawful, FleetOfMortals(later), COMPLETIONS, {**body, "stream": True})
    assert put_together(streamed, len(answer["choices"])) == answer["choices"]


def _bytes(token):
    """What a token of a completion says; `bytes:\\xc3` is a part of a character."""
    if token.startswith("bytes:"):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()


class Listener(FleetOfMortals):
    """Notes what engines are given to read."""

    def __init__(self):
        super().__init__()
        self.prompts: list[str | list[int]] = []

    def generate(self, asked):
        self.prompts.append(asked.prompt)
        return super().generate(asked)


def test_the_engine_reads_the_very_tokens_that_are_echoed(lawful):
    fleet = Listener()
    body = {"prompt": ["é", "x"], "echo": True, "n": 2}
    ask(lawful, fleet, COMPLETIONS, {**body, "logprobs": 0})
    assert fleet.prompts == [list("é".encode())] * 2 + [[120]] * 2
    ask(lawful, fleet, COMPLETIONS, body)
    assert fleet.prompts[4:] == ["é"] * 2 + ["x"] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_equal_prompts_alone_are_computed_once(lawful, stream):
    fleet = Listener()
    body = {"prompt": ["the", "x", "the"], "n": 2, "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = ask(lawful, fleet, COMPLETIONS, body)
    assert fleet.prompts == [list(b"the"), list(b"x")]
    *chunks, last = chunks_of(answer) if stream else [answer.json()] * 2
    choices = {c["index"]: c for chunk in chunks for c in chunk["choices"]}
    assert [choices[index]["text"] for index in range(6)] == ["the"] * 2 + ["x"] * 2 + ["the"] * 2
    for index in (0, 5):
        _, *rest = prompt_entries(b"the", 1) or ()
        likely = [entry.logprob for entry in rest if entry is not None]
        assert choices[index]["logprobs"]["token_logprobs"] == [None, *likely]
        assert choices[index]["finish_reason"] == "length"
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (7, 0)


def test_an_empty_prompt_is_refused_echoed_or_not(config):
    write_text_files(config.model.path)  # its tokenizer would add a special token
    for body in ({"prompt": ""}, {"prompt": "", "echo": True, "logprobs": 1}):
        answer = ask(config, LoopFleet(FakeLoop()), COMPLETIONS, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
