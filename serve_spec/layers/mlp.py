"""The gated feed-forward of Llama."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from serve_spec.layers.linear import Linear
from serve_spec.layers.module import Layer


class GatedMLP(Layer):
    """down(silu(gate(x)) · up(x)); gate and up are one product."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = Linear(
            hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        )
        self.down = Linear(intermediate_size, {"down_proj": hidden_size})

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))

    __call__ = forward

    def tensors(self) -> dict[str, Tensor]:
        """Gate, up and down matrices."""
        return {**self.gate_up.tensors(), **self.down.tensors()}
