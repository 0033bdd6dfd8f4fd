"""A tiny random pair, and engines on it."""

from dataclasses import replace

import pytest

from serve_spec.engine import build
from serve_spec.engine.worker_rank import follow
from serve_spec.parallel import channel
from serve_spec.parallel.device_group import DeviceGroup
from serve_spec.profile import source
from serve_spec.profile.measure import measure_costs
from serve_spec.structured import masks
from tests.helpers.engines import SOON_S, llm_maker, make_pair
from tests.helpers.ranks import start_threads


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def make_llm(pair):
    return llm_maker(pair, "cpu")


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """Wait for masks, so that no count depends on how busy this machine is."""
    monkeypatch.setattr(masks, "PATIENCE_S", 60.0)
    monkeypatch.setattr(masks, "SLOW_MASK_S", 60.0)


@pytest.fixture
def budgets(tmp_path, monkeypatch):
    """Return the time limits of cost measurements; the first fails, the others are short."""
    asked = []

    def measure(key, worker, grid, limits, budget, pages):
        asked.append(budget.budget_s)
        if len(asked) == 1:
            raise RuntimeError("the device is lost")
        return measure_costs(key, worker, grid, limits, replace(budget, budget_s=0.3), pages)

    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "measure_costs", measure)
    monkeypatch.setattr(source, "_FIRST_PAUSE_S", 0.0)
    return asked


@pytest.fixture
def threads(monkeypatch):
    """Start worker ranks as threads called "rank 1" and so on, which end with the test.

    As on GPUs, the next gather of a rank overwrites the result of the one before.
    """
    started, gathered, gather = [], {}, DeviceGroup.gather_columns

    def reuse_memory(self, x, width):
        result = gather(self, x, width)
        if self in gathered:
            gathered[self].fill_(float("nan"))
        gathered[self] = result
        return result

    def launch(module, size, config, launcher):
        return start_threads(follow, config, size, started)

    monkeypatch.setattr(build, "launch", launch)
    monkeypatch.setattr(DeviceGroup, "gather_columns", reuse_memory)
    monkeypatch.setattr(channel, "_GRACE_S", 1e6)  # what fails here must not end this process
    yield
    for thread in started:
        thread.join(SOON_S)
    assert not any(thread.is_alive() for thread in started)
