"""Root-mean-square normalisation, alone and together with the residual addition before it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from serve_spec.layers.module import Layer, parameter


class RMSNorm(Layer):
    """x / sqrt(mean(x²) + eps) · w over the last dimension; float32 inside, x's dtype outside."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = parameter(width)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    __call__ = forward

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual). Neither input is changed: callers may share them."""
        residual = residual + x
        return self.forward(residual), residual

    def tensors(self) -> dict[str, Tensor]:
        """The gain."""
        return {"weight": self.weight}
