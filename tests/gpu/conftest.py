"""A tiny random pair, and engines on it on a GPU."""

import pytest

from tests.helpers.engines import MakeLLM, Pair, llm_maker, make_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def make_llm(pair: Pair) -> MakeLLM:
    return llm_maker(pair, "cuda")
