"""Answers have the fields of the OpenAI API, log-probabilities too, and no more than asked for."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from serve_spec.config import ServeSpecConfig
from serve_spec.core.request import FinishReason, TokenLogprob
from serve_spec.core.stats import SpeculationStats
from serve_spec.engine.tokenizer import TokenBytes
from serve_spec.serving.events import event
from serve_spec.serving.protocols import logprobs
from serve_spec.serving.protocols.answers import (
    AnswerHead,
    ChatFormat,
    CompletionFormat,
    Details,
    Echo,
    fingerprint,
    usage,
)
from tests.helpers.checkpoints import make_tokenizer
from tests.serving.asgi import CHAT, COMPLETIONS, Server, chunks_of
from tests.serving.fake_engine import logprobs_of, prompt_logprobs_of
from tests.serving.fakes import FailingChoices, delta

COUNTS = usage(2, 3, SpeculationStats())
FORMATS = [CompletionFormat, ChatFormat]


def head(**options):
    return AnswerHead("cmpl-1", "m", 0, "fp_1", **options)


def every_answer(form):
    """One of each shape."""
    whole = form.complete([[delta("a"), delta("b", finish=FinishReason.STOP)]], COUNTS)
    chunks = [form.opening(0), form.chunk(0, delta("a")), form.usage_chunk(COUNTS)]
    return [whole, *[chunk for chunk in chunks if chunk is not None]]


@pytest.mark.parametrize("form", FORMATS)
def test_a_stream_shows_usage_only_when_asked_and_then_null_until_the_last_chunk(form):
    assert "usage" not in form(head()).chunk(0, delta("a"))
    asked = form(head(include_usage=True))
    assert asked.chunk(0, delta("a"))["usage"] is None
    last = asked.usage_chunk(COUNTS)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5


@pytest.mark.parametrize("form", FORMATS)
def test_finish_reasons_are_the_words_of_the_openai_api(form):
    chunks = [form(head()).chunk(0, delta("", finish=reason)) for reason in FinishReason]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == ["stop", "length", "abort"]
    assert json.loads(json.dumps(chunks)) == chunks


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("forced", [True, False])
def test_every_answer_has_the_head_of_its_request_and_a_label_if_acceptance_is_forced(form, forced):
    """Every chunk too: a stream may break off, or not be asked for its usage."""
    counts = usage(2, 3, SpeculationStats(synthetic_acceptance=forced))
    assert ("synthetic_acceptance" in counts["speculation"]) == forced
    shared = {"id": "cmpl-1", "created": 0, "model": "m", "system_fingerprint": "fp_1"}
    for answer in every_answer(form(head(synthetic_acceptance=forced))):
        assert answer.get("synthetic_acceptance") == (True if forced else None)
        assert shared.items() <= answer.items()


def test_the_official_client_finds_nothing_missing_in_them():
    whole, *_ = every_answer(CompletionFormat(head(), [Echo("before")]))
    assert Completion.model_validate(whole).model_extra == {}
    whole, *chunks = every_answer(ChatFormat(head()))
    assert ChatCompletion.model_validate(whole).choices[0].message.content == "ab"
    for chunk in chunks:
        assert ChatCompletionChunk.model_validate(chunk).model_extra == {}


def token_bytes(token_id):
    return TokenBytes(bytes([token_id]))


def scored(token, finish=None):
    """A round that brings one token."""
    scored = TokenLogprob(ord(token), -1.0, 1, ((ord("z"), -2.0),))
    return delta(token, ord(token), finish=finish)._replace(logprobs=(scored,))


def test_the_official_client_reads_log_probabilities():
    choices = [[scored("a", FinishReason.STOP)]]
    whole = Completion.model_validate(
        CompletionFormat(head(), token_bytes=token_bytes).complete(choices, COUNTS)
    )
    assert whole.choices[0].logprobs.top_logprobs == [{"z": -2.0, "a": -1.0}]
    form = ChatFormat(head(), token_bytes)
    chat = ChatCompletion.model_validate(form.complete(choices, COUNTS))
    chunk = ChatCompletionChunk.model_validate(form.chunk(0, *choices[0]))
    for shown in (chat.choices[0].logprobs, chunk.choices[0].logprobs):
        assert [(t.token, t.bytes, t.logprob) for t in shown.content] == [("a", [97], -1.0)]
        assert [t.token for t in shown.content[0].top_logprobs] == ["z"]


def test_the_choices_with_the_highest_log_probabilities_are_shown_in_their_order():
    def candidate(text, logprob):
        scored = TokenLogprob(97, logprob, 1)
        return [delta(text, 97, finish=FinishReason.STOP)._replace(logprobs=(scored, scored))]

    form = CompletionFormat(head(), num_candidates=3)
    form.details = Details(num_choices=2)
    of_first = [candidate("a", -3.0), candidate("b", -1.0), candidate("c", -2.0)]
    of_second = [candidate("x", -1.0), candidate("y", -1.0), candidate("z", -1.0)]
    shown = form.complete([*of_first, *of_second], COUNTS)["choices"]
    assert [choice["text"] for choice in shown] == ["b", "c", "x", "y"]
    assert [choice["index"] for choice in shown] == [0, 1, 2, 3]


def test_the_fingerprint_is_that_of_version_and_model():
    first = fingerprint("1", {"path": "a"})
    assert first == fingerprint("1", {"path": "a"})
    assert len({first, fingerprint("2", {"path": "a"}), fingerprint("1", {"path": "b"})}) == 3


@pytest.mark.parametrize(
    "text",
    ["a", "", "two\nlines\r\n\n", "\u2028\u2029\x85\x0b\x0c", "é😀", "\ud800", "data: [DONE]"],
)
def test_any_text_survives_as_one_line(text):
    frame = event({"text": text}).decode("ascii")
    assert frame.startswith("data: ")
    assert frame.endswith("\n\n")
    assert len(frame.splitlines()) == 2
    assert json.loads(frame.removeprefix("data: ")) == {"text": text}


EOS = 256
# The euro sign in two tokens, then an "a".
EURO = [TokenLogprob(300, -0.5, 1), TokenLogprob(0xAC, -1.0, 2), TokenLogprob(0x61, -2.0, 3)]


def bytes_of(token_id):
    """One byte per id; one special token; one token of two bytes that are no character."""
    if token_id == EOS:
        return TokenBytes(b"<eos>", is_special=True)
    return TokenBytes(b"\xe2\x82" if token_id == 300 else bytes([token_id]))


def test_a_completion_shows_a_token_its_likelihood_its_rivals_and_its_place():
    tokens = [
        TokenLogprob(0x61, -1.5, 2, ((0x62, -0.5), (0x61, -1.5))),
        TokenLogprob(0x63, -4.0, 9, ((0x62, -0.25),)),
    ]
    assert logprobs.completion_logprobs(tokens, bytes_of, logprobs.TextOffsets()) == {
        "tokens": ["a", "c"],
        "token_logprobs": [-1.5, -4.0],
        "top_logprobs": [{"b": -0.5, "a": -1.5}, {"b": -0.25, "c": -4.0}],
        "text_offset": [0, 1],
    }


def test_a_chat_shows_bytes_and_exactly_the_rivals_asked_for():
    shown = logprobs.chat_logprobs([TokenLogprob(0x61, -1.5, 2, ((0x62, -0.5),))], bytes_of)
    assert shown == {
        "content": [
            {
                "token": "a",
                "logprob": -1.5,
                "bytes": [0x61],
                "top_logprobs": [{"token": "b", "logprob": -0.5, "bytes": [0x62]}],
            }
        ],
        "refusal": None,
    }


def test_parts_of_a_character_are_shown_as_bytes_and_begin_where_it_does():
    shown = logprobs.completion_logprobs(EURO, bytes_of, logprobs.TextOffsets())
    assert shown["tokens"] == ["bytes:\\xe2\\x82", "bytes:\\xac", "a"]
    assert shown["text_offset"] == [0, 0, 1]
    chat = logprobs.chat_logprobs(EURO, bytes_of)["content"]
    assert [token["token"] for token in chat] == ["\\xe2\\x82", "\\xac", "a"]
    assert bytes(b for token in chat for b in token["bytes"] or []).decode() == "€a"


def test_a_special_token_is_shown_by_name_and_takes_no_room_in_the_text():
    tokens = [TokenLogprob(EOS, -0.1, 1), TokenLogprob(0x61, -0.2, 1)]
    shown = logprobs.completion_logprobs(tokens, bytes_of, logprobs.TextOffsets())
    assert (shown["tokens"], shown["text_offset"]) == (["<eos>", "a"], [0, 0])
    assert logprobs.chat_logprobs(tokens, bytes_of)["content"][0]["bytes"] is None


@pytest.mark.parametrize(
    ("text", "tokens", "offsets"),
    [
        ("ab", ["<eos>", "a", "b"], [0, 0, 1]),
        ("<eos>b", ["<eos>", "b"], [0, 5]),
        ("<eos>b", ["<eos>", "<eos>", "b"], [0, 5, 5]),
        ("a b", [" a", " b"], [0, 1]),
        ("a b", [" ", "a", " b"], [0, 0, 1]),
        (" a", [" a", "<eos>"], [0, 2]),
        ("a\u0301b", ["á", "b", "c"], [0, 1, 2]),
        ("a", ["a", "b", "c"], [0, 1, 1]),
    ],
    ids=str,
)
def test_tokens_of_a_prompt_are_found_in_its_text(text, tokens, offsets):
    """Added tokens and spaces, special tokens that a client wrote, and texts that were changed."""
    places = logprobs.EchoOffsets(text)
    spelled = [TokenBytes(token.encode(), token == "<eos>") for token in tokens]
    assert [places.next(raw) for raw in spelled] == offsets


@given(st.binary(max_size=12))
def test_broken_characters_of_a_prompt_do_not_move_what_follows(emitted):
    """Bytes that are none are shown as U+FFFD, one for several of them."""
    text = emitted.decode(errors="replace") + "end"
    places = logprobs.EchoOffsets(text)
    offsets = [places.next(TokenBytes(bytes([byte]))) for byte in emitted + b"end"]
    assert [text[offset:] for offset in offsets[-2:]] == ["nd", "d"]
    assert offsets == sorted(offsets)


def test_what_can_not_come_up_has_a_number_that_json_knows():
    tokens = [TokenLogprob(0x61, -math.inf, 9, ())]
    for shown in (
        logprobs.completion_logprobs(tokens, bytes_of, logprobs.TextOffsets()),
        logprobs.chat_logprobs(tokens, bytes_of),
    ):
        assert "-9999.0" in json.dumps(shown, allow_nan=False)


@given(st.text(max_size=20), st.lists(st.integers(0, 60), max_size=6))
def test_a_stream_in_any_pieces_shows_what_the_whole_answer_shows(text, cuts):
    tokens = [TokenLogprob(byte, -1.0, 1) for byte in text.encode()]
    whole = logprobs.completion_logprobs(tokens, bytes_of, logprobs.TextOffsets())
    offsets, start = logprobs.TextOffsets(), 0
    pieces = None
    for end in [*sorted(cuts), len(tokens)]:
        piece = logprobs.completion_logprobs(tokens[start:end], bytes_of, offsets)
        pieces = piece if pieces is None else logprobs.joined(pieces, piece)
        start = max(start, end)
    assert pieces == whole
    begins = [text.encode()[:i].decode(errors="ignore") for i in range(len(tokens))]
    assert whole["text_offset"] == [len(before) for before in begins]


def ask(config, fleet, path, body):
    return Server(config, fleet, max_in_flight=64).ask("POST", path, json=body)


def put_together(answer, num_choices):
    """The text of a stream, in the form of a whole answer's choices."""
    choices = [{"index": i, "text": ""} for i in range(num_choices)]
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
            choice["logprobs"] = logprobs.joined(before, shown)
    return choices


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    """A model whose tokens are bytes, as those of `SamplingLoop`."""
    folder = make_tokenizer(tmp_path_factory.mktemp("bytes"))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 99}))
    (folder / "tokenizer_config.json").unlink()  # its chat template writes special tokens
    return ServeSpecConfig.load({"model": {"path": str(folder)}})


MESSAGES = [{"role": "user", "content": "the é prompt"}]
ANYTHING = {
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
@given(body=CHAT_BODIES, ending=st.integers(0, 9))
def test_a_chat_that_loses_its_replicas_shows_what_the_whole_answer_shows(byte_model, body, ending):
    body = {**body, "messages": MESSAGES, "logprobs": True}
    answer = ask(byte_model, FailingChoices(), CHAT, body).json()
    streamed = put_together(
        ask(byte_model, FailingChoices(ending), CHAT, {**body, "stream": True}), body["n"]
    )
    num_tokens = 0
    for choice, pieces in zip(answer["choices"], streamed, strict=True):
        assert pieces["text"] == choice["message"]["content"]
        assert pieces["finish_reason"] == choice["finish_reason"]
        assert pieces["logprobs"] == choice["logprobs"]
        content = choice["logprobs"]["content"]
        emitted = bytes(byte for token in content for byte in token["bytes"])
        assert emitted.startswith(choice["message"]["content"].encode().rstrip("\ufffd".encode()))
        tokens = logprobs_of("the é prompt".encode(), emitted, body["top_logprobs"]) or ()
        assert [token["logprob"] for token in content] == [scored.logprob for scored in tokens]
        assert {len(token["top_logprobs"]) for token in content} <= {body["top_logprobs"]}
        num_tokens += len(content)
    assert num_tokens == answer["usage"]["completion_tokens"]


@LAW
@given(body=COMPLETION_BODIES, ending=st.integers(0, 9), later=st.integers(0, 9))
def test_wherever_replicas_are_lost_every_token_has_its_likelihood_and_place_in_answer_and_stream(
    byte_model, body, ending, later
):
    answer = ask(byte_model, FailingChoices(ending), COMPLETIONS, body).json()
    num_tokens = 0
    for index, choice in enumerate(answer["choices"]):
        prompt, shown = prompts_of(body)[index // body["n"]], choice["logprobs"]
        before = list(prompt_logprobs_of(prompt, body["logprobs"]) or ()) if body["echo"] else []
        emitted = b"".join(_bytes(token) for token in shown["tokens"])[len(before) :]
        tokens = [*before, *(logprobs_of(prompt, emitted, body["logprobs"]) or ())]
        expected = [None if scored is None else scored.logprob for scored in tokens]
        assert shown["token_logprobs"] == expected
        num_tokens += len(emitted)
        for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
            if offset < len(choice["text"]):  # others belong to the stop string, which is cut off
                here = choice["text"][offset]
                assert here == "\ufffd" or _bytes(token) in here.encode()
    assert num_tokens == answer["usage"]["completion_tokens"]
    streamed = ask(byte_model, FailingChoices(later), COMPLETIONS, {**body, "stream": True})
    assert put_together(streamed, len(answer["choices"])) == answer["choices"]


def _bytes(token):
    """The bytes of a completion's token; `bytes:\\xc3` is a part of a character."""
    if token.startswith("bytes:"):
        return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))
    return token.encode()


class Listener(FailingChoices):
    """Notes what engines are given to read."""

    def __init__(self):
        super().__init__()
        self.prompts = []

    def generate(self, asked):
        self.prompts.append(asked.prompt)
        return super().generate(asked)


def test_the_engine_reads_the_very_tokens_that_are_echoed(byte_model):
    fleet = Listener()
    body = {"prompt": ["é", "x"], "echo": True, "n": 2}
    ask(byte_model, fleet, COMPLETIONS, {**body, "logprobs": 0})
    assert fleet.prompts == [list("é".encode())] * 2 + [[120]] * 2
    ask(byte_model, fleet, COMPLETIONS, body)
    assert fleet.prompts[4:] == ["é"] * 2 + ["x"] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_equal_prompts_alone_are_computed_once(byte_model, stream):
    fleet = Listener()
    body = {"prompt": ["the", "x", "the"], "n": 2, "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = ask(byte_model, fleet, COMPLETIONS, body)
    assert fleet.prompts == [list(b"the"), list(b"x")]
    *chunks, last = chunks_of(answer) if stream else [answer.json()] * 2
    choices = {c["index"]: c for chunk in chunks for c in chunk["choices"]}
    assert [choices[index]["text"] for index in range(6)] == ["the"] * 2 + ["x"] * 2 + ["the"] * 2
    for index in (0, 5):
        _, *rest = prompt_logprobs_of(b"the", 1) or ()
        likely = [scored.logprob for scored in rest if scored is not None]
        assert choices[index]["logprobs"]["token_logprobs"] == [None, *likely]
        assert choices[index]["finish_reason"] == "length"
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (7, 0)
