"""Weights that float16 holds, kept in float16 for float32 products on CPUs.

A product of few rows takes as long as its weights take to read, and these are half as long. Most
checkpoints hold bfloat16 or float16, whose 8 or 11 significant bits float16 has room for, once a
power of two moves the largest weight near its upper end.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from serve_spec.layers.formats.base import WeightFormat
from serve_spec.layers.formats.plain import PlainWeight

# Below this many weights the call costs more than reading them.
_MIN_ELEMENTS = 1 << 16
# Weight rows of one product: a result of more columns leaves the cache between its partial sums.
_MAX_ROWS = 16384
# The most a weight may lose, over the largest of its row: a 64th of what float32 rounds it to.
_TOLERANCE = 2.0**-30
# The largest weight is moved below 2^15: float16 ends at 2^16.
_TOP_EXPONENT = 15


class Fp16Weight(WeightFormat):
    """A float32 weight [out, in] and its bias [out]; the weight times 2^exponent is float16."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, exponent: int = 0) -> None:
        super().__init__()
        self._num_bytes = 2 * weight.numel()
        self._scale = 2.0**-exponent
        up = 2.0**exponent
        rows = weight.split(_MAX_ROWS)
        biases = [None] * len(rows) if bias is None else [b * up for b in bias.split(_MAX_ROWS)]
        self._packed: list[Any] = [
            torch.ops.quantized.linear_prepack_fp16(part * up, part_bias)
            for part, part_bias in zip(rows, biases, strict=True)
        ]

    @classmethod
    def convert(cls, plain: PlainWeight) -> Fp16Weight | None:
        """Return `plain` in float16; None if that loses something or is not faster here."""
        weight = plain.weight
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            return None
        if weight.numel() < _MIN_ELEMENTS or not fp16_works():
            return None
        exponent = lossless_exponent(weight)
        return None if exponent is None else cls(weight, plain.bias, exponent)

    @property
    def num_bytes(self) -> int:
        """Return the memory of the weight."""
        return self._num_bytes

    def linear(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x·Wᵀ + b, summed in float32."""
        parts = [torch.ops.quantized.linear_dynamic_fp16(x, packed) for packed in self._packed]
        out: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self._scale != 1.0:
            out *= self._scale
        return out if out_dtype is None else out.to(out_dtype)


def lossless_exponent(weight: Tensor) -> int | None:
    """Return the exponent e with which `weight` [out, in] times 2^e is float16; None if none is.

    0 if the weight is float16 as it is. Else a weight may lose 2^-30 of the largest of its row.
    """
    low, high = (float(bound) for bound in weight.aminmax())
    largest = max(-low, high)
    if not math.isfinite(largest):
        return None
    for exponent in (0, _TOP_EXPONENT - math.frexp(largest)[1]):
        if _is_lossless(weight, exponent):
            return exponent
    return None


def _is_lossless(weight: Tensor, exponent: int) -> bool:
    # In parts that stay in the processor's cache, up to the first that loses something.
    for part in weight.split(max(1, _MIN_ELEMENTS // weight.shape[1])):
        scaled = part * 2.0**exponent
        lost = (scaled.half().float() - scaled).abs_().amax(dim=1)
        if not torch.all(lost <= _TOLERANCE * scaled.abs_().amax(dim=1)):
            return False
    return True


@cache
def fp16_works() -> bool:
    """Return whether such products are right here, and a row's bits the same alone; tried once."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 1100, generator=generator) for n in (17, 200))
    weight = weight.half().float()
    try:
        product = Fp16Weight(weight).linear
        found = product(x)
        alone = torch.cat([product(row) for row in x.split(1)])
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.equal(alone, found) and torch.allclose(found, x @ weight.T, rtol=1e-4, atol=1e-3)
