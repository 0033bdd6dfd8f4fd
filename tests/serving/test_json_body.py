"""Bodies are bounded before they are parsed."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from serve_spec.core.errors import InvalidRequest
from serve_spec.serving.errors import ApiError
from serve_spec.serving.protocols import fields, json_body
from serve_spec.serving.protocols.openai import ChatRequest, CompletionRequest

TEXTS = st.text(alphabet='a"\\,:[{}]é\n\U0001f98a', max_size=8)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def sizes(value):
    """Return the numbers of containers, members, strings and commas of a value."""
    inner = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(inner, list):
        return [0, 0, isinstance(value, str), 0]
    num_names = len(value) if isinstance(value, dict) else 0
    own = [1, num_names, num_names, max(0, len(inner) - 1)]
    return [sum(column) for column in zip(own, *map(sizes, inner), strict=True)]


LIMITS = ("MAX_CONTAINERS", "MAX_MEMBERS", "MAX_STRINGS", "MAX_VALUES")


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_values_are_counted_exactly_and_read_as_they_are(value, ascii_only, indent):
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "_SMALL_BYTES", 0)
        for name, count in zip(LIMITS, sizes(value), strict=True):
            patch.setattr(json_body, name, count)
        assert json_body.parse_body(body) == value
        for name, count in zip(LIMITS, sizes(value), strict=True):
            patch.setattr(json_body, name, count - 1)
            with pytest.raises(ApiError, match=f"more than {count - 1} "):
                json_body.parse_body(body)
            patch.setattr(json_body, name, count)


PART = {"type": "text", "text": ""}
HEAVY = {
    "token ids": {"prompt": [1] * 4_000_000},
    "prompts": {"prompt": [[1]] * 2_000_000},
    "messages": {"messages": [{"role": "user", "content": [PART] * 16}] * 16_000},
    "choices": {"guided_choice": ["a"] * 2_000_000},
    "fields": {f"k{i}": 1 for i in range(600_000)},
    "schema": {"structured_outputs": {"json": {"a": [1] * 4_000_000}}},
    "strings": {"bad_words": ['\\"'] * 500_000},
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_body_is_refused_before_it_is_parsed(name, monkeypatch):
    body = json.dumps(HEAVY[name], separators=(",", ":")).encode()[: 8 << 20]
    monkeypatch.setattr(msgspec.json, "decode", lambda body: pytest.fail("it was parsed"))
    with pytest.raises(ApiError, match=r"^The body has more than \d+ ") as caught:
        json_body.parse_body(body)
    assert caught.value.status == 400


FIELDS = {f"k{i}": 1 for i in range(json_body.MAX_FIELDS + 1)}
DEEP = {"a": [[{"b": [1] * 30}] for _ in range(1200)]}


def refusal(schema, data):
    """Return the error of a body that parses."""
    body = json.dumps(data).encode()
    with pytest.raises((ApiError, InvalidRequest, ValidationError)) as caught:
        schema.model_validate(json_body.parse_body(body)).sampling_params()
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (FIELDS, "more than 1024 fields"),
        ({"prompt": [[1]] * 20_000}, "at most 16384 prompts, not 20000"),
        ({"prompt": ["a"] * 20_000}, "at most 16384 prompts, not 20000"),
        ({"guided_choice": ["a"] * 40_000}, "at most 32768 items"),
        ({"structured_outputs": {"choice": ["a"] * 40_000}}, "at most 32768 characters"),
        ({"structured_outputs": {"json": DEEP}}, "at most 32768 characters"),
        ({"guided_json": {"a": "b" * 40_000}}, "at most 32768 characters"),
    ],
)
def test_lists_of_a_body_have_limits_of_their_own(fields, message):
    assert message in refusal(CompletionRequest, {"prompt": "a", **fields})
    if "prompt" not in fields:
        chat = {"messages": [{"role": "user", "content": "a"}]}
        assert message in refusal(ChatRequest, {**chat, **fields})


def test_a_schema_is_measured_before_it_is_closed(monkeypatch):
    monkeypatch.setattr(fields, "closed", lambda schema: pytest.fail("closed"))
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": DEEP}}
    assert "at most 32768" in refusal(CompletionRequest, {"prompt": "a", "response_format": form})
