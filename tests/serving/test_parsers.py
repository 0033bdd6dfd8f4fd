"""Answers are divided into reasoning, content and calls, however their text is cut into deltas."""

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.serving.parsers import AnswerParser, AnswerSyntax

TOOLS = {"f": {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}, "g": {}}
F, G = ("f", '{"a": 1}'), ("g", "{}")
HERMES, THINKING = AnswerSyntax("hermes", None, TOOLS), AnswerSyntax("hermes", "think", TOOLS)
LLAMA, JSON = AnswerSyntax("llama3_json", None, TOOLS), AnswerSyntax("json", None, TOOLS)
MISTRAL = AnswerSyntax("mistral", "mistral", TOOLS)
CHANNELS = AnswerSyntax("openai", "openai", TOOLS)
HARD = '{"s": "}\\"</tool_call>[]\\\\", "a": [1, {}]}'
START = "<|start|>assistant"

ANSWERS = {
    "content only": (THINKING, "  a < b <tool  ", "", "  a < b <tool  ", []),
    "hermes": (
        THINKING,
        '<think>\nhm <tool_call> </thi \n</think>\n\nLet me.\n\n<tool_call>\n{"name": "f", '
        f'"arguments": {HARD}}}\n</tool_call>\n<tool_call>\n{{"arguments": {{}}, "name": "g"}}\n'
        "</tool_call>\n",
        "hm <tool_call> </thi",
        "Let me.",
        [("f", HARD), G],
    ),
    "thoughts that the prompt opens": (
        AnswerSyntax(None, "think", is_reasoning=True), "hm\n</think>\n\nYes.", "hm", "Yes.", [],
    ),
    "a tag in the content": (THINKING, "A <think> </think>.", "", "A <think> </think>.", []),
    "thoughts that never end": (THINKING, "<think>hm", "hm", "", []),
    "qwen3-coder": (
        HERMES,
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n1\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        "", "", [("f", '{"a": 1, "s": "1\\n2"}')],
    ),
    "glm": (
        HERMES,
        "Ok <tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "", "Ok", [F],
    ),
    "llama": (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", "", [F]),
    "several of llama": (
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"type": "function", "name": "g", '
        '"parameters": {}}',
        "", "", [F, G],
    ),
    "llama's short form": (LLAMA, '{"function": "f", "parameters": {"a": 1}}', "", "", [F]),
    "JSON that calls no function": (LLAMA, '{"name": "Bob"}', "", '{"name": "Bob"}', []),
    "JSON of an unknown function": (
        LLAMA, '{"name": "h", "parameters": {}}', "", '{"name": "h", "parameters": {}}', [],
    ),
    "JSON inside a text": (LLAMA, f'See {{"name": "f", "parameters": {HARD}}}', "",
                           f'See {{"name": "f", "parameters": {HARD}}}', []),
    "mistral": (
        MISTRAL,
        'Ok [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "123456789"}, '
        '{"name": "g", "arguments": {}}]',
        "", "Ok", [F, G],
    ),
    "mistral's newer form": (
        MISTRAL,
        '[THINK]hm[/THINK][TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}',
        "hm", "", [F, G],
    ),
    "a list": (
        JSON, '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]',
        "", "", [F, G],
    ),
    "channels": (
        CHANNELS,
        f"<|channel|>analysis<|message|>hm<|end|>{START}<|channel|>commentary<|message|>Ok<|end|>"
        f"{START}<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"a": 1}<|call|>',
        "hm", "Ok", [F],
    ),
    "recipient before the channel": (
        CHANNELS,
        f'{START} to=functions.g<|channel|>commentary<|message|>{{}}', "", "", [G],
    ),
    "no arguments": (
        CHANNELS,
        "<|channel|>commentary to=functions.g<|message|><|end|>"
        f"{START}<|channel|>commentary to=functions.g<|message|>",
        "", "", [G, G],
    ),
    "final channel": (
        CHANNELS, f"<|channel|>analysis<|message|>hm<|end|>{START}<|channel|>final<|message|>Yes.",
        "hm", "Yes.", [],
    ),
    "channels without channels": (CHANNELS, "Yes.", "", "Yes.", []),
    "nothing": (THINKING, "", "", "", []),
}  # fmt: skip
BROKEN = {
    "no JSON": (HERMES, "a <tool_call>\n{'name': 'f'}\n</tool_call> b"),
    "no call": (HERMES, 'a <tool_call>\n{"a": 1}\n</tool_call>'),
    "no string as name": (HERMES, '<tool_call>{"name": 3}</tool_call>'),
    "no end": (HERMES, 'a <tool_call>\n{"nam'),
    "arguments in a broken string": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{"}</tool_call>',
    ),
    "nested too deeply": (HERMES, f"<tool_call>{'[' * 5}{{{'[' * 100_000}</tool_call>"),
    "no list": (MISTRAL, "[TOOL_CALLS] [f"),
    "end of a tag": (THINKING, "a </tool_call> b"),
}


def parse(text, syntax, cuts=(), *, is_whole=False):
    """Parse a text that arrives cut at `cuts`; return reasoning, content and calls."""
    parser = AnswerParser(syntax, is_whole=is_whole)
    places = [0, *sorted(cuts), len(text)]
    texts, calls = {"reasoning": "", "content": ""}, []
    for start, end in pairwise(places):
        for part in parser.feed(text[start:end]):
            _add(part, texts, calls)
    for part in parser.feed("", is_last=True):
        _add(part, texts, calls)
    return texts["reasoning"], texts["content"], [tuple(call) for call in calls]


def _add(part, texts, calls):
    if part.kind == "name":
        assert part.call == len(calls)
        calls.append([part.text, ""])
    elif part.kind == "arguments":
        assert part.call == len(calls) - 1
        calls[-1][1] += part.text
    else:
        texts[part.kind] += part.text


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_the_parts_that_its_format_says_in_a_stream_and_whole(name):
    syntax, text, *parts = ANSWERS[name]
    assert list(parse(text, syntax, is_whole=True)) == parts
    for size in (1, 2, 3, 5, 8, 13, 1000):
        assert list(parse(text, syntax, range(size, len(text), size))) == parts


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_call_is_content(name):
    syntax, text = BROKEN[name]
    assert parse(text, syntax, is_whole=True) == ("", text, [])
    assert parse(text, syntax, range(1, min(len(text), 200))) == ("", text, [])


def test_only_whole_answers_take_back_calls_whose_arguments_turn_out_to_be_broken():
    for arguments in ("{x}", '{"a": 1'):
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}'
        assert parse(text, HERMES, is_whole=True) == ("", text, [])
        assert parse(text, HERMES, range(len(text))) == ("", "", [("f", arguments)])


def test_arguments_are_passed_on_as_they_are_written():
    parser = AnswerParser(HERMES)
    parser.feed('<tool_call>\n{"name": "f", "arguments": ')
    sent = [part.text for piece in ('{"s": ', '"x', 'y"') for part in parser.feed(piece)]
    assert sent == ["f", '{"s": ', '"x', 'y"']


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral's newer form", "a list"])
def test_without_parallel_calls_the_first_one_is_returned(name):
    syntax, text, _, _, calls = ANSWERS[name]
    alone = AnswerSyntax(syntax.calls, syntax.reasoning, TOOLS, is_parallel=False)
    assert parse(text, alone, range(len(text)))[2] == calls[:1]


FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|python_tag|>", "<|channel|>", "analysis", "<|message|>", "<|end|>", "to=functions.f", "f",
    '{"name": "f", "arguments": ', "{", "}", "[", "]", '"', "\\", " ", "\n", ",", ";", "é", "<",
    "<function=f>", "<parameter=a>", "</parameter>", "1", "name",
]  # fmt: skip


@given(
    pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=30),
    syntax=st.sampled_from([HERMES, THINKING, LLAMA, JSON, MISTRAL, CHANNELS]),
    seed=st.integers(0, 99),
)
def test_whatever_a_model_writes_the_cuts_make_no_difference(pieces, syntax, seed):
    text = "".join(pieces)
    cuts = random.Random(seed).choices(range(len(text) + 1), k=8)
    assert parse(text, syntax, cuts) == parse(text, syntax, range(len(text)))
    for _, arguments in parse(text, syntax, is_whole=True)[2]:
        json.loads(arguments)
