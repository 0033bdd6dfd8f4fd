"""A tiny random pair, and engines on it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_spec.engine import build, costs
from serve_spec.engine.profile import Measurement, TimeBudget, measure_costs
from tests.helpers.engines import MakeLLM, Pair, llm_maker, make_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def make_llm(pair: Pair) -> MakeLLM:
    return llm_maker(pair, "cpu")


@pytest.fixture
def budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Within what time costs were to be measured: the first attempt fails, others take a moment."""
    asked: list[float] = []

    def measure(worker: Any, grid: Any, limits: Any, budget: TimeBudget, pages: Any) -> Measurement:
        asked.append(budget.budget_s)
        if len(asked) == 1:
            raise RuntimeError("the device is lost")
        return measure_costs(worker, grid, limits, replace(budget, budget_s=0.3), pages)

    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "measure_costs", measure)
    monkeypatch.setattr(costs, "_FIRST_PAUSE_S", 0.0)
    return asked
