"""The fields of a request that say what the text has to look like; one of them may be given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import Grammar

_FORMAT = "response_format"
_NESTED = "structured_outputs"
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def grammar_of(
    *,
    response_format: tuple[str, Mapping[str, Any] | None] | None,
    structured_outputs: Mapping[str, Any] | None,
    guided: Mapping[str, Any],
) -> Grammar | None:
    """The one grammar that a request asks for, in whatever way.

    response_format: its `type` and its `json_schema`.
    structured_outputs, guided: the grammar by its language: json, regex, grammar, choice; in the
    first json_object too.

    Raises:
        InvalidRequest: there are several, or one can not be; names the field.
    """
    found = [] if response_format is None else _of_format(*response_format)
    found += _by_language("guided_", guided)
    if structured_outputs is not None:
        _check_known(_NESTED, structured_outputs, tuple(_GRAMMARS))
        found += _by_language(f"{_NESTED}.", structured_outputs)
    if len(found) > 1:
        raise found[1].refusal(f"the text can not follow {found[0].source} too; give one of them")
    return found[0] if found else None


_GRAMMARS: Mapping[str, Callable[[Any, str], Grammar]] = {
    "json": Grammar.json_schema,
    "json_object": lambda _, source: Grammar.json_object(source),
    "regex": Grammar.regex,
    "grammar": Grammar.ebnf,
    "choice": Grammar.choice,
}


def _by_language(prefix: str, given: Mapping[str, Any]) -> list[Grammar]:
    return [
        _GRAMMARS[language](value, prefix + language)
        for language, value in given.items()
        if value is not None and value is not False
    ]


def _of_format(kind: str, schema: Mapping[str, Any] | None) -> list[Grammar]:
    if kind not in ("text", "json_object", "json_schema"):
        fix = 'use "text", "json_object" or "json_schema"'
        raise InvalidRequest(f"{_FORMAT}.type", kind, fix)
    if kind == "json_schema":
        return [_of_schema(schema or {})]
    if schema is not None:
        fix = 'goes with the type "json_schema" alone'
        raise InvalidRequest(f"{_FORMAT}.json_schema", f"<object of {len(schema)}>", fix)
    return [Grammar.json_object(f"{_FORMAT}.type")] if kind == "json_object" else []


def _of_schema(given: Mapping[str, Any]) -> Grammar:
    """Of `{"name": ..., "schema": {...}}`. It always holds, whatever `strict` says."""
    field = f"{_FORMAT}.json_schema"
    _check_known(field, given, _SCHEMA_FIELDS)
    if not isinstance(given.get("schema"), dict):
        raise InvalidRequest(f"{field}.schema", None, "give a JSON Schema, which is an object")
    return Grammar.json_schema(given["schema"], f"{field}.schema")


def _check_known(field: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise InvalidRequest(field, unknown[:80], f"known are {', '.join(known)}")
