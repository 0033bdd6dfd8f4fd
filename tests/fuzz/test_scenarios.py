"""Whatever comes together, a request gets what it gets alone: a random scenario per example.

A scenario follows from the slice and its number alone, so a failure comes back, by itself.
`make test` runs slice 0, `make fuzz SLICES=40` as many as wanted, a few hundred requests each.

Scenarios are drawn independently, value by value: what hypothesis makes of so many values repeats
itself, and hardly ever runs short of pages.
"""

import os
from collections import Counter
from random import Random

import pytest

from tests.helpers.scenarios import Scenarios, any_scenario

SLICE = int(os.environ.get("SERVE_SPEC_FUZZ_SLICE", "0"))
EXAMPLES = int(os.environ.get("SERVE_SPEC_FUZZ_EXAMPLES", "30"))


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory):
    return Scenarios(tmp_path_factory.mktemp("scenarios"))


@pytest.fixture(scope="module")
def met():
    """How often the scenarios of the slice met what they are for."""
    return Counter()


@pytest.mark.parametrize("number", range(EXAMPLES))
def test_a_request_gets_in_any_company_what_it_gets_alone(scenarios, met, number):
    met.update(scenarios.check(any_scenario(Random(f"{SLICE}/{number}"))))


def test_the_scenarios_above_met_what_they_are_for(met):
    """Each in at least a tenth of them, if there are enough to tell."""
    assert EXAMPLES < 30 or len(met) == 6
    assert EXAMPLES < 30 or min(met.values()) >= EXAMPLES / 10, met
