"""The prompts that tokens bring are paid for, beside the drafts that pay there."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive.objective import Counts, Floats, Menu
from serve_spec.adaptive.prompt_load import PromptLoad, lost_at_an_end
from tests.helpers.rounds import verified_round

ROUND = verified_round([1], batch_size=2, num_steps=3)


def load(num_requests: int = 100, rows: int = 64, tokens: int = 80) -> PromptLoad:
    """Of requests that are all alike."""
    found = PromptLoad()
    for _ in range(num_requests):
        ended = replace(ROUND, num_ended=1, num_ended_prompt_rows=rows, num_ended_tokens=tokens)
        found.observe(ended)
    return found


def menu(tokens: list[float], ms: list[float], num_rows: list[int]) -> Menu:
    speeds = np.array(tokens) / np.array(ms)
    return Menu(np.array(tokens), np.array(num_rows), np.array(ms), speeds, lambda k: np.full(1, k))


def alike(num_prompt_rows: Floats, num_rows: Counts) -> Floats:
    """Rows of prompts that take the same beside anything."""
    return 0.02 * num_prompt_rows + 0.0 * num_rows


TIERS = menu([10.0, 16.0, 18.0], [4.0, 5.0, 6.0], [10, 20, 30])


def added(found: PromptLoad, tiers: Menu = TIERS, cost: object = alike) -> Floats:
    return found.added_ms(tiers.tokens, tiers.ms, tiers, cost)  # type: ignore[arg-type]


def test_before_any_request_ended_nothing_is_known_of_prompts() -> None:
    fresh = PromptLoad()
    fresh.observe(ROUND)
    assert not fresh.is_known
    assert fresh.rows_per_token == fresh.rows_per_prompt == 0.0


@given(st.integers(1, 300), st.integers(1, 4000), st.integers(1, 4000))
def test_requests_that_are_alike_are_told_by_any_number_of_them(
    num_requests: int, rows: int, tokens: int
) -> None:
    found = load(num_requests, rows, tokens)
    assert found.rows_per_token == pytest.approx(rows / tokens)
    assert found.rows_per_prompt == pytest.approx(rows)


def test_prompts_that_everybody_shares_are_free() -> None:
    assert not load(rows=0).is_known


def test_what_requests_bring_now_outweighs_what_they_brought() -> None:
    found = load(rows=10)
    for _ in range(400):
        many = replace(ROUND, num_ended=1, num_ended_prompt_rows=500, num_ended_tokens=80)
        found.observe(many)
    assert found.rows_per_prompt == pytest.approx(500, rel=0.01)


def test_requests_that_end_together_count_as_one_by_one() -> None:
    together, apart = PromptLoad(), load(8)
    ended = replace(ROUND, num_ended=8, num_ended_prompt_rows=8 * 64, num_ended_tokens=8 * 80)
    together.observe(ended)
    assert together.rows_per_token == pytest.approx(apart.rows_per_token)


def test_where_rows_take_the_same_beside_any_round_all_tokens_bear_the_same() -> None:
    per_token = added(load()) / TIERS.tokens
    assert per_token == pytest.approx([0.02 * 64 / 80] * 3)


@given(st.floats(0.05, 40.0))
def test_the_mean_over_chance_is_the_mean_of_what_is_brought(prompts_a_round: float) -> None:
    """As many rows as tokens bring, however they come together."""
    tokens = np.array([10.0])
    tiers = menu([10.0], [4.0], [10])
    found = load(rows=64, tokens=max(1, round(640 / (64 * prompts_a_round) * 64)))
    brought = found.rows_per_token * tokens[0]
    assert added(found, tiers) == pytest.approx([0.02 * brought], rel=0.03)


def test_where_rows_get_dearer_chance_costs_more_than_its_mean() -> None:
    def dearer(num_prompt_rows: Floats, num_rows: Counts) -> Floats:
        return 1e-4 * (num_prompt_rows + num_rows) ** 2 - 1e-4 * num_rows**2.0

    found = load(rows=64, tokens=64)
    brought = found.rows_per_token * TIERS.tokens
    at_once = np.array([dearer(rows, n) for rows, n in zip(brought, TIERS.num_rows, strict=True)])
    assert (added(found, TIERS, dearer) > at_once).all()


def test_beside_prompts_a_round_drafts_less_where_that_is_cheaper() -> None:
    """A wall behind 15 rows: nobody verifies drafts behind it beside prompts."""

    def wall(num_prompt_rows: Floats, num_rows: Counts) -> Floats:
        return 0.02 * num_prompt_rows + np.where(num_rows > 15, 1000.0, 0.0)

    cost = added(load(), TIERS, wall)
    chance = 1.0 - np.exp(-TIERS.tokens / 80)
    # Tier 0 beside a prompt: its own time, and tokens that are lost at what they are worth.
    worse = np.maximum(0.0, TIERS.ms[0] - TIERS.tokens[0] / TIERS.tokens * TIERS.ms)
    assert cost == pytest.approx(added(load()) + chance * worse)
    assert (cost < 2.0).all()


def test_tiers_that_can_not_be_had_are_nobodys_way_out() -> None:
    tiers = menu([10.0, 16.0], [4.0, math.inf], [10, 20])
    found = added(load(), tiers)
    assert np.isfinite(found[0])
    assert tiers.slowed(found / tiers.ms).goodput[1] == 0.0


def rounds_of_a_text(num_tokens: int, chances: list[float]) -> float:
    """Rounds until so many tokens are out, in the mean. chances: of 1, 2, .. tokens a round."""
    mean = [0.0]
    for left in range(1, num_tokens + 1):
        after = [mean[max(0, left - tokens)] for tokens in range(1, len(chances) + 1)]
        mean.append(1.0 + float(np.dot(chances, after)))
    return mean[-1]


@given(st.lists(st.floats(0.05, 0.95), max_size=7))
def test_a_text_takes_as_many_rounds_as_if_it_were_longer_by_what_its_end_loses(
    accept_rates: list[float],
) -> None:
    """A whole life: one round of the prompt, from which the first token comes, and all others."""
    survival = np.cumprod([1.0, *accept_rates])
    speeds = np.cumsum(survival)
    rounds = 1.0 + rounds_of_a_text(299, list(survival - np.append(survival[1:], 0.0)))
    assert rounds == pytest.approx((300 + lost_at_an_end(speeds)[-1]) / speeds[-1], rel=1e-3)


def test_the_end_of_a_text_without_drafts_loses_nothing() -> None:
    assert lost_at_an_end(np.array([1.0])) == pytest.approx([0.0])


def test_the_deeper_rounds_go_the_more_an_end_loses() -> None:
    lost = lost_at_an_end(np.array([1.0, 1.7, 2.2, 2.5]))
    assert (np.diff(lost) > 0).all()


def share(found: PromptLoad, row_ms: float, fixed_ms: float) -> Floats:
    """What ends take of rounds of as many ms as they have rows, and something."""

    def prompt_ms(num_prompt_rows: Floats, num_rows: Counts) -> Floats:
        return row_ms * num_prompt_rows + 0.0 * num_rows

    ms = fixed_ms + row_ms * TIERS.num_rows
    return found.idle_share(np.array([0.0, 1.0, 2.0]), ms, TIERS.num_rows, prompt_ms)


def test_where_rounds_take_what_they_take_whoever_is_idle_ends_cost_their_tokens() -> None:
    assert share(load(tokens=80), 0.0, 5.0) == pytest.approx([0.0, 1 / 80, 2 / 80])


def test_where_rounds_are_as_long_as_they_have_rows_an_idle_place_costs_nothing() -> None:
    assert share(load(tokens=80), 0.1, 0.0) == pytest.approx([0.0, 0.0, 0.0])


def test_ends_cost_short_texts_more() -> None:
    assert (share(load(tokens=40), 0.1, 5.0)[1:] > share(load(tokens=400), 0.1, 5.0)[1:]).all()
