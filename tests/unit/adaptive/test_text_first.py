"""Whose drafts a row verifies: those of its text, or a model's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive.objective import Floats, RoundCosts
from serve_spec.adaptive.text_first import RETRY_FOUND, RETRY_STEPS, TextFirst, text_steps
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch
from tests.helpers.rounds import decode_batch, verified_round

DEPTH = 4
RATES = st.lists(st.floats(0.01, 0.99), min_size=DEPTH, max_size=DEPTH)


def costs(size: int, draft_ms: float = 1.0, row_ms: float = 0.5) -> RoundCosts:
    """A plain round takes 10 ms, a verified draft `row_ms`, a draft step `draft_ms` per row."""
    step = np.outer(np.arange(size + 1), np.ones(DEPTH)) * draft_ms
    verify = 10.0 + size * row_ms * np.arange(DEPTH + 1)
    return RoundCosts(size, step, verify, np.ones(2 * DEPTH + 1), host=0.0)


def survival(*rates: list[float]) -> Floats:
    return np.cumprod(np.array(rates), axis=1)


def with_text(batch: DecodeBatch, found: int = DEPTH) -> DecodeBatch:
    return replace(batch, text_steps=[found] * batch.size)


def never() -> bool:
    return False


@given(text=RATES, model=RATES, draft_ms=st.floats(0, 5), row_ms=st.floats(0, 5))
def test_each_row_takes_the_faster_kind_at_its_best_depth(
    text: list[float], model: list[float], draft_ms: float, row_ms: float
) -> None:
    def speeds(rates: list[float], step_ms: float) -> list[float]:
        kept = [0.0, *np.cumsum(np.cumprod(rates))]
        return [(1 + kept[k]) / (10 + k * (row_ms + step_ms)) for k in range(DEPTH + 1)]

    [steps] = text_steps(survival(text), survival(model), costs(1, draft_ms, row_ms))
    of_text, of_model = speeds(text, 0.0), speeds(model, draft_ms)
    if steps:
        assert of_text[steps] == pytest.approx(max(of_text))
        assert max(of_text) >= max(of_model) * (1 - 1e-9)
    else:
        best = max(of_text)
        assert max(of_model) >= best * (1 - 1e-9) or of_text[0] == pytest.approx(best)


@given(text=RATES, model=RATES, of_tree=st.floats(0.01, 1))
def test_a_row_goes_by_its_text_only_where_that_is_faster_than_the_models_trees_too(
    text: list[float], model: list[float], of_tree: float
) -> None:
    trees = np.array([of_tree])
    [beside_chains] = text_steps(survival(text), survival(model), costs(1))
    [beside_trees] = text_steps(survival(text), survival(model), costs(1), trees)
    kept = [0.0, *np.cumsum(np.cumprod(text))]
    fastest = max((1 + kept[k]) / (10 + k * 0.5) for k in range(DEPTH + 1))
    assert beside_trees == (beside_chains if fastest >= of_tree else 0)


def lesson(correct: int, batch: DecodeBatch, *, from_text: bool) -> StepRecord:
    rows = batch.size
    return verified_round([correct] * rows, rows, DEPTH, is_from_text=[from_text] * rows)


def test_a_request_whose_text_misleads_goes_over_to_the_model_and_others_do_not() -> None:
    first, size = TextFirst(DEPTH), 8
    model = survival(*[[0.6] * DEPTH] * size)
    for _ in range(20):
        kept = [0, *[DEPTH] * (size - 1)]
        first.observe_rounds([verified_round(kept, size, DEPTH, is_from_text=[True] * size)])
    batch = with_text(decode_batch(size))
    first.plan(batch.request_ids, model, costs(size))
    steps = first.steps(batch, DEPTH, never)
    assert steps[0] == 0
    assert all(count > 0 for count in steps[1:])


def test_what_a_model_drafts_says_nothing_of_drafts_from_texts() -> None:
    first, batch = TextFirst(DEPTH), decode_batch(2)
    before = first.survival.pooled_rates
    for _ in range(50):
        first.observe_rounds([lesson(0, batch, from_text=False)])
    assert first.survival.pooled_rates == pytest.approx(before)


def test_what_is_passed_over_is_tried_again_now_and_then_if_that_can_be_afforded() -> None:
    first, batch = TextFirst(DEPTH), with_text(decode_batch(1))
    for _ in range(40):
        first.observe_rounds([lesson(0, batch, from_text=True)])
    first.plan(batch.request_ids, survival([0.9] * DEPTH), costs(1))
    rounds = [first.steps(batch, DEPTH, lambda: True) for _ in range(2 * RETRY_FOUND)]
    assert [row for row in rounds if row != [0]] == [[RETRY_STEPS]] * 2
    assert all(first.steps(batch, DEPTH, never) == [0] for _ in range(2 * RETRY_FOUND))
    nothing = with_text(batch, found=0)
    assert all(first.steps(nothing, DEPTH, lambda: True) == [0] for _ in range(RETRY_FOUND))


def test_a_request_that_left_is_new_when_it_comes_back() -> None:
    first = TextFirst(DEPTH)
    first.observe_rounds([lesson(0, decode_batch(1), from_text=True)])
    assert first.survival.num_requests == 1
    first.forget("0")
    assert first.survival.num_requests == 0
