"""RMS norm over the last dimension, alone and fused with a residual addition."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel
from serve_spec.ops.linear import whole


@has_kernel
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight, in float32, rounded once to x's dtype.

    x: [..., width]; weight: [width].
    """
    return F.rms_norm(x, weight.shape, weight, eps)


@has_kernel
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual); the sum is rounded before the norm.

    residual: [..., width]; x: the same, or its addends (see `linear.whole`).
    """
    total = residual + whole(x, residual)
    return rms_norm(total, weight, eps), total
