"""Speculation that is measured to be slower than plain decoding is turned off."""

import random
from itertools import count

import pytest

from serve_spec.adaptive.baseline import (
    DOUBTED_EVERY_ROUNDS,
    FIRST_CLOSED_ROUNDS,
    SpeedGuard,
)

OFF_MS = 10.0


def accept_length(rng: random.Random, mean: float) -> int:
    """Tokens of one row: drafts kept one after the other, scattered about as much as the mean."""
    length = 1
    while rng.random() < 1 - 1 / mean:
        length += 1
    return length


def wants_off(guard: SpeedGuard, number: int) -> bool:
    """Whether a policy runs round `number` plain."""
    return guard.is_closed or number % (DOUBTED_EVERY_ROUNDS if guard.is_in_doubt else 128) == 0


def run(guard: SpeedGuard, speedup: float, rounds: int, seed: int = 0) -> int:
    """Rounds of one row, `speedup` times off on average; how many of them found it closed."""
    rng = random.Random(seed)
    closed = 0
    for n in range(rounds):
        closed += guard.is_closed
        noise = rng.lognormvariate(0, 0.05)
        if wants_off(guard, n):
            guard.observe_off(OFF_MS * noise, OFF_MS)
        else:
            guard.observe(accept_length(rng, 2.0), 1, OFF_MS * 2.0 / speedup * noise, OFF_MS)
    return closed


def lose(guard: SpeedGuard) -> None:
    """Speculation a third as fast as off, with the plain rounds that belong to it, till it ends."""
    for n in count():
        if guard.is_closed:
            return
        if wants_off(guard, n):
            guard.observe_off(OFF_MS, OFF_MS)
        else:
            guard.observe(1, 1, 3 * OFF_MS, OFF_MS)


@pytest.mark.parametrize("speedup", [0.5, 0.8])
def test_speculation_that_loses_is_off_most_of_the_time(speedup: float) -> None:
    assert run(SpeedGuard(), speedup, 4000, seed=1) > 0.75 * 4000


@pytest.mark.parametrize("seed", range(5))
def test_chance_does_not_close_a_guard_where_speculation_gains(seed: int) -> None:
    guard = SpeedGuard()
    run(guard, 1.15, 10_000, seed)
    assert guard.num_closings <= 2


@pytest.mark.parametrize("slower", [0.3, 0.5, 2.0, 3.0])
def test_a_machine_that_changes_its_speed_between_plain_rounds_closes_nothing(
    slower: float,
) -> None:
    guard = SpeedGuard()
    for n in range(2000):
        ms = OFF_MS * (slower if n // 300 % 2 else 1.0)
        if wants_off(guard, n):
            guard.observe_off(ms, OFF_MS)
        else:
            guard.observe(2, 1, ms * 2.0 / 1.2, OFF_MS)
    assert guard.num_closings == 0


def test_what_looks_slower_is_compared_with_new_plain_rounds_before_it_counts() -> None:
    guard = SpeedGuard()
    for num_closings in (0, 1):
        guard.observe_off(OFF_MS, OFF_MS)
        for _ in range(1000):
            guard.observe(1, 1, 3 * OFF_MS, OFF_MS)
        assert guard.is_in_doubt
        assert guard.num_closings == num_closings


def test_a_closed_guard_opens_again_each_time_later_but_never_stays_shut() -> None:
    guard = SpeedGuard()
    waits = []
    for _ in range(8):
        lose(guard)
        waits.append(guard.closed_rounds_left)
        while guard.is_closed:
            guard.observe_off(OFF_MS, OFF_MS)
    assert waits == [FIRST_CLOSED_ROUNDS * times for times in (1, 2, 4, 8, 16, 32, 32, 32)]


def test_the_speedup_is_measured_against_measured_plain_rounds_of_any_size() -> None:
    """Unit times carry batch size and context; their level, here off by 3, cancels."""
    guard = SpeedGuard()
    for _ in range(50):
        guard.observe_off(12.0, 12.0 / 3)
        guard.observe(2 * 4, 4, 15.0, 10.0 / 3)
    assert guard.speedup == pytest.approx(2 * 10.0 / 15.0)
