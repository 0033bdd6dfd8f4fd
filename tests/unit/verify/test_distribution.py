"""The emitted distribution is the target's, whatever the draft: tested on a Markov target."""

import pytest
import torch
from scipy import stats
from torch import Tensor

from serve_spec.core.draft import DraftChain
from serve_spec.core.request import SamplingParams
from serve_spec.ops.sampling import SamplingRows, sample_coupled
from serve_spec.verify.verifier import judge

VOCAB, DRAWS, DEPTH, START = 6, 100_000, 2, 0
CPU = torch.device("cpu")


def emitted_pairs(target: Tensor, draft: Tensor, temperature: float) -> tuple[Tensor, float]:
    """First two tokens of many requests from a Markov target [V, V], by rounds of speculation.

    Returns counts over the VOCAB² pairs and the share of first drafts kept.
    """
    params = [SamplingParams(temperature=temperature)] * DRAWS

    def rows(position: int, width: int) -> SamplingRows:
        seeds = [seed for seed in range(DRAWS) for _ in range(width)]
        positions = [position + i for _ in range(DRAWS) for i in range(width)]
        return SamplingRows.create(
            [p for p in params for _ in range(width)], seeds, positions, VOCAB, CPU
        )

    sampling = rows(0, DEPTH + 1)
    roots = torch.arange(DRAWS) * (DEPTH + 1)
    last, chain = torch.full((DRAWS,), START), []
    for step in range(DEPTH):
        last = sample_coupled(draft[last], sampling, roots + step, None)
        chain.append(last)
    drafts = torch.stack(chain, dim=1)
    context = torch.cat([torch.full((DRAWS, 1), START), drafts], dim=1)
    verdict = judge(
        target[context].reshape(-1, VOCAB), DraftChain(drafts, (DEPTH,) * DRAWS), sampling
    )
    first = torch.tensor([tokens[0] for tokens in verdict.token_ids])
    # Requests whose first draft was rejected draw their second token in the next round.
    again = judge(
        target[first],
        DraftChain(torch.zeros(DRAWS, 0, dtype=torch.int64), (0,) * DRAWS),
        rows(1, 1),
    )
    second = torch.tensor(
        [
            tokens[1] if len(tokens) > 1 else redrawn[0]
            for tokens, redrawn in zip(verdict.token_ids, again.token_ids, strict=True)
        ]
    )
    kept = sum(len(tokens) > 1 for tokens in verdict.token_ids) / DRAWS
    return (first * VOCAB + second).bincount(minlength=VOCAB * VOCAB), kept


@pytest.mark.parametrize(("temperature", "noise"), [(0.7, 3.0), (1.0, 0.3)])
def test_two_emitted_tokens_follow_the_targets_joint_law(temperature: float, noise: float) -> None:
    """Chi-square over 100k pairs, a good and a poor draft; fails by chance once in 10,000 seeds."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(VOCAB, VOCAB, generator=generator)
    draft = target + noise * torch.randn(VOCAB, VOCAB, generator=generator)
    counts, kept = emitted_pairs(target, draft, temperature)
    law = (target.double() / temperature).softmax(1)
    expected = (law[START].unsqueeze(1) * law).flatten() * DRAWS
    expected *= DRAWS / expected.sum()
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-4
    assert 0.1 < kept < 0.95, "both ways out of the walk must be taken often"


def test_a_coupled_draft_is_kept_more_often_than_an_independent_one() -> None:
    """At temperature 1 with a draft near the target: coupling beats chance by far."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(VOCAB, VOCAB, generator=generator)
    draft = target + 0.3 * torch.randn(VOCAB, VOCAB, generator=generator)
    _, kept = emitted_pairs(target, draft, 1.0)
    independent = (target[START].softmax(0) * draft[START].softmax(0)).sum().item()
    assert kept > independent + 0.2
