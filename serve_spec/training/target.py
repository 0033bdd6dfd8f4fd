"""Target: a small Llama trained on the corpus by next-token prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.training.batches import windows
from serve_spec.training.checkpoint import export_checkpoint, load_tensors, read_config
from serve_spec.training.compiling import compiled
from serve_spec.training.llama import Llama, llama_config
from serve_spec.training.loop import Run, Trainer
from serve_spec.training.settings import LlamaShape, Recipe


def train_target(recipe: Recipe, train: Tensor, held_out: Tensor, run: Run, out: Path) -> Llama:
    """Train on `train` [N], watch `held_out` [M] (token streams on the device), export to `out`."""
    device, phase = train.device, recipe.phases["target"]
    model = Llama(recipe.target)
    model.initialise(torch.Generator().manual_seed(recipe.seed))
    model.to(device)
    loss_of = compiled(_loss_of(model), device)
    rng = torch.Generator().manual_seed(recipe.seed + 1)
    fixed = torch.Generator().manual_seed(recipe.seed + 2)
    watch = [
        windows(held_out, phase.rows, phase.row_tokens + 1, fixed)
        for _ in range(phase.heldout_batches)
    ]

    def loss_fn(step: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        return loss_of(windows(train, phase.rows, phase.row_tokens + 1, rng)), {}

    def heldout() -> Tensor:
        # With gradients on, so that the compiled training graph is reused as it is.
        return torch.stack([loss_of(rows).detach() for rows in watch]).mean()

    Trainer(model, phase, run, rng, heldout).train(loss_fn)
    export_checkpoint(out, model.state_dict(), llama_config(recipe.target))
    return model


def _loss_of(model: Llama) -> Callable[[Tensor], Tensor]:
    """Mean next-token cross-entropy of rows [B, T + 1], as a function of the rows alone."""

    def loss(rows: Tensor) -> Tensor:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
            logits = model.logits(model(rows[:, :-1]).last)
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    return loss


def load_llama(folder: Path, device: torch.device, dtype: torch.dtype) -> Llama:
    """Read an exported Llama checkpoint, frozen, in `dtype`."""
    config = read_config(folder)
    fields = LlamaShape.__dataclass_fields__
    model = Llama(LlamaShape(**{name: config[name] for name in fields}))
    model.load_state_dict(load_tensors(folder, torch.device("cpu")))
    return model.to(device, dtype).eval().requires_grad_(False)
