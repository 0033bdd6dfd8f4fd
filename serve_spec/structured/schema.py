"""JSON Schemas whose compilation would take too long, found before it begins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from math import gcd, lcm
from typing import Any

from serve_spec.core.grammar import Grammar

MAX_DEPTH = 100
"""Objects and arrays inside each other: the compiler's own limit is a little above."""

MAX_REMAINDERS = 10_000
"""`multipleOf` becomes an automaton of all remainders; this many take a fifth of a second."""


def checked_schema(grammar: Grammar) -> dict[str, Any]:
    """The schema, unless it is no JSON object, too deep, or its numbers are too dear.

    Raises:
        InvalidRequest: says which, naming the grammar's source.
    """
    try:
        schema = json.loads(grammar.text)
        values = list(_values(schema))
        num_remainders = _remainders(values)
    except RecursionError:
        raise grammar.refusal(_TOO_DEEP) from None
    except ValueError as error:
        raise grammar.refusal(f"not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise grammar.refusal("a JSON Schema is an object here")
    if max(depth for depth, _ in values) > MAX_DEPTH:
        raise grammar.refusal(_TOO_DEEP)
    if num_remainders > MAX_REMAINDERS:
        fix = f"the least common multiple of all multipleOf may be {MAX_REMAINDERS} at most"
        raise grammar.refusal(fix)
    return schema


_TOO_DEEP = f"nest at most {MAX_DEPTH} objects and arrays"


def _values(root: object) -> Iterator[tuple[int, object]]:
    """Every value in `root`, with the number of objects and arrays around it."""
    left = [(0, root)]
    while left:
        depth, value = left.pop()
        yield depth, value
        inner = value.values() if isinstance(value, dict) else value
        if isinstance(inner, list | type({}.values())):
            left += ((depth + 1, item) for item in inner)


def _remainders(values: list[tuple[int, object]]) -> int:
    """The least common multiple of all `multipleOf`, in units of their last decimal place."""
    steps = [value.get("multipleOf") for _, value in values if isinstance(value, dict)]
    # As they are written: 0.1 is a tenth.
    exact = [
        Fraction(str(step))
        for step in steps
        if isinstance(step, int | float) and not isinstance(step, bool) and step > 0
    ]
    if not exact:
        return 0
    multiple = lcm(*(step.numerator for step in exact))
    return multiple * lcm(*(s.denominator for s in exact)) // gcd(*(s.denominator for s in exact))
