"""Training-time test: a draft layer unrolled as it will be used (EAGLE-3, arXiv 2503.01840).

Step k at row i stands for the k-th draft step of a round whose newest target feature is that of
position i. Its input is token x_{i+1+k} and the state of step k-1 (step 0: the target's feature),
its position is i+k, and it predicts x_{i+2+k}. Its attention sees the keys of step 0 at rows 0..i
and, at row i only, the keys of steps 1..k. That is exactly the draft's cache when drafting:

    row i = 2, step 2:   step-0 keys 0 1 2 | own keys of steps 1, 2   (positions 0 1 2 | 3 4)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from serve_spec.training.compiling import compiled
from serve_spec.training.llama import rotary_table
from serve_spec.training.settings import LlamaShape
from serve_spec.training.teacher import Lesson, Teacher


class DraftLayer(Protocol):
    """What a draft head must offer to be unrolled."""

    shape: LlamaShape

    def enter(self, lesson: Lesson) -> Tensor:
        """State before step 0, from the target's features: [B, T, H]."""

    def project(
        self, embeds: Tensor, state: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual [B, T, H] and rotated q, k, and v, each [B, heads, T, D]."""

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """State after attention output [B, heads, T, D]: [B, T, H]."""

    def logits(self, state: Tensor) -> Tensor:
        """Draft logits [B, T, V] of a state."""


def attend(
    q: Tensor, context_k: Tensor, context_v: Tensor, own_k: Tensor, own_v: Tensor, live: Tensor
) -> Tensor:
    """Causal attention over step-0 keys plus per-row attention over the row's own drafted keys.

    Args:
        q: queries [B, heads, T, D].
        context_k, context_v: step 0, [B, kv_heads, T, D].
        own_k, own_v: steps 1..S, [B, kv_heads, S, T, D]; unused places may hold anything.
        live: [S] bool, which of the S places count.

    Returns:
        [B, heads, T, D]. Softmax in float32.
    """
    kv_heads, length, dim = context_k.shape[1], q.shape[2], q.shape[3]
    grouped = q.unflatten(1, (kv_heads, -1))
    rows = grouped.flatten(2, 3)
    scores = (rows @ context_k.mT).unflatten(2, (-1, length)).float() * dim**-0.5
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    own = (grouped.unsqueeze(3).float() * own_k.unsqueeze(2).float()).sum(-1) * dim**-0.5
    own = own.masked_fill(~live[:, None], -torch.inf)
    peak = torch.maximum(scores.amax(-1), own.amax(3)).detach()
    weights = (scores - peak.unsqueeze(-1)).exp()
    own_weights = (own - peak.unsqueeze(3)).exp()
    total = weights.sum(-1) + own_weights.sum(3)
    mixed = (weights.to(q.dtype).flatten(2, 3) @ context_v).unflatten(2, (-1, length)).float()
    mixed = mixed + (own_weights.unsqueeze(-1) * own_v.unsqueeze(2).float()).sum(3)
    attended: Tensor = mixed / total.unsqueeze(-1)
    return attended.to(q.dtype).flatten(1, 2)


def draft_loss(
    logits: Tensor, probs: Tensor, weight: Tensor, overlap_weight: float
) -> tuple[Tensor, Tensor]:
    """Loss of one unroll step and the acceptance it stands for.

    Cross-entropy towards the target's law, plus `overlap_weight` times the total variation, which
    is one minus the best acceptance any exact rule can reach.

    Args:
        logits, probs: [B, T, V]. weight: [T], one where the place is real.

    Returns:
        loss and mean overlap sum(min(p, q)), both 0-d.
    """
    log_q = logits.float().log_softmax(-1)
    p = probs.float()
    cross = -(p * log_q).sum(-1)
    overlap = torch.minimum(p, log_q.exp()).sum(-1)
    share = weight / (weight.sum() * logits.shape[0])
    loss = ((cross + overlap_weight * (1.0 - overlap)) * share).sum()
    return loss, (overlap.detach() * share).sum()


@dataclass(frozen=True)
class UnrollOps:
    """The three pieces of a step, compiled once and used at every step."""

    project: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
    close: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    loss: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

    @staticmethod
    def of(layer: DraftLayer, device: torch.device, overlap_weight: float = 0.0) -> UnrollOps:
        """Pieces for `layer`; compiled when `device` is a GPU."""

        def close(
            residual: Tensor,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            own_k: Tensor,
            own_v: Tensor,
            live: Tensor,
        ) -> Tensor:
            return layer.finish(residual, attend(q, k, v, own_k, own_v, live))

        def loss(state: Tensor, probs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return draft_loss(layer.logits(state), probs, weight, overlap_weight)

        return UnrollOps(
            compiled(layer.project, device), compiled(close, device), compiled(loss, device)
        )


def unroll(
    layer: DraftLayer, ops: UnrollOps, teacher: Teacher, lesson: Lesson, steps: int
) -> Iterator[Tensor]:
    """States [B, T, H] of steps 0..steps-1; `layer.logits` turns a state into draft logits."""
    shape, length = layer.shape, lesson.row_tokens
    cos, sin = rotary_table(length + steps, shape.head_dim, shape.rope_theta, lesson.last.device)
    state = layer.enter(lesson)
    context: tuple[Tensor, Tensor] | None = None
    own: list[tuple[Tensor, Tensor]] = []
    for step in range(steps):
        embeds = teacher.embed(lesson.tokens_from(1 + step))
        residual, q, k, v = ops.project(
            embeds, state, cos.narrow(0, step, length), sin.narrow(0, step, length)
        )
        if context is None:
            context = (k, v)
        else:
            own.append((k, v))
        own_k = _stacked([pair[0] for pair in own], context[0], steps)
        own_v = _stacked([pair[1] for pair in own], context[1], steps)
        live = torch.arange(max(1, steps - 1), device=k.device) < step
        state = ops.close(residual, q, *context, own_k, own_v, live)
        yield state


def _stacked(own: list[Tensor], like: Tensor, steps: int) -> Tensor:
    """Keys of steps 1.. as [B, kv_heads, steps-1, T, D], zeros where no step has been yet.

    Width and differentiability are the same at every step, so one compiled graph serves them all.
    """
    blank = torch.zeros_like(like).requires_grad_(like.requires_grad)
    places = max(1, steps - 1)
    return torch.stack([*own, *[blank] * (places - len(own))], dim=2)


def unrolled_loss(
    layer: DraftLayer,
    ops: UnrollOps,
    teacher: Teacher,
    lesson: Lesson,
    steps: int,
    decay: float,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Sum over steps of decay^k times the step's loss; overlaps [steps]; the states themselves."""
    total = torch.zeros((), device=lesson.last.device)
    overlaps: list[Tensor] = []
    states: list[Tensor] = []
    place = torch.arange(lesson.row_tokens, device=lesson.last.device)
    for step, state in enumerate(unroll(layer, ops, teacher, lesson, steps)):
        # Row i of step k needs token x_{i+1+k}, which must lie inside the row.
        real = (place < lesson.row_tokens - 1 - step).float()
        loss, overlap = ops.loss(state, lesson.probs_from(1 + step), real)
        total = total + decay**step * loss
        overlaps.append(overlap)
        states.append(state)
    return total, torch.stack(overlaps), states
