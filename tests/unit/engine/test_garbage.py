"""Python's cycle collector stays out of rounds, and is restored afterwards."""

import gc
from types import FunctionType, ModuleType

import pytest
import torch

from serve_spec.adaptive import AdaptiveController
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import SamplingParams, SpeculativeOptions
from serve_spec.engine import build
from serve_spec.engine.engine import GC_THRESHOLD, freeze_gc, unfreeze_gc
from serve_spec.metrics import NullSink
from tests.helpers.simulated_costs import GPU_8B, recorded_table


@pytest.fixture(autouse=True)
def _as_python_has_it():
    yield
    unfreeze_gc()


def num_collections(num_objects):
    """Return how often the collector runs while so many objects are made and kept."""
    before = [stats["collections"] for stats in gc.get_stats()]
    kept = [[] for _ in range(num_objects)]
    after = [stats["collections"] for stats in gc.get_stats()]
    assert len(kept) == num_objects
    return sum(after) - sum(before)


def test_the_collector_runs_seldom_but_still_runs():
    usually = num_collections(10 * gc.get_threshold()[0])
    freeze_gc()
    assert usually > 0
    assert num_collections(10_000) == 0, "a step of a large batch makes no more objects"
    assert num_collections(3 * GC_THRESHOLD) > 0


@pytest.mark.parametrize("num_engines", [1, 2])
def test_objects_are_collected_again_once_it_is_restored(num_engines):
    usual = gc.get_threshold()
    for _ in range(num_engines):
        freeze_gc()
    assert gc.get_freeze_count() > 0
    unfreeze_gc()
    assert gc.get_threshold() == usual
    assert gc.get_freeze_count() == 0


def num_objects(root):
    """Return how many Python objects an object leads to."""
    seen, left = {}, [root]
    while left:
        this = left.pop()
        if id(this) in seen or isinstance(this, type | ModuleType | FunctionType | torch.Tensor):
            continue
        seen[id(this)] = this
        left += gc.get_referents(this)
    return len(seen)


RULES = Grammar.regex("[a-z ]*")
LIVES = {
    "off": ("EAGLE3", "goodput", {"speculative": SpeculativeOptions(enabled=False)}),
    "no match": ("NGRAM", "goodput", {}),
    "grammars": ("EAGLE3", "goodput", {"grammar": RULES}),
    "per request": ("EAGLE3", "per_request", {}),
}


@pytest.mark.parametrize(("algorithm", "strategy", "options"), LIVES.values(), ids=LIVES)
def test_an_engine_keeps_nothing_of_rounds_and_requests_that_have_ended(
    make_llm, monkeypatch, tmp_path, algorithm, strategy, options
):
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    monkeypatch.setitem(build._PROFILE_BUDGET_S, "cpu", 0.3)
    keys = {"speculative_ngram_min_match_window_size": 5} if algorithm == "NGRAM" else {}
    keys |= {"speculative_adaptive": True, "speculative_adaptive_strategy": strategy}
    engine = make_llm(algorithm, 3, prefix_caching=False, **keys).engine
    engine.metrics = NullSink()  # a window of rounds
    settings = engine.controller.settings
    engine.controller = AdaptiveController(settings, recorded_table(GPU_8B, trees=settings.trees))
    params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True, **options)

    def live(number):
        for i in range(4):
            engine.add(engine.new_sequence(f"{number}-{i}", [i, 2 * i, 3], params))
        for _ in range(10):
            engine.step()
        engine.abort(f"{number}-0")
        while engine.has_work:
            engine.step()
        return num_objects(engine)

    first = max(live(number) for number in range(4))
    last = max(live(number) for number in range(4, 24))
    # A kept round has some fifty objects, a kept request more.
    assert last - first < 1000
