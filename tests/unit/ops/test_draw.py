"""Sampling: against plain numbers one row at a time, by its distribution, and its kernels."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.request import SamplingParams
from serve_spec.ops import draw as dispatched
from serve_spec.ops.dispatch import reference_of
from serve_spec.ops.draw import perturbed_scores, score_in_slices, score_tokens
from tests.helpers.memory import poisoned_memory
from tests.helpers.plain_sampling import assert_largest, draft_values, draw_params, values
from tests.helpers.triton import DEVICE

from serve_spec.ops import draw_triton  # isort: skip

draw_tokens = reference_of(dispatched.draw_tokens)
draw_children = reference_of(dispatched.draw_children)

CPU = torch.device("cpu")
VOCAB = 1500  # two chunks at the least, the last one broken
MIX = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0, top_k=2, top_p=0.1),
    SamplingParams(temperature=1.7, top_k=3),
    SamplingParams(temperature=0.6, top_p=0.7),
    SamplingParams(temperature=1.2, min_p=0.2),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1.0, top_k=1),
]

DRAW = pytest.mark.parametrize(
    "draw", [draw_tokens, draw_triton.draw_tokens], ids=["reference", "kernel"]
)
CHILDREN = pytest.mark.parametrize(
    "children", [draw_children, draw_triton.draw_children], ids=["reference", "kernel"]
)

seeds = st.integers(-(2**63), 2**63 - 1)
sampling_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-300, 1e-40, 1e-6, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 3, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01, 1e-300]),  # the last is 0 in float32
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mixed_round(num_rows, device=CPU):
    """Owners, positions and parameters of rows that go through all of `MIX`, and padding."""
    owners = torch.arange(num_rows, dtype=torch.int32) % (len(MIX) + 1) - 1
    positions = torch.arange(num_rows) * 37 + 5
    params = draw_params(MIX, [7 - 3 * 2**40 * i for i in range(len(MIX))], device)
    return owners.to(device), positions.to(device), params


@DRAW
@settings(max_examples=10)
@given(st.lists(st.tuples(sampling_params, seeds), min_size=1, max_size=6), st.booleans())
def test_a_token_is_the_likeliest_after_filters_and_noise(draw, rows, has_ties):
    params, row_seeds = (list(column) for column in zip(*rows, strict=True))
    logits = randn(len(rows), 60) * 3
    logits = logits.round() if has_ties else logits
    owners = torch.arange(len(rows), dtype=torch.int32, device=DEVICE)
    known = draw_params(params, row_seeds, DEVICE)
    found = draw(logits.to(DEVICE), owners, owners.long() + 90, known)
    numbers = [
        values(logits[r].tolist(), params[r], row_seeds[r], 90 + r) for r in range(len(rows))
    ]
    assert_largest(found.tolist(), numbers)


def assert_same_draws(found, expected, values):
    """Equal tokens, or a near tie: logarithms differ in their last places between the two.

    values: float32 [T, V], what the draws took the largest of.
    """
    for row in (found != expected).nonzero().flatten().tolist():
        assert min(found[row], expected[row]) >= 0, (row, found[row], expected[row])
        best, other = values[row, expected[row]].item(), values[row, found[row]].item()
        assert best - other <= 1e-5 * max(1.0, abs(best)), (row, best, other)


@pytest.mark.parametrize(
    ("dtype", "num_ids"),
    [(torch.float32, None), (torch.bfloat16, VOCAB - 300), (torch.float16, VOCAB - 300)],
)
def test_the_kernel_draws_what_the_reference_draws(dtype, num_ids):
    owners, positions, params = mixed_round(19, DEVICE)
    # A strided view of padded logits.
    logits = (randn(19, VOCAB + 36, seed=1) * 2.5).to(dtype).to(DEVICE)[:, :VOCAB]
    expected = draw_tokens(logits, owners, positions, params, num_ids=num_ids)
    values = perturbed_scores(logits, owners, positions, params, num_ids=num_ids)
    with poisoned_memory():
        found = draw_triton.draw_tokens(logits, owners, positions, params, num_ids=num_ids)
    assert found.dtype == torch.int64
    assert_same_draws(found, expected, values)


@DRAW
def test_a_row_is_drawn_alike_alone_and_among_many(draw):
    """Many rows are cut into other chunks than one; padding is enough to make them many."""
    few, many, vocab = 9, 400, 1400
    assert draw_triton._choose_chunk(1, vocab) != draw_triton._choose_chunk(many, vocab)
    owners, positions, params = mixed_round(few, DEVICE)
    logits = (randn(few, vocab, seed=4) * 2).to(DEVICE)
    alone = [
        draw(logits[r : r + 1], owners[r : r + 1], positions[r : r + 1], params) for r in range(few)
    ]
    padding = torch.arange(few, many, device=DEVICE)
    together = draw(
        torch.cat([logits, logits[:1].expand(many - few, -1)]),
        torch.cat([owners, torch.full_like(padding, -1, dtype=torch.int32)]),
        torch.cat([positions, padding]),
        params,
    )
    assert together[:few].tolist() == torch.cat(alone).tolist()


@DRAW
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_without_a_possible_token_draws_minus_one(draw, value):
    owners, positions, params = mixed_round(18, DEVICE)
    logits = randn(18, 200).to(DEVICE)
    logits[3:9, 170] = value
    logits[12:, :] = float("-inf")
    found = draw(logits, owners, positions, params)
    broken = torch.zeros(18, dtype=torch.bool)
    broken[3:9], broken[12:] = True, True
    assert (found.cpu() == -1).tolist() == (broken & (owners.cpu() >= 0)).tolist()


@DRAW
def test_greedy_takes_the_smallest_of_equal_tokens_and_padding_draws_nothing(draw):
    logits = torch.zeros(2, VOCAB, device=DEVICE)
    logits[:, [700, 1200, 1450]] = 4.0
    owners = torch.tensor([0, -1], dtype=torch.int32, device=DEVICE)
    params = draw_params([SamplingParams(temperature=0.0)], [0], DEVICE)
    found = draw(logits, owners, torch.zeros_like(owners).long(), params)
    assert found.tolist() == [700, 0]


@CHILDREN
@pytest.mark.parametrize("is_reduced", [False, True])
def test_children_are_the_likeliest_drafts_with_their_log_probabilities(children, is_reduced):
    width = 700 if is_reduced else VOCAB
    ids = [*range(3, 3 + 2 * width, 2)] if is_reduced else [*range(width)]
    target_ids = torch.tensor(ids, device=DEVICE) if is_reduced else None
    logits, row_seeds = randn(len(MIX), width, seed=4) * 3, [5 - i for i in range(len(MIX))]
    owners = torch.arange(len(MIX), dtype=torch.int32, device=DEVICE)
    arguments = (
        logits.to(DEVICE),
        owners,
        owners.long() * 7 + 90,
        draw_params(MIX, row_seeds, DEVICE),
        torch.tensor([0.85], device=DEVICE),
        target_ids,
    )
    found, likely = children(*arguments, 4)
    for r, params in enumerate(MIX):
        row = logits[r].tolist()
        numbers = draft_values(
            row, params, row_seeds[r], 90 + 7 * r, 0.85, ids if is_reduced else None
        )
        best = np.argsort(-numbers, kind="stable")[:4]
        assert found[r].tolist() == [ids[v] for v in best]
        expected = numbers[best] - np.logaddexp.reduce(numbers)
        np.testing.assert_allclose(likely[r].cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "num_rows", "width", "topk", "is_reduced"),
    [
        (torch.float32, 1, VOCAB, 1, False),
        (torch.bfloat16, 7, 1027, 5, False),
        (torch.float16, 7, 1027, 5, True),
        (torch.float32, 9, 40, 10, True),
    ],
)
def test_the_kernel_ranks_children_as_the_reference_does(dtype, num_rows, width, topk, is_reduced):
    """Equal scores, also across chunks; the last chunk of 1027 holds fewer than are wanted."""
    owners, positions, params = mixed_round(num_rows, DEVICE)
    logits = (randn(num_rows, width, seed=8) * 2).round().to(dtype)
    logits[:, 5::3] = float("-inf")
    target_ids = torch.arange(width, device=DEVICE) * 5 + 2 if is_reduced else None
    at = torch.full((1,), 0.85, device=DEVICE)
    arguments = logits.to(DEVICE), owners, positions, params, at, target_ids
    ids, likely = draw_children(*arguments, topk)
    with poisoned_memory():
        found, its_likely = draw_triton.draw_children(*arguments, topk)
    assert torch.equal(found, ids)
    torch.testing.assert_close(its_likely, likely, rtol=1e-5, atol=1e-5)
    chain, logprob = draw_triton.draw_children(*arguments, 1)
    assert torch.equal(found[:, :1], chain)
    torch.testing.assert_close(its_likely[:, :1], logprob, rtol=1e-5, atol=1e-5)


def test_children_are_the_same_in_chunks_of_any_size(monkeypatch):
    vocab = 4500
    sizes = [draw_triton._choose_chunk(num_rows, vocab) for num_rows in (1, 200, 1000)]
    assert len(set(sizes)) == 3
    owners, positions, params = mixed_round(5, DEVICE)
    logits = (randn(5, vocab, seed=9) * 2).round().to(DEVICE)
    at = torch.full((1,), 0.85, device=DEVICE)
    found = []
    for size in sizes:
        monkeypatch.setattr(draw_triton, "_choose_chunk", lambda *_, size=size: size)
        found.append(draw_triton.draw_children(logits, owners, positions, params, at, None, 3))
    for ids, likely in found[1:]:
        assert torch.equal(ids, found[0][0])
        torch.testing.assert_close(likely, found[0][1], rtol=1e-5, atol=1e-5)


@CHILDREN
def test_where_fewer_tokens_or_none_are_possible_the_other_children_are_none(children):
    """Those that there are have all of the probability; the first chunk has none."""
    owners, positions, params = mixed_round(4, DEVICE)
    logits = torch.full((4, VOCAB), float("-inf"), device=DEVICE)
    possible = [1030, 1100, 1400]
    logits[:, possible] = torch.tensor([-1.0, 0.5, -1.0], device=DEVICE)
    at = torch.ones(1, device=DEVICE)
    ids, likely = children(logits, owners, positions, params, at, None, 6)
    assert ids[1].tolist() == [1100, 1030, 1400, -1, -1, -1], "a greedy row ranks equals by id"
    assert [sorted(row) for row in ids[:, :3].tolist()] == [possible] * 4
    assert (ids[:, 3:] == -1).all()
    torch.testing.assert_close(likely.exp().sum(1), torch.ones_like(likely[:, 0]))
    logits = randn(4, VOCAB)
    logits[1, 1200] = float("nan")
    logits[2] = float("-inf")
    logits[3, 30] = float("inf")
    owners = torch.tensor([0, 1, 1, 0], dtype=torch.int32, device=DEVICE)
    rows = owners, owners.long() + 4, draw_params(MIX, [1] * len(MIX), DEVICE)
    for topk, reduced in ((3, None), (1, torch.arange(VOCAB, device=DEVICE) + 1000)):
        at = torch.ones(1, device=DEVICE)
        ids, likely = children(logits.to(DEVICE), *rows, at, reduced, topk)
        assert (ids[0] >= 0).all()
        assert (ids[1:] == -1).all()
        assert not likely[1:].isfinite().any()


def scored(logits, tokens, params, num_top):
    rows = draw_params(params, [0] * len(params), CPU)
    return score_tokens(logits, tokens, rows, num_top, has_filters=any(p.filters for p in params))


def test_equal_tokens_rank_by_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0]] * 4)
    table = scored(logits, torch.arange(4), [SamplingParams(temperature=0.0)] * 4, 0)
    assert table[:, 1].tolist() == [4, 1, 2, 3]


def test_rows_scored_in_slices_equal_those_scored_together(monkeypatch):
    params = [SamplingParams(temperature=0.5 + r / 10, top_k=r) for r in range(1, 12)]
    logits = torch.randn(11, 40, generator=torch.Generator().manual_seed(4))
    tokens = logits.argmax(-1)
    together = scored(logits, tokens, params, 3)
    seen = []

    def logits_of(part):
        seen.append(len(logits[part]))
        return logits[part]

    monkeypatch.setattr(dispatched, "_MAX_LOGITS", 4 * 40)
    rows = draw_params(params, [0] * 11, CPU)
    found = score_in_slices(logits_of, 40, tokens, rows, 3, has_filters=True)
    assert seen == [4, 4, 3]
    assert torch.equal(found, together)
