"""Laws of the training-time test: the unroll is what the drafter does when it drafts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.training.eagle import eagle_from
from serve_spec.training.eagle3 import eagle3_from
from serve_spec.training.llama import Llama, rotary_table
from serve_spec.training.medusa import MedusaHeads, medusa_loss
from serve_spec.training.settings import LlamaShape
from serve_spec.training.teacher import Lesson, Teacher
from serve_spec.training.unroll import DraftLayer, UnrollOps, attend, draft_loss, unroll

SHAPE = LlamaShape(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
STEPS = 5


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    model = Llama(SHAPE)
    model.initialise(torch.Generator().manual_seed(0))
    # Larger weights than at initialisation, so that attention is far from uniform.
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(8)
    return Teacher(model.double().requires_grad_(False), padding=STEPS + 1)


def sequential_states(
    layer: DraftLayer, teacher: Teacher, lesson: Lesson, tokens: Tensor, row: int
) -> list[Tensor]:
    """Draft from row `row` of one sequence as an engine does: prefill, then one token at a time,
    own state fed back, keys appended to a cache. tokens [1, T]; states [H] of steps 0..STEPS-1."""
    cos, sin = rotary_table(64, SHAPE.head_dim, SHAPE.rope_theta, tokens.device)
    cache_k = cache_v = torch.empty(1, SHAPE.num_key_value_heads, 0, SHAPE.head_dim).double()
    states: list[Tensor] = []
    incoming = layer.enter(lesson)[:, : row + 1]
    place = 0
    for step in range(STEPS):
        width = incoming.shape[1]
        at = slice(place, place + width)
        embeds = teacher.embed(tokens[:, place + 1 : place + 1 + width])
        residual, q, k, v = layer.project(embeds, incoming, cos[at].double(), sin[at].double())
        cache_k, cache_v = torch.cat([cache_k, k], 2), torch.cat([cache_v, v], 2)
        attended = F.scaled_dot_product_attention(
            q, cache_k, cache_v, is_causal=step == 0, enable_gqa=True
        )
        incoming = layer.finish(residual, attended)[:, -1:]
        states.append(incoming[0, 0])
        place += width
    return states


@pytest.mark.parametrize("family", ["eagle3", "eagle"])
def test_unroll_equals_sequential_drafting_with_a_cache(teacher: Teacher, family: str) -> None:
    build = {"eagle3": eagle3_from, "eagle": eagle_from}[family]
    layer = build(teacher.model, torch.Generator().manual_seed(1)).double()
    tokens = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(2))
    lesson = teacher(tokens)
    ops = UnrollOps.of(layer, torch.device("cpu"))
    with torch.no_grad():
        unrolled = list(unroll(layer, ops, teacher, lesson, STEPS))
        for row in (0, 7, 13):
            drafted = sequential_states(layer, teacher, lesson, tokens, row)
            for step in range(STEPS):
                # Softmax and norms run in float32 in both, in another order of summation.
                torch.testing.assert_close(
                    unrolled[step][0, row], drafted[step], rtol=2e-4, atol=2e-5
                )


def test_attention_over_unused_own_places_ignores_their_content() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 6, 8, generator=generator)
    k, v = torch.randn(2, 1, 2, 6, 8, generator=generator)
    own_k, own_v = torch.randn(2, 1, 2, 3, 6, 8, generator=generator)
    live = torch.tensor([True, False, False])
    before = attend(q, k, v, own_k, own_v, live)
    own_k[:, :, 1:] = 1e4
    own_v[:, :, 1:] = -1e4
    torch.testing.assert_close(attend(q, k, v, own_k, own_v, live), before)


def test_draft_loss_is_smallest_where_draft_and_target_agree() -> None:
    logits = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    probs = logits.softmax(-1)
    everywhere = torch.ones(3)
    same, overlap = draft_loss(logits, probs, everywhere, overlap_weight=1.0)
    other, less = draft_loss(logits.flip(-1), probs, everywhere, overlap_weight=1.0)
    assert overlap.item() == pytest.approx(1.0, abs=1e-5)
    assert same < other
    assert less < overlap


def test_medusa_head_h_is_trained_on_the_law_of_token_j_plus_2_plus_h(teacher: Teacher) -> None:
    """Heads that are the identity at row j reproduce the law of x_{j+1}; a lesson whose law of
    x_{j+2+h} is that very law therefore gives head h full overlap, and any other shift does not."""
    tokens = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(3))
    lesson = teacher(tokens)
    heads = MedusaHeads(SHAPE, 3, teacher.model.embedding).double()
    law = teacher.model.logits(lesson.last).softmax(-1)
    for head in range(3):
        probs = torch.zeros_like(lesson.probs)
        # probs[:, i] is the law of x_{i+1}; head h at j must be compared with i = j + 1 + h.
        probs[:, 1 + head : 1 + head + 12] = law[:, : probs.shape[1] - 1 - head]
        shifted = Lesson(lesson.tokens, lesson.captured, lesson.last, probs, lesson.row_tokens)
        _, overlaps = medusa_loss(heads, shifted, decay=0.8, overlap_weight=0.0)
        assert [o > 0.999 for o in overlaps] == [h == head for h in range(3)]
