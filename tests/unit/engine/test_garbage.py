"""Python's cycle collector stays out of rounds, and is restored afterwards."""

import gc

import pytest

from serve_spec.engine.engine import GC_THRESHOLD, freeze_gc, unfreeze_gc


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
