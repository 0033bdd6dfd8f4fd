"""Answers are divided into reasoning, content and calls, however their text is cut into deltas."""

import json
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.serving.protocols.parsers import AnswerParser, AnswerSyntax

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
    "keys after the arguments": (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}, "meta": {"a": "} b"}}\n</tool_call>\nok',
        "", "ok", [F],
    ),
    "arguments first": (
        HERMES, f'<tool_call>\n{{"arguments": {HARD}, "name": "f"}}\n</tool_call>',
        "", "", [("f", HARD)],
    ),
    "a brace too few": (
        HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>\nok', "", "ok", [F],
    ),
    "text about the marker": (
        HERMES, "Use the <tool_call> tag {like this}, or g. Done", "",
        "Use the <tool_call> tag {like this}, or g. Done", [],
    ),
    "a function that was not offered": (
        HERMES, 'a <tool_call>{"name": "h", "arguments": {}}</tool_call> b', "",
        'a <tool_call>{"name": "h", "arguments": {}}</tool_call> b', [],
    ),
    "functions that were not offered": (
        HERMES, "<tool_call><function=h></function></tool_call><tool_call>h\n</tool_call>", "",
        "<tool_call><function=h></function></tool_call><tool_call>h\n</tool_call>", [],
    ),
    "qwen3-coder's marks in a value": (
        HERMES,
        "<tool_call>\n<function=f>\n<parameter=s>\n</tool_call></function></parameter> x\n"
        "</parameter>\n</function>\n</tool_call>",
        "", "", [("f", '{"s": "</tool_call></function></parameter> x"}')],
    ),
    "qwen3-coder without the marker, and its end": (
        HERMES,
        "Ok\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
        "<function=g>\n</function>",
        "", "Ok", [F, G],
    ),
    "text about qwen3-coder's marks": (
        HERMES, "Write <function=f> before g.", "", "Write <function=f> before g.", [],
    ),
    "glm, stopped before the end": (
        HERMES, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>", "", "", [F],
    ),
    "glm without arguments": (HERMES, "<tool_call>g</tool_call>", "", "", [G]),
    "a list after reasoning": (
        AnswerSyntax("llama3_json", "think", TOOLS, is_reasoning=True),
        "r \n</think>\n\n[1, 2]", "r", "[1, 2]", [],
    ),
    "channels of functions that were not offered": (
        CHANNELS, '<|channel|>commentary to=functions.h<|message|>{}', "", "{}", [],
    ),
    "arguments that the end cuts": (
        HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": 1', "", "", [("f", '{"a": 1')],
    ),
    "a further call that the end cuts": (
        JSON, '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "para', "", "", [F],
    ),
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
    "no object as arguments": (HERMES, '<tool_call>{"name": "f", "arguments": {x}}</tool_call>'),
    "qwen3-coder, cut": (HERMES, "<tool_call><function=f><parameter=s>x"),
    "no list": (MISTRAL, "[TOOL_CALLS] [f"),
    "end of a tag": (THINKING, "a </tool_call> b"),
}


def parse(text, syntax, cuts=(), *, ends_with_text=False):
    """Parse a text that arrives cut at `cuts`; return reasoning, content and calls."""
    parser = AnswerParser(syntax)
    places = [0, *sorted(cuts), len(text)]
    texts, calls = {"reasoning": "", "content": ""}, []
    for start, end in pairwise(places):
        for part in parser.feed(text[start:end], is_last=ends_with_text and end == len(text)):
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
    assert list(parse(text, syntax)) == list(parse(text, syntax, ends_with_text=True)) == parts
    for size in (1, 2, 3, 5, 8, 13, 1000):
        assert list(parse(text, syntax, range(size, len(text), size))) == parts


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_call_is_content(name):
    syntax, text = BROKEN[name]
    assert parse(text, syntax) == ("", text, [])
    assert parse(text, syntax, range(1, min(len(text), 200))) == ("", text, [])


def test_arguments_are_passed_on_as_they_are_written():
    parser = AnswerParser(HERMES)
    parser.feed('<tool_call>\n{"name": "f", "arguments": ')
    sent = [part.text for piece in ('{"s": ', '"x', 'y"') for part in parser.feed(piece)]
    assert sent == ["f", '{"s": ', '"x', 'y"']


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral's newer form", "a list"])
def test_without_parallel_calls_the_first_one_is_returned(name):
    syntax, text, _, _, calls = ANSWERS[name]
    alone = AnswerSyntax(syntax.calls, syntax.reasoning, TOOLS, is_parallel=False)
    for cuts in ((), range(len(text))):
        assert parse(f"{text} more", alone, cuts)[1:] == (ANSWERS[name][3], calls[:1])


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
    parsed = parse(text, syntax)
    assert parsed == parse(text, syntax, ends_with_text=True)
    assert parsed == parse(text, syntax, cuts) == parse(text, syntax, range(len(text)))
    assert {name for name, _ in parsed[2]} <= TOOLS.keys()


def hermes(name, arguments):
    return (
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>\n'
    )


def other_order(name, arguments):
    call = {"id": "}", "arguments": arguments, "name": name}
    return f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"


def coder(name, arguments):
    values = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def glm(name, arguments):
    values = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{values}</tool_call>"


def llama(name, arguments):
    return json.dumps({"name": name, "parameters": arguments})


def mistral(name, arguments):
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}"


def channel(name, arguments):
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{START}{head}{json.dumps(arguments)}<|call|>"


DEFINITIONS = {
    "R": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "Level": {"enum": [1, 2]},
    "Self": {"anyOf": [{"$ref": "#/$defs/Self"}, {"type": "integer"}]},
    **{f"D{depth}": {"anyOf": [{"$ref": f"#/$defs/D{depth + 1}"}] * 2} for depth in range(60)},
    "D60": {"type": "boolean"},
}
INTEGER, STRING, NULL = ({"type": name} for name in ("integer", "string", "null"))
# Schema of an argument, text of it, value.
TYPED = [
    (STRING, "5", "5"),
    (STRING, "null", "null"),
    (STRING, '"a"', '"a"'),
    (STRING, "", ""),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"anyOf": [INTEGER, NULL]}, "5", 5),
    ({"anyOf": [INTEGER, NULL]}, "null", None),
    ({"anyOf": [INTEGER, NULL]}, "None", None),
    ({"anyOf": [INTEGER, NULL], "default": None}, "five", "five"),
    ({"anyOf": [STRING, NULL]}, "null", None),
    ({"anyOf": [STRING, NULL]}, "5", "5"),
    ({"anyOf": [STRING, INTEGER]}, "5", "5"),
    ({"anyOf": [INTEGER, STRING]}, "5", 5),
    ({"anyOf": [INTEGER, STRING]}, "5.5", "5.5"),
    ({"anyOf": [{"type": "array", "items": STRING}, NULL]}, '["a"]', ["a"]),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "x", "x"),
    ({"type": ["integer", "null"], "enum": [1, None]}, "1", 1),
    ({"type": "string", "nullable": True}, "null", None),
    ({"oneOf": [INTEGER, {"type": "boolean"}]}, "true", True),
    ({"oneOf": [{"const": "all"}, INTEGER]}, "all", "all"),
    ({"allOf": [{"$ref": "#/$defs/R"}], "description": "r"}, '{"x": 1}', {"x": 1}),
    ({"$ref": "#/$defs/R"}, '{"x": 1}', {"x": 1}),
    ({"$ref": "#/$defs/Level"}, "2", 2),
    ({"$ref": "#/$defs/Self"}, "2", 2),
    ({"$ref": "#/$defs/D0"}, "true", True),
    ({"$ref": "#/$defs/none"}, '{"x": 1}', {"x": 1}),
    ({"enum": [1, "2", None]}, "2", "2"),
    ({"enum": [1, 2]}, "3", 3),
    ({"enum": [True]}, "1", "1"),
    ({"const": 4}, "4", 4),
    ({"enum": [0.5, 4.0]}, "4", 4),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({"type": "boolean"}, "1", "1"),
    ({"type": "integer"}, "5.0", 5),
    ({"type": "integer"}, "True", "True"),
    ({"type": "integer", "enum": [1, 2]}, "3", 3),
    ({"type": "number"}, "5.5", 5.5),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "array"}, "[1, {}]", [1, {}]),
    ({"type": "array"}, "[1e999]", "[1e999]"),
    ({"type": "object"}, "{'a': 1}", "{'a': 1}"),
    ({"type": "object"}, "[" * 100_000, "[" * 100_000),
    ({}, "[1]", [1]),
    ({}, "a", "a"),
    (True, "5", 5),
]


@pytest.mark.parametrize(("schema", "text", "value"), TYPED, ids=lambda given: repr(given)[:60])
def test_an_argument_without_a_type_of_its_own_has_the_first_of_its_schema_that_fits(
    schema, text, value
):
    root = {"type": "object", "properties": {"v": schema}, "$defs": DEFINITIONS}
    syntax = AnswerSyntax("hermes", tools={"f": root})
    for write in (coder, glm):
        ((_, arguments),) = parse(write("f", {"v": text}), syntax)[2]
        read = json.loads(arguments)["v"]
        assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("root", "value"),
    [
        ({"properties": {}}, "5"),
        ({"additionalProperties": INTEGER}, 5),
        ({"$ref": "#/$defs/Args", "$defs": {"Args": {"properties": {"v": INTEGER}}}}, 5),
        ({"allOf": [{}, {"properties": {"v": INTEGER}}]}, 5),
        ({"$ref": "#"}, "5"),
    ],
)
def test_the_schema_of_an_argument_is_found_where_its_root_has_it(root, value):
    (call,) = parse(coder("f", {"v": "5"}), AnswerSyntax("hermes", tools={"f": root}))[2]
    assert json.loads(call[1]) == {"v": value}


THOUGHT = "<think>\n{}\n</think>\n\n"
FORMATS = {
    "hermes": (THINKING, THOUGHT, "{}", hermes, "\n"),
    "hermes, other order": (THINKING, THOUGHT, "{}", other_order, ""),
    "qwen3-coder": (THINKING, THOUGHT, "{}", coder, "\n"),
    "glm": (THINKING, THOUGHT, "{}", glm, ""),
    "llama": (AnswerSyntax("llama3_json", "think", TOOLS), THOUGHT, None, llama, "; "),
    "mistral": (MISTRAL, "[THINK]{}[/THINK]", "{}", mistral, ""),
    "channels": (
        CHANNELS, f"{START}<|channel|>analysis<|message|>{{}}<|end|>",
        f"{START}<|channel|>commentary<|message|>{{}}<|end|>", channel, "",
    ),
}  # fmt: skip
WORDS = st.lists(
    st.sampled_from(["a", "é", "<", "</", "{", "}", "[", '"', "\\", " ", "\n", "1", "tool_call>"]),
    max_size=8,
).map("".join)
VALUES = st.lists(
    st.sampled_from(
        ["x", "</tool_call>", "</function>", "</parameter>", "</arg_value>", "<", '"', "}"]
    ),
    max_size=4,
).map(lambda marks: " y ".join([*marks, "x"]))
CALLS = st.tuples(st.sampled_from("fg"), st.dictionaries(st.sampled_from("st"), VALUES, max_size=2))


@pytest.mark.parametrize("name", FORMATS)
@given(
    thought=WORDS.map(str.strip),
    content=WORDS.map(str.strip),
    calls=st.lists(CALLS, max_size=3),
    seed=st.integers(0, 99),
)
def test_a_message_is_read_as_its_format_writes_it_however_it_is_cut(
    name, thought, content, calls, seed
):
    syntax, reasoning, plain, call, between = FORMATS[name]
    content = content if plain and not content.startswith(("{", "[")) else ""
    text = reasoning.format(thought) if thought else ""
    text += plain.format(content) if content else ""
    text += between.join(call(*each) for each in calls)
    cuts = random.Random(seed).choices(range(len(text) + 1), k=8)
    for given_cuts in ((), cuts, range(len(text))):
        read_thought, read_content, read = parse(text, syntax, given_cuts)
        assert (read_thought, read_content) == (thought, content)
        assert [(each, json.loads(arguments)) for each, arguments in read] == calls
