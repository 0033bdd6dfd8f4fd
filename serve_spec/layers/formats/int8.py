"""Eight-bit integers, by torch's dynamic quantization on CPUs.

A row of the weight has a factor of its own, and what it is multiplied with goes into eight bits,
too, by its range in this call. Rows are brought to one range before: the first token of a text has
numbers so large that all others would be lost beside them.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from serve_spec.layers.formats.base import WeightFormat
from serve_spec.layers.formats.plain import PlainWeight

_LARGEST = 127
_TINY = torch.finfo(torch.float32).tiny


class Int8Weight(WeightFormat):
    """A weight [out, in] and its bias [out], laid out for products on this processor."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        values, scale = quantized_rows(weight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tensors of quantized numbers may go, some day
            of_torch = torch._make_per_channel_quantized_tensor(
                values, scale.double(), torch.zeros(len(scale), dtype=torch.long), axis=0
            )
        self._num_bytes = values.nbytes + scale.nbytes
        self._packed: Any = torch.ops.quantized.linear_prepack(of_torch, None)
        self._bias = None if bias is None else bias.float()

    @classmethod
    def convert(cls, plain: PlainWeight) -> Int8Weight:
        """Return `plain` in eight bits, of any shape."""
        return cls(plain.weight, plain.bias)

    @property
    def num_bytes(self) -> int:
        """Return the memory of values and factors."""
        return self._num_bytes

    def linear(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x·Wᵀ + b, summed in float32."""
        out_dtype = out_dtype or x.dtype
        x = x.float()
        largest = x.abs().amax(dim=1, keepdim=True).clamp_(min=_TINY)
        out: Tensor = torch.ops.quantized.linear_dynamic(x / largest, self._packed, _needs_room())
        out *= largest
        if self._bias is not None:
            out += self._bias
        return out.to(out_dtype)


def quantized_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest int8 [out, in] to `weight`, and the factor of each row, [out]."""
    largest = weight.float().abs().amax(dim=1).clamp(min=_TINY)
    scale = largest / _LARGEST
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale


@cache
def int8_works() -> bool:
    """Return whether such products work on this processor; tried once."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=generator) for n in (3, 16))
    expected = x @ weight.T
    try:
        found = Int8Weight(weight).linear(x)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((found - expected).norm() < 0.1 * expected.norm())


@cache
def _needs_room() -> bool:
    # Without these instructions sums of two products saturate, unless one bit is left free.
    has_vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)
    return not has_vnni()
