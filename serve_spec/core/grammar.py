"""Grammars as requests state them, before compilation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from serve_spec.core.errors import InvalidRequest

MAX_GRAMMAR_CHARS = 2**15
"""Compilation time and time per token grow with the length of a grammar."""


class GrammarKind(StrEnum):
    """Language a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "grammar"
    CHOICE = "choice"
    CALLS = "tool calls"
    LLGUIDANCE = "llguidance"


@dataclass(frozen=True)
class CallsForm:
    """The form of an answer that calls functions: `thought`, then calls.

    Texts are lists of pieces; a piece that is the name of a special token stands for that token.
    `calls` has the text before the arguments, their JSON Schema, and the text after them, for each
    function. `thought` has the texts before and after any text that the answer may begin with, and
    whether the answer is already within it; the second text begins with the marker of its end.
    `is_free`: the answer may have any text before and between its calls, or instead of them. The
    first piece of `opening`, or else of each call, then is the marker that begins a call.
    """

    calls: Sequence[tuple[Sequence[str], Mapping[str, Any], Sequence[str]]]
    opening: Sequence[str] = ()
    between: Sequence[str] = ()
    ending: Sequence[str] = ()
    is_single: bool = False
    thought: tuple[Sequence[str], Sequence[str], bool] | None = None
    is_free: bool = False


@dataclass(frozen=True)
class Grammar:
    """A grammar that the whole generated text has to match.

    JSON_SCHEMA: a JSON Schema; REGEX: a regular expression without look-around; EBNF: Lark's
    notation, or GBNF's (`root ::= ...`); CHOICE: a JSON list of alternative texts; CALLS: a
    `CallsForm` as JSON; LLGUIDANCE: what `GrammarCompiler.translate` made of one of these.
    `source`: the request field it came from, for error messages.
    """

    kind: GrammarKind
    text: str
    source: str = field(default="grammar", compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text:
            fix = "give a text that is not empty"
            raise InvalidRequest(self.source, f"<{type(self.text).__name__}>", fix)
        if len(self.text) > MAX_GRAMMAR_CHARS and self.kind is not GrammarKind.LLGUIDANCE:
            fix = f"shorten it to at most {MAX_GRAMMAR_CHARS} characters"
            raise self.refusal(fix)
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise self.refusal(f"not a Unicode text: {error.reason}") from None

    @classmethod
    def json_schema(cls, schema: object, source: str = "grammar") -> Grammar:
        """Return the grammar of JSON valid under a schema, given as an object or as JSON text."""
        if isinstance(schema, str):
            return cls(GrammarKind.JSON_SCHEMA, schema, source)
        refuse_large(schema, source)
        try:
            return cls(GrammarKind.JSON_SCHEMA, json.dumps(schema), source)
        except (TypeError, RecursionError) as error:
            fix = f"not a JSON Schema: {error}"
            raise InvalidRequest(source, f"<{type(schema).__name__}>", fix) from None

    @classmethod
    def json_object(cls, source: str = "grammar") -> Grammar:
        """Return the grammar of any JSON object."""
        return cls.json_schema({"type": "object"}, source)

    @classmethod
    def regex(cls, expression: str, source: str = "grammar") -> Grammar:
        """Return the grammar of the full matches of a regular expression."""
        return cls(GrammarKind.REGEX, expression, source)

    @classmethod
    def ebnf(cls, rules: str, source: str = "grammar") -> Grammar:
        """Return the grammar of what `start` (Lark) or `root` (GBNF) derives."""
        return cls(GrammarKind.EBNF, rules, source)

    @classmethod
    def choice(cls, texts: Sequence[str], source: str = "grammar") -> Grammar:
        """Return the grammar of these texts."""
        refuse_large(texts, source)
        are_texts = isinstance(texts, list | tuple) and all(isinstance(t, str) for t in texts)
        if not are_texts or not texts or not all(texts):
            fix = "give a list of at least one text, none of them empty"
            raise InvalidRequest(source, f"<{type(texts).__name__}>", fix)
        return cls(GrammarKind.CHOICE, json.dumps(list(texts)), source)

    @classmethod
    def calls(cls, form: CallsForm, source: str = "tools") -> Grammar:
        """Return the grammar of calls of functions."""
        return cls(GrammarKind.CALLS, json.dumps(vars(form)), source)

    def refusal(self, fix: str) -> InvalidRequest:
        """Return an error that names the source field, and the length of the grammar only."""
        return InvalidRequest(self.source, f"<{self.kind} of {len(self.text)} characters>", fix)


def refuse_large(value: object, source: str) -> None:
    """Raise InvalidRequest for lists and objects that make a grammar of too many characters.

    It looks at no more of them than that, where writing them as JSON could take a second.
    """
    num_chars, left = 0, [value]
    while left:
        found = left.pop()
        inside = (*found, *found.values()) if isinstance(found, dict) else found
        if isinstance(inside, list | tuple | str):
            num_chars += len(inside)
        if num_chars > MAX_GRAMMAR_CHARS:
            fix = f"shorten it to at most {MAX_GRAMMAR_CHARS} characters"
            raise InvalidRequest(source, f"<{type(value).__name__}>", fix)
        if isinstance(inside, list | tuple):
            left += inside


LANGUAGES: Mapping[str, Callable[[Any, str], Grammar]] = {
    "json": Grammar.json_schema,
    "json_object": lambda _, source: Grammar.json_object(source),
    "regex": Grammar.regex,
    "grammar": Grammar.ebnf,
    "choice": Grammar.choice,
}
"""How a grammar is made of its text, by the keys of vLLM's structured outputs."""


def structured_grammar(given: Mapping[str, Any], source: str = "structured_outputs") -> Grammar:
    """Return the grammar under one of `LANGUAGES`; raise InvalidRequest for none or several."""
    for name in given:
        if name not in LANGUAGES:
            fix = f"unknown key; use {', '.join(LANGUAGES)}"
            raise InvalidRequest(source, str(name)[:80], fix)
    found = [name for name, value in given.items() if value not in (None, False)]
    if len(found) != 1:
        fix = f"give exactly one of {', '.join(LANGUAGES)}"
        raise InvalidRequest(source, ", ".join(found), fix)
    return LANGUAGES[found[0]](given[found[0]], f"{source}.{found[0]}")
