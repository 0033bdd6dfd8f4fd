"""Forced acceptance: the law that was asked for, drawn from seed and position alone."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.draft import DraftChain
from serve_spec.core.request import SamplingParams
from serve_spec.ops.sampling import SamplingRows
from serve_spec.verify.synthetic import (
    Acceptance,
    SyntheticVerdict,
    choose_verdict,
    draft_chances,
)
from serve_spec.verify.verifier import judge

VOCAB = 50
CPU = torch.device("cpu")
ROWS = 20_000

acceptances = st.one_of(st.floats(1, 9), st.lists(st.floats(0, 1), min_size=1, max_size=8))


def kept(acceptance: Acceptance, num_steps: list[int], start: int = 0) -> list[int]:
    """Drafts kept of rows with seeds `start`, `start + 1`, ... at position 100."""
    seeds = [start + i for i in range(len(num_steps))]
    verdict = SyntheticVerdict(acceptance)
    return verdict.num_correct_drafts(num_steps, seeds=seeds, positions=[100] * len(seeds))


def mean_length(chances: list[float]) -> float:
    return 1 + sum(accumulate(chances, lambda a, b: a * b))


@given(st.integers(1, 8), st.floats(0, 1))
def test_a_length_within_reach_is_met_at_every_depth_by_one_chance(
    num_steps: int, share: float
) -> None:
    length = 1 + share * num_steps
    chances = draft_chances(length, num_steps)
    assert len(set(chances)) == 1
    assert mean_length(chances) == pytest.approx(length, abs=1e-9)


@given(st.integers(1, 8), st.floats(0, 5))
def test_a_depth_that_can_not_reach_the_length_keeps_every_draft(
    num_steps: int, more: float
) -> None:
    assert kept(num_steps + 1 + more, [num_steps] * 5) == [num_steps] * 5


def test_a_list_is_one_law_at_every_depth_and_its_last_chance_goes_on() -> None:
    assert draft_chances([0.8, 0.6], 1) == [0.8]
    assert draft_chances([0.8, 0.6], 4) == [0.8, 0.6, 0.6, 0.6]


@pytest.mark.parametrize("num_steps", [2, 3, 7])
def test_the_mean_over_many_rows_is_the_length_asked_for(num_steps: int) -> None:
    """Five standard errors of a count within 0..num_steps."""
    mean = 1 + sum(kept(2.5, [num_steps] * ROWS)) / ROWS
    assert mean == pytest.approx(2.5, abs=5 * num_steps / 2 / ROWS**0.5)


def test_of_the_rows_that_reach_a_position_the_asked_share_is_kept() -> None:
    counts = kept([0.9, 0.5, 0.2], [3] * ROWS)
    for position, chance in enumerate([0.9, 0.5, 0.2]):
        reached = [count for count in counts if count >= position]
        share = sum(count > position for count in reached) / len(reached)
        assert share == pytest.approx(chance, abs=5 * 0.5 / len(reached) ** 0.5)


@given(acceptances, st.lists(st.integers(0, 8), min_size=1, max_size=20))
def test_a_row_never_keeps_more_than_it_drafted(
    acceptance: Acceptance, num_steps: list[int]
) -> None:
    counts = kept(acceptance, num_steps)
    assert all(0 <= count <= steps for count, steps in zip(counts, num_steps, strict=True))


@given(acceptances, st.lists(st.integers(0, 8), min_size=1, max_size=10))
def test_what_a_row_keeps_does_not_depend_on_its_batch(
    acceptance: Acceptance, num_steps: list[int]
) -> None:
    together = kept(acceptance, num_steps)
    alone = [kept(acceptance, [steps], start=seed)[0] for seed, steps in enumerate(num_steps)]
    assert together == alone


def test_seeds_and_positions_draw_for_themselves() -> None:
    verdict = SyntheticVerdict([0.5])
    by_seed = verdict.num_correct_drafts([8] * 50, seeds=list(range(50)), positions=[9] * 50)
    by_position = verdict.num_correct_drafts([8] * 50, seeds=[9] * 50, positions=list(range(50)))
    assert len(set(by_seed)) > 3
    assert len(set(by_position)) > 3


def ragged_round(num_steps: list[int]) -> tuple[torch.Tensor, DraftChain, SamplingRows]:
    """Drafts 10, 11, ... in every row; the target draws 30, 31, ... along all rows."""
    draws = [(b, i) for b, steps in enumerate(num_steps) for i in range(steps + 1)]
    logits = torch.nn.functional.one_hot(torch.arange(len(draws)) % 20 + 30, VOCAB).float()
    drafts = (torch.arange(max(num_steps)) + 10).expand(len(num_steps), -1)
    sampling = SamplingRows.create(
        [SamplingParams(temperature=0)] * len(draws),
        seeds=[b for b, _ in draws],
        positions=[100 + i for _, i in draws],
        vocab_size=VOCAB,
        device=CPU,
    )
    return logits, DraftChain(drafts, tuple(num_steps)), sampling


def test_a_row_emits_the_drafts_it_keeps_and_then_the_target_s_draw_after_them() -> None:
    num_steps = [3, 0, 2, 3]
    emitted = SyntheticVerdict([0.6])(*ragged_round(num_steps)).token_ids
    root = 30
    for tokens, steps, count in zip(emitted, num_steps, kept([0.6], num_steps), strict=True):
        assert tokens == [*range(10, 10 + count), root + count]
        root += steps + 1
    assert len({len(tokens) for tokens in emitted}) > 1, "the draws of this test must differ"


@pytest.mark.parametrize("acceptance", [4.0, [1.0]])
def test_a_round_without_drafts_is_decided_by_the_target(acceptance: Acceptance) -> None:
    plain = ragged_round([0, 0, 0])
    assert SyntheticVerdict(acceptance)(*plain) == judge(*plain)


def test_unless_it_is_asked_for_the_target_judges() -> None:
    assert choose_verdict(None) is judge
