"""Training of every drafter against the frozen target."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.models import Llama
from serve_spec.models.eagle import Eagle
from serve_spec.training.drafts import NewDraft, new_draft
from serve_spec.training.loop import Run, Trainer, compiled
from serve_spec.training.sampling import mixed_rows, windows
from serve_spec.training.settings import Recipe
from serve_spec.training.unroll import (
    Lesson,
    Teacher,
    draft_loss,
    features_of,
    forward_rows,
    medusa_loss,
    unroll,
    unroll_step,
    unrolled_loss,
)
from serve_spec.training.weights import export_checkpoint

LessonLoss = Callable[[Lesson], tuple[Tensor, Tensor]]
"""Loss of one lesson, and the mean overlap sum(min(p, q)) per draft step."""


@dataclass(frozen=True)
class Data:
    """Token streams [N] and the on-policy pool [R, T], all on the training device."""

    train: Tensor
    held_out: Tensor
    pool: Tensor


def train_head(name: str, recipe: Recipe, target: Llama, data: Data, run: Run, out: Path) -> None:
    """Train drafter `name` on alternating corpus and on-policy rows, then export it to `out`."""
    phase = recipe.phases[name]
    teacher = Teacher(target, padding=recipe.unroll_steps + 1)
    draft = new_draft(name, target, recipe)
    loss_of = lesson_loss(name, recipe, draft, teacher.device)
    rng = torch.Generator().manual_seed(recipe.seed + 1)
    fixed = torch.Generator().manual_seed(recipe.seed + 2)
    watch = [
        windows(data.held_out, phase.rows, phase.row_tokens, fixed)
        for _ in range(phase.heldout_batches)
    ]

    def loss_fn(step: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        batch_tokens = phase.rows * phase.row_tokens
        rows = mixed_rows(step, data.train, data.pool, batch_tokens, phase.row_tokens, rng)
        loss, overlaps = loss_of(teacher(rows))
        return loss, {"overlap": overlaps}

    def heldout() -> Tensor:
        return torch.stack([loss_of(teacher(rows))[0].detach() for rows in watch]).mean()

    Trainer(draft.weights.parameters, phase, run, rng, heldout).train(loss_fn)
    export_checkpoint(out, draft.weights.parameters, draft.config)


def lesson_loss(name: str, recipe: Recipe, draft: NewDraft, device: torch.device) -> LessonLoss:
    """Return the loss of draft `name` as a function of a lesson."""
    losses = {"medusa": _medusa_loss, "standalone": _distillation_loss}
    inner = losses.get(name, _unrolled_loss)(recipe, draft, device)

    def loss(lesson: Lesson) -> tuple[Tensor, Tensor]:
        draft.weights.bind()
        return inner(lesson)

    return loss


def _unrolled_loss(recipe: Recipe, draft: NewDraft, device: torch.device) -> LessonLoss:
    """Return the loss of an EAGLE or EAGLE-3 head."""
    head = draft.head
    encode, step = compiled(head.encode, device), compiled(unroll_step(head), device)

    def step_loss(state: Tensor, probs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logits = head.logits(state).unflatten(0, probs.shape[:2])
        return draft_loss(logits, probs, weight, recipe.overlap_weight)

    fast_loss = compiled(step_loss, device)
    # EAGLE-1 states are predictions of the target's features.
    feature_weight = recipe.feature_weight if isinstance(head, Eagle) else 0.0

    def loss(lesson: Lesson) -> tuple[Tensor, Tensor]:
        state = encode(features_of(head, lesson))
        states = unroll(step, state, lesson, recipe.unroll_steps)
        total, overlaps, first = unrolled_loss(states, fast_loss, lesson, recipe.unroll_decay)
        if feature_weight:
            predicted = first.unflatten(0, lesson.last.shape[:2])[:, :-1]
            gap = F.smooth_l1_loss(predicted.float(), lesson.last[:, 1:].float())
            total = total + feature_weight * gap
        return total, overlaps

    return loss


def _medusa_loss(recipe: Recipe, draft: NewDraft, device: torch.device) -> LessonLoss:
    """Return the loss of Medusa heads."""
    head = draft.head
    return _compiled_lesson_loss(
        lambda lesson: medusa_loss(head, lesson, recipe.unroll_decay, recipe.overlap_weight),
        device,
    )


def _distillation_loss(recipe: Recipe, draft: NewDraft, device: torch.device) -> LessonLoss:
    """Return the loss of a stand-alone draft: the target's distribution at every position."""
    model = draft.model
    assert isinstance(model, Llama)

    def loss(lesson: Lesson) -> tuple[Tensor, Tensor]:
        tokens = lesson.tokens_from(0)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            hidden, _ = forward_rows(model, tokens)
            logits = model.logits(hidden.flatten(0, 1)).unflatten(0, tokens.shape)
        everywhere = torch.ones(lesson.row_tokens, device=tokens.device)
        total, overlap = draft_loss(logits, lesson.probs_from(0), everywhere, recipe.overlap_weight)
        return total, overlap[None]

    return _compiled_lesson_loss(loss, device)


def _compiled_lesson_loss(loss: LessonLoss, device: torch.device) -> LessonLoss:
    """Compile a loss over the tensors of a lesson; the dataclass stays outside the graph."""

    def of_tensors(tokens: Tensor, last: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return loss(Lesson(tokens, last, last, probs, last.shape[1]))

    fast = compiled(of_tensors, device)
    return lambda lesson: fast(lesson.tokens, lesson.last, lesson.probs)
