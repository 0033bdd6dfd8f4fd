"""Masks of the library are those of the language; hostile grammars are refused."""

import json
import logging
import random
import sys
from math import lcm

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tokenizers import AddedToken

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import MAX_GRAMMAR_CHARS, CallsForm, Grammar, GrammarKind
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.structured.compiler import (
    MAX_DEPTH,
    MAX_REMAINDERS,
    GrammarCompiler,
    checked_schema,
)
from tests.helpers.checkpoints import EOS_ID, VOCAB
from tests.helpers.grammars import PARENTHESES, byte_compiler, ids_of, is_of, shipped_tokenizer
from tests.serving.texts import byte_tokenizer

EXPRESSIONS = ["[a-c]{2,4}x?", "(ab|ba)*c", "a.b", "(foo|bar)(,(foo|bar))*", r"-?\d+(\.\d{1,2})?"]


def is_short(expression):
    """Whether it may be repeated: of repeated repetitions `regex` tries every way to split a text,
    which takes minutes for ten letters of `(((a*){1,3}){1,3}){1,3}`.
    """
    return not {"*", "{"} & {*expression}


expressions = st.recursive(
    st.sampled_from(["a", "b", "[ab]", "[^a]", "ab", "c?", "a*", "(b|c)"]),
    lambda inner: (
        st.builds("({}|{})".format, inner, inner)
        | st.builds("{}{}".format, inner, inner)
        | st.builds("({}){{1,3}}".format, inner.filter(is_short))
    ),
    max_leaves=5,
)


LETTERS = set(b"abcfor,.-17 x\n")


def may_follow(expression, text):
    """The letters after which a text can still become a match, and the end where it is one."""
    pattern = regex.compile(expression.encode())
    letters = {b for b in LETTERS if pattern.fullmatch(text + bytes([b]), partial=True)}
    match = pattern.fullmatch(text)
    return letters | ({EOS_ID} if match else set())


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(EXPRESSIONS) | expressions, st.integers(0, 2**16))
def test_the_mask_is_what_the_text_can_still_become(expression, seed):
    """Along a random walk over some letters; no id that is no token's, ever."""
    try:
        matcher = byte_compiler().matcher(Grammar.regex(expression))
    except InvalidRequest:
        assert may_follow(expression, b"") == {EOS_ID}, "only an empty text may match"
        return
    rng, text = random.Random(seed), b""
    for _ in range(12):
        allowed = ids_of(matcher.mask())
        assert allowed & {*LETTERS, *range(256, VOCAB)} == may_follow(expression, text)
        if not allowed & LETTERS:
            break
        text += bytes([rng.choice(sorted(allowed & LETTERS))])
        assert matcher.advance([text[-1]])


GRAMMARS = [
    Grammar.regex(EXPRESSIONS[4]),
    Grammar.choice(["a", "ab", "-$", "é ü", "\n\\t"]),
    Grammar.ebnf(PARENTHESES),
    Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}}),
    Grammar.json_schema({"enum": [1, "é", None, {"a": [True]}]}),
]


def shipped_compiler():
    tokenizer = Tokenizer(shipped_tokenizer())
    return GrammarCompiler(lambda: tokenizer.describe(8200), 8200, [0])


def wander(matcher, seed, end, most):
    """Return the tokens of a random text, with its end if it came to one."""
    rng = random.Random(seed)
    text = []
    while len(text) < most and end not in text:
        text.append(rng.choice(sorted(ids_of(matcher.mask()))))
        if text[-1] != end:
            assert matcher.advance(text[-1:])
    return text


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_every_random_text_that_ends_is_one_of_the_grammar(grammar):
    compiler, num_ended = shipped_compiler(), 0
    tokenizer = Tokenizer(shipped_tokenizer())
    for seed in range(24):
        token_ids = wander(compiler.matcher(grammar), seed, 0, 60)
        assert max(token_ids) < tokenizer.vocab_size
        if token_ids[-1] == 0:
            num_ended += 1
            text = tokenizer.decode(token_ids[:-1])
            assert "\ufffd" in text or is_of(text, grammar)
    assert num_ended > 3, "some texts must end"


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.kind)
def test_another_compiler_finds_the_same_texts_in_a_translated_grammar(grammar):
    first, second = shipped_compiler(), shipped_compiler()
    first.matcher(grammar)
    translated = first.translate(grammar)
    assert translated.kind is GrammarKind.LLGUIDANCE
    matcher, other = first.matcher(grammar), second.matcher(translated)
    for token in wander(first.matcher(grammar), 1, 0, 60):
        assert ids_of(matcher.mask()) == ids_of(other.mask())
        assert matcher.advance([token]) == other.advance([token])


def test_a_model_without_an_end_has_no_grammars():
    endless = GrammarCompiler(lambda: Tokenizer(shipped_tokenizer()).describe(8200), 8200, [])
    with pytest.raises(InvalidRequest, match="no end-of-text token"):
        endless.matcher(Grammar.json_object())


@pytest.mark.parametrize("is_missing", [False, True])
def test_an_engine_without_grammars_warns_and_refuses_them(monkeypatch, caplog, is_missing):
    """Its tokenizer is of a kind that the library does not know, or the library is not there."""
    if is_missing:
        monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(lambda: "{}", VOCAB, [EOS_ID])
    monkeypatch.setattr(logging.getLogger("serve_spec"), "propagate", True)
    with caplog.at_level("WARNING"):
        compiler.prepare()
    assert "requests with a grammar will be refused" in caplog.text
    with pytest.raises(InvalidRequest):
        compiler.matcher(Grammar.json_object())


def chain(inner, num_links):
    links = {str(i): inner(f"#/$defs/{i + 1}") for i in range(num_links)}
    return {"$defs": {**links, str(num_links): {"type": "integer"}}, "$ref": "#/$defs/0"}


HOSTILE = {
    "no json": Grammar.json_schema("{"),
    "a number": Grammar.json_schema("1e999"),
    "deeper": Grammar.json_schema("[" * (MAX_GRAMMAR_CHARS // 2) + "]" * (MAX_GRAMMAR_CHARS // 2)),
    "nothing": Grammar.json_schema({"enum": []}),
    "itself": Grammar.json_schema({"$ref": "#"}),
    "a file": Grammar.json_schema({"$ref": "file:///etc/hosts"}),
    "nowhere": Grammar.json_schema({"$ref": "#/$defs/gone"}),
    "not supported": Grammar.json_schema({"type": "array", "uniqueItems": True}),
    "remainders": Grammar.json_schema({"type": "integer", "multipleOf": 999_983}),
    "powers": Grammar.json_schema(
        {
            "type": "string",
            "allOf": [
                {"anyOf": [{"minLength": i}, {"maxLength": 99 - i}, {"pattern": "a" * i}]}
                for i in range(16)
            ],
        }
    ),
    "a surrogate": Grammar.json_schema({"const": "\ud800"}),
    "open": Grammar.regex("(a"),
    "back": Grammar.regex(r"(a)\1"),
    "empty set": Grammar.regex(r"[^\s\S]"),
    "empty text": Grammar.regex("a{0}"),
    "no rules": Grammar.ebnf("a"),
    "parentheses": Grammar.ebnf("start: " + "(" * 9000 + '"a"' + ")" * 9000),
    "a schema inside": Grammar.ebnf('start: %json {"multipleOf": 999983}'),
    "an import": Grammar.ebnf('%import /etc/hosts\nstart: "a"'),
}


@pytest.mark.parametrize("grammar", HOSTILE.values(), ids=HOSTILE)
def test_an_invalid_grammar_is_refused_with_a_short_message(grammar):
    with pytest.raises(InvalidRequest) as refusal:
        byte_compiler().matcher(grammar)
    assert refusal.value.field == "grammar"
    assert len(str(refusal.value)) < 500


HEAVY = {
    "items": Grammar.json_schema(chain(lambda link: {"items": {"$ref": link}}, 600)),
    "doubling": Grammar.json_schema(chain(lambda link: {"anyOf": [{"$ref": link}] * 2}, 40)),
    "names": Grammar.json_schema({"properties": {f"k{i}": {"type": "string"} for i in range(900)}}),
    "long arrays": Grammar.json_schema(
        {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}}
    ),
    "states": Grammar.regex("(a|b)*a(a|b){200}"),
    "letters": Grammar.regex(r"(\w|\d|\s|.){1,20000}"),
    "choice": Grammar.choice([f"x{i}" for i in range(3000)]),
    "ambiguous": Grammar.ebnf('start: start start | "a"'),
    "expressions": Grammar.ebnf(
        "start: A\nA: /(.*a.*){10}/ & /(.*b.*){10}/ & /(.*c.*){10}/ & ~/(.*d.*){5}/"
    ),
    "certain for ever": Grammar.ebnf("start: /x+/ ~2..3"),
    "many": Grammar.ebnf('start: ("a"{1,10000}){1,10000}'),
}


@pytest.mark.parametrize("grammar", HEAVY.values(), ids=HEAVY)
def test_heavy_grammars_are_refused_or_followed_and_break_nothing(grammar):
    """A text may exceed the limits later: then nothing may follow, and `problem` is set."""
    try:
        matcher = byte_compiler().matcher(grammar)
    except InvalidRequest:
        return
    rng = random.Random(0)
    for _ in range(30):
        mask = matcher.mask()
        if mask is None:
            assert matcher.problem
            break
        token = rng.choice(sorted(ids_of(mask)))
        if token == EOS_ID:
            break
        matcher.advance([token])


def test_a_schema_is_written_with_bounded_space():
    """A model that may write any amount of it sometimes writes nothing else."""
    matcher = byte_compiler().matcher(Grammar.json_schema({"const": {"a": [1]}}))
    for text in (json.dumps({"a": [1]}, indent=n) for n in (None, 2, 16, "\t")):
        assert matcher.copy().advance([*text.encode()])
    for text in ("{   ", "{\n\n", "{\n" + " " * 33):
        assert not matcher.copy().advance([*text.encode()])


PAIR = {"properties": {"a": {"type": "boolean"}, "b": {"type": "integer"}}}
KINDS = {"properties": {"a": {"enum": ["x", "y", 1]}, "b": {"type": "integer"}}}
IF_TRUE = {"if": {"properties": {"a": {"const": True}}}, "then": {"required": ["b"]}}
IF_X = {"if": {"properties": {"a": {"const": "x"}}, "required": ["a"]}, "then": {"required": ["b"]}}
REWRITTEN = [
    {"type": "array", "uniqueItems": False},
    {"type": "array", "maxItems": 1, "uniqueItems": True},
    {**PAIR, "dependentRequired": {"a": ["b"]}},
    {**PAIR, "dependentSchemas": {"b": {"properties": {"a": {"const": False}}}}},
    {**PAIR, **IF_TRUE},
    {**PAIR, **IF_TRUE, "else": {"properties": {"b": {"minimum": 2}}}},
    {**KINDS, **IF_X},
    {**PAIR, "if": {"required": ["a"]}, "else": {"required": ["b"]}},
    {**PAIR, "if": {"type": "object"}, "then": {**PAIR, **IF_TRUE}},
    {"anyOf": [{**PAIR, "not": {"required": ["a", "b"]}}, {"type": "null"}]},
    {"not": {"type": ["string", "number"]}},
    {"not": {"anyOf": [{"type": "object"}, {"type": "array"}]}},
    {"enum": ["x", 1, 2, None], "not": {"enum": [1, "y"]}},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
    {"propertyNames": {"pattern": "^[ax]$"}, "additionalProperties": {"type": "boolean"}},
    {"propertyNames": {"type": "string", "maxLength": 1, "title": "Short"}},
    {"propertyNames": {"$ref": "#/$defs/K"}, "$defs": {"K": {"const": "b", "type": "string"}}},
    {"items": {"propertyNames": {"const": "a"}}},
]
VALUES = [
    *(None, True, 1, 2, 0.5, "x", "y", [], [1], [1, 1], [{"a": 1}], [{"b": 1}], {}, {"x": True}),
    *({"a": True}, {"a": False}, {"a": "x"}, {"a": "y"}, {"b": 1}, {"b": 2}, {"a": True, "b": 1}),
    *({"a": False, "b": 1}, {"a": "x", "b": 1}, {"a": True, "xy": 1}),
]


@pytest.mark.parametrize("schema", REWRITTEN, ids=json.dumps)
def test_keywords_that_the_library_lacks_are_written_in_others_of_the_same_meaning(schema):
    matcher = byte_compiler().matcher(Grammar.json_schema(schema))
    valid = [Draft202012Validator(schema).is_valid(value) for value in VALUES]
    assert any(valid)
    assert not all(valid)
    for value, is_valid in zip(VALUES, valid, strict=True):
        text = matcher.copy()
        is_text = text.advance([*json.dumps(value).encode()])
        assert (is_text and EOS_ID in ids_of(text.mask())) == is_valid, value


UNSUPPORTED = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "not": {"type": "string", "not": {"const": "a"}},
    "if": {"if": {"properties": {"a": {"minimum": 3}}}, "then": {"required": ["b"]}},
    "propertyNames": {**PAIR, "propertyNames": {"minLength": 2}},
    "dependentRequired": {"dependentRequired": ["a"]},
    "unevaluatedProperties": {**PAIR, "unevaluatedProperties": False},
}


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_a_keyword_that_cannot_be_followed_is_refused_by_its_name(keyword):
    """It would be dangerous to ignore it."""
    with pytest.raises(InvalidRequest, match=rf'Unimplemented keys: .*"{keyword}"') as refusal:
        byte_compiler().matcher(Grammar.json_schema(UNSUPPORTED[keyword]))
    assert "llguidance" not in str(refusal.value)


def test_nested_conditions_do_not_double_at_every_level():
    schema = {"enum": [True]}
    for _ in range(40):
        schema = {"if": {"not": schema}, "then": {"type": "null"}}
    with pytest.raises(InvalidRequest):
        byte_compiler().matcher(Grammar.json_schema(schema))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(0, 3))
def test_the_remainders_of_all_steps_together_are_counted(steps, places):
    schema = {"anyOf": [{"items": {"multipleOf": step / 10**places}} for step in steps]}
    # A step of 1.5 among whole ones counts in tenths, which makes no remainder more.
    if lcm(*steps) <= MAX_REMAINDERS:
        checked_schema(Grammar.json_schema(schema))
    elif places == 0:
        with pytest.raises(InvalidRequest, match="multipleOf"):
            checked_schema(Grammar.json_schema(schema))


def test_the_depth_of_a_schema_is_bounded_and_properties_may_have_the_names_of_keywords():
    def nested(depth):
        return Grammar.json_schema('{"a":' * depth + "1" + "}" * depth)

    checked_schema(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 900):
        with pytest.raises(InvalidRequest, match=f"nest at most {MAX_DEPTH}"):
            checked_schema(nested(depth))
    checked_schema(Grammar.json_schema({"properties": {"multipleOf": {"type": "string"}}}))
    checked_schema(Grammar.json_schema({"multipleOf": True}))


ARGUMENTS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
CALL = (["<tool_call>", '\n{"name": "f", "arguments": '], ARGUMENTS, ["}\n", "</tool_call>"])
CALLED = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
SINGLE = CallsForm([CALL], is_single=True)
SEVERAL = CallsForm([CALL], between=["\n"], thought=(["<think>"], ["</think>"], False))
OPEN = CallsForm([CALL], thought=(["<think>"], ["</think>"], True))
FREE = CallsForm([CALL], is_free=True, thought=(["<think>"], ["</think>"], False))
TEXTUAL = CallsForm([(["<call>", CALL[0][1]], ARGUMENTS, ["}"])], is_free=True)
ONE = CallsForm(TEXTUAL.calls, is_free=True, is_single=True)
LISTED = CallsForm([(["f"], ARGUMENTS, [])], ["<call>", "["], [", "], ["]"], is_free=True)
TOLD = '<call>\n{"name": "f", "arguments": {"a": 1}}'
CHANNELS = CallsForm(
    [(["<|channel|>", "to=f", "<|message|>"], ARGUMENTS, [])],
    is_single=True,
    thought=(["<|channel|>", "analysis", "<|message|>"], ["<|end|>", "again"], False),
)


def calls_tokenizer():
    """Some markers are tokens, special or not; others are ordinary text."""
    tokenizer = byte_tokenizer(adds_bos=False)
    names = ["<tool_call>", "<|channel|>", "<|message|>", "<|end|>"]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return tokenizer


@pytest.mark.parametrize(
    ("form", "text", "is_whole"),
    [
        (SINGLE, CALLED, True),
        (SINGLE, f"{CALLED}\n{CALLED}", False),
        (SINGLE, CALLED.replace("1", '"1"'), False),
        (SINGLE, CALLED.replace("f", "g"), False),
        (SINGLE, "<think></think>", False),
        (SEVERAL, f"{CALLED}\n{CALLED}", True),
        (SEVERAL, f"<think>a < b\n{CALLED}</think>\n\n{CALLED}", False),
        (SEVERAL, f"<think>a < b </think\n</think>\n\n{CALLED}", True),
        (OPEN, CALLED, False),
        (OPEN, f"hm\n</think>{CALLED}", True),
        (CHANNELS, '<|channel|>to=f<|message|>{"a": 1}', True),
        (
            CHANNELS,
            '<|channel|>analysis<|message|>hm<|end|>again<|channel|>to=f<|message|>{"a":1}',
            True,
        ),
        (CHANNELS, "<|channel|>final<|message|>hm", False),
        (FREE, "", True),
        (FREE, "<think>hm</think> No call.", True),
        (FREE, f"<think>hm</think>\n{CALLED}\n{CALLED} Then more.", True),
        (FREE, "So: " + CALLED.replace("1", '"1"'), False),
        (FREE, f"{CALLED} <tool_call>", False),
        (TEXTUAL, "a <call", True),
        (TEXTUAL, f"é {TOLD} and {TOLD}.", True),
        (TEXTUAL, f"{TOLD} and <call>x", False),
        (TEXTUAL, "<call>", False),
        (ONE, f"a {TOLD} b", True),
        (ONE, f"a {TOLD} {TOLD}", False),
        (LISTED, "a, [b]", True),
        (LISTED, 'a <call>[f{"a": 1}, f{"a": 2}]', True),
        (LISTED, 'a <call>[f{"a": 1}, g{"a": 2}]', False),
    ],
)
def test_an_answer_that_calls_functions_is_a_thought_and_calls(form, text, is_whole):
    tokenizer = calls_tokenizer()
    compiler = GrammarCompiler(tokenizer.to_str, tokenizer.get_vocab_size(), [256])
    matcher = compiler.matcher(Grammar.calls(form))
    is_valid = matcher.advance(tokenizer.encode(text).ids)
    assert (is_valid and bool((matcher.mask() & compiler.ends).any())) == is_whole
