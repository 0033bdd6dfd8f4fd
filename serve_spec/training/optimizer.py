"""Optimisers: Muon for weight matrices, AdamW for everything else.

Muon (Jordan et al., 2024; https://kellerjordan.github.io/posts/muon/) replaces the momentum of a
matrix by its nearest semi-orthogonal matrix. The update is scaled to the root-mean-square of an
AdamW update (Liu et al., arXiv 2502.16982), so both take one learning rate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# Quintic Newton-Schulz coefficients chosen for a steep slope at zero.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_UPDATE_RMS = 0.2


def orthogonalise(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Approximate nearest semi-orthogonal matrices of a batch [n, rows, cols], in bfloat16."""
    x: Tensor = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True).bfloat16() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * (gram @ gram)) @ x
    orthogonal: Tensor = x.mT if tall else x
    return orthogonal


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; matrices of one shape are handled as one batch."""

    def __init__(
        self, params: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; `closure` is not supported."""
        assert closure is None, "Muon takes no closure"
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    by_shape[param.shape].append(param)
            for params in by_shape.values():
                self._update(params, group)

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        grads: list[Tensor] = []
        for param in params:
            assert param.grad is not None
            grads.append(param.grad)
            if "momentum" not in self.state[param]:
                self.state[param]["momentum"] = torch.zeros_like(param)
        buffers = [self.state[param]["momentum"] for param in params]
        blend = 1 - group["momentum"]
        torch._foreach_lerp_(buffers, grads, blend)
        looked_ahead = torch._foreach_lerp(grads, buffers, group["momentum"])
        updates = orthogonalise(torch.stack(list(looked_ahead))).to(params[0].dtype)
        scale = _UPDATE_RMS * max(params[0].shape) ** 0.5
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, list(updates.unbind()), alpha=-group["lr"] * scale)


def build_optimizers(
    named: Iterable[tuple[str, Tensor]], lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for matrices inside layers, AdamW for embeddings, output heads, norms and biases."""
    matrices: list[Tensor] = []
    tables: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, param in named:
        if not param.requires_grad:
            continue
        if param.ndim < 2:
            vectors.append(param)
        elif "embed_tokens" in name or "lm_head" in name:
            tables.append(param)
        else:
            matrices.append(param)
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((tables, weight_decay), (vectors, 0.0))
        if params
    ]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(Muon(matrices, lr, weight_decay))
    if groups:
        fused = groups[0]["params"][0].is_cuda  # type: ignore[index]
        optimizers.append(torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused))
    return optimizers
