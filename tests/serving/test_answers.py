"""Answers have the fields of the OpenAI API, and no more than were asked for."""

from __future__ import annotations

import json

from serve_spec.core.request import FinishReason, SpeculationStats
from serve_spec.serving.answers import CompletionFormat, usage


def test_a_stream_shows_usage_only_when_asked_and_then_null_until_the_last_chunk() -> None:
    plain = CompletionFormat("cmpl-1", "m", 0)
    assert "usage" not in plain.chunk("a", None)
    asked = CompletionFormat("cmpl-1", "m", 0, include_usage=True)
    assert asked.chunk("a", None)["usage"] is None
    last = asked.usage_chunk(usage(2, 3, SpeculationStats()))
    assert last["choices"] == []
    assert last["usage"] is not None
    assert last["usage"]["total_tokens"] == 5


def test_finish_reasons_are_the_words_of_the_openai_api() -> None:
    form = CompletionFormat("cmpl-1", "m", 0)
    reasons = [form.chunk("", reason)["choices"][0]["finish_reason"] for reason in FinishReason]
    assert reasons == ["stop", "length", "abort"]
    assert json.loads(json.dumps(form.chunk("", FinishReason.STOP))) == form.chunk(
        "", FinishReason.STOP
    )


def test_every_answer_of_forced_acceptance_is_labelled_and_no_other_is() -> None:
    """Every chunk too: a stream may break off, or not be asked for its usage."""
    for forced in (True, False):
        form = CompletionFormat("cmpl-1", "m", 0, synthetic_acceptance=forced)
        counts = usage(2, 3, SpeculationStats(synthetic_acceptance=forced))
        assert ("synthetic_acceptance" in counts["speculation"]) == forced
        for answer in (
            form.completion("a", FinishReason.STOP, counts),
            form.chunk("a", None),
            form.usage_chunk(counts),
        ):
            assert answer.get("synthetic_acceptance") == (True if forced else None)
