"""Drafts of the text that a grammar forces, with the tokenizer of a shipped checkpoint."""

import pytest

from serve_spec.core.grammar import Grammar
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.structured.compiler import GrammarCompiler
from serve_spec.structured.forced import ForcedText
from tests.helpers.grammars import byte_compiler, ids_of, shipped_tokenizer

KINDS = {"name": "string", "height": "integer", "nick": "string", "is_active": "integer"}
PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in KINDS.items()},
        "required": [*KINDS],
        "additionalProperties": False,
    }
)
EVERY_STYLE = pytest.mark.parametrize(
    ("text", "seen", "forced"),
    [
        ('{"name": "Ann", "height": 4, "nick": "A", "is_active": 1}', 4, ' "nick": "'),
        ('{"name":"Ann","height":4,"nick":"A","is_active":1}', 4, '"nick":"'),
        ('{\n  "name": "Ann",\n  "height": 4,\n  "nick": "A"', 4, '\n  "nick": "'),
    ],
    ids=["spaces", "compact", "lines"],
)


@pytest.fixture(scope="module")
def compiler():
    tokenizer = Tokenizer(shipped_tokenizer())
    size = tokenizer.base_vocab_size
    return GrammarCompiler(lambda: tokenizer.describe(size), size, [0])


def drafts(compiler, grammar, text, most=16):
    """Return the drafts after a text, as text, and check that the matcher stays where it is."""
    matcher = compiler.matcher(grammar)
    tokens = compiler.tokens_of(text.encode())
    assert matcher.advance(tokens)
    mask = matcher.mask()
    found = ForcedText(compiler).drafts(matcher, mask, tokens, most)
    assert ids_of(matcher.mask()) == ids_of(mask)
    assert matcher.allows_all(found)
    assert len(found) <= most
    assert [*found] == compiler.tokens_of(compiler.bytes_of(found))
    return compiler.bytes_of(found).decode()


@EVERY_STYLE
def test_the_next_name_is_drafted_with_white_space_as_before(compiler, text, seen, forced):
    before = text[: text.index(str(seen)) + 2]
    assert drafts(compiler, PERSON, before) == forced


@EVERY_STYLE
@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_tokens_are_drafted_than_there_is_room_for(compiler, text, seen, forced, most):
    before = text[: text.index(str(seen)) + 2]
    found = drafts(compiler, PERSON, before, most)
    assert found
    assert forced.startswith(found)
    assert found != forced


def test_white_space_that_the_text_has_not_had_is_not_guessed(compiler):
    assert drafts(compiler, PERSON, "{") == ""
    assert drafts(compiler, PERSON, '{"') == "name"
    assert drafts(compiler, PERSON, '{"name": "Ann",') == ""


def test_white_space_that_has_begun_is_continued(compiler):
    begun = '{\n  "name": "Ann",\n  "height": 4,\n'
    assert drafts(compiler, PERSON, begun) == '  "nick": "'


@pytest.mark.parametrize(
    ("expression", "before", "forced"),
    [
        ("first(a|b)second", "", "first"),
        ("first(a|b)second", "firsta", "second"),
        ("[a-z]*", "", ""),
        ("(a|b)", "", ""),
        ("é(a|b)", "", "é"),
    ],
)
def test_forced_text_ends_at_the_next_choice(expression, before, forced):
    assert drafts(byte_compiler(), Grammar.regex(expression), before) == forced


def test_a_last_token_that_the_next_letter_may_change_is_not_drafted(compiler):
    found = drafts(compiler, Grammar.regex("the customer na[a-z]{4}"), "")
    assert "the customer na".startswith(found)
    assert found != "the customer na"


def test_forced_text_ends_before_a_special_token(compiler):
    grammar = Grammar.ebnf('start: "one " <[0]> "two"')
    assert drafts(compiler, grammar, "").rstrip() == "one"
