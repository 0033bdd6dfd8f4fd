"""A tiny random pair, and engines on it."""

from dataclasses import replace

import pytest

from serve_spec.engine import build, costs
from serve_spec.engine.profile import measure_costs
from tests.helpers.engines import llm_maker, make_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def make_llm(pair):
    return llm_maker(pair, "cpu")


@pytest.fixture
def budgets(tmp_path, monkeypatch):
    """Within what time costs were to be measured: the first attempt fails, others take a moment."""
    asked: list[float] = []

    def measure(key, worker, grid, limits, budget, pages):
        asked.append(budget.budget_s)
        if len(asked) == 1:
            raise RuntimeError("the device is lost")
        return measure_costs(key, worker, grid, limits, replace(budget, budget_s=0.3), pages)

    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "measure_costs", measure)
    monkeypatch.setattr(costs, "_FIRST_PAUSE_S", 0.0)
    return asked
