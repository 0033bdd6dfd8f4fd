"""JSON Schemas in other words: keywords that the compiler lacks, written with those it has.

A keyword that cannot be expressed exactly stays, so that the compiler refuses it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = Any
"""An object, or a boolean."""

KEYWORDS = ("uniqueItems", "propertyNames", "dependentRequired", "dependentSchemas", "not", "if")
"""What `rewritten` replaces where it can."""

# Not `if` and `not`: what is inside stands twice in the result, and would double at every level.
_OF_ONE = ("items", "additionalProperties", "contains", "then", "else")
_OF_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_TYPES = ("object", "array", "string", "number", "boolean", "null")
_NOTES = frozenset({"title", "description", "$comment", "examples", "default"})


def rewritten(schema: Schema, root: Mapping[str, Any]) -> Schema:
    """Return an equivalent schema. root: holds what references name."""
    if not isinstance(schema, dict):
        return schema
    time.sleep(0)  # other threads wait for Python's lock, the engine's among them
    new = {
        key: rewritten(value, root)
        if key in _OF_ONE
        else [rewritten(item, root) for item in value]
        if key in _OF_LISTS and isinstance(value, list)
        else {name: rewritten(item, root) for name, item in value.items()}
        if key in _OF_NAMES and isinstance(value, dict)
        else value
        for key, value in schema.items()
    }
    if new.get("uniqueItems") is False or new.get("maxItems") in (0, 1):
        new.pop("uniqueItems", None)
    _replace_names(new, root)
    clauses = [*_dependencies(new), *_condition(new), *_negation(new)]
    return {**new, "allOf": [*new.get("allOf", []), *clauses]} if clauses else new


def _replace_names(schema: dict[str, Any], root: Mapping[str, Any]) -> None:
    """Write `propertyNames` as a pattern of the only properties, if there are no others."""
    if "propertyNames" not in schema or {"properties", "patternProperties"} & schema.keys():
        return
    names = schema["propertyNames"]
    if isinstance(names, dict) and names.keys() - _NOTES == {"$ref"}:
        names = _referred(str(names["$ref"]), root)
    if (pattern := _pattern(names)) is None:
        return
    del schema["propertyNames"]
    if pattern:
        schema["patternProperties"] = {pattern: schema.get("additionalProperties", True)}
        schema["additionalProperties"] = False


def _referred(reference: str, root: Mapping[str, Any]) -> Schema:
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _pattern(names: Schema) -> str | None:
    """Return the pattern of strings that match a schema, empty for all; None: there is none."""
    if not isinstance(names, dict):
        return "" if names is True else None
    keys = names.keys() - _NOTES
    if "type" in keys and names["type"] != "string":
        return None
    keys -= {"type"}
    values = names["enum"] if keys == {"enum"} else [names["const"]] if keys == {"const"} else None
    if isinstance(values, list):
        texts = [re.escape(value) for value in values if isinstance(value, str)]
        return f"^({'|'.join(texts)})$" if texts else None
    if keys == {"pattern"} and isinstance(names["pattern"], str):
        return str(names["pattern"])
    if keys and keys <= {"minLength", "maxLength"}:
        return f"^[\\s\\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None if keys else ""


def _dependencies(schema: dict[str, Any]) -> list[Schema]:
    """Take out what properties depend on each other; return clauses that say the same."""
    needed = schema.pop("dependentRequired", None) or {}
    schemas = schema.pop("dependentSchemas", None) or {}
    then = [(name, {"required": names}) for name, names in needed.items()]
    return [{"anyOf": [_absent(name), clause]} for name, clause in [*then, *schemas.items()]]


def _absent(name: str) -> Schema:
    return {"properties": {name: False}}


def _condition(schema: dict[str, Any]) -> list[Schema]:
    """Take out `if`, `then` and `else`; return clauses that say the same."""
    if "if" not in schema:
        return []
    condition = schema["if"]
    otherwise = negated(condition, schema)
    if otherwise is None:
        return []
    del schema["if"]
    then, other = schema.pop("then", True), schema.pop("else", True)
    clauses = [] if then is True else [{"anyOf": [otherwise, then]}]
    return clauses if other is True else [*clauses, {"anyOf": [condition, other]}]


def _negation(schema: dict[str, Any]) -> list[Schema]:
    if "not" not in schema or (clause := negated(schema["not"], schema)) is None:
        return []
    del schema["not"]
    return [clause]


def negated(schema: Schema, domain: Mapping[str, Any]) -> Schema | None:
    """Return the schema of values in `domain` that do not match `schema`; None: not expressible."""
    if isinstance(schema, bool):
        return not schema
    parts: list[Schema | None] = []
    keys = schema.keys() - _NOTES
    for key in keys & {"type", "const", "enum", "required", "properties", "allOf", "anyOf"}:
        parts += _PARTS[key](schema[key], domain)
    if keys - _PARTS.keys() or None in parts:
        return None
    return {"anyOf": parts} if parts else False


def _without_type(types: Any, domain: Mapping[str, Any]) -> list[Schema | None]:
    named = [types] if isinstance(types, str) else types
    allowed = domain.get("type", _TYPES)
    allowed = [allowed] if isinstance(allowed, str) else allowed
    if "integer" in named and "number" not in named and "number" in allowed:
        return [None]  # numbers with a fraction
    left = [kind for kind in allowed if kind not in named]
    if "number" in named:
        left = [kind for kind in left if kind != "integer"]
    return [{"type": left}] if left else []


def _without_values(values: Any, domain: Mapping[str, Any]) -> list[Schema | None]:
    known = domain.get("enum", [domain["const"]] if "const" in domain else None)
    if known is None:
        known = [True, False] if domain.get("type") == "boolean" else None
    if known is None or not isinstance(values, list):
        return [None]
    excluded = [_typed(value) for value in values]
    left = [value for value in known if _typed(value) not in excluded]
    return [{"enum": left}] if left else []


def _typed(value: Any) -> tuple[bool, Any]:
    return isinstance(value, bool), value  # true is no 1


def _without_names(names: Any, domain: Mapping[str, Any]) -> list[Schema | None]:
    return [{"type": "object", **_absent(name)} for name in names]


def _without_properties(properties: Any, domain: Mapping[str, Any]) -> list[Schema | None]:
    parts: list[Schema | None] = []
    known = domain.get("properties", {})
    for name, schema in properties.items():
        other = negated(schema, known.get(name, {}))
        part = {"type": "object", "properties": {name: other}, "required": [name]}
        parts.append(None if other is None else part)
    return parts


_PARTS: dict[str, Callable[[Any, Mapping[str, Any]], list[Schema | None]]] = {
    "type": _without_type,
    "const": lambda value, domain: _without_values([value], domain),
    "enum": _without_values,
    "required": _without_names,
    "properties": _without_properties,
    "allOf": lambda schemas, domain: [negated(schema, domain) for schema in schemas],
    "anyOf": lambda schemas, domain: [
        None
        if None in (parts := [negated(schema, domain) for schema in schemas])
        else {"allOf": parts}
    ],
}
