"""Training of every drafter against the frozen target; one function, four loss functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_spec.training.batches import mixed_rows, windows
from serve_spec.training.checkpoint import export_checkpoint
from serve_spec.training.compiling import compiled
from serve_spec.training.eagle import eagle_config, eagle_from
from serve_spec.training.eagle3 import eagle3_config, eagle3_from
from serve_spec.training.llama import Llama, llama_config
from serve_spec.training.loop import Run, Trainer
from serve_spec.training.medusa import MedusaHeads, medusa_config, medusa_loss
from serve_spec.training.settings import Recipe
from serve_spec.training.standalone import distillation_loss, standalone_from
from serve_spec.training.teacher import Lesson, Teacher
from serve_spec.training.unroll import UnrollOps, unrolled_loss

# Loss of one lesson, and the mean overlap sum(min(p, q)) per draft step.
LessonLoss = Callable[[Lesson], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Data:
    """Token streams [N] and the on-policy pool [R, T], all on the training device."""

    train: Tensor
    held_out: Tensor
    pool: Tensor


@dataclass(frozen=True)
class Student:
    """A drafter to train: its module, its loss and its config.json."""

    module: nn.Module
    loss: LessonLoss
    config: dict[str, Any]


def build_student(name: str, recipe: Recipe, teacher: Teacher) -> Student:
    """The drafter called `name`: "eagle3", "eagle", "medusa" or "standalone"."""
    builders = {
        "eagle3": _eagle3,
        "eagle": _eagle,
        "medusa": _medusa,
        "standalone": _standalone,
    }
    if name not in builders:
        raise ValueError(f"drafter {name!r} is unknown; use one of {sorted(builders)}")
    return builders[name](recipe, teacher)


def train_head(name: str, recipe: Recipe, target: Llama, data: Data, run: Run, out: Path) -> None:
    """Train drafter `name` on corpus and on-policy rows in turn, then export it to `out`."""
    phase = recipe.phases[name]
    teacher = Teacher(target, padding=recipe.unroll_steps + 1)
    student = build_student(name, recipe, teacher)
    rng = torch.Generator().manual_seed(recipe.seed + 1)
    fixed = torch.Generator().manual_seed(recipe.seed + 2)
    watch = [
        windows(data.held_out, phase.rows, phase.row_tokens, fixed)
        for _ in range(phase.heldout_batches)
    ]

    def loss_fn(step: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        batch_tokens = phase.rows * phase.row_tokens
        rows = mixed_rows(step, data.train, data.pool, batch_tokens, phase.row_tokens, rng)
        loss, overlaps = student.loss(teacher(rows))
        return loss, {"overlap": overlaps}

    def heldout() -> Tensor:
        return torch.stack([student.loss(teacher(rows))[0].detach() for rows in watch]).mean()

    Trainer(student.module, phase, run, rng, heldout).train(loss_fn)
    export_checkpoint(out, student.module.state_dict(), student.config)


def _eagle3(recipe: Recipe, teacher: Teacher) -> Student:
    head = eagle3_from(teacher.model, torch.Generator().manual_seed(recipe.seed))
    ops = UnrollOps.of(head, teacher.device, recipe.overlap_weight)

    def loss(lesson: Lesson) -> tuple[Tensor, Tensor]:
        total, overlaps, _ = unrolled_loss(
            head, ops, teacher, lesson, recipe.unroll_steps, recipe.unroll_decay
        )
        return total, overlaps

    return Student(head, loss, eagle3_config(recipe.target))


def _eagle(recipe: Recipe, teacher: Teacher) -> Student:
    head = eagle_from(teacher.model, torch.Generator().manual_seed(recipe.seed))
    ops = UnrollOps.of(head, teacher.device, recipe.overlap_weight)

    def loss(lesson: Lesson) -> tuple[Tensor, Tensor]:
        total, overlaps, states = unrolled_loss(
            head, ops, teacher, lesson, recipe.unroll_steps, recipe.unroll_decay
        )
        # The first prediction at row i is meant to be the target's feature at i + 1.
        gap = F.smooth_l1_loss(states[0][:, :-1].float(), lesson.last[:, 1:].float())
        return total + recipe.feature_weight * gap, overlaps

    return Student(head, loss, eagle_config(recipe.target))


def _medusa(recipe: Recipe, teacher: Teacher) -> Student:
    head = teacher.model.embedding.detach()
    heads = MedusaHeads(recipe.target, recipe.medusa_heads, head).to(teacher.device)

    def loss(lesson: Lesson) -> tuple[Tensor, Tensor]:
        return medusa_loss(heads, lesson, recipe.unroll_decay, recipe.overlap_weight)

    config = medusa_config(recipe.target, recipe.medusa_heads)
    return Student(heads, compiled_lesson_loss(loss, teacher.device), config)


def _standalone(recipe: Recipe, teacher: Teacher) -> Student:
    draft = standalone_from(recipe.standalone, recipe.seed, teacher.device)

    def loss(lesson: Lesson) -> tuple[Tensor, Tensor]:
        return distillation_loss(draft, lesson, recipe.overlap_weight)

    return Student(
        draft, compiled_lesson_loss(loss, teacher.device), llama_config(recipe.standalone)
    )


def compiled_lesson_loss(loss: LessonLoss, device: torch.device) -> LessonLoss:
    """Compile a loss over the lesson's tensors; the record itself stays outside the graph."""

    def of_tensors(tokens: Tensor, last: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        row_tokens = last.shape[1]
        return loss(Lesson(tokens, last, last, probs, row_tokens))

    fast = compiled(of_tensors, device)
    return lambda lesson: fast(lesson.tokens, lesson.last, lesson.probs)
