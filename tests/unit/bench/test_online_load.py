"""Loads of `bench online`: schedules follow from the seed, with the named rate and shape."""

from collections import Counter
from itertools import pairwise
from math import sqrt
from statistics import fmean, pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.bench.online.load import Bursty, Poisson, Ramp, text_requests

RATES = st.floats(0.01, 1000)
COUNTS = st.integers(1, 200)
SEEDS = st.integers(0, 2**32)
OPEN = (
    st.builds(Poisson, RATES)
    | st.builds(Bursty, RATES, st.integers(1, 20))
    | st.builds(Ramp, RATES, RATES)
)
MANY = 20_000


@given(OPEN, COUNTS, SEEDS)
def test_a_schedule_is_a_function_of_its_seed_and_never_goes_back(load, count, seed):
    times = load.arrivals(count, seed)
    assert times == load.arrivals(count, seed)
    assert len(times) == count
    assert times[0] >= 0
    assert all(before <= after for before, after in pairwise(times))


@given(RATES, st.floats(0.1, 10), COUNTS, SEEDS)
def test_a_rate_is_a_unit_of_time_and_nothing_else(rate, factor, count, seed):
    """Whatever is measured at several rates sees the same arrivals, closer together."""
    slow = Poisson(rate).arrivals(count, seed)
    fast = Poisson(rate * factor).arrivals(count, seed)
    assert [time * factor for time in fast] == pytest.approx(slow)


@pytest.mark.parametrize("seed", range(2))
def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential(seed):
    rate = 3.0
    times = Poisson(rate).arrivals(MANY, seed)
    gaps = [after - before for before, after in pairwise([0.0, *times])]
    # The mean of n exponentials has a relative deviation of 1/√n, their variance one of √(8/n).
    assert fmean(gaps) * rate == pytest.approx(1, abs=5 / sqrt(MANY))
    assert pvariance(gaps) * rate**2 == pytest.approx(1, abs=5 * sqrt(8 / MANY))


@given(RATES, st.integers(1, 20), st.integers(1, 300), SEEDS)
def test_bursts_come_whole_at_one_instant_and_are_poisson_themselves(rate, size, count, seed):
    times = Bursty(rate, size).arrivals(count, seed)
    sizes = list(Counter(times).values())
    assert sizes[:-1] == [size] * (len(sizes) - 1)
    assert sizes[-1] == count - size * (len(sizes) - 1) <= size
    bursts = Poisson(rate / size).arrivals(len(sizes), seed)
    assert list(Counter(times)) == bursts


@given(RATES, RATES, COUNTS, SEEDS)
def test_a_ramp_ends_on_time_at_the_mean_of_its_rates(first, last, count, seed):
    load = Ramp(first, last)
    assert load.seconds(count) == pytest.approx(count / ((first + last) / 2))
    assert load.arrivals(count, seed)[-1] <= load.seconds(count) * (1 + 1e-9)


@pytest.mark.parametrize(("first", "last"), [(1, 9), (9, 1), (5, 5), (0.01, 10)])
@pytest.mark.parametrize("part", [0.1, 0.25, 0.5, 0.9])
def test_by_any_part_of_a_ramp_as_many_have_come_as_its_rate_adds_up_to(first, last, part):
    load = Ramp(first, last)
    end = part * load.seconds(MANY)
    share = sum(time <= end for time in load.arrivals(MANY, 3)) / MANY
    expected = (first * part + (last - first) * part**2 / 2) / ((first + last) / 2)
    deviation = sqrt(expected * (1 - expected) / MANY)
    assert share == pytest.approx(expected, abs=5 * deviation)


def test_every_other_mixed_request_is_shuffled_and_sampled():
    plain, mixed = (
        text_requests(6, prompt_chars=80, output_tokens=7, temperature=0.5, mixed=mixed)
        for mixed in (False, True)
    )
    assert mixed[::2] == plain[::2]
    for hard, easy in zip(mixed[1::2], plain[1::2], strict=True):
        assert hard.prompt != easy.prompt
        assert sorted(hard.prompt.split(" ")) == sorted(easy.prompt.split(" "))
        assert (hard.params.temperature, hard.params.seed) == (1.0, easy.params.seed)
