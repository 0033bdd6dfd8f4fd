"""Verification of steps whose target, and draft, know the last token alone: the real operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from serve_spec.core.draft import TextDrafts
from serve_spec.core.request import SamplingParams
from serve_spec.ops import draw
from serve_spec.ops.acceptance import forced_counts
from serve_spec.ops.noise import seed_words
from serve_spec.ops.rejection import DraftLogits
from serve_spec.worker.forward import run_target
from serve_spec.worker.graphs import StepSize
from serve_spec.worker.request_slots import RING_TOKENS, RequestSlots
from serve_spec.worker.step_buffers import StepBuffers
from serve_spec.worker.verify import (
    Acceptance,
    Verifier,
    VerifyResult,
    draft_chances,
    read_results,
    survival_table,
)
from tests.helpers.plain_sampling import draw_params, processed, softmax

CPU = torch.device("cpu")
VOCAB, START, MAX_DEPTH = 6, 0, 3
FALSE_ALARM = 1e-6
SAMPLED, GREEDY = SamplingParams(temperature=1.0), SamplingParams(temperature=0.0)
METHODS = ["standard", "block"]


class Requests:
    """Requests in slots of their own, after a text of `START` alone.

    target: logits by the last token [V, V]. method: how drafts are drawn and verified.
    """

    def __init__(
        self,
        target: Tensor,
        params: Sequence[SamplingParams],
        seeds: Sequence[int] | None = None,
        method: str = "coupled",
        target_ids: Tensor | None = None,
        synthetic_acceptance: Acceptance | None = None,
    ) -> None:
        count, vocab = len(params), target.shape[1]
        slots = RequestSlots.create(count, 1, 0, vocab, CPU)
        slots.recent.fill_(START)
        known = draw_params(params, range(count) if seeds is None else seeds, CPU)
        for field, values in zip(slots.params, known, strict=True):
            field[:-1] = values
        self.buffers = StepBuffers.create(slots, MAX_DEPTH, None, 1)
        if method != "coupled":
            num_ids = vocab if target_ids is None else len(target_ids)
            logits = DraftLogits.create((count, MAX_DEPTH, num_ids), target_ids, vocab, CPU)
            self.buffers = replace(self.buffers, draft_logits=logits)
        self.target_ids = target_ids
        self.verifier = Verifier(MAX_DEPTH, CPU, synthetic_acceptance, method)
        self._target: Any = SimpleNamespace(
            model=SimpleNamespace(
                forward=lambda ids, *_: SimpleNamespace(hidden=ids, features=None),
                logits=lambda hidden: target[hidden].clone(),
            ),
            pool=SimpleNamespace(page_size=1 << 20, scratch_slot=0),
            kinds=(),
            capture=None,
            features=None,
        )

    def draft(self, draft: Tensor, depth: int) -> None:
        """Draft chains from a draft [V, V] as the configured method does."""
        buffers, slots = self.buffers, self.buffers.slots
        owners = torch.arange(buffers.max_requests, dtype=torch.int32)
        roots = slots.lengths[:-1].long()
        last = slots.recent[owners.long(), (roots - 1) % RING_TOKENS].long()
        for step in range(depth):
            logits = draft[last] if self.target_ids is None else draft[last][:, self.target_ids]
            arguments = logits, owners, roots + step
            if buffers.draft_logits is None:
                sharpness = buffers.sharpness
                last = draw.draw_drafts(*arguments, slots.params, sharpness, self.target_ids)
            else:
                buffers.draft_logits.logits[:, step] = logits
                last = draw.sample_drafts(*arguments, roots, slots.params, self.target_ids)
            buffers.drafts[:, step] = last

    def verify(self, counts: Sequence[int], drafts: Sequence[Sequence[int]] = ()) -> VerifyResult:
        """Verify so many drafts of each request, by default those of `draft`."""
        self.buffers.write_requests([*range(len(counts))], counts, counts)
        if drafts:
            self.buffers.write_drafts({b: TextDrafts((*ids,)) for b, ids in enumerate(drafts)})
        size = StepSize(sum(counts) + len(counts), len(counts))
        tokens = run_target(self._target, self.buffers, size, MAX_DEPTH + 1)
        self.verifier(tokens, self.buffers)
        self.logits = tokens.logits
        return read_results(self.buffers.results.tolist())


def markov(noise: float, *, is_markov: bool = True, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits by the token before [V, V] of a target, and of a draft that is off by `noise`.

    is_markov: False: both are the same after every token.
    """
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
    draft = target + noise * torch.randn(VOCAB, VOCAB, generator=generator)
    if is_markov:
        return target, draft
    return target[:1].repeat(VOCAB, 1), draft[:1].repeat(VOCAB, 1)


def emitted_pairs(
    method: str,
    noise: float = 1.0,
    params: SamplingParams = SAMPLED,
    target_ids: Tensor | None = None,
    *,
    is_markov: bool = True,
    draws: int = 8_000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the p-value of the target's joint distribution of the first two tokens of many
    requests, and the share of first drafts accepted.

    Two drafts in the first round, one in the second, which begins where the first one ended.
    """
    target, draft = markov(noise, is_markov=is_markov, seed=seed)
    seeds = [7 * seed for seed in range(draws)]
    requests = Requests(target, [params] * draws, seeds, method, target_ids)
    texts: list[list[int]] = [[] for _ in range(draws)]
    kept = 0
    for depth in (2, 1):
        requests.draft(draft, depth)
        for text, tokens in zip(texts, requests.verify([depth] * draws).token_ids, strict=True):
            kept += depth == 2 and len(tokens) > 1
            text += tokens
    counts = np.bincount([first * VOCAB + second for first, second, *_ in texts], None, VOCAB**2)
    law = np.stack([softmax(processed(row.tolist(), params)) for row in target])
    expected = (law[START][:, None] * law).flatten() * draws
    assert not counts[expected == 0].any(), "what filters remove is never emitted"
    likely = expected > 0
    found = stats.chisquare(counts[likely], expected[likely], sum_check=False)
    return float(found.pvalue), kept / draws


def test_a_coupled_draft_is_accepted_more_often_than_an_independent_one() -> None:
    target, draft = markov(0.3, seed=1)
    _, kept = emitted_pairs("coupled", 0.3, seed=1)
    independent = (target[START].softmax(0) * draft[START].softmax(0)).sum().item()
    assert kept > independent + 0.2


@pytest.mark.parametrize("method", ["coupled", *METHODS])
@pytest.mark.parametrize(
    ("noise", "is_markov", "params"),
    [
        (0.5, True, SAMPLED),
        (3.0, False, SAMPLED),
        (1.0, True, SamplingParams(temperature=0.7, top_k=4)),
    ],
)
def test_two_tokens_verified_follow_the_targets_joint_distribution(
    method: str, noise: float, is_markov: bool, params: SamplingParams
) -> None:
    """Chi-square over 8,000 pairs; a right rule fails one choice of seeds in a million."""
    p_value, kept = emitted_pairs(method, noise, params, is_markov=is_markov)
    assert p_value > FALSE_ALARM
    assert 0.1 < kept < 0.95, "both ways out of a round must be taken often"


@pytest.mark.parametrize("method", ["coupled", *METHODS])
def test_they_also_do_if_the_draft_knows_half_of_the_tokens(method: str) -> None:
    """As above: one in a million."""
    p_value, _ = emitted_pairs(method, target_ids=torch.tensor([4, 0, 3]))
    assert p_value > FALSE_ALARM


def test_greedy_requests_and_those_without_drafts_are_verified_as_without_rejection() -> None:
    """Neither they nor broken drafts change what others of the batch emit."""
    target, draft = markov(1.0)
    params, seeds = [GREEDY, SAMPLED, SAMPLED, SAMPLED], [0, 1, 2, 0]
    counts, drafts = [2, 0, 2, 2], [[1, 2], [0, 0], [3, -1], [3, 4]]

    def verified(method: str, at: Sequence[int]) -> VerifyResult:
        requests = Requests(target, [params[b] for b in at], [seeds[b] for b in at], method)
        if requests.buffers.draft_logits is not None:
            logits = requests.buffers.draft_logits.logits
            for place, b in enumerate(at):
                logits[place, :2] = draft[[START, 3]]
                logits[place, 1] += float("nan") if drafts[b][1] < 0 else 0
        return requests.verify([counts[b] for b in at], [drafts[b] for b in at])

    found = verified("block", range(4))
    assert found.token_ids[:2] == verified("coupled", range(4)).token_ids[:2]
    assert found.broken_drafts == (2,)
    assert all(0 <= token < VOCAB for row in found.token_ids for token in row)
    assert len(found.token_ids[2]) <= 2
    assert verified("block", [3]).token_ids[0] == found.token_ids[3]


@pytest.mark.parametrize("method", ["coupled", *METHODS])
def test_a_target_that_gives_nan_is_reported_as_broken(method: str) -> None:
    target, draft = markov(1.0)
    target[:, 2] = float("nan")
    requests = Requests(target, [SAMPLED] * 3, [1, 2, 3], method)
    requests.draft(draft, 2)
    with pytest.raises(RuntimeError, match="check the checkpoint"):
        requests.verify([2] * 3)


def forced(
    acceptance: Acceptance, num_steps: Sequence[int], seeds: Sequence[int] | None = None
) -> list[int]:
    """Return how many drafts are accepted of requests with these seeds at position 100."""
    seeds = range(len(num_steps)) if seeds is None else seeds
    words = torch.tensor([seed_words(seed) for seed in seeds], dtype=torch.int32)
    steps = torch.tensor(num_steps, dtype=torch.int32)
    at = torch.full((len(num_steps),), 100)
    found: list[int] = forced_counts(words, at, steps, survival_table(acceptance, 8)).tolist()
    return found


@given(st.integers(1, 8), st.floats(0, 1))
def test_a_length_within_reach_is_met_at_every_depth_by_one_chance(
    num_steps: int, share: float
) -> None:
    length = 1 + share * num_steps
    chances = draft_chances(length, num_steps)
    assert len(set(chances)) == 1
    mean = 1 + sum(accumulate(chances, lambda a, b: a * b))
    assert mean == pytest.approx(length, abs=1e-9)


@given(st.integers(1, 8), st.floats(0, 5))
def test_a_depth_that_cannot_reach_the_length_accepts_every_draft(
    num_steps: int, more: float
) -> None:
    assert forced(num_steps + 1 + more, [num_steps] * 5) == [num_steps] * 5


def test_a_list_is_the_same_at_every_depth_and_its_last_chance_goes_on() -> None:
    assert draft_chances([0.8, 0.6], 1) == [0.8]
    assert draft_chances([0.8, 0.6], 4) == [0.8, 0.6, 0.6, 0.6]


def test_of_the_requests_that_reach_a_position_the_asked_share_is_accepted() -> None:
    counts = forced([0.9, 0.5, 0.2], [3] * 20_000)
    for position, chance in enumerate([0.9, 0.5, 0.2]):
        reached = [count for count in counts if count >= position]
        share = sum(count > position for count in reached) / len(reached)
        assert share == pytest.approx(chance, abs=5 * 0.5 / len(reached) ** 0.5)


def test_forced_acceptance_differs_by_seed_and_from_round_to_round() -> None:
    target, _ = markov(1.0)
    requests = Requests(target, [GREEDY] * 50, synthetic_acceptance=[0.6])
    lengths = [
        [len(tokens) for tokens in requests.verify([3] * 50, [[1, 2, 3]] * 50).token_ids]
        for _ in range(2)
    ]
    assert len(set(lengths[0])) == 4
    assert lengths[0] != lengths[1]


def test_a_request_emits_the_drafts_it_is_forced_to_and_then_the_targets_draw() -> None:
    target, _ = markov(1.0)
    drafts = [1, 2, 3]
    requests = Requests(target, [GREEDY] * 6, synthetic_acceptance=[0.6])
    emitted = requests.verify([3, 0, 2, 3, 3, 1], [drafts] * 6).token_ids
    for tokens in emitted:
        kept = len(tokens) - 1
        assert tokens == [*drafts[:kept], int(target[[START, *drafts][kept]].argmax())]
    assert len({len(tokens) for tokens in emitted}) > 1, "the requests of this test differ"
