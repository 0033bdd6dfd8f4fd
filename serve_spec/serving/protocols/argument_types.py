"""Types of arguments that a model writes as text: Qwen3-Coder's format, and GLM's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

_Schema: TypeAlias = Mapping[str, Any]
# Position of the first alternatives that accept a value; less is earlier. None: it is not accepted.
_Rank: TypeAlias = tuple[int, ...] | None

# Templates write null and booleans as JSON or as Python does.
_WORDS: Mapping[str, Any] = {"null": None, "None": None, "True": True, "False": False}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def typed(arguments: Iterable[tuple[str, str]], schema: _Schema) -> dict[str, Any]:
    """Return arguments by name, each of the first type of its JSON Schema that its text fits.

    A text that fits none is a string. schema: that of all arguments.
    """
    return {
        name: _converted(text.removeprefix("\n").removesuffix("\n"), name, schema)
        for name, text in arguments
    }


def _converted(text: str, name: str, root: _Schema) -> Any:
    try:
        schema = _property(root, name, root, set())
        for has_literals in (True, False):
            ranked = [
                (value is not None, rank, value)
                for value in _candidates(text)
                if (rank := _Ranking(root, has_literals).rank(schema, value)) is not None
            ]
            if ranked:
                return min(ranked, key=lambda each: each[:2])[2]
    except RecursionError:
        pass
    return text


def _candidates(text: str) -> Iterator[Any]:
    """Yield the values that a text may stand for; itself is the last one."""
    word = text.strip()
    try:
        value = _WORDS[word] if word in _WORDS else json.loads(word, **_STRICT)
    except (ValueError, RecursionError):
        value = text
    if not isinstance(value, str):  # strings are written without quotes
        yield value
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    yield text


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not JSON")
    return value


_STRICT: dict[str, Any] = {"parse_float": _finite, "parse_constant": _finite}


def _property(schema: Any, name: str, root: _Schema, seen: set[str]) -> Any:
    """Return the schema of an argument; that of a string if it is not known."""
    found = _named(schema, name, root, seen)
    return {"type": "string"} if found is None else found


def _named(schema: Any, name: str, root: _Schema, seen: set[str]) -> Any:
    if not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    ref = schema.get("$ref")
    inner = [part for key in ("allOf", "anyOf", "oneOf") for part in _parts(schema, key)]
    if isinstance(ref, str) and ref not in seen:
        seen.add(ref)
        inner.append(_resolved(ref, root))
    for part in inner:
        if (found := _named(part, name, root, seen)) is not None:
            return found
    others = schema.get("additionalProperties")
    return others if isinstance(others, Mapping) else None


def _resolved(ref: str, root: _Schema) -> Any:
    """Return the schema that a reference within `root` names; {} for one that is not there."""
    found: Any = root
    for key in ref.removeprefix("#").split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        found = found.get(key, {}) if isinstance(found, Mapping) else {}
    return found if ref.startswith("#") else {}


def _parts(schema: _Schema, key: str) -> list[Any]:
    parts = schema.get(key)
    return parts if isinstance(parts, list) else []


class _Ranking:
    """Ranks one value by a schema.

    has_literals: `enum` and `const` name the values; otherwise only types, beside no `type`.
    """

    def __init__(self, root: _Schema, has_literals: bool) -> None:
        self._root = root
        self._has_literals = has_literals
        # By reference: each is read once, so that nested references cost no more.
        self._known: dict[str, _Rank] = {}

    def rank(self, schema: Any, value: Any) -> _Rank:
        """Return the rank of a value; None if a keyword rejects it."""
        if not isinstance(schema, Mapping):
            return None if schema is False else (isinstance(value, str),)
        if value is None and schema.get("nullable") is True:
            return (0,)
        ranks = [*self._ranks(schema, value)]
        if any(rank is None for rank in ranks):
            return None
        # Without a type, a text that is JSON is no string.
        return sum(filter(None, ranks), ()) if ranks else (isinstance(value, str),)

    def _ranks(self, schema: _Schema, value: Any) -> Iterator[_Rank]:
        if isinstance(ref := schema.get("$ref"), str):
            yield self._of_reference(ref, value)
        if kinds := schema.get("type"):
            names = kinds if isinstance(kinds, list) else [kinds]
            yield _first((0,) if _is_of(value, name) else None for name in names)
        if self._has_literals or not kinds:
            if isinstance(literals := schema.get("enum"), list):
                yield _first((0,) if self._is_like(value, each) else None for each in literals)
            if "const" in schema:
                yield (0,) if self._is_like(value, schema["const"]) else None
        for key in ("anyOf", "oneOf"):
            if parts := _parts(schema, key):
                yield _first(self.rank(part, value) for part in parts)
        for part in _parts(schema, "allOf"):
            yield self.rank(part, value)

    def _is_like(self, value: Any, literal: Any) -> bool:
        kinds = {type(value), type(literal)}
        is_like = len(kinds) == 1 or kinds == {int, float}
        return is_like and (value == literal or not self._has_literals)

    def _of_reference(self, ref: str, value: Any) -> _Rank:
        if ref not in self._known:
            self._known[ref] = None  # of a reference to itself
            self._known[ref] = self.rank(_resolved(ref, self._root), value)
        return self._known[ref]


def _first(ranks: Iterable[_Rank]) -> _Rank:
    """Return the place of the first alternative that accepts the value, and its rank in it."""
    return next(((place, *rank) for place, rank in enumerate(ranks) if rank is not None), None)


def _is_of(value: Any, name: object) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES.get(str(name), (object,)))
