"""The drafts of a round maximise the throughput of a batch that is refilled."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive.objective import (
    RoundCosts,
    depth_beside_prompts,
    per_sequence,
    speeds,
    uniform,
    usable,
)

PLENTY = 10_000


def survivals(rows: int, steps: int) -> st.SearchStrategy[np.ndarray]:
    """Falling along every row, as products of rates are."""
    rates = st.lists(st.floats(0.01, 0.99), min_size=rows * steps, max_size=rows * steps)
    return rates.map(lambda values: np.cumprod(np.array(values).reshape(rows, steps), axis=1))


def costs_of(
    rows: int, step_ms: list[float], verify_ms: list[float], host: float = 0.0
) -> RoundCosts:
    """Draft steps cost the same for any rows; verification 5 ms and what each depth adds."""
    step = np.tile(step_ms, (rows + 1, 1))
    step[0] = 0.0
    verify = 5.0 + np.concatenate([[0.0], np.cumsum(verify_ms)])
    return RoundCosts(rows, step, verify, np.ones(2 * len(verify) - 1), host)


MS = st.floats(0.0, 3.0)
WEIGHTS = st.lists(st.floats(1.0, 4.0), min_size=3, max_size=3)


@given(
    survival=survivals(3, 3),
    weights=WEIGHTS,
    step_ms=st.lists(MS, min_size=3, max_size=3),
    verify_ms=st.lists(MS, min_size=3, max_size=3),
    host=MS,
)
def test_no_choice_of_drafts_beats_the_best_tier_s(
    survival: np.ndarray,
    weights: list[float],
    step_ms: list[float],
    verify_ms: list[float],
    host: float,
) -> None:
    costs, weight = costs_of(3, step_ms, verify_ms, host), np.array(weights)
    speed = np.concatenate([np.ones((3, 1)), 1 + np.cumsum(survival, axis=1)], axis=1)
    best = max(
        3
        * weight.sum()
        / sum(weight[r] / speed[r, k] for r, k in enumerate(rows))
        / costs.round_ms(np.array(rows))
        for rows in product(range(4), repeat=3)
    )
    found = per_sequence(survival, weight, costs, PLENTY).goodput.max()
    assert found == pytest.approx(best, rel=1e-6)


@given(
    survival=survivals(5, 4),
    caps=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    max_drafts=st.integers(0, 20),
    menu_of=st.sampled_from([uniform, per_sequence]),
)
def test_no_row_drafts_more_than_it_can_use_nor_the_round_more_than_it_affords(
    survival: np.ndarray, caps: list[int], max_drafts: int, menu_of: object
) -> None:
    costs = costs_of(5, [0.1] * 4, [0.05] * 4)
    worth = usable(survival, np.array(caps))
    menu = menu_of(worth, speeds(worth, 4), costs, max_drafts)  # type: ignore[operator]
    for num_steps in range(5):
        choice = menu.choice(num_steps)
        assert choice.shape.depth <= num_steps
        assert all(
            0 <= steps <= min(cap, choice.shape.depth)
            for steps, cap in zip(choice.row_steps, caps, strict=True)
        )
        assert choice.row_steps.sum() <= max_drafts
        kept = sum(survival[r, :k].sum() for r, k in enumerate(choice.row_steps))
        assert choice.tokens == pytest.approx(5 + kept)
        assert choice.ms == pytest.approx(costs.round_ms(choice.row_steps))


@given(st.integers(1, 8), st.lists(st.floats(0.5, 2), min_size=7, max_size=7))
def test_a_correction_holds_for_its_stretch_of_drafts_per_row(
    rows: int, factors: list[float]
) -> None:
    verify = np.array([5.0, 6.0, 8.0, 9.0])
    costs = RoundCosts(rows, np.zeros((rows + 1, 3)), verify, np.array(factors), 0.0)
    drafts = np.arange(3 * rows + 1)
    table = np.interp(drafts, rows * np.arange(4), verify)
    found = costs.verify_ms(drafts) / table
    assert found == pytest.approx([factors[math.ceil(2 * n / rows)] for n in drafts])
    assert costs.off == pytest.approx(5.0 * factors[0])


@given(
    survival=survivals(3, 3),
    step_ms=st.lists(MS, min_size=3, max_size=3),
    verify_ms=st.lists(MS, min_size=3, max_size=3),
    added_ms=st.lists(MS, min_size=13, max_size=13),
    tier=st.integers(0, 3),
)
def test_beside_prompts_a_plan_is_cut_where_its_tokens_are_worth_most_beyond_their_time(
    survival: np.ndarray,
    step_ms: list[float],
    verify_ms: list[float],
    added_ms: list[float],
    tier: int,
) -> None:
    costs = costs_of(3, step_ms, verify_ms)
    choice = per_sequence(survival, np.ones(3), costs, PLENTY).choice(tier)
    prompt_ms = np.cumsum(added_ms)

    def gain(depth: int) -> float:
        cut = np.minimum(choice.row_steps, depth)
        tokens = 3 + sum(survival[row, :steps].sum() for row, steps in enumerate(cut))
        ms = costs.round_ms(cut) + prompt_ms[3 + cut.sum()]
        return float(tokens * choice.ms / choice.tokens - ms)

    depth = depth_beside_prompts(choice, survival, costs, lambda rows: prompt_ms[rows])
    assert 0 <= depth <= choice.shape.depth
    best = max(gain(other) for other in range(choice.shape.depth + 1))
    assert gain(depth) == pytest.approx(best, abs=1e-9)


def test_rows_that_stop_drafting_early_are_not_paid_for_later_steps() -> None:
    """Draft steps here cost 1 ms per row: four rows in the first step, one in the second."""
    step = np.arange(5)[:, None] * np.array([[1.0, 1.0]])
    costs = RoundCosts(4, step, np.ones(3), np.ones(5), 0.0)
    assert costs.round_ms(np.array([1, 1, 1, 2])) == 4 + 1 + 1
