"""Replays of recorded traces, and the loads and prompts of benchmarks."""

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulator import Phase, Simulator
from serve_spec.adaptive.policy import StaticPolicy
from serve_spec.bench.trace import AcceptanceTrace, TraceSet, load_traces
from serve_spec.bench.workload import (
    CLASSES,
    SPREAD,
    Load,
    TextKind,
    held_out_prompts,
    phases,
    prompts_by_source,
    steady_batches,
)
from serve_spec.core.draft import DraftShape
from tests.helpers.simulated_costs import TWO_CPU_CORES

TRACES = load_traces(Path(__file__).parents[2] / "data" / "acceptance_traces.json")
MIXTURE = Phase("mixture", 8, 20, 60)


def rounds_of(policy, phase, costs=TWO_CPU_CORES, **limits):
    rounds = []
    simulator = Simulator(
        policy, TRACES, costs, on_round=lambda *each: rounds.append(each), **limits
    )
    return simulator.run(phase), rounds


@pytest.mark.parametrize("mixes", [False, True])
def test_prompts_run_alone_or_in_mixed_batches_and_all_are_computed(mixes):
    steps = []

    def costs(shape):
        steps.append(shape)
        return TWO_CPU_CORES(shape)

    report, rounds = rounds_of(
        StaticPolicy(DraftShape.chain(3)), MIXTURE, costs, mixes_prompts=mixes
    )
    decoding = [shape for shape in steps if shape.batch_size]
    assert report.num_rounds == len(rounds) == len(decoding)
    assert report.decode_ms == pytest.approx(sum(TWO_CPU_CORES(s).step_ms for s in decoding))
    alone = [shape for shape in steps if not shape.batch_size]
    assert report.prompt_ms == pytest.approx(sum(TWO_CPU_CORES(s).step_ms for s in alone))
    assert any(shape.num_prefill_tokens for shape in decoding) == mixes
    traces = {kind: TRACES.of(kind)[0].num_prompt_tokens for kind in MIXTURE.kinds}
    asked = sum(traces[MIXTURE.kind(i)] for i in range(MIXTURE.num_requests))
    assert sum(shape.num_prefill_tokens for shape in steps) == asked
    assert sum(verified.num_ended for _, _, verified in rounds) == MIXTURE.num_requests
    assert sum(verified.num_ended_prompt_tokens for _, _, verified in rounds) == asked


def test_a_depth_or_a_length_that_was_not_recorded_is_refused():
    with pytest.raises(ValueError, match="num_steps=9"):
        Simulator(StaticPolicy(DraftShape.chain(9)), TRACES, TWO_CPU_CORES)
    with pytest.raises(ValueError, match="num_tokens=1000"):
        rounds_of(StaticPolicy(DraftShape.chain(1)), Phase("heated", 1, 1, 1000))
    known = TraceSet(7, (AcceptanceTrace("code", 0.0, 0, 9, (1, 2)),))
    with pytest.raises(ValueError, match="shuffled"):
        Simulator(StaticPolicy(DraftShape.chain(1)), known, TWO_CPU_CORES).run(
            Phase("mixture", 1, 2, 3)
        )


PROMPTS = {"code": [[i, i + 1, 5, 5] for i in range(20)], "shuffled": [[9, i] for i in range(20)]}


def first(load, count, number=0):
    return [request for request, _ in islice(load.requests(number, PROMPTS), count)]


@given(st.integers(1, 64), st.integers(4, 200))
def test_lengths_lie_around_the_mean_and_the_first_batch_has_all_ages(batch_size, num_tokens):
    load = Load("mixture", batch_size, num_tokens)
    ages = [load.length(request) / num_tokens for request in range(batch_size)]
    assert all(0 < age <= (1 + SPREAD) * (at + 1) / batch_size + 1 for at, age in enumerate(ages))
    later = [load.length(request) for request in range(batch_size, batch_size + 200)]
    assert (1 - SPREAD) * num_tokens - 1 <= min(later) < 0.7 * num_tokens + 1
    assert 1.3 * num_tokens - 1 < max(later) <= (1 + SPREAD) * num_tokens + 1
    assert sum(later) / 200 == pytest.approx(num_tokens, rel=0.05, abs=1)


def test_requests_of_a_steady_batch_have_the_same_length():
    loads = steady_batches([4, 1, 4], ["predictable", "mixture"], [None], 50)
    assert [load.label for load in loads] == [
        *("batch 1, predictable T=0", "batch 1, mixture T=0/1"),
        *("batch 4, predictable T=0", "batch 4, mixture T=0/1"),
    ]
    assert {load.length(request) for load in loads for request in range(9)} == {50}


def test_texts_run_in_reverse_order_while_the_batch_size_falls():
    trace = phases([1, 4, 1], ["predictable"], [0.0, 0.5])
    assert [(load.batch_size, load.temperature) for load in trace] == [
        *((1, 0.0), (1, 0.5)),
        *((4, 0.0), (4, 0.5)),
        *((1, 0.5), (1, 0.0)),
    ]


@pytest.mark.parametrize("temperature", [None, 0.7])
def test_every_batch_of_a_mixture_has_half_of_each_kind(temperature):
    load = Load("mixture", 4, temperature=temperature)
    assert load.label == f"batch 4, mixture T={'0/1' if temperature is None else '0.7/0.7'}"
    low, high = (0.0, 1.0) if temperature is None else (0.7, 0.7)
    kinds = [request.kind for request in first(load, 12)]
    for start in range(0, 12, 4):
        batch = Counter(kinds[start : start + 4])
        assert batch == {TextKind("code", low): 2, TextKind("shuffled", high): 2}


@given(st.sampled_from(list(CLASSES)), st.integers(0, 50))
def test_requests_repeat_and_have_distinct_seeds(prompt_class, number):
    load = Load(prompt_class, 8)
    requests = first(load, 40, number)
    assert requests == first(load, 40, number)
    others = first(load, 40, number + 1)
    assert len({request.seed for request in requests + others}) == 80
    assert all(list(r.prompt) in PROMPTS[r.kind.prompts] for r in requests)


def byte_ids(text):
    return list(text.encode())


def test_prompts_repeat_and_have_the_requested_length_also_shuffled():
    found, again = (prompts_by_source(byte_ids, count=5, num_tokens=60) for _ in range(2))
    assert found == again
    assert [len(prompt) for prompt in found["code"]] == [60] * 5
    assert [*map(sorted, found["shuffled"])] == [*map(sorted, found["code"])]
    assert found["shuffled"] != found["code"]
    assert found["code"] != held_out_prompts(byte_ids, count=5, num_tokens=60, seed=1)


def test_prompts_need_an_installed_package():
    with pytest.raises(ValueError, match="no_such_package"):
        held_out_prompts(byte_ids, count=1, num_tokens=10, packages=["no_such_package"])
