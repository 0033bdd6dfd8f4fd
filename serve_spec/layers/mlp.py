"""The gated feed-forward of Llama."""

from __future__ import annotations

from torch import Tensor

from serve_spec.layers.module import Destination, Layer
from serve_spec.layers.parallel import column_linear, row_linear
from serve_spec.ops import linear
from serve_spec.parallel.group import SINGLE, TensorParallel


class GatedMLP(Layer):
    """down(silu(gate(x)) · up(x)); gate and up are one product.

    intermediate_size: this rank's neurons.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, parallel: TensorParallel = SINGLE
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up = column_linear(hidden_size, parts, parallel)
        self.down = row_linear(intermediate_size, {"down_proj": hidden_size}, parallel)

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, H] -> [T, H], or its partial sums (see `ops.linear.sum_partials`)."""
        if x.is_cuda and self.gate_up.integers is None:
            inner = linear.gate_up(x, self.gate_up.weight, self.gate_up.fp8)
        else:
            inner = linear.silu_and_mul(self.gate_up(x))
        return self.down.partials(inner)

    __call__ = forward

    def tensors(self) -> dict[str, Destination]:
        """Return gate, up and down matrices."""
        return {**self.gate_up.tensors(), **self.down.tensors()}
