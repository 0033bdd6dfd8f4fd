"""A fleet reports no more than its actor can bear, and no less than it must."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.serving.stats_actor import ReportPace

LONGEST_S = 7.5


class Process:
    """Uses so many CPU seconds for a report."""

    def __init__(self):
        self.used_s = 3.0
        self.pace = ReportPace(lambda: self.used_s, longest_s=LONGEST_S)

    def take(self, num_reports, cost_s):
        for _ in range(num_reports):
            self.used_s += cost_s
            self.pace.count()


@given(st.floats(50e-6, 5e-3), st.integers(1, 100_000))
def test_what_reports_cost_stays_within_a_core_unless_replicas_would_seem_silent(
    cost_s, num_replicas
):
    process = Process()
    process.take(20_000, cost_s)
    interval_s = process.pace.interval_s(num_replicas)
    cores = num_replicas / interval_s * cost_s
    assert 0 <= interval_s <= LONGEST_S
    assert interval_s == LONGEST_S or cores == pytest.approx(0.6, rel=0.05)


def test_a_fleet_of_ordinary_size_reports_as_it_likes():
    assert Process().pace.interval_s(100) < 0.1


def test_a_machine_that_others_burden_asks_for_fewer_and_later_for_more_again():
    process = Process()
    process.take(20_000, 200e-6)
    calm = process.pace.interval_s(5000)
    process.take(20_000, 600e-6)
    burdened = process.pace.interval_s(5000)
    process.take(20_000, 200e-6)
    assert burdened == pytest.approx(3 * calm, rel=0.05)
    assert process.pace.interval_s(5000) == pytest.approx(calm, rel=0.05)
