"""Speculation that is measured to be slower than plain decoding is turned off."""

import random

import pytest

from serve_spec.adaptive.baseline import FIRST_CLOSED_ROUNDS, MIN_SAMPLES, SpeedGuard

OFF_MS = 10.0


def accept_length(rng: random.Random, mean: float) -> int:
    """Tokens of one row: drafts kept one after the other, scattered about as much as the mean."""
    length = 1
    while rng.random() < 1 - 1 / mean:
        length += 1
    return length


def run(guard: SpeedGuard, speedup: float, rounds: int, seed: int = 0) -> int:
    """Rounds of one row, `speedup` times off on average; how often the guard closed."""
    rng = random.Random(seed)
    for n in range(rounds):
        if guard.is_closed or n % 128 == 0:
            guard.observe_off(OFF_MS * rng.lognormvariate(0, 0.05), OFF_MS)
        else:
            tokens = accept_length(rng, 2.0)
            guard.observe(tokens, 1, OFF_MS * 2.0 / speedup * rng.lognormvariate(0, 0.05), OFF_MS)
    return guard.num_closings


@pytest.mark.parametrize("speedup", [0.5, 0.8])
def test_speculation_that_loses_is_off_most_of_the_time(speedup: float) -> None:
    guard = SpeedGuard()
    rng, closed = random.Random(1), 0
    guard.observe_off(OFF_MS, OFF_MS)
    for _ in range(4000):
        closed += guard.is_closed
        if guard.is_closed:
            guard.observe_off(OFF_MS, OFF_MS)
        else:
            guard.observe(accept_length(rng, 2.0), 1, OFF_MS * 2.0 / speedup, OFF_MS)
    assert closed > 0.75 * 4000


@pytest.mark.parametrize("seed", range(5))
def test_chance_does_not_close_a_guard_where_speculation_gains(seed: int) -> None:
    assert run(SpeedGuard(), 1.15, 10_000, seed) <= 2


def test_a_single_batch_of_bad_luck_needs_more_than_a_few_samples() -> None:
    guard = SpeedGuard()
    guard.observe_off(OFF_MS, OFF_MS)
    for _ in range(MIN_SAMPLES - 1):
        guard.observe(1, 1, 3 * OFF_MS, OFF_MS)
        assert not guard.is_closed
    guard.observe(1, 1, 3 * OFF_MS, OFF_MS)
    assert guard.is_closed


def test_without_a_measured_baseline_nothing_is_concluded() -> None:
    guard = SpeedGuard()
    for _ in range(1000):
        guard.observe(1, 1, 5 * OFF_MS, OFF_MS)
    assert not guard.is_closed
    assert guard.speedup is None


def test_a_closed_guard_opens_again_each_time_later_but_never_stays_shut() -> None:
    guard = SpeedGuard()
    guard.observe_off(OFF_MS, OFF_MS)
    waits = []
    for _ in range(8):
        while not guard.is_closed:
            guard.observe(1, 1, 3 * OFF_MS, OFF_MS)
        waits.append(guard.closed_rounds_left)
        while guard.is_closed:
            guard.observe_off(OFF_MS, OFF_MS)
    first = FIRST_CLOSED_ROUNDS
    assert waits == [
        first,
        2 * first,
        4 * first,
        8 * first,
        16 * first,
        32 * first,
        *[32 * first] * 2,
    ]


def test_the_speedup_is_measured_against_measured_plain_rounds_of_any_size() -> None:
    """Unit times carry batch size and context; their level, here off by 3, cancels."""
    guard = SpeedGuard()
    for _ in range(50):
        guard.observe_off(12.0, 12.0 / 3)
        guard.observe(2 * 4, 4, 15.0, 10.0 / 3)
    assert guard.speedup == pytest.approx(2 * 10.0 / 15.0)
