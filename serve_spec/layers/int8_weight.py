"""Matrix products with weights in eight-bit integers on CPUs: a quarter of the bytes of float32.

By torch's dynamic quantization: a row of the weight has a factor of its own, and what it is
multiplied with goes into eight bits, too, by its range in this call. Rows are brought to one range
before: the first token of a text has numbers so large that all others would be lost beside them.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

_LARGEST = 127
_TINY = torch.finfo(torch.float32).tiny


class Int8Weight:
    """A weight [out, in] and its bias, laid out for products on this processor."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        values, scale = quantized_rows(weight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tensors of quantized numbers may go, some day
            of_torch = torch._make_per_channel_quantized_tensor(
                values, scale.double(), torch.zeros(len(scale), dtype=torch.long), axis=0
            )
        self.num_bytes = values.numel() + 4 * scale.numel()
        self._packed: Any = torch.ops.quantized.linear_prepack(of_torch, None)
        self._bias = None if bias is None else bias.float()

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Return whether a weight of this shape can be laid out so: any can."""
        return True

    def linear(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        """Return x·Wᵀ + b: [T, in] -> [T, out]."""
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
    try:
        found = Int8Weight(weight).linear(x, torch.float32)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    expected = x @ weight.T
    return bool((found - expected).norm() < 0.1 * expected.norm())


@cache
def _needs_room() -> bool:
    # Without these instructions sums of two products saturate, unless one bit is left free.
    has_vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)
    return not has_vnni()
