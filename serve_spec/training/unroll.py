"""Losses of drafts, and training-time test: a draft unrolled as in inference.

Step k at row i stands for the k-th draft step of a round whose newest target feature is that of
position i (EAGLE-3, arXiv 2503.01840). Its input is token x_{i+1+k} and the state of step k-1
(step 0: the target's feature), its position is i+k, and it predicts x_{i+2+k}. Its attention sees
the keys of step 0 at rows 0..i and, at row i only, the keys of steps 1..k, as the draft's cache:

    row i = 2, step 2:   step-0 keys 0 1 2 | own keys of steps 1, 2   (positions 0 1 2 | 3 4)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.core.context import ForwardContext
from serve_spec.models import FeatureCapture, Llama
from serve_spec.models.draft import DraftHead
from serve_spec.models.draft_shape import capture_layers
from serve_spec.training.attention import (
    UnrollCache,
    UnrolledAttention,
    causal_context,
    row_positions,
)
from serve_spec.training.loop import compiled

Step = Callable[
    [Tensor, Tensor, Tensor, UnrollCache | None, Tensor], tuple[Tensor, UnrollCache | None]
]
"""(tokens [B, T], state [B·T, H], positions [B·T], cache, live) -> (state, cache)."""


def draft_loss(
    logits: Tensor, probs: Tensor, weight: Tensor, overlap_weight: float
) -> tuple[Tensor, Tensor]:
    """Return the loss of one draft step and its expected acceptance.

    The loss is the cross-entropy towards the target's distribution plus `overlap_weight` times the
    total variation, which is one minus the best acceptance of any lossless verification.

    Args:
        logits, probs: [B, T, V]. weight: [T], 1 at valid positions, else 0.

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


def unroll_step(head: DraftHead) -> Step:
    """Return one draft step of `head` as a compilable function of tensors."""

    def step(
        tokens: Tensor, state: Tensor, positions: Tensor, cache: UnrollCache | None, live: Tensor
    ) -> tuple[Tensor, UnrollCache | None]:
        attention = UnrolledAttention(head.shape, tokens.shape[0], cache, live)
        context = ForwardContext(positions, attention)
        return head.forward(tokens.flatten(), state, context), attention.cache

    return step


def features_of(head: DraftHead, lesson: Lesson) -> Tensor:
    """Return the target features [B·T, F] that `head` reads."""
    assert head.capture is not None, "a stand-alone draft reads no features"
    features = lesson.last if head.capture.layer_ids is None else lesson.captured
    return features.flatten(0, 1)


def unroll(step: Step, state: Tensor, lesson: Lesson, steps: int) -> Iterator[Tensor]:
    """Yield states [B·T, H] of steps 0..steps-1; `head.logits` turns a state into logits.

    state: `head.encode` of the features.
    """
    num_rows, length = lesson.tokens.shape[0], lesson.row_tokens
    cache: UnrollCache | None = None
    for index in range(steps):
        positions = row_positions(num_rows, length, state.device, first=index)
        live = torch.arange(max(1, steps - 1), device=state.device) < index
        state, cache = step(lesson.tokens_from(1 + index), state, positions, cache, live)
        yield state


def unrolled_loss(
    states: Iterator[Tensor],
    loss: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    lesson: Lesson,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum over steps of decay^k times the step's loss, overlaps [steps], first state.

    loss: of a state [B·T, H], the target's probabilities [B, T, V] and weights [T].
    """
    total = torch.zeros((), device=lesson.last.device)
    overlaps: list[Tensor] = []
    first: Tensor | None = None
    place = torch.arange(lesson.row_tokens, device=lesson.last.device)
    for step, state in enumerate(states):
        # Row i of step k needs token x_{i+1+k}, which must lie inside the row.
        real = (place < lesson.row_tokens - 1 - step).float()
        part, overlap = loss(state, lesson.probs_from(1 + step), real)
        total = total + decay**step * part
        overlaps.append(overlap)
        first = state if first is None else first
    assert first is not None, "an unroll has at least one step"
    return total, torch.stack(overlaps), first


def medusa_loss(
    head: DraftHead, lesson: Lesson, decay: float, overlap_weight: float
) -> tuple[Tensor, Tensor]:
    """Return the sum over Medusa heads of decay^h times their loss, and overlaps [heads].

    Head h at position j predicts x_{j+2+h}; the target's distribution of that token is the one at
    position j+1+h of the same row.
    """
    assert head.max_steps is not None, "Medusa has a number of heads"
    state = head.encode(lesson.last.flatten(0, 1))
    total = torch.zeros((), device=lesson.last.device)
    overlaps: list[Tensor] = []
    place = torch.arange(lesson.row_tokens, device=lesson.last.device)
    for index in range(head.max_steps):
        real = (place < lesson.row_tokens - 1 - index).float()
        logits = head.logits(state, index).unflatten(0, lesson.last.shape[:2])
        loss, overlap = draft_loss(logits, lesson.probs_from(1 + index), real, overlap_weight)
        total = total + decay**index * loss
        overlaps.append(overlap)
    return total, torch.stack(overlaps)


@dataclass(frozen=True)
class Lesson:
    """Output of the target for rows [B, T].

    `tokens` [B, T + S] and `probs` [B, T + S, V] are padded with zeros by S places, so that a view
    shifted by up to S places has the same shape at every unroll step.
    """

    tokens: Tensor
    captured: Tensor  # [B, T, 3H], inputs of the three capture layers (pre-norm residual stream)
    last: Tensor  # [B, T, H], after the target's final norm
    probs: Tensor  # [B, T + S, V], next-token distribution at each position
    row_tokens: int

    def tokens_from(self, shift: int) -> Tensor:
        """Return token x_{j + shift} at place j: [B, T]; zero past the end."""
        return self.tokens.narrow(1, shift, self.row_tokens)

    def probs_from(self, shift: int) -> Tensor:
        """Return the distribution of x_{j + shift + 1} at place j: [B, T, V]; zero past the end."""
        return self.probs.narrow(1, shift, self.row_tokens)


class Teacher:
    """The target, run without gradients. `padding` is the largest shift a lesson allows."""

    def __init__(self, model: Llama, padding: int, fast: bool = True) -> None:
        self.model = model
        self.padding = padding
        self.device = model.embed_tokens.weight.device
        self.capture = FeatureCapture(capture_layers(None, model.shape.num_layers))
        self._forward = compiled(self._teach, self.device) if fast else self._teach

    def _teach(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden, captured = forward_rows(self.model, tokens, self.capture)
        assert captured is not None
        probs = self.model.logits(hidden.flatten(0, 1)).float().softmax(-1).to(hidden.dtype)
        padded = F.pad(probs.unflatten(0, tokens.shape), (0, 0, 0, self.padding))
        return captured, hidden, padded

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Lesson:
        """Return the lesson of int64 rows [B, T]."""
        captured, last, probs = self._forward(tokens)
        padded = F.pad(tokens, (0, self.padding))
        return Lesson(padded, captured, last, probs, tokens.shape[1])


def forward_rows(
    model: Llama, tokens: Tensor, capture: FeatureCapture | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return post-norm hidden [B, T, H] and captured features [B, T, F] of rows [B, T]."""
    out = model.forward(tokens.flatten(), causal_context(model.rank_shape, tokens), capture)
    features = None if out.features is None else out.features.unflatten(0, tokens.shape)
    return out.hidden.unflatten(0, tokens.shape), features
