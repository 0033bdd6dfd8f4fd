"""Sampled drafts on the device: drawn and judged as on the host, by the law and its kernels."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_spec.core.draft import DraftChain, DraftLaws
from serve_spec.core.request import SamplingParams
from serve_spec.drafters.draws import SampledDraws
from serve_spec.ops import acceptance, draw, rejection
from serve_spec.ops.noise import Stream, seed_words, stream_keys
from serve_spec.ops.rejection import DraftLogits
from serve_spec.ops.sampling import SamplingRows, draw_params
from serve_spec.verify.rejection import RejectionVerdict
from tests.helpers.memory import poisoned_memory
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
]
METHODS = pytest.mark.parametrize("method", ["standard", "block"])
TWINS = pytest.mark.parametrize(
    "twin", [reference(rejection), rejection_triton], ids=["plain", "kernel"]
)


@dataclass
class Round:
    """Drafts of sequences on lanes of their own, the last one first, drawn from laws near p."""

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
    def of(
        cls, counts: list[int], depth: int, noise: float = 0.7, num_draft_ids: int = VOCAB
    ) -> Round:
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
        draws = SampledDraws(rows_of(params, seeds, lengths, [depth] * size),
            [b * (depth + 1) for b in range(size)], depth, target_ids, CPU)  # fmt: skip
        drafts = [draws.draw(near[:, i], torch.arange(size), i) for i in range(depth)]
        return cls(counts, depth, params, seeds, lengths, logits, near, target_ids,
            torch.stack(drafts, dim=1))  # fmt: skip

    def judged_by_the_host(self, method: str) -> list[list[int]]:
        """What sequences that have rows emit."""
        there = [b for b, n in enumerate(self.counts) if n >= 0]
        counts = [self.counts[b] for b in there]
        rows = rows_of(*([of[b] for b in there] for of in self.known), counts)
        drafting = [b for b in there if self.counts[b]]
        inverse = torch.tensor([1 / (self.params[b].temperature or 1.0) for b in drafting])
        scores = self.draft_logits[drafting] * inverse.view(-1, 1, 1)
        laws = DraftLaws(scores, self.target_ids)
        chain = DraftChain(self.drafts[there], tuple(counts), laws)
        return RejectionVerdict(method)(self.logits, chain, rows).token_ids

    @property
    def known(self) -> tuple[list[SamplingParams], list[int], list[int]]:
        return self.params, self.seeds, self.lengths

    def judged_on_lanes(self, method: str, twin: Any, num_padding: int = 3) -> list[list[int]]:
        """The same, over the static tensors of a round."""
        size = len(self.counts)
        params = draw_params(self.params[::-1], self.seeds[::-1], DEVICE)
        lanes = torch.arange(size - 1, -1, -1, dtype=torch.int32, device=DEVICE)
        lens = torch.tensor([n + 1 for n in self.counts], dtype=torch.int32)
        starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32).to(DEVICE)
        rows = [(b, i) for b, n in enumerate(self.counts) for i in range(n + 1)]
        padding = [0] * num_padding
        tokens = [int(self.drafts[b, i - 1]) if i else 5 for b, i in rows] + padding
        positions = torch.tensor([self.lengths[b] + i for b, i in rows] + padding).to(DEVICE)
        owners = torch.tensor([size - 1 - b for b, _ in rows] + [-1] * num_padding)
        owners = owners.to(torch.int32).to(DEVICE)
        parents = torch.tensor([i - 1 for _, i in rows] + padding, dtype=torch.int32).to(DEVICE)
        logits = torch.cat([self.logits, self.logits[:1].expand(num_padding, -1)]).to(DEVICE)
        row_tokens = torch.tensor(tokens).to(DEVICE)
        shape = size + 2, self.depth, self.draft_logits.shape[2]
        ids = None if self.target_ids is None else self.target_ids.to(DEVICE)
        drafted = DraftLogits.create(shape, ids, VOCAB, DEVICE)
        drafted.logits.fill_(float("nan"))[:size] = self.draft_logits.to(DEVICE)
        drawn = reference(draw).draw_tokens(logits, owners, positions, params)
        with poisoned_memory():
            forced = twin.reject_drafts(
                logits, row_tokens, drawn, starts, lanes, positions, params, drafted, method
            )
        accepted = reference(acceptance).accept_path(
            row_tokens, parents, drawn, starts, self.depth, forced
        )
        emitted = zip(accepted.token_ids.tolist(), accepted.num_correct.tolist(), strict=True)
        there = (n >= 0 for n in self.counts)
        return [row[: kept + 1] for (row, kept), is_in in zip(emitted, there, strict=True) if is_in]


def rows_of(
    params: list[SamplingParams], seeds: list[int], lengths: list[int], counts: list[int]
) -> SamplingRows:
    at = [(b, i) for b, n in enumerate(counts) for i in range(n + 1)]
    return SamplingRows.create(
        [params[b] for b, _ in at],
        [seeds[b] for b, _ in at],
        [lengths[b] + i for b, i in at],
        VOCAB,
        CPU,
    )


def ragged(depth: int, size: int = 18) -> list[int]:
    """Rows with all drafts, with fewer, with none, and (-1) sequences that have left."""
    return [[depth, 0, max(0, depth - 1), 1, depth, -1, depth][b % 7] for b in range(size)]


@pytest.mark.parametrize("stream", Stream)
def test_keys_of_a_stream_made_on_the_device_have_the_hosts_bits(stream: Stream) -> None:
    seeds, roots = [0, -1, 2**63 - 1, -7 * 2**40, 5], [1, 2**31 + 3, 900, 17, 4]
    positions = [root + i for i, root in enumerate(roots)]
    words = torch.tensor([seed_words(seed) for seed in seeds], dtype=torch.int32, device=DEVICE)
    made = draw.stream_seeds_of(stream, words, torch.tensor(roots, device=DEVICE))
    found = draw.row_keys_of(made, torch.tensor(positions, device=DEVICE))
    assert torch.equal(found.cpu(), stream_keys(stream, seeds, roots, positions))


@pytest.mark.parametrize("twin", [reference(draw), draw_triton], ids=["plain", "kernel"])
@pytest.mark.parametrize("is_reduced", [False, True])
def test_sampled_drafts_are_the_hosts(twin: Any, is_reduced: bool) -> None:
    """And a row that no token can be drawn from says so."""
    depth, size = 3, 20
    num_ids = 1300 if is_reduced else VOCAB
    made = Round.of([depth] * size, depth, num_draft_ids=num_ids)
    params = draw_params(made.params, made.seeds, DEVICE)
    ids = None if made.target_ids is None else made.target_ids.to(DEVICE)
    owners = torch.arange(size, dtype=torch.int32, device=DEVICE)
    owners[4] = -1
    roots = torch.tensor(made.lengths, device=DEVICE)
    for step in range(depth):
        logits = made.draft_logits[:, step].to(DEVICE)
        logits[7, 3] = float("nan")
        with poisoned_memory():
            found = twin.sample_drafts(logits, owners, roots + step, roots, params, ids)
        expected = made.drafts[:, step].clone()
        expected[4], expected[7] = 0, -1
        assert found.tolist() == expected.tolist()


@TWINS
@METHODS
@pytest.mark.parametrize(("depth", "num_draft_ids"), [(1, VOCAB), (2, 1300), (5, VOCAB)])
def test_lanes_judge_as_the_host_does(
    twin: Any, method: str, depth: int, num_draft_ids: int
) -> None:
    """Ragged chains, greedy ones and those of filtered laws among them."""
    made = Round.of(ragged(depth), depth, num_draft_ids=num_draft_ids)
    expected = made.judged_by_the_host(method)
    assert made.judged_on_lanes(method, twin) == expected
    kept = [len(tokens) - 1 for tokens in expected]
    counts = [n for n in made.counts if n >= 0]
    assert 0 < sum(kept) < sum(counts), "the test needs kept and lost drafts"


@TWINS
@METHODS
def test_chains_end_before_a_draft_that_is_no_token(twin: Any, method: str) -> None:
    made = Round.of([4] * 9, 4, noise=0.0)
    for b in range(0, 9, 2):
        made.drafts[b, b % 4] = -1
        made.draft_logits[b, b % 4] = float("nan")
    expected = made.judged_by_the_host(method)
    assert made.judged_on_lanes(method, twin) == expected
    assert max(map(len, expected[::2])) > 1


@TWINS
@METHODS
def test_where_filters_end_among_equal_scores_the_smallest_ids_are_left(
    twin: Any, method: str
) -> None:
    """Scores of a few values only: every cut is among equals."""
    made = Round.of(ragged(2), 2)
    made.logits = (made.logits * 0.7).round() * 2
    assert made.judged_on_lanes(method, twin) == made.judged_by_the_host(method)


@TWINS
@METHODS
def test_a_draft_that_is_the_target_is_kept_on_lanes_too(twin: Any, method: str) -> None:
    made = Round.of([3] * 9, 3, noise=0.0)
    kept = [len(tokens) - 1 for tokens in made.judged_on_lanes(method, twin)]
    sampled = [n for n, p in zip(kept, made.params, strict=True) if not p.filters]
    assert sampled == [3] * len(sampled)


@TWINS
@METHODS
def test_a_target_that_gives_nan_is_said_to_be_broken_on_lanes_too(twin: Any, method: str) -> None:
    made = Round.of([2] * 9, 2)
    made.logits[:, 40] = float("nan")
    assert [tokens[-1] for tokens in made.judged_on_lanes(method, twin)] == [-1] * 9


@TWINS
@METHODS
def test_how_a_chain_is_judged_does_not_depend_on_the_others(twin: Any, method: str) -> None:
    whole = Round.of(ragged(2), 2)
    together = whole.judged_on_lanes(method, twin)
    there = [b for b, n in enumerate(whole.counts) if n >= 0]
    first = 0
    for number, b in enumerate(there[:5]):
        rows = whole.counts[b] + 1
        alone = Round(
            [whole.counts[b]], 2, *([of[b]] for of in whole.known),
            whole.logits[first : first + rows], whole.draft_logits[b : b + 1], None,
            whole.drafts[b : b + 1],
        )  # fmt: skip
        assert alone.judged_on_lanes(method, twin, num_padding=0) == together[number : number + 1]
        first += rows


@pytest.mark.parametrize("has_ties", [False, True])
def test_laws_end_where_their_filters_do(has_ties: bool) -> None:
    """Also at scores of 0, which no number halved gets to."""
    rng, size, vocab = random.Random(1), 40, 700
    params = [
        SamplingParams(
            temperature=rng.choice([0.3, 1.0, 2.0]),
            top_k=rng.choice([0, 0, 1, 2, 50, 699]),
            top_p=rng.choice([1.0, 1.0, 0.999, 0.9, 0.5, 0.01]),
            min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
        )
        for _ in range(size)
    ]
    logits = torch.randn(2 * size, vocab, generator=torch.Generator().manual_seed(1)) * 3
    logits = (logits.round() if has_ties else logits).to(DEVICE)
    logits[5, 100:] = float("-inf")
    on_device = draw_params(params, [0] * size, DEVICE)
    starts = torch.arange(0, 2 * size + 1, 2, dtype=torch.int32, device=DEVICE)
    lanes = torch.arange(size, dtype=torch.int32, device=DEVICE)
    tops, totals, cuts = (torch.full((size, 3), float("nan"), device=DEVICE) for _ in range(3))
    cut_ids = torch.zeros(size, 3, dtype=torch.int32, device=DEVICE)
    rejection_triton._law_kernel[(3, size)](
        *(tops, totals, cuts, cut_ids, logits, vocab, starts, lanes),
        *(on_device.inverse_temperature, logits, lanes),
        *(on_device.top_k, on_device.top_p, on_device.min_p),
        DEPTH=1,
        NUM_IDS=vocab,
        NUM_DRAFT_IDS=vocab,
        BLOCK=256,
        CUT_BLOCK=256,
        DEPENDENT=False,
    )
    rows = on_device.of(lanes.repeat_interleave(2))
    scores = draw.tempered(logits, rows.inverse_temperature)
    ids = torch.arange(vocab, device=DEVICE)
    cut, cut_id = cuts[:, :2].reshape(-1, 1), cut_ids[:, :2].reshape(-1, 1)
    kept = (scores > cut) | ((scores == cut) & (ids < cut_id))
    likely = scores.softmax(dim=1) > 0
    assert torch.equal(kept & likely, draw.survivors(scores, rows) & likely)
    masses = (scores - scores.amax(dim=1, keepdim=True)).exp() * kept
    torch.testing.assert_close(totals[:, :2].flatten(), masses.sum(dim=1))
