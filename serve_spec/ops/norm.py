"""Root-mean-square normalisation over the last dimension, alone and after a residual addition."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel
from serve_spec.ops.linear import whole


@has_kernel
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight: float32 inside, rounded once, to x's dtype.

    x: [..., width]; weight: [width].
    """
    return F.rms_norm(x, weight.shape, weight, eps)


@has_kernel
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); the sum is rounded before it is normed.

    residual: [..., width]; x: the same, or its addends (see `linear.whole`). Neither is changed.
    """
    total = residual + whole(x, residual)
    return rms_norm(total, weight, eps), total
