"""Stand-alone draft: a smaller Llama with the target's tokenizer, distilled from the target."""

from __future__ import annotations

import torch
from torch import Tensor

from serve_spec.training.llama import Llama
from serve_spec.training.settings import LlamaShape
from serve_spec.training.teacher import Lesson
from serve_spec.training.unroll import draft_loss


def standalone_from(shape: LlamaShape, seed: int, device: torch.device) -> Llama:
    """Freshly initialised draft model."""
    draft = Llama(shape)
    draft.initialise(torch.Generator().manual_seed(seed))
    return draft.to(device)


def distillation_loss(draft: Llama, lesson: Lesson, overlap_weight: float) -> tuple[Tensor, Tensor]:
    """Loss towards the target's law at every position; the mean overlap as [1]."""
    tokens = lesson.tokens_from(0)
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        logits = draft.logits(draft(tokens).last)
    everywhere = torch.ones(lesson.row_tokens, device=tokens.device)
    loss, overlap = draft_loss(logits, lesson.probs_from(0), everywhere, overlap_weight)
    return loss, overlap[None]
