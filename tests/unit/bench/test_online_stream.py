"""Laws of reading a stream: how the network cuts it changes times, never what was said."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.bench.online.stream import SseParser, read_stream
from serve_spec.core.request import FinishReason, SpeculationStats, TokenDelta
from serve_spec.serving import sse
from serve_spec.serving.answers import AnswerHead, CompletionFormat, usage
from tests.unit.bench.online_fakes import chunk, event

TEXTS = st.text(max_size=12)


@st.composite
def cut(draw: st.DrawFn, whole: bytes) -> list[bytes]:
    """`whole` in pieces, some of them empty."""
    ends = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    return [whole[start:end] for start, end in pairwise([0, *ends, len(whole)])]


@settings(max_examples=50)
@given(st.data(), st.lists(TEXTS, max_size=6), st.sampled_from([b"\n", b"\r\n"]))
def test_events_do_not_depend_on_how_the_bytes_were_cut(
    data: st.DataObject, texts: list[str], end: bytes
) -> None:
    payloads = [json.dumps(text, ensure_ascii=False) for text in texts]
    lines = b"".join(
        b": a comment" + end + b"data: " + payload.encode() + end + b"id: 3" + end * 2
        for payload in payloads
    )
    parser = SseParser()
    events = [event for piece in data.draw(cut(lines)) for event in parser.feed(piece)]
    assert events == payloads


def test_several_data_lines_are_one_event_and_an_unfinished_one_is_none() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\ndata:b\n\ndata: c\n") == ["a\nb"]
    assert parser.feed(b"\n") == ["c"]


@settings(max_examples=50)
@given(st.data(), st.lists(TEXTS, min_size=1, max_size=6))
def test_what_the_server_streams_is_what_is_read(data: st.DataObject, texts: list[str]) -> None:
    form = CompletionFormat(AnswerHead("cmpl-1", "tiny", 0, "fp_1", include_usage=True))
    stats = SpeculationStats()
    stats.observe(3, 2)
    said = [TokenDelta("cmpl-1-0", (1,), text) for text in texts]
    said.append(TokenDelta("cmpl-1-0", (), "", FinishReason.LENGTH))
    frames = [sse.frame(dict(form.chunk(0, delta))) for delta in said]
    frames.append(sse.frame(dict(form.usage_chunk(usage(7, 11, stats)))))
    pieces = data.draw(cut(b"".join([*frames, sse.DONE])))
    answer = read_stream((float(time), piece) for time, piece in enumerate(pieces))
    assert answer.error is None
    assert answer.text == "".join(texts)
    assert (answer.num_tokens, answer.usage["prompt_tokens"]) == (11, 7)
    assert answer.usage["speculation"]["rounds_by_num_steps"] == {"3": 1}
    assert len(answer.chunk_s) == sum(map(bool, texts)) + 1, "one time per piece, the end included"
    assert answer.chunk_s == sorted(answer.chunk_s)


def test_a_chunk_came_when_its_last_byte_came() -> None:
    first, second = event(chunk("a")), event(chunk("b"))
    arrivals = [(1.0, first[:9]), (2.0, first[9:] + second[:-1]), (5.0, second[-1:])]
    assert read_stream(arrivals).chunk_s == [2.0, 5.0]


def test_tokens_are_counted_by_usage_else_by_ids_and_never_by_chunks() -> None:
    ids, running = chunk("ab", token_ids=[4, 5]), {**chunk("c"), "usage": {"completion_tokens": 9}}
    assert read_stream([(1.0, event(ids) + event(ids))]).num_tokens == 4
    assert read_stream([(1.0, event(ids) + event(running))]).num_tokens == 9
    assert read_stream([(1.0, event(chunk("a")))]).num_tokens == 0


def test_token_ids_without_text_are_a_first_token() -> None:
    half_a_character = chunk("", token_ids=[200])
    assert read_stream([(1.0, event(half_a_character))]).chunk_s == [1.0]
    assert read_stream([(1.0, event(chunk("")))]).chunk_s == []


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (b"data: [DONE]\n\n", None),
        (b"", "broken off"),
        (b"data: [DONE]\n", "broken off"),
        (event({"error": {"message": "boom"}}), "error frame"),
        (event({"error": {"message": "boom"}}) + b"data: [DONE]\n\n", "error frame"),
        (b"data: {\n\n", "bad frame"),
        (event([1]), "bad frame"),
        (event({"text": "no choices"}), "bad frame"),
    ],
)
def test_only_an_answer_that_says_it_is_done_is_whole(last: bytes, error: str | None) -> None:
    answer = read_stream([(1.0, event(chunk("a"))), (2.0, last)])
    assert (answer.error, answer.text) == (error, "a")
