"""Python's cycle collector stays out of rounds, and is given back as it was."""

import gc

import pytest

from serve_spec.engine.engine import GC_THRESHOLD, freeze_gc, unfreeze_gc


@pytest.fixture(autouse=True)
def _as_python_has_it():
    yield
    unfreeze_gc()


def num_looks(num_objects):
    """How often the collector looks around while so many objects come and stay."""
    before = [stats["collections"] for stats in gc.get_stats()]
    kept = [[] for _ in range(num_objects)]
    after = [stats["collections"] for stats in gc.get_stats()]
    assert len(kept) == num_objects
    return sum(after) - sum(before)


def test_what_a_round_of_many_rows_is_made_of_is_not_looked_at():
    usually = num_looks(10 * gc.get_threshold()[0])
    freeze_gc()
    assert usually > 0
    assert num_looks(10_000) == 0


def test_a_calm_collector_still_looks_now_and_then():
    freeze_gc()
    assert num_looks(3 * GC_THRESHOLD) > 0


@pytest.mark.parametrize("num_engines", [1, 2])
def test_what_was_there_is_looked_at_again_once_it_is_restored(num_engines):
    usual = gc.get_threshold()
    for _ in range(num_engines):
        freeze_gc()
    assert gc.get_freeze_count() > 0
    unfreeze_gc()
    assert gc.get_threshold() == usual
    assert gc.get_freeze_count() == 0
