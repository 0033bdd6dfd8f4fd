"""Floats and a copy of eight bits, for a draft's products of few rows on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from serve_spec.layers.formats.base import WeightFormat
from serve_spec.layers.formats.plain import PlainWeight
from serve_spec.ops import linear


class Fp8DraftWeight(WeightFormat):
    """A plain weight, and its values in float8_e4m3fn with a scale per row.

    Products of few rows read the copy, half as many bytes, and so take less time. All others read
    the exact weight.
    """

    def __init__(self, plain: PlainWeight) -> None:
        super().__init__()
        self.plain = plain
        self.values, self.scale = fp8_rows(plain.weight)

    @property
    def num_bytes(self) -> int:
        """Return the memory of both."""
        return self.plain.num_bytes + self.values.nbytes + self.scale.nbytes

    def linear(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x·Wᵀ + b: [T, in] -> [T, out]."""
        if self._is_fastest(x):
            return linear.small_linear(x, self.values, self.plain.bias, out_dtype, self.scale)
        return self.plain.linear(x, out_dtype)

    def partials(self, x: Tensor) -> Tensor:
        """Return `linear(x)`, or partial sums of it."""
        if not self._is_fastest(x):
            return self.plain.partials(x)
        if self.plain.bias is not None:
            return self.linear(x)
        return linear.small_partials(x, self.values, self.scale)

    def gate_up(self, x: Tensor) -> Tensor:
        """Return silu(gate) · up."""
        if not self._is_fastest(x):
            return self.plain.gate_up(x)
        if self.plain.bias is not None:
            return super().gate_up(x)
        return linear.small_gate_up(x, self.values, self.scale)

    def _is_fastest(self, x: Tensor) -> bool:
        is_supported = linear.is_supported(x, self.plain.weight)
        return is_supported and linear.is_ours(x.shape[0], bits=8)


def fp8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `weight` [out, in] in float8_e4m3fn, and the scale of each row, float32 [out].

    A scale maps the largest value of its row to the largest float8.
    """
    dtype = torch.float8_e4m3fn
    largest = weight.float().abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    scale = largest / torch.finfo(dtype).max
    return (weight.float() / scale[:, None]).to(dtype), scale
