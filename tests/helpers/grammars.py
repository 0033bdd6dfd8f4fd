"""Grammars over the byte-level tokenizer of the test checkpoints, and checks of their texts."""

import json
import re
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from serve_spec.core.grammar import GrammarKind
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.structured.compiler import GrammarCompiler
from tests.helpers.checkpoints import EOS_ID, VOCAB, make_tokenizer

PARENTHESES = 'root ::= "(" root ")" root | [ab]*'


@lru_cache
def byte_compiler():
    """A token is a byte; ids from 259 on are no token's."""
    return GrammarCompiler(_describe, VOCAB, [EOS_ID])


def _describe():
    with TemporaryDirectory() as folder:
        return Tokenizer(make_tokenizer(folder)).describe(VOCAB)


def ids_of(mask):
    """The tokens a mask allows."""
    assert mask is not None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def is_of(text, grammar):
    """Return whether a text is one of the grammar's."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return is_valid(text, json.loads(grammar.text))
        case GrammarKind.REGEX:
            return re.fullmatch(grammar.text, text) is not None
        case GrammarKind.CHOICE:
            return text in json.loads(grammar.text)
        case GrammarKind.EBNF:
            assert grammar.text == PARENTHESES
            inner = re.sub("[ab]", "", text)
            while "()" in inner:
                inner = inner.replace("()", "")
            return inner == ""


def check_text(token_ids, grammar):
    """Assert that every token was legal, and that a text which the grammar ended is one of it.

    Tokens are checked one at a time, by a matcher of their own.
    """
    matcher = byte_compiler().matcher(grammar)
    for token in token_ids:
        assert token in ids_of(matcher.mask())
        if token != EOS_ID:
            assert matcher.advance([token])
    text = bytes(token for token in token_ids if token != EOS_ID).decode(errors="surrogateescape")
    assert EOS_ID not in token_ids[:-1]
    assert token_ids[-1] != EOS_ID or is_of(text, grammar)


def is_valid(text, schema):
    """Whether a text is JSON, and valid under a schema."""
    # Here, so that tests on a GPU do without it.
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def shipped_tokenizer():
    """The folder of a tokenizer with merges."""
    return Path(__file__).parents[2] / "serve_spec/assets/tiny/target"
