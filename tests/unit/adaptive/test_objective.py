"""The drafts of a round maximise expected tokens per millisecond."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive.objective import (
    RoundCosts,
    best_per_sequence,
    best_uniform,
    plain,
    speeds,
    usable,
)

PLENTY = 10_000


def survivals(rows: int, steps: int) -> st.SearchStrategy[np.ndarray]:
    """Falling along every row, as products of rates are."""
    rates = st.lists(st.floats(0.01, 0.99), min_size=rows * steps, max_size=rows * steps)
    return rates.map(lambda values: np.cumprod(np.array(values).reshape(rows, steps), axis=1))


def costs_of(
    rows: int, steps: int, step_ms: list[float], row_ms: list[float], host: float = 0.0
) -> RoundCosts:
    """Draft steps cost the same for any rows; every further verified row costs its own."""
    draft = np.zeros((rows + 1, steps + 1))
    draft[1:, 1:] = np.cumsum(step_ms[:steps])
    verify = 5.0 + np.concatenate([[0.0], np.cumsum(row_ms[: rows * steps])])
    return RoundCosts(draft, verify, host)


MS = st.floats(0.0, 3.0)


@given(
    survival=survivals(3, 3),
    weights=st.lists(st.floats(1.0, 4.0), min_size=3, max_size=3),
    step_ms=st.lists(MS, min_size=3, max_size=3),
    row_ms=st.lists(MS, min_size=9, max_size=9),
    host=MS,
)
def test_no_choice_of_drafts_beats_the_best_tier_s(
    survival: np.ndarray,
    weights: list[float],
    step_ms: list[float],
    row_ms: list[float],
    host: float,
) -> None:
    costs, weight = costs_of(3, 3, step_ms, row_ms, host), np.array(weights)
    speed = np.concatenate([np.ones((3, 1)), 1 + np.cumsum(survival, axis=1)], axis=1)
    best = max(
        3
        * weight.sum()
        / sum(weight[r] / speed[r, k] for r, k in enumerate(rows))
        / (sum(step_ms[: max(rows)]) + costs.verify[sum(rows)] + host)
        for rows in product(range(4), repeat=3)
    )
    found = [best_per_sequence(survival, weight, k, costs, PLENTY).goodput for k in (1, 2, 3)]
    assert max(*found, plain(3, costs).goodput) == pytest.approx(best, rel=1e-6)


@given(
    survival=survivals(4, 3),
    step_ms=st.lists(MS, min_size=3, max_size=3),
    row_ms=st.lists(MS, min_size=12, max_size=12),
    num_steps=st.integers(1, 3),
)
def test_choosing_per_sequence_is_never_worse_than_one_depth_for_all(
    survival: np.ndarray, step_ms: list[float], row_ms: list[float], num_steps: int
) -> None:
    costs, weights = costs_of(4, 3, step_ms, row_ms), speeds(survival, num_steps)
    own = best_per_sequence(survival, weights, num_steps, costs, PLENTY)
    same = best_uniform(survival, weights, num_steps, costs, PLENTY)
    assert own.goodput >= same.goodput * (1 - 1e-9)


def test_goodput_is_the_throughput_of_a_batch_that_is_refilled() -> None:
    """Two kinds of requests, as many of each, 120 tokens long, replaced when they end."""
    survival = np.array([[0.9, 0.8], [0.3, 0.1]])
    speed = speeds(survival, 2)
    # A kind is in the batch as long as it takes: of 10 rows, so many of each.
    share = (1 / speed) / (1 / speed).sum()
    present = np.repeat(survival, np.rint(1000 * share).astype(int), axis=0)
    wide = costs_of(len(present), 2, [0.5, 0.5], [0.0] * 2 * len(present))
    choice = best_uniform(present, speeds(present, 2), 2, wide, PLENTY)
    assert choice.goodput == pytest.approx(choice.tokens / choice.ms)
    # Seen from a batch in which both kinds are equally many, as they are while nothing drafts.
    even = best_uniform(survival, np.ones(2), 2, costs_of(2, 2, [0.5, 0.5], [0.0] * 4), PLENTY)
    assert even.goodput / 2 == pytest.approx(choice.goodput / len(present), rel=1e-3)


@given(
    survival=survivals(5, 4),
    caps=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    num_steps=st.integers(1, 4),
    max_drafts=st.integers(0, 20),
    per_sequence=st.booleans(),
)
def test_no_row_drafts_more_than_it_can_use_nor_the_round_more_than_it_affords(
    survival: np.ndarray, caps: list[int], num_steps: int, max_drafts: int, per_sequence: bool
) -> None:
    best = best_per_sequence if per_sequence else best_uniform
    costs = costs_of(5, 4, [0.1] * 4, [0.01] * 20)
    worth = usable(survival, np.array(caps))
    choice = best(worth, speeds(worth, num_steps), num_steps, costs, max_drafts)
    assert all(
        0 <= steps <= min(cap, num_steps) for steps, cap in zip(choice.row_steps, caps, strict=True)
    )
    assert choice.row_steps.sum() <= max_drafts
    kept = sum(survival[r, :k].sum() for r, k in enumerate(choice.row_steps))
    assert choice.tokens == pytest.approx(5 + kept, rel=1e-6)
    assert choice.ms == pytest.approx(costs.round_ms(choice.row_steps))


def test_easy_rows_draft_while_hard_ones_rest() -> None:
    survival = np.array([[0.95, 0.9, 0.86], [0.1, 0.01, 0.001]])
    costs = costs_of(2, 3, [0.1] * 3, [0.5] * 6)
    choice = best_per_sequence(survival, speeds(survival, 3), 3, costs, PLENTY)
    assert choice.row_steps.tolist() == [3, 0]


def test_a_round_without_drafts_costs_a_plain_round() -> None:
    costs = costs_of(2, 3, [0.2] * 3, [1.0] * 6, host=0.5)
    assert costs.round_ms(np.zeros(2, dtype=np.int64)) == costs.off == 5.5


def test_where_no_draft_pays_none_is_made() -> None:
    survival = np.full((8, 3), 0.05)
    costs = costs_of(8, 3, [1.0] * 3, [1.0] * 24)
    assert not best_per_sequence(survival, np.ones(len(survival)), 3, costs, PLENTY).row_steps.any()


def test_rows_that_stop_drafting_early_are_not_paid_for_later_steps() -> None:
    """Draft steps here cost 1 ms per row: 3 + 1 rows in the first step, one in the second."""
    rows = np.arange(5)[:, None]
    draft = rows * np.array([[0.0, 1.0, 2.0]])
    costs = RoundCosts(draft, np.ones(9), 0.0)
    assert costs.round_ms(np.array([1, 1, 1, 2])) == 4 + 1 + 1
