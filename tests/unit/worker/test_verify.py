"""The verdict on sampled drafts with its real noise: two positions, over rounds, and its power."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from serve_spec.core.draft import DraftChain, DraftLaws
from serve_spec.core.request import SamplingParams
from serve_spec.drafters.draws import SampledDraws
from serve_spec.ops.noise import Stream, StreamKeys, row_keys, stream_keys
from serve_spec.ops.sampling import SamplingRows, filter_scores
from serve_spec.verify.rejection import RejectionVerdict
from serve_spec.verify.verifier import judge

VOCAB, DRAWS, START = 6, 8_000, 0
CPU = torch.device("cpu")
FALSE_ALARM = 1e-6
SAMPLED = SamplingParams(temperature=1.0)


def laws(noise: float, *, is_markov: bool = True) -> tuple[Tensor, Tensor]:
    """Logits of a target by the token before [V, V], and those of a draft, off by `noise`.

    is_markov: False: both are the same after every token.
    """
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
    draft = target + noise * torch.randn(VOCAB, VOCAB, generator=generator)
    if is_markov:
        return target, draft
    return target[:1].repeat(VOCAB, 1), draft[:1].repeat(VOCAB, 1)


def round_of(
    method: str,
    target: Tensor,
    draft: Tensor,
    params: SamplingParams,
    texts: list[list[int]],
    seeds: list[int],
    depth: int,
    keys_of: StreamKeys,
    target_ids: Tensor | None = None,
) -> list[list[int]]:
    """What every request emits in one round of `depth` drafts after its text; all of one length."""
    position, count = len(texts[0]) - 1, len(texts)
    sampling = SamplingRows.create(
        [params] * (count * (depth + 1)),
        [seed for seed in seeds for _ in range(depth + 1)],
        [position + i for _ in seeds for i in range(depth + 1)],
        VOCAB,
        CPU,
    )
    roots = [b * (depth + 1) for b in range(count)]
    draws = SampledDraws(sampling, roots, depth, target_ids, CPU, keys_of)
    contexts = [torch.tensor([text[-1] for text in texts])]
    for step in range(depth):
        logits = draft[contexts[-1]]
        logits = logits if target_ids is None else logits[:, target_ids]
        contexts.append(draws.draw(logits, torch.arange(count), step))
    context = torch.stack(contexts, dim=1)
    chain = DraftChain(context[:, 1:], (depth,) * count, draws.laws)
    verdict = RejectionVerdict(method, keys_of)
    return verdict(target[context].reshape(-1, VOCAB), chain, sampling).token_ids


def emitted_pairs(
    method: str,
    noise: float = 1.0,
    params: SamplingParams = SAMPLED,
    keys_of: StreamKeys = stream_keys,
    target_ids: Tensor | None = None,
    *,
    is_markov: bool = True,
) -> tuple[float, float]:
    """p-value of the target's joint law of the first two tokens of many requests; share of first
    drafts kept.

    Two drafts in the first round, one in the second, which begins wherever the first one ended.
    """
    target, draft = laws(noise, is_markov=is_markov)
    seeds = [7 * seed for seed in range(DRAWS)]
    arguments = method, target, draft, params
    texts = [[START, *tokens] for tokens in round_of(
        *arguments, [[START]] * DRAWS, seeds, 2, keys_of, target_ids
    )]  # fmt: skip
    short = [b for b, text in enumerate(texts) if len(text) == 2]
    again = round_of(
        *arguments, [texts[b] for b in short], [seeds[b] for b in short], 1, keys_of, target_ids
    )
    for b, tokens in zip(short, again, strict=True):
        texts[b] += tokens
    first, second = torch.tensor([text[1:3] for text in texts]).unbind(1)
    counts = (first * VOCAB + second).bincount(minlength=VOCAB**2)
    scores = filter_scores(target.double() / params.temperature, [params] * VOCAB)
    law = scores.softmax(dim=1)
    expected = (law[START].unsqueeze(1) * law).flatten() * DRAWS
    assert not counts[expected == 0].any(), "what filters remove is never emitted"
    likely = expected > 0
    found = stats.chisquare(counts[likely].numpy(), expected[likely].numpy(), sum_check=False)
    return float(found.pvalue), 1 - len(short) / DRAWS


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize(
    ("noise", "is_markov", "params"),
    [
        (0.5, True, SAMPLED),
        (3.0, False, SAMPLED),
        (1.0, True, SamplingParams(temperature=0.7, top_k=4)),
    ],
)
def test_two_emitted_tokens_follow_the_targets_joint_law(
    method: str, noise: float, is_markov: bool, params: SamplingParams
) -> None:
    """Chi-square over 8,000 pairs; a right rule fails one choice of seeds in a million."""
    p_value, kept = emitted_pairs(method, noise, params, is_markov=is_markov)
    assert p_value > FALSE_ALARM
    assert 0.1 < kept < 0.95, "both ways out of a round must be taken often"


@pytest.mark.parametrize("method", ["standard", "block"])
def test_so_they_do_where_the_draft_knows_half_of_the_tokens(method: str) -> None:
    """As above: one in a million."""
    p_value, _ = emitted_pairs(method, target_ids=torch.tensor([4, 0, 3]))
    assert p_value > FALSE_ALARM


def shared_noise(
    stream: Stream, seeds: list[int], roots: list[int], positions: list[int]
) -> Tensor:
    """What is drawn in place of a draft sees the noise that the draft was drawn with."""
    stream = Stream.DRAFT if stream is Stream.RECOVER else stream
    return stream_keys(stream, seeds, roots, positions)


def noise_of_every_round(
    stream: Stream, seeds: list[int], roots: list[int], positions: list[int]
) -> Tensor:
    """Noise by position alone: what judged a block is seen again in the round after it."""
    return stream_keys(stream, seeds, [0] * len(seeds), positions)


def noise_of_the_law(
    stream: Stream, seeds: list[int], roots: list[int], positions: list[int]
) -> Tensor:
    """One noise for everything."""
    return row_keys(seeds, positions)


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("standard", shared_noise),
        ("block", shared_noise),
        ("block", noise_of_every_round),
        ("standard", noise_of_the_law),
        ("block", noise_of_the_law),
    ],
)
def test_the_same_test_finds_out_noise_that_is_used_twice(method: str, wrong: StreamKeys) -> None:
    """Were it not exact, the tests above would fail: these laws are the ones they look at."""
    p_value, _ = emitted_pairs(method, 3.0, keys_of=wrong, is_markov=False)
    assert p_value < FALSE_ALARM


def test_sampled_drafts_are_kept_more_often_than_any_others() -> None:
    """1 - TV of the first position, within five standard errors."""
    target, draft = laws(1.0)
    p, q = target[START].softmax(0), draft[START].softmax(0)
    _, kept = emitted_pairs("standard")
    overlap = float(torch.minimum(p, q).sum())
    assert abs(kept - overlap) < 5 * (overlap * (1 - overlap) / DRAWS) ** 0.5


def test_greedy_rows_and_rows_without_drafts_are_judged_as_ever() -> None:
    """And neither they nor broken drafts change what others of the batch emit."""
    target, draft = laws(1.0)
    params = [SamplingParams(temperature=t) for t in (0.0, 1.0, 1.0, 1.0)]
    steps = (2, 0, 2, 2)
    rows = [b for b, count in enumerate(steps) for _ in range(count + 1)]
    sampling = SamplingRows.create(
        [params[b] for b in rows],
        [b % 3 for b in rows],  # rows 0 and 3 share a seed
        [5 + i for count in steps for i in range(count + 1)],
        VOCAB,
        CPU,
    )
    tokens = torch.tensor([[1, 2], [0, 0], [3, -1], [3, 4]])
    scores = draft[torch.tensor([[0, 1], [0, 3], [0, 3]])]
    scores[1, 1] = float("nan")
    chain = DraftChain(tokens, steps, DraftLaws(scores, None))
    logits = target[torch.tensor([START, 1, 2, START, START, 3, 0, START, 3, 4])]
    walked, found = (
        judge(logits, chain, sampling),
        RejectionVerdict("block")(logits, chain, sampling),
    )
    assert found.token_ids[:2] == walked.token_ids[:2]
    assert found.broken_drafts == (2,)
    assert all(0 <= token < VOCAB for row in found.token_ids for token in row)
    assert len(found.token_ids[2]) <= 2
    alone = SamplingRows.create(params[3:] * 3, [0] * 3, [5, 6, 7], VOCAB, CPU)
    only = DraftChain(tokens[3:], (2,), DraftLaws(scores[2:], None))
    assert RejectionVerdict("block")(logits[-3:], only, alone).token_ids[0] == found.token_ids[3]


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_target_that_gives_nan_is_said_to_be_broken(method: str) -> None:
    target, draft = laws(1.0)
    target[:, 2] = float("nan")
    with pytest.raises(RuntimeError, match="check the checkpoint"):
        round_of(method, target, draft, SAMPLED, [[START]] * 3, [1, 2, 3], 2, stream_keys)
