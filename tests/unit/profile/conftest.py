"""A tiny random pair, and engines on it."""

import pytest

from tests.helpers.engines import llm_maker, make_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def make_llm(pair):
    return llm_maker(pair, "cpu")
