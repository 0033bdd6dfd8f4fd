"""Laws of the speed of full batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.bench.full_batches import SETTLE_ROUNDS, FullBatches
from serve_spec.core.record import StepRecord, StepTimes
from tests.helpers.rounds import verified_round


def a_round(tokens: list[int], ms: float = 10.0, prompt: int = 0) -> StepRecord:
    """A round in which the requests emit `tokens`."""
    kept = [count - 1 for count in tokens]
    times = StepTimes(1.0, 2.0, ms)
    return verified_round(kept, len(tokens), 3, times=times, num_prefill_tokens=prompt)


def settled(size: int) -> list[StepRecord]:
    """The rounds that are not counted."""
    return [a_round([9] * size, ms=1000.0)] * SETTLE_ROUNDS


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(1, 100)), min_size=1, max_size=50))
def test_of_one_request_at_a_time_it_is_tokens_over_time(rounds: list[tuple[int, float]]) -> None:
    speed = FullBatches(1)
    speed.add([*settled(1), *(a_round([tokens], ms) for tokens, ms in rounds)])
    tokens, ms = sum(r[0] for r in rounds), sum(r[1] for r in rounds)
    assert speed.tokens_per_second == pytest.approx(tokens / ms * 1e3)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8), st.integers(1, 20))
def test_it_is_what_a_batch_that_is_refilled_reaches(paces: list[int], num_rounds: int) -> None:
    """Requests of 840 tokens, each at its own pace, in a server where one follows another."""
    speed = FullBatches(len(paces))
    speed.add([*settled(len(paces)), *[a_round(paces, ms=5.0)] * num_rounds])
    rounds_of_a_request = sum(840 / pace for pace in paces) / len(paces)
    tokens_per_ms = len(paces) * 840 / rounds_of_a_request / 5.0
    assert speed.tokens_per_second == pytest.approx(tokens_per_ms * 1e3)


def test_prompts_and_thinning_ends_do_not_count() -> None:
    alone, among_others = FullBatches(2), FullBatches(2)
    full = [a_round([2, 4])] * 5
    alone.add([*settled(2), *full])
    prompts, end = [a_round([], prompt=7), a_round([1, 1], prompt=7)], [a_round([8])] * 9
    among_others.add([*prompts, *settled(2), *full, *end])
    assert alone.tokens_per_second == among_others.tokens_per_second


def test_batches_that_never_were_full_have_no_speed() -> None:
    speed = FullBatches(4)
    speed.add([*settled(3), a_round([2, 2, 2])])
    speed.add(settled(4))
    assert speed.tokens_per_second is None
