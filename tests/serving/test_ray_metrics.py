"""What reaches Ray's metrics, and at what price for the engine."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.record import StepTimes
from serve_spec.metrics import (
    BATCH_SIZE,
    FORCED_ACCEPTANCE,
    LAST_REASON,
    METRICS,
    OUTPUT_TOKENS,
    ROUNDS,
    STEP_MS,
    Reading,
)
from serve_spec.serving.ray_metrics import (
    LABELS,
    RayMetrics,
    RoundSink,
    StateReadings,
    merged,
)
from tests.helpers.rounds import verified_round

ROUND = verified_round([1], batch_size=1, num_steps=2, times=StepTimes(1.0, 2.0, 3.5))


class Recorder(RayMetrics):
    """Keeps what would be exported."""

    def __init__(self):
        super().__init__(METRICS, dict.fromkeys(LABELS, "0"))
        self.seen: list[Reading] = []

    def record(self, reading):
        super().record(reading)
        self.seen.append(reading)


def test_rounds_are_exported_once_and_only_when_flushed():
    metrics = Recorder()
    sink = RoundSink(metrics)
    sink.observe(ROUND)
    sink.observe(ROUND)
    assert not metrics.seen
    sink.flush()
    tokens = [r.value for r in metrics.seen if r.metric == OUTPUT_TOKENS]
    assert tokens == [4.0]
    assert [r.value for r in metrics.seen if r.metric == STEP_MS] == [3.5, 3.5]
    metrics.seen.clear()
    sink.flush()
    assert not metrics.seen


def test_a_sink_that_nobody_flushes_takes_no_more_memory():
    metrics = Recorder()
    sink = RoundSink(metrics)
    for _ in range(20_000):
        sink.observe(ROUND)
    sink.flush()
    assert sum(r.metric == STEP_MS for r in metrics.seen) < 10_000


readings = st.one_of(
    st.builds(
        lambda value, tier: Reading(ROUNDS, value, {"num_steps": tier}),
        st.integers(1, 9),
        st.sampled_from("012"),
    ),
    st.builds(lambda value: Reading(BATCH_SIZE, value), st.integers(0, 9)),
    st.builds(lambda value: Reading(STEP_MS, value), st.integers(1, 9)),
)


@given(st.lists(readings, max_size=40))
def test_merging_keeps_sums_newest_values_and_every_observation(found):
    def facts(some):
        counts: Counter[str] = Counter()
        for reading in some:
            if reading.metric == ROUNDS:
                counts[reading.labels["num_steps"]] += int(reading.value)
        sizes = [r.value for r in some if r.metric == BATCH_SIZE][-1:]
        return counts, sizes, [r.value for r in some if r.metric == STEP_MS]

    assert facts(merged(found)) == facts(found)


def test_an_old_reason_is_set_back_when_a_new_one_comes():
    state = StateReadings()
    state.of({"last_reason": "gain"})
    found = {
        r.labels["reason"]: r.value
        for r in state.of({"last_reason": "kv"})
        if r.metric == LAST_REASON
    }
    assert found == {"gain": 0.0, "kv": 1.0}


@pytest.mark.parametrize(("told", "shown"), [(None, 0.0), (2.5, 1.0), ([0.9, 0.5], 1.0)])
def test_forced_acceptance_is_a_gauge_beside_the_figures_it_spoils(told, shown):
    found = StateReadings().of({"synthetic_acceptance": told})
    assert found == [Reading(FORCED_ACCEPTANCE, shown)]


@pytest.mark.parametrize("odd", [{}, {"slot": None, "last_reason": None}, {"slot": "all"}], ids=str)
def test_a_snapshot_that_says_nothing_exports_nothing(odd):
    assert StateReadings().of(odd) == []
