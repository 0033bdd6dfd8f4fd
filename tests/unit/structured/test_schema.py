"""What a schema costs is known before it is compiled."""

from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import Grammar
from serve_spec.structured.compiler import MAX_DEPTH, MAX_REMAINDERS, checked_schema


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(0, 3))
def test_the_remainders_of_all_steps_together_are_counted(steps, places):
    """In units of the last decimal place, wherever in the schema they are."""
    schema = {"anyOf": [{"items": {"multipleOf": step / 10**places}} for step in steps]}
    # A step of 1.5 among whole ones counts in tenths, which makes no remainder more.
    if lcm(*steps) <= MAX_REMAINDERS:
        checked_schema(Grammar.json_schema(schema))
    elif places == 0:
        with pytest.raises(InvalidRequest, match="multipleOf"):
            checked_schema(Grammar.json_schema(schema))


@pytest.mark.parametrize("depth", [1, MAX_DEPTH, MAX_DEPTH + 1, 900])
def test_a_schema_is_so_deep_at_most(depth):
    grammar = Grammar.json_schema('{"a":' * depth + "1" + "}" * depth)
    if depth <= MAX_DEPTH:
        checked_schema(grammar)
    else:
        with pytest.raises(InvalidRequest, match=f"nest at most {MAX_DEPTH}"):
            checked_schema(grammar)


def test_a_property_may_be_called_as_a_keyword_is():
    checked_schema(Grammar.json_schema({"properties": {"multipleOf": {"type": "string"}}}))
    checked_schema(Grammar.json_schema({"multipleOf": True}))
