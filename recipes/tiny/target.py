"""Target: a small Decoder trained on the corpus by next-token prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.tiny.settings import PairRecipe
from recipes.training.loop import Run, Trainer, compiled
from recipes.training.sampling import windows
from recipes.training.unroll import forward_rows
from recipes.training.weights import MasterWeights, export_checkpoint, initialise, new_llama
from serve_spec.models.decoder import Decoder


def train_target(recipe: PairRecipe, train: Tensor, held_out: Tensor, run: Run, out: Path) -> None:
    """Train on `train` [N], measure loss on `held_out` [M] (token streams), export to `out`."""
    device, phase = train.device, recipe.phases["target"]
    model = new_llama(recipe.target, device, torch.float32)
    masters = MasterWeights(model)
    initialise(masters, model.shape.num_layers, torch.Generator().manual_seed(recipe.seed))
    fast_loss = compiled(_loss_of(model), device)
    rng = torch.Generator().manual_seed(recipe.seed + 1)
    fixed = torch.Generator().manual_seed(recipe.seed + 2)
    watch = [
        windows(held_out, phase.rows, phase.row_tokens + 1, fixed)
        for _ in range(phase.heldout_batches)
    ]

    def loss_of(rows: Tensor) -> Tensor:
        masters.bind()
        return fast_loss(rows)

    def loss_fn(step: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        return loss_of(windows(train, phase.rows, phase.row_tokens + 1, rng)), {}

    def heldout() -> Tensor:
        # With gradients on, so that the compiled training graph is reused.
        return torch.stack([loss_of(rows).detach() for rows in watch]).mean()

    Trainer(masters.parameters, phase, run, rng, heldout).train(loss_fn)
    export_checkpoint(out, masters.parameters, recipe.target)


def _loss_of(model: Decoder) -> Callable[[Tensor], Tensor]:
    """Return the mean next-token cross-entropy of rows [B, T + 1] as a function of the rows."""

    def loss(rows: Tensor) -> Tensor:
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
            hidden, _ = forward_rows(model, rows[:, :-1])
            logits = model.logits(hidden.flatten(0, 1))
        return F.cross_entropy(logits.float(), rows[:, 1:].flatten())

    return loss
