"""Masks of tokens: what they allow stays as it is, the rest cannot be drawn."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.ops import score_edits
from serve_spec.ops.score_edits import LEAST
from tests.helpers.triton import DEVICE, reference

from serve_spec.ops import score_edits_triton  # isort: skip

VOCAB = 2500  # several blocks, the last one broken
WAYS = [reference(score_edits), score_edits_triton]


def packed(allowed):
    """Masks [M, V] of booleans as words."""
    num_masks, vocab = allowed.shape
    words = torch.zeros(num_masks, -(-vocab // 32), dtype=torch.int64)
    for token in range(vocab):
        words[:, token // 32] += allowed[:, token].long() << token % 32
    return words.to(torch.int32)  # the highest bit becomes the sign


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 9)), min_size=1, max_size=6, unique=True),
    st.lists(st.integers(-1, 3), min_size=6, max_size=6),
    st.integers(0, 2**32),
)
def test_a_token_keeps_the_scores_that_its_mask_allows_and_no_other(way, tokens, places, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(tokens), VOCAB, generator=generator)
    allowed = torch.rand(4, VOCAB, generator=generator) < 0.5
    found = logits.to(DEVICE)
    owners, offsets = torch.tensor(tokens, dtype=torch.int32, device=DEVICE).unbind(1)
    table = torch.tensor(places, dtype=torch.int32, device=DEVICE).view(2, 3)
    layout = owners.contiguous(), offsets.contiguous()
    way.mask_scores(found, *layout, table, packed(allowed).to(DEVICE))  # type: ignore[attr-defined]
    for row, (owner, offset) in enumerate(tokens):
        # Others are padding, or tokens of prompts.
        place = places[3 * owner + offset] if 0 <= owner < 2 and offset < 3 else -1
        keep = torch.ones(VOCAB, dtype=torch.bool) if place < 0 else allowed[place]
        expected = logits[row].masked_fill(~keep, float("-inf"))
        assert torch.equal(found[row].cpu(), expected)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_allowed_can_be_drawn_though_nothing_else_wants_it(way):
    logits = torch.full((3, VOCAB), float("-inf"), device=DEVICE)
    logits[1, 3] = 2.0
    logits[2, 3] = float("nan")
    allowed = torch.zeros(1, VOCAB, dtype=torch.bool)
    allowed[0, [3, 60]] = True
    numbers = torch.arange(3, dtype=torch.int32, device=DEVICE)
    places = torch.zeros(1, 3, dtype=torch.int32, device=DEVICE)
    words = packed(allowed).to(DEVICE)
    way.mask_scores(logits, numbers * 0, numbers, places, words)  # type: ignore[attr-defined]
    kept = logits[:, [3, 60]].cpu()
    assert torch.equal(kept[:2], torch.tensor([[LEAST, LEAST], [2.0, LEAST]]))
    assert kept[2].isnan().tolist() == [True, False], "a broken model is still told from a ban"
    assert (logits[:, 4:60] == float("-inf")).all()
