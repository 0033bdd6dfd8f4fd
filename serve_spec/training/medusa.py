"""Medusa heads over the target's own output head (arXiv 2401.10774), in vLLM's layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_spec.training.settings import LlamaShape
from serve_spec.training.teacher import Lesson
from serve_spec.training.unroll import draft_loss


class ResBlock(nn.Module):
    """x + SiLU(W x + b), saved as `layers.0.{weight,bias}`; starts as the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden_size, hidden_size)])
        nn.init.zeros_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)

    @property
    def inner(self) -> nn.Linear:
        layer = self.layers[0]
        assert isinstance(layer, nn.Linear)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.inner.weight.to(x.dtype), self.inner.bias.to(x.dtype)
        return x + F.silu(F.linear(x, weight, bias))


class MedusaHeads(nn.Module):
    """Head h at position j reads the post-norm feature f_j and predicts x_{j+2+h}."""

    output_head: Tensor

    def __init__(self, shape: LlamaShape, num_heads: int, output_head: Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResBlock(shape.hidden_size) for _ in range(num_heads))
        self.register_buffer("output_head", output_head, persistent=False)

    def logits(self, last: Tensor, head: int) -> Tensor:
        """Logits [B, T, V] of head `head` from features [B, T, H]."""
        return F.linear(self.blocks[head](last), self.output_head)


def medusa_loss(
    heads: MedusaHeads, lesson: Lesson, decay: float, overlap_weight: float
) -> tuple[Tensor, Tensor]:
    """Sum over heads of decay^h times the loss towards the law of x_{j+2+h}; overlaps [heads].

    The law of x_{j+2+h} is what the target says at position j+1+h of the same row.
    """
    total = torch.zeros((), device=lesson.last.device)
    overlaps: list[Tensor] = []
    place = torch.arange(lesson.row_tokens, device=lesson.last.device)
    for head in range(len(heads.blocks)):
        real = (place < lesson.row_tokens - 1 - head).float()
        logits = heads.logits(lesson.last, head)
        loss, overlap = draft_loss(logits, lesson.probs_from(1 + head), real, overlap_weight)
        total = total + decay**head * loss
        overlaps.append(overlap)
    return total, torch.stack(overlaps)


def medusa_config(shape: LlamaShape, num_heads: int) -> dict[str, Any]:
    """config.json in vLLM's naming; `original_lm_head` means the target's head is used."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": num_heads,
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "truncated_vocab_size": shape.vocab_size,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "torch_dtype": "bfloat16",
    }
