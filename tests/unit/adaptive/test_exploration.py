"""Learning never takes more than its share of the time."""

from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive.exploration import BackOff, ExplorationBudget


@given(rounds=st.lists(st.tuples(st.floats(0.1, 100), st.none() | st.floats(0, 50)), max_size=200))
def test_at_no_moment_have_probes_taken_more_than_their_share(
    rounds: list[tuple[float, float | None]],
) -> None:
    budget = ExplorationBudget(0.005)
    for round_ms, wanted in rounds:
        if wanted is not None:
            budget.spend(wanted)
        budget.pass_time(round_ms)
        assert budget.spent_share <= 0.005


def test_a_refused_probe_costs_nothing_and_is_paid_for_later() -> None:
    budget = ExplorationBudget(0.01)
    assert not budget.spend(1.0)
    assert budget.spent_ms == 0.0
    for _ in range(100):
        budget.pass_time(1.0)
    assert budget.spend(1.0)
    assert not budget.spend(0.1)


def test_waits_double_to_their_limit_and_start_over_after_a_success() -> None:
    wait = BackOff(8, 64)
    waits = []
    for _ in range(6):
        waits.append(wait.rounds)
        wait.fail()
    assert waits == [8, 16, 32, 64, 64, 64]
    wait.succeed()
    assert wait.rounds == 8
