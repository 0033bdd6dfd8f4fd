"""A frame is one event for every client, whatever the text holds."""

import json

import pytest

from serve_spec.serving import sse


@pytest.mark.parametrize(
    "text",
    ["a", "", "two\nlines\r\n\n", "\u2028\u2029\x85\x0b\x0c", "é😀", "\ud800", "data: [DONE]"],
)
def test_any_text_survives_as_one_line(text):
    frame = sse.frame({"text": text}).decode("ascii")
    assert frame.startswith("data: ")
    assert frame.endswith("\n\n")
    assert len(frame.splitlines()) == 2
    assert json.loads(frame.removeprefix("data: ")) == {"text": text}
