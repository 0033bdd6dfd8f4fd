"""Loads and prompts of benchmarks."""

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_a_temperature_replaces_those_of_the_class():
    load = Load("mixture", 2, temperature=0.7)
    assert load.label == "batch 2, mixture T=0.7/0.7"
    kinds = [request.kind for request in first(load, 2)]
    assert kinds == [TextKind("code", 0.7), TextKind("shuffled", 0.7)]


def test_every_batch_of_a_mixture_has_half_of_each_kind():
    kinds = [request.kind for request in first(Load("mixture", 4), 12)]
    for start in range(0, 12, 4):
        batch = Counter(kinds[start : start + 4])
        assert batch == {TextKind("code", 0.0): 2, TextKind("shuffled", 1.0): 2}


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
