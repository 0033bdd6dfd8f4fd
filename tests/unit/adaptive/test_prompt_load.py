"""The prompts that tokens bring are paid for, beside the drafts that pay there."""

from __future__ import annotations

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


TOKENS, MS = np.array([10.0, 16.0, 18.0]), np.array([4.0, 5.0, 6.0])
TIERS = Menu(TOKENS, np.array([10, 20, 30]), MS, TOKENS / MS, lambda k: np.full(1, k))


def alike(num_prompt_rows: Floats, num_rows: Counts) -> Floats:
    """Rows of prompts that take the same beside anything."""
    return 0.02 * num_prompt_rows + 0.0 * num_rows


@given(st.integers(1, 300), st.integers(1, 4000), st.integers(1, 4000))
def test_requests_that_are_alike_are_told_by_any_number_of_them(
    num_requests: int, rows: int, tokens: int
) -> None:
    found = load(num_requests, rows, tokens)
    assert found.rows_per_token == pytest.approx(rows / tokens)
    assert found.rows_per_prompt == pytest.approx(rows)


@given(st.floats(0.05, 40.0))
def test_the_mean_over_chance_is_the_mean_of_what_is_brought(prompts_a_round: float) -> None:
    """As many rows as tokens bring, however they come together, beside rounds of any size."""
    found = load(rows=64, tokens=max(1, round(640 / prompts_a_round)))
    brought = found.rows_per_token * TIERS.tokens
    added = found.added_ms(TIERS.tokens, TIERS.ms, TIERS, alike)
    assert added == pytest.approx(0.02 * brought, rel=0.03)


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


def share(found: PromptLoad, row_ms: float, fixed_ms: float) -> Floats:
    """What ends take of rounds of as many ms as they have rows, and something."""

    def prompt_ms(num_prompt_rows: Floats, num_rows: Counts) -> Floats:
        return row_ms * num_prompt_rows + 0.0 * num_rows

    ms = fixed_ms + row_ms * TIERS.num_rows
    return found.idle_share(np.array([0.0, 1.0, 2.0]), ms, TIERS.num_rows, prompt_ms)


def test_an_idle_place_costs_its_tokens_unless_rounds_are_only_as_long_as_they_have_rows() -> None:
    assert share(load(tokens=80), 0.0, 5.0) == pytest.approx([0.0, 1 / 80, 2 / 80])
    assert share(load(tokens=80), 0.1, 0.0) == pytest.approx([0.0, 0.0, 0.0])
