"""Laws of the trace of phases."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from serve_spec.bench.phases import (
    CLASSES,
    CPU_BATCH_SIZES,
    GPU_BATCH_SIZES,
    MAX_TOKENS,
    MIN_TOKENS,
    MIN_WAVES,
    Phase,
    TextKind,
    phase_requests,
    phase_trace,
    shuffled,
)

PROMPTS = {"code": [[i, i + 1, 5, 5] for i in range(20)], "shuffled": [[9, i] for i in range(20)]}


@given(
    st.sampled_from([CPU_BATCH_SIZES, GPU_BATCH_SIZES]),
    st.floats(0.05, 300),
    st.floats(0.01, 30),
)
def test_a_phase_takes_about_the_time_it_was_given_within_the_limits_of_a_request(
    batch_sizes: tuple[int, ...], round_ms: float, seconds: float
) -> None:
    trace = phase_trace(batch_sizes, list(CLASSES), dict.fromkeys(batch_sizes, round_ms), seconds)
    assert len(trace) == len(batch_sizes) * len(CLASSES)
    for phase in trace:
        waves = phase.num_requests // phase.batch_size
        assert phase.num_requests == waves * phase.batch_size > 0
        assert MIN_TOKENS <= phase.num_tokens <= MAX_TOKENS
        plain_seconds = waves * phase.num_tokens * round_ms / 1e3
        shortest = MIN_WAVES * MIN_TOKENS * round_ms / 1e3
        assert plain_seconds <= max(1.1 * seconds, shortest)
        assert plain_seconds >= 0.85 * seconds


@given(st.integers(10, 96), st.integers(20, 200))
def test_lengths_fill_their_range_evenly_and_are_the_same_every_time(
    num_tokens: int, num_requests: int
) -> None:
    phase = Phase("mixture", 4, num_requests, num_tokens, spread=0.5)
    lengths = [phase.length(request) for request in range(num_requests)]
    assert lengths == [phase.length(request) for request in range(num_requests)]
    assert sum(lengths) == phase.total_tokens
    assert 0.5 * num_tokens - 1 <= min(lengths) < 0.7 * num_tokens
    assert 1.3 * num_tokens < max(lengths) <= 1.5 * num_tokens + 1
    assert abs(sum(lengths) / num_requests - num_tokens) <= 0.05 * num_tokens + 1


def test_of_equal_lengths_every_request_emits_the_mean() -> None:
    assert {Phase("mixture", 4, 9, 50).length(request) for request in range(9)} == {50}


def test_the_way_down_runs_the_classes_backwards() -> None:
    trace = phase_trace([1, 4, 1], ["predictable", "heated"], {1: 10.0, 4: 10.0}, 1.0)
    steps = [(phase.batch_size, phase.prompt_class) for phase in trace]
    assert steps == [
        *((1, "predictable"), (1, "heated")),
        *((4, "predictable"), (4, "heated")),
        *((1, "heated"), (1, "predictable")),
    ]


def test_half_of_a_mixture_is_of_each_kind_in_every_batch() -> None:
    phase = Phase("mixture", 4, 12, 64)
    kinds = [request.kind for request in phase_requests(phase, 0, PROMPTS)]
    for first in range(0, 12, 4):
        batch = Counter(kinds[first : first + 4])
        assert batch == {TextKind("code", 0.0): 2, TextKind("shuffled", 1.0): 2}


@given(st.sampled_from(list(CLASSES)), st.integers(0, 50))
def test_requests_are_the_same_every_time_and_no_two_of_a_trace_share_a_seed(
    prompt_class: str, index: int
) -> None:
    phase = Phase(prompt_class, 8, 40, 64)
    requests = phase_requests(phase, index, PROMPTS)
    assert requests == phase_requests(phase, index, PROMPTS)
    others = phase_requests(phase, index + 1, PROMPTS)
    assert len({request.seed for request in requests + others}) == 80
    assert all(list(r.prompt) in PROMPTS[r.kind.prompts] for r in requests)


@given(st.lists(st.lists(st.integers(0, 9), max_size=9), max_size=5))
def test_shuffling_keeps_the_tokens_of_every_prompt(prompts: list[list[int]]) -> None:
    mixed = shuffled(prompts)
    assert mixed == shuffled(prompts)
    assert [sorted(prompt) for prompt in mixed] == [sorted(prompt) for prompt in prompts]
