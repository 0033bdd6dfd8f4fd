"""SwiGLU activation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel


@has_kernel
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up, with silu(gate) rounded to the dtype before the product.

    gate_up: [T, 2·I], gates first. Returns [T, I].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
