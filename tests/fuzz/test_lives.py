"""Whatever comes together, a request gets what it gets alone: a random life per example.

A life follows from the slice and its number alone, so a failure comes back, by itself.
`make test` runs slice 0, `make fuzz SLICES=40` as many as wanted, a few hundred requests each.

Lives are drawn independently, value by value: what hypothesis makes of so many values repeats
itself, and hardly ever runs short of pages.
"""

import os
from collections import Counter
from random import Random

import pytest

from tests.helpers.lives import Lives, any_life

SLICE = int(os.environ.get("SERVE_SPEC_FUZZ_SLICE", "0"))
EXAMPLES = int(os.environ.get("SERVE_SPEC_FUZZ_EXAMPLES", "30"))


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    return Lives(tmp_path_factory.mktemp("lives"))


@pytest.fixture(scope="module")
def met():
    """How often the lives of the slice met what they are for."""
    return Counter()


@pytest.mark.parametrize("number", range(EXAMPLES))
def test_a_request_gets_in_any_company_what_it_gets_alone(lives, met, number):
    met.update(lives.check(any_life(Random(f"{SLICE}/{number}"))))


def test_the_lives_above_met_what_they_are_for(met):
    """Each in a tenth of them at least, of as many as say anything."""
    assert EXAMPLES < 30 or len(met) == 6
    assert EXAMPLES < 30 or min(met.values()) >= EXAMPLES / 10, met
