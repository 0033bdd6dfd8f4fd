"""Laws of the survival estimator: censoring, ageing, ease of requests, and nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.adaptive.survival import (
    SurvivalEstimator,
)
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.record import DraftColumns

MAX_STEPS = 5
RATES = np.array([0.8, 0.6, 0.7, 0.5, 0.6])
Row = tuple[str, int, int]


@st.composite
def rounds_of_rows(draw: st.DrawFn, max_size: int = 12) -> list[list[Row]]:
    """Rounds of rows (request, steps, correct drafts); no request twice in a round."""
    steps = st.integers(0, MAX_STEPS)
    row = st.tuples(st.sampled_from("abcdef"), steps, steps).map(
        lambda row: (row[0], row[1], min(row[1], row[2]))
    )
    a_round = st.lists(row, max_size=6, unique_by=lambda row: row[0])
    return draw(st.lists(a_round, max_size=max_size))


def observe(estimator: SurvivalEstimator, rows: Sequence[Row], times: int = 1) -> None:
    """Shows the estimator a round of these rows, `times` times."""
    for _ in range(times):
        estimator.observe([r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows])


def learned(rounds: Sequence[Sequence[Row]]) -> SurvivalEstimator:
    estimator = SurvivalEstimator(MAX_STEPS)
    for rows in rounds:
        observe(estimator, rows)
    return estimator


def columns(rows: Sequence[Row]) -> DraftColumns:
    return DraftColumns([r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows])


@pytest.mark.parametrize(
    "steps",
    [lambda rng: 5, lambda rng: int(rng.integers(0, 6)), lambda rng: int(rng.choice([1, 1, 1, 5]))],
    ids=["always deep", "any depth", "mostly shallow"],
)
@pytest.mark.parametrize("rounds_at_once", [1, 24])
def test_pooled_rates_find_the_truth_whatever_depth_they_are_learned_at(
    steps: Callable[[np.random.Generator], int], rounds_at_once: int
) -> None:
    rng = np.random.default_rng(0)
    estimator = SurvivalEstimator(MAX_STEPS)
    request_ids = [str(row) for row in range(32)]
    seen = []
    for _ in range(600 // rounds_at_once):
        rounds = []
        for _ in range(rounds_at_once):
            kept = np.cumprod(rng.random((32, MAX_STEPS)) < RATES, axis=1).sum(axis=1)
            tried = [steps(rng) for _ in request_ids]
            rounds.append(DraftColumns(request_ids, tried, np.minimum(kept, tried).tolist()))
        estimator.observe_rounds(rounds)
        seen.append(estimator.pooled_rates)
    assert np.mean(seen[len(seen) // 3 :], axis=0) == pytest.approx(RATES, abs=0.03)


@given(rounds_of_rows())
def test_rounds_learned_together_count_as_they_would_one_by_one(rounds: list[list[Row]]) -> None:
    """Requests come and go between them, and some rounds are plain."""
    together, alone = SurvivalEstimator(MAX_STEPS), learned(rounds)
    together.observe_rounds([columns(rows) for rows in rounds])
    assert together.pooled_trials == pytest.approx(alone.pooled_trials)
    assert together.num_requests == alone.num_requests


def test_positions_not_tried_follow_the_level_of_those_that_are() -> None:
    estimator = SurvivalEstimator(MAX_STEPS)
    observe(estimator, [(str(kept), 5, kept) for kept in range(6)], times=200)
    before = estimator.pooled_rates
    observe(estimator, [("a", 1, 0), ("b", 1, 1), ("c", 1, 0)], times=200)
    assert (estimator.pooled_rates < before - 0.1).all()


def test_one_hit_or_miss_more_moves_a_request_the_way_it_should() -> None:
    estimator = SurvivalEstimator(MAX_STEPS)
    rows = [("better", 3, 2), ("same", 3, 1), ("worse", 3, 0)]
    observe(estimator, [("traffic", 5, 3)], times=50)
    observe(estimator, rows)
    better, same, worse = estimator.survival([row[0] for row in rows])
    assert (better > same).all()
    assert (same > worse).all()


def test_a_request_whose_text_turns_easy_is_soon_taken_for_easy() -> None:
    estimator = SurvivalEstimator(MAX_STEPS)
    observe(estimator, [("turning", 5, 0), ("other", 5, 2)], times=100)
    observe(estimator, [("turning", 5, 5), ("other", 5, 2)], times=6)
    turning, unknown = estimator.survival(["turning", "unknown"])
    assert (turning > unknown).all()


@given(rounds_of_rows())
@settings(max_examples=60)
def test_requests_never_seen_get_the_pooled_rates(rounds: list[list[Row]]) -> None:
    estimator = learned(rounds)
    [unknown] = estimator.survival(["unknown"])
    assert unknown == pytest.approx(np.cumprod(estimator.pooled_rates))


@given(rounds_of_rows(), st.integers(1, 30))
@settings(max_examples=60)
def test_rows_without_drafts_teach_nothing_but_their_evidence_ages(
    rounds: list[list[Row]], times: int
) -> None:
    estimator = learned(rounds)
    request_ids = [*"abcdef", "new"]
    pooled, remembered = estimator.pooled_rates, estimator.num_requests
    before = estimator.survival(request_ids)
    observe(estimator, [(request_id, 0, 0) for request_id in request_ids], times)
    assert estimator.pooled_rates.tolist() == pooled.tolist()
    assert estimator.num_requests == remembered
    average = np.cumprod(pooled)
    moved = np.abs(estimator.survival(request_ids) - average)
    assert (moved <= np.abs(before - average) + 1e-12).all()


@given(rounds_of_rows(), st.data())
@settings(max_examples=60)
def test_the_order_of_rows_in_a_round_does_not_matter(
    rounds: list[list[Row]], data: st.DataObject
) -> None:
    shuffled = [data.draw(st.permutations(rows)) for rows in rounds]
    one, other = learned(rounds), learned(shuffled)
    assert one.pooled_rates == pytest.approx(other.pooled_rates)
    assert one.survival("abcdef") == pytest.approx(other.survival("abcdef"))


@given(rounds_of_rows(), st.data())
@settings(max_examples=60)
def test_what_a_request_is_worth_does_not_depend_on_who_else_is_asked_about(
    rounds: list[list[Row]], data: st.DataObject
) -> None:
    estimator = SurvivalEstimator(MAX_STEPS)
    some = st.lists(st.sampled_from("abcdef"), unique=True)
    for rows in rounds:
        estimator.survival(data.draw(some))
        observe(estimator, rows)
        together = estimator.survival(list("abcdef"))
        alone = np.concatenate([estimator.survival([request_id]) for request_id in "abcdef"])
        assert together == pytest.approx(alone)


@given(rounds_of_rows(), st.permutations("abcdef"))
@settings(max_examples=60)
def test_forgetting_leaves_no_trace_of_a_request(rounds: list[list[Row]], order: list[str]) -> None:
    estimator = learned(rounds)
    drafted = {request_id for rows in rounds for request_id, steps, _ in rows if steps}
    assert estimator.num_requests == len(drafted)
    for number, request_id in enumerate(order, start=1):
        estimator.forget(request_id)
        estimator.forget(request_id)
        assert estimator.num_requests == len(drafted - set(order[:number]))
    again, unknown = estimator.survival([order[0], "unknown"])
    assert again.tolist() == unknown.tolist()


def test_a_new_request_inherits_nothing_from_the_one_whose_place_it_takes() -> None:
    used, fresh = SurvivalEstimator(MAX_STEPS), SurvivalEstimator(MAX_STEPS)
    observe(used, [("old", 5, 0), ("other", 5, 3)], times=5)
    observe(fresh, [("old", 5, 0), ("other", 5, 3)], times=5)
    used.forget("old")
    observe(used, [("new", 5, 4)])
    observe(fresh, [("new", 5, 4)])
    assert used.survival(["new"]).tolist() == fresh.survival(["new"]).tolist()


def test_hundreds_of_requests_at_once_are_kept_apart() -> None:
    estimator = SurvivalEstimator(MAX_STEPS)
    rows = [(str(row), 5, row % 6) for row in range(500)]
    observe(estimator, rows, times=3)
    assert estimator.num_requests == 500
    survival = estimator.survival([row[0] for row in rows])
    assert len(np.unique(survival[:, 0])) == 6
    for row in range(494):
        assert survival[row].tolist() == survival[row + 6].tolist()
    for request_id, *_ in rows:
        estimator.forget(request_id)
    assert estimator.num_requests == 0


@given(rounds_of_rows())
@settings(max_examples=60)
def test_a_new_estimator_starts_where_its_prior_comes_from(rounds: list[list[Row]]) -> None:
    estimator = learned(rounds)
    started = SurvivalEstimator(MAX_STEPS, json.loads(json.dumps(estimator.prior())))
    assert started.pooled_rates == pytest.approx(estimator.pooled_rates)
    assert started.pooled_trials.tolist() == [0.0] * MAX_STEPS


def test_an_empty_round_and_an_empty_batch_are_fine() -> None:
    estimator = SurvivalEstimator(MAX_STEPS)
    estimator.observe([], [], [])
    assert estimator.survival([]).shape == (0, MAX_STEPS)


def test_a_snapshot_is_json_and_shows_rates_and_what_they_rest_on() -> None:
    estimator = learned([[("a", 3, 1)]])
    snapshot = json.loads(json.dumps(estimator.snapshot()))
    assert snapshot["num_requests"] == 1
    assert [entry["trials"] for entry in snapshot["positions"]] == [1, 1, 0, 0, 0]
    rates = [entry["accept_rate"] for entry in snapshot["positions"]]
    assert rates == pytest.approx(estimator.pooled_rates, abs=1e-4)


@pytest.mark.parametrize(
    ("request_ids", "row_steps", "num_correct_drafts", "message"),
    [
        (["a", "b"], [3, 3], [1, 4], r"num_correct_drafts=4: must be an integer in 0\.\.3"),
        (["a", "b"], [3], [1, 1], r"lengths=\[2, 1, 2\]: give every column one entry per row"),
        (["a", "a"], [3, 3], [1, 1], "name each request once"),
    ],
)
def test_an_impossible_round_is_refused_and_teaches_nothing(
    request_ids: list[str], row_steps: list[int], num_correct_drafts: list[int], message: str
) -> None:
    estimator = SurvivalEstimator(MAX_STEPS)
    with pytest.raises(ValueError, match=message):
        estimator.observe(request_ids, row_steps, num_correct_drafts)
    with pytest.raises(ValueError, match="name each request once"):
        estimator.survival(["a", "a"])
    assert estimator.num_requests == 0
    assert estimator.pooled_trials.tolist() == [0.0] * MAX_STEPS


@pytest.mark.parametrize(
    "prior_rates", [[], [0.5], [0.5] * 4, [0.5, 0.5, 1.0], [0.0, 0.5, 0.5], [0.5, 0.5, np.nan]]
)
def test_a_prior_that_is_none_is_refused(prior_rates: list[float]) -> None:
    with pytest.raises(ValueError, match=r"prior_rates=.*give max_steps=3 numbers between 0 and 1"):
        SurvivalEstimator(3, prior_rates)


TREES = (DraftShape(2, 6, 4), DraftShape(4, 15, 4))
CHAIN = DraftShape.chain(MAX_STEPS)


def drafted(
    estimator: SurvivalEstimator,
    rates: np.ndarray,
    arms: Sequence[DraftShape],
    gain: float = 3.0,
    num_rounds: int = 300,
    batch_size: int = 48,
) -> SurvivalEstimator:
    """Rounds of these arms in turn; a level's odds are `gain` times those of a chain's position."""
    rng = np.random.default_rng(1)
    request_ids = [str(row) for row in range(batch_size)]
    for number in range(num_rounds):
        shape = arms[number % len(arms)]
        steps = shape.depth
        truth = rates[:steps] if shape.is_chain else eased(rates, gain)[:steps]
        kept = np.cumprod(rng.random((batch_size, steps)) < truth, axis=1).sum(axis=1)
        estimator.observe(request_ids, [steps] * batch_size, kept.tolist(), shape)
    return estimator


def eased(rates: np.ndarray, gain: float) -> np.ndarray:
    odds = gain * rates / (1 - rates)
    return odds / (1 + odds)


@given(rounds_of_rows(), st.lists(st.sampled_from([CHAIN, *TREES]), min_size=1), st.integers(1, 60))
@settings(max_examples=60)
def test_survival_lies_within_0_and_1_and_never_rises_with_the_position_or_level(
    rounds: list[list[Row]], arms: list[DraftShape], times: int
) -> None:
    estimator = SurvivalEstimator(MAX_STEPS, trees=TREES)
    for number, rows in enumerate(rounds):
        shape = arms[number % len(arms)]
        most = shape.depth
        cut = [(name, min(k, most), min(kept, most)) for name, k, kept in rows]
        for _ in range(times):
            estimator.observe([r[0] for r in cut], [r[1] for r in cut], [r[2] for r in cut], shape)
    for shape in (CHAIN, *TREES):
        survival = estimator.survival([*"abcdef", "unknown"], shape)
        assert survival.shape == (7, shape.depth)
        assert ((survival > 0) & (survival < 1)).all()
        assert (np.diff(survival, axis=1) <= 0).all()


@pytest.mark.parametrize("gain", [1.2, 8.0])
def test_each_shape_finds_its_own_rates_level_by_level(gain: float) -> None:
    estimator = SurvivalEstimator(MAX_STEPS, trees=TREES)
    drafted(estimator, RATES, [CHAIN, *TREES], gain)
    assert estimator.pooled_rates == pytest.approx(RATES, abs=0.06)
    for tree in TREES:
        truth = eased(RATES, gain)[: tree.depth]
        assert estimator.rates(tree) == pytest.approx(truth, abs=0.06)


def test_what_a_request_keeps_of_trees_moves_its_chains_and_the_other_way_round() -> None:
    estimator = SurvivalEstimator(MAX_STEPS, trees=TREES)
    for _ in range(20):
        estimator.observe(["easy", "hard"], [4, 4], [4, 0], TREES[1])
    easy, hard = estimator.survival(["easy", "hard"])
    assert easy[0] > hard[0] + 0.2
    for _ in range(40):
        estimator.observe(["easy", "hard"], [5, 5], [0, 5])
    easy, hard = estimator.survival(["easy", "hard"], TREES[0])
    assert easy[0] < hard[0]


def test_a_tree_deeper_than_any_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="max_steps=5"):
        SurvivalEstimator(MAX_STEPS, trees=[DraftShape(6, 20, 4)])
