"""Answers have the fields of the OpenAI API, and no more than were asked for."""

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from serve_spec.core.request import FinishReason, SpeculationStats, TokenLogprob
from serve_spec.engine.tokenizer import TokenBytes
from serve_spec.serving.answers import (
    AnswerHead,
    ChatFormat,
    CompletionFormat,
    Details,
    Echo,
    event,
    fingerprint,
    usage,
)
from tests.serving.fakes import delta

COUNTS = usage(2, 3, SpeculationStats())
FORMATS = [CompletionFormat, ChatFormat]


def head(**options):
    return AnswerHead("cmpl-1", "m", 0, "fp_1", **options)


def every_answer(form):
    """One of each shape."""
    whole = form.whole([[delta("a"), delta("b", finish=FinishReason.STOP)]], COUNTS)
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
    entry = TokenLogprob(ord(token), -1.0, 1, ((ord("z"), -2.0),))
    return delta(token, ord(token), finish=finish)._replace(logprobs=(entry,))


def test_the_official_client_reads_log_probabilities():
    choices = [[scored("a", FinishReason.STOP)]]
    whole = Completion.model_validate(
        CompletionFormat(head(), token_bytes=token_bytes).whole(choices, COUNTS)
    )
    assert whole.choices[0].logprobs.top_logprobs == [{"z": -2.0, "a": -1.0}]
    form = ChatFormat(head(), token_bytes)
    chat = ChatCompletion.model_validate(form.whole(choices, COUNTS))
    chunk = ChatCompletionChunk.model_validate(form.chunk(0, *choices[0]))
    for logprobs in (chat.choices[0].logprobs, chunk.choices[0].logprobs):
        assert [(t.token, t.bytes, t.logprob) for t in logprobs.content] == [("a", [97], -1.0)]
        assert [t.token for t in logprobs.content[0].top_logprobs] == ["z"]


def test_the_choices_with_the_highest_log_probabilities_are_shown_in_their_order():
    def candidate(text, logprob):
        entry = TokenLogprob(97, logprob, 1)
        return [delta(text, 97, finish=FinishReason.STOP)._replace(logprobs=(entry, entry))]

    form = CompletionFormat(head(), num_candidates=3)
    form.details = Details(num_choices=2)
    of_first = [candidate("a", -3.0), candidate("b", -1.0), candidate("c", -2.0)]
    of_second = [candidate("x", -1.0), candidate("y", -1.0), candidate("z", -1.0)]
    shown = form.whole([*of_first, *of_second], COUNTS)["choices"]
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
