"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.request import TokenLogprob
from serve_spec.engine.tokenizer import TokenBytes
from serve_spec.serving.logprobs import (
    CompletionLogprobs,
    EchoOffsets,
    TextOffsets,
    chat_logprobs,
    completion_logprobs,
    joined,
)

EOS = 256
# The euro sign in two tokens, then an "a".
EURO = [TokenLogprob(300, -0.5, 1), TokenLogprob(0xAC, -1.0, 2), TokenLogprob(0x61, -2.0, 3)]


def token_bytes(token_id):
    """One byte per id; one special token; one token of two bytes that are no character."""
    if token_id == EOS:
        return TokenBytes(b"<eos>", is_special=True)
    return TokenBytes(b"\xe2\x82" if token_id == 300 else bytes([token_id]))


def test_a_completion_shows_a_token_its_likelihood_its_rivals_and_its_place():
    entries = [
        TokenLogprob(0x61, -1.5, 2, ((0x62, -0.5), (0x61, -1.5))),
        TokenLogprob(0x63, -4.0, 9, ((0x62, -0.25),)),
    ]
    assert completion_logprobs(entries, token_bytes, TextOffsets()) == {
        "tokens": ["a", "c"],
        "token_logprobs": [-1.5, -4.0],
        "top_logprobs": [{"b": -0.5, "a": -1.5}, {"b": -0.25, "c": -4.0}],
        "text_offset": [0, 1],
    }


def test_a_chat_shows_bytes_and_exactly_the_rivals_asked_for():
    shown = chat_logprobs([TokenLogprob(0x61, -1.5, 2, ((0x62, -0.5),))], token_bytes)
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
    shown = completion_logprobs(EURO, token_bytes, TextOffsets())
    assert shown["tokens"] == ["bytes:\\xe2\\x82", "bytes:\\xac", "a"]
    assert shown["text_offset"] == [0, 0, 1]
    chat = chat_logprobs(EURO, token_bytes)["content"]
    assert [token["token"] for token in chat] == ["\\xe2\\x82", "\\xac", "a"]
    assert bytes(b for token in chat for b in token["bytes"] or []).decode() == "€a"


def test_a_special_token_is_shown_by_name_and_takes_no_room_in_the_text():
    entries = [TokenLogprob(EOS, -0.1, 1), TokenLogprob(0x61, -0.2, 1)]
    shown = completion_logprobs(entries, token_bytes, TextOffsets())
    assert (shown["tokens"], shown["text_offset"]) == (["<eos>", "a"], [0, 0])
    assert chat_logprobs(entries, token_bytes)["content"][0]["bytes"] is None


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
    places = EchoOffsets(text)
    spelled = [TokenBytes(token.encode(), token == "<eos>") for token in tokens]
    assert [places.next(raw) for raw in spelled] == offsets


@given(st.binary(max_size=12))
def test_broken_characters_of_a_prompt_do_not_move_what_follows(said):
    """Bytes that are none are shown as U+FFFD, one for several of them."""
    text = said.decode(errors="replace") + "end"
    places = EchoOffsets(text)
    offsets = [places.next(TokenBytes(bytes([byte]))) for byte in said + b"end"]
    assert [text[offset:] for offset in offsets[-2:]] == ["nd", "d"]
    assert offsets == sorted(offsets)


def test_what_can_not_come_up_has_a_number_that_json_knows():
    entries = [TokenLogprob(0x61, -math.inf, 9, ())]
    for shown in (
        completion_logprobs(entries, token_bytes, TextOffsets()),
        chat_logprobs(entries, token_bytes),
    ):
        assert "-9999.0" in json.dumps(shown, allow_nan=False)


@given(st.text(max_size=20), st.lists(st.integers(0, 60), max_size=6))
def test_a_stream_in_any_pieces_shows_what_the_whole_answer_shows(text, cuts):
    entries = [TokenLogprob(byte, -1.0, 1) for byte in text.encode()]
    whole = completion_logprobs(entries, token_bytes, TextOffsets())
    offsets, start = TextOffsets(), 0
    pieces: CompletionLogprobs | None = None
    for end in [*sorted(cuts), len(entries)]:
        piece = completion_logprobs(entries[start:end], token_bytes, offsets)
        pieces = piece if pieces is None else joined(pieces, piece)
        start = max(start, end)
    assert pieces == whole
    begins = [text.encode()[:i].decode(errors="ignore") for i in range(len(entries))]
    assert whole["text_offset"] == [len(before) for before in begins]
