"""Rejection sampling against plain numbers one chain at a time: reference and kernels."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from serve_spec.core.request import SamplingParams
from serve_spec.ops import acceptance, draw, rejection
from serve_spec.ops.noise import Stream
from serve_spec.ops.rejection import DraftLogits
from tests.helpers.memory import poisoned_memory
from tests.helpers.plain_sampling import (
    assert_largest,
    coin,
    draw_params,
    gumbel,
    processed,
    softmax,
    stream_key,
    verify_chain,
)
from tests.helpers.triton import DEVICE, reference

from serve_spec.ops import draw_triton, rejection_triton  # isort: skip

CPU = torch.device("cpu")
VOCAB = 2100  # two chunks, the last one broken
MIX = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=0.9, top_k=9, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=0.0, top_k=2),
    SamplingParams(temperature=1.1, top_k=1),
    SamplingParams(temperature=1.0, top_p=1e-6),
    SamplingParams(temperature=2.0, top_k=2099),
    SamplingParams(temperature=0.3, top_p=0.999),
    SamplingParams(temperature=1.0, min_p=1.0),
]
METHODS = pytest.mark.parametrize("method", ["standard", "block"])
BOTH = pytest.mark.parametrize(
    "ops", [reference(rejection), rejection_triton], ids=["reference", "kernel"]
)


@dataclass
class Batch:
    """Chains of requests in slots of their own, the last one first; drafts are near the target.

    counts: drafts of each request; -1 for one that has left.
    """

    counts: list[int]
    depth: int
    params: list[SamplingParams]
    seeds: list[int]
    lengths: list[int]
    logits: Tensor
    draft_logits: Tensor
    target_ids: Tensor | None
    drafts: Tensor

    @classmethod
    def of(cls, counts, depth, noise=0.7, num_draft_ids=VOCAB):
        generator = torch.Generator().manual_seed(depth)
        size = len(counts)
        params = [MIX[b % len(MIX)] for b in range(size)]
        seeds, lengths = [11 - 3 * 2**40 * b for b in range(size)], [9 + 5 * b for b in range(size)]
        target_ids = None
        if num_draft_ids < VOCAB:
            target_ids = torch.randperm(VOCAB, generator=generator)[:num_draft_ids]
        base = torch.randn(size, depth + 1, VOCAB, generator=generator) * 3
        near = base[:, :depth] if target_ids is None else base[:, :depth, target_ids]
        near = near + noise * torch.randn(near.shape, generator=generator)
        logits = torch.cat([base[b, : n + 1] for b, n in enumerate(counts) if n >= 0])
        rows, owners = draw_params(params, seeds, CPU), torch.arange(size, dtype=torch.int32)
        roots = torch.tensor(lengths)
        drafts = [
            reference(draw).sample_drafts(near[:, i], owners, roots + i, roots, rows, target_ids)[0]
            for i in range(depth)
        ]
        drafted = torch.stack(drafts, dim=1)
        return cls(counts, depth, params, seeds, lengths, logits, near, target_ids, drafted)

    def expected(self, method):
        emitted, first = [], 0
        drawn = self._drawn.tolist()
        for b, count in enumerate(self.counts):
            if count < 0:
                continue
            tokens = self.drafts[b, :count].tolist()
            tokens = tokens[: tokens.index(-1)] if -1 in tokens else tokens
            draws = drawn[first : first + count + 1]
            kept, rejected = 0, None
            if self.params[b].is_greedy:
                while kept < len(tokens) and tokens[kept] == draws[kept]:
                    kept += 1
            elif tokens:
                kept, rejected = self._verify(method, b, tokens, self.logits[first:])
            emitted.append([*tokens[:kept], draws[kept] if rejected is None else rejected])
            first += count + 1
        return emitted

    def _verify(self, method, b, tokens, logits):
        params, seed, root = self.params[b], self.seeds[b], self.lengths[b]
        ids = range(VOCAB) if self.target_ids is None else self.target_ids.tolist()
        draft_probs = np.zeros((len(tokens), VOCAB))
        for i, row in enumerate(draft_probs):
            scores = self.draft_logits[b, i].double().numpy() / params.temperature
            row[list(ids)] = softmax(scores)
        return verify_chain(
            method,
            tokens,
            [*draft_probs],
            [softmax(processed(row.tolist(), params)) for row in logits[: len(tokens) + 1]],
            [coin(stream_key(Stream.ACCEPT, seed, root, root + i)) for i in range(len(tokens))],
            stream_key(Stream.RECOVER, seed, root, root),
        )

    @property
    def _rows(self):
        return [(b, i) for b, n in enumerate(self.counts) for i in range(n + 1)]

    @property
    def _drawn(self):
        owners = torch.tensor([b for b, _ in self._rows], dtype=torch.int32)
        positions = torch.tensor([self.lengths[b] + i for b, i in self._rows])
        rows = draw_params(self.params, self.seeds, CPU)
        return reference(draw).draw_tokens(self.logits, owners, positions, rows)

    def emitted(self, method, ops):
        size = len(self.counts)
        params = draw_params(self.params[::-1], self.seeds[::-1], DEVICE)
        slots = torch.arange(size - 1, -1, -1, dtype=torch.int32, device=DEVICE)
        lens = torch.tensor([n + 1 for n in self.counts], dtype=torch.int32)
        starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32).to(DEVICE)
        padding = [0] * 3
        tokens = [int(self.drafts[b, i - 1]) if i else 5 for b, i in self._rows] + padding
        positions = torch.tensor([self.lengths[b] + i for b, i in self._rows] + padding).to(DEVICE)
        parents = torch.tensor([i - 1 for _, i in self._rows] + padding, dtype=torch.int32)
        logits = torch.cat([self.logits, self.logits[:1].expand(3, -1)]).to(DEVICE)
        row_tokens = torch.tensor(tokens).to(DEVICE)
        shape = size + 2, self.depth, self.draft_logits.shape[2]
        ids = None if self.target_ids is None else self.target_ids.to(DEVICE)
        drafted = DraftLogits.create(shape, ids, VOCAB, DEVICE)
        drafted.logits.fill_(float("nan"))[:size] = self.draft_logits.to(DEVICE)
        drawn = torch.cat([self._drawn, torch.tensor(padding, dtype=torch.int64)]).to(DEVICE)
        with poisoned_memory():
            forced = ops.reject_drafts(
                logits,
                rejection.Chains(row_tokens, starts, slots),
                drawn,
                positions,
                params,
                drafted,
                method,
            )
        accepted = reference(acceptance).accept_path(
            row_tokens, parents.to(DEVICE), drawn, starts, self.depth, forced
        )
        found = zip(accepted.token_ids.tolist(), accepted.num_correct.tolist(), strict=True)
        there = (n >= 0 for n in self.counts)
        return [row[: kept + 1] for (row, kept), is_in in zip(found, there, strict=True) if is_in]


def ragged(depth, size=14):
    return [[depth, 0, max(0, depth - 1), 1, depth, -1, depth][b % 7] for b in range(size)]


@pytest.mark.parametrize("ops", [reference(draw), draw_triton], ids=["reference", "kernel"])
@pytest.mark.parametrize("is_reduced", [False, True])
def test_sampled_drafts_have_noise_of_their_own(ops, is_reduced):
    """And a row from which no token can be drawn gives -1."""
    depth, size = 2, len(MIX)
    made = Batch.of([depth] * size, depth, num_draft_ids=1300 if is_reduced else VOCAB)
    params = draw_params(made.params, made.seeds, DEVICE)
    ids = None if made.target_ids is None else made.target_ids.to(DEVICE)
    owners = torch.arange(size, dtype=torch.int32, device=DEVICE)
    owners[4] = -1
    roots = torch.tensor(made.lengths, device=DEVICE)
    draft_id = {v: i for i, v in enumerate([*range(VOCAB)] if ids is None else ids.tolist())}
    for step in range(depth):
        logits = made.draft_logits[:, step].to(DEVICE)
        logits[7, 3] = float("nan")
        with poisoned_memory():
            drafts, peaks = ops.sample_drafts(logits, owners, roots + step, roots, params, ids)
        found = drafts.tolist()
        assert (found[4], found[7]) == (0, -1)
        whole = [b for b in range(size) if b not in (4, 7)]
        numbers, most_likely = [], []
        for b in whole:
            row, root = made.params[b], made.lengths[b]
            key = stream_key(Stream.DRAFT, made.seeds[b], root, root + step)
            scores = made.draft_logits[b, step].double().numpy()
            is_random = not row.is_greedy
            scale = 1 / row.temperature if is_random else 1.0
            numbers.append(scores * scale + is_random * gumbel(key, len(scores)))
            most_likely.append((scores * scale).max() - np.logaddexp.reduce(scores * scale))
        np.testing.assert_allclose(peaks[whole].cpu(), most_likely, rtol=1e-4, atol=1e-4)
        assert_largest([draft_id[found[b]] for b in whole], numbers)


def broken(made):
    for b in range(0, len(made.counts), 2):
        made.drafts[b, b % 4] = -1
        made.draft_logits[b, b % 4] = float("nan")
    return made


BATCHES = {
    "few draft ids": lambda: Batch.of(ragged(2), 2, num_draft_ids=1300),
    "long chains": lambda: Batch.of(ragged(4, 7), 4),
    "alone": lambda: Batch.of([4], 4, noise=1.5),
    "broken drafts": lambda: broken(Batch.of([4] * 5, 4, noise=0.0)),
}


@cache
def batch_and_expected(name, method):
    made = BATCHES[name]()
    return made, made.expected(method)


@pytest.mark.parametrize("name", BATCHES)
@METHODS
@BOTH
def test_drafts_are_accepted_by_their_probabilities(ops, method, name):
    made, expected = batch_and_expected(name, method)
    assert made.emitted(method, ops) == expected
    kept = sum(len(tokens) - 1 for tokens in expected)
    assert 0 < kept < sum(n for n in made.counts if n >= 0), "drafts are kept, and others are not"


@BOTH
@METHODS
def test_a_target_that_gives_nan_draws_no_token(ops, method):
    made = Batch.of([2] * 3, 2)
    made.logits[:, 40] = float("nan")
    assert [tokens[-1] for tokens in made.emitted(method, ops)] == [-1] * 3


@BOTH
@pytest.mark.parametrize(
    ("filters", "has_ties"),
    [({"top_k": 3}, True), ({"top_p": 0.8}, False), ({"min_p": 0.2}, True)],
    ids=str,
)
def test_an_unlikely_draft_is_accepted_unless_a_filter_removes_it(ops, filters, has_ties):
    """The likeliest tokens of one distribution, each drafted once by an unlikely draft."""
    count, params = 6, SamplingParams(temperature=0.5, **filters)
    made = Batch.of([1] * count, 1)
    made.params = [params] * count
    made.logits = made.logits[:1].expand(2 * count, -1)
    made.logits = made.logits.round() if has_ties else made.logits
    made.drafts = made.logits[0].topk(count).indices.unsqueeze(1)
    made.draft_logits = torch.zeros(count, 1, VOCAB).scatter_(2, made.drafts.unsqueeze(1), -20.0)
    kept = [len(tokens) > 1 for tokens in made.emitted("standard", ops)]
    scores = processed(made.logits[0].tolist(), params)
    assert kept == [scores[token] > -np.inf for token in made.drafts[:, 0].tolist()]
    assert 0 < sum(kept) < count
