"""One random pair for all fleets, and what it says without a fleet."""

import copy

import pytest

from tests.e2e.fleet import fleet_settings, offline_answers


@pytest.fixture(scope="session")
def _pair(tmp_path_factory):
    return fleet_settings(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def settings(_pair):
    """A configuration of two replicas; a module may change its own."""
    return copy.deepcopy(_pair)


@pytest.fixture(scope="session")
def offline(_pair):
    """Texts and token counts of the offline engine, by max_tokens."""
    return offline_answers(_pair)
