"""Four-bit integers, by torch's own kernels for CPUs and GPUs.

`GROUP` numbers of a row have a grid of sixteen: each is (code - 8) · step + middle. Groups of 64
would take 4.5 bits a number instead of 5, but a copy of the shipped target in them makes 79 of 100
choices as the target does, in groups of 32 83.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from serve_spec.layers.formats.base import WeightFormat
from serve_spec.layers.formats.plain import PlainWeight

GROUP = 32
_LAST_CODE, _MIDDLE_CODE = 15, 8
# What the kernel for CPUs cuts a weight's rows into.
_ROWS = 16
# Of bfloat16: the largest fraction of a number that is rounded away, and the smallest step.
_ROUNDING, _TINY_BFLOAT16 = 2**-8, torch.finfo(torch.bfloat16).tiny
# The oldest GPUs with bfloat16 products.
_MIN_CAPABILITY = (8, 0)


class Int4Weight(WeightFormat):
    """A weight [out, in] and its bias [out], laid out for products on its device."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        codes, self._grids = quantized_groups(weight)
        self._packed = _packed(codes)
        self._bias = bias

    @classmethod
    def convert(cls, plain: PlainWeight) -> Int4Weight | None:
        """Return `plain` in four bits; None if the kernels cannot cut its shape into blocks."""
        num_outputs, in_features = plain.weight.shape
        is_taken = num_outputs % _ROWS == 0 and in_features % GROUP == 0
        return cls(plain.weight, plain.bias) if is_taken else None

    @property
    def num_bytes(self) -> int:
        """Return the memory of codes and grids."""
        return self._packed.nbytes + self._grids.nbytes

    def linear(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x·Wᵀ + b: x and the product are rounded to bfloat16."""
        aten = torch.ops.aten
        multiply = aten._weight_int4pack_mm if x.is_cuda else aten._weight_int4pack_mm_for_cpu
        out: Tensor = multiply(x.bfloat16().contiguous(), self._packed, GROUP, self._grids)
        if self._bias is not None:
            out = out + self._bias
        return out.to(out_dtype or x.dtype)


def quantized_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes nearest to `weight` [out, in], uint8 of its shape, and their grids.

    grids: step and middle of each group, bfloat16 [in / GROUP, out, 2]. They reach over the whole
    group, so that every number is off by at most half a step.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=2)
    middle = (low + (high - low) * (_MIDDLE_CODE / _LAST_CODE)).bfloat16().float()
    below = (middle - low) / _MIDDLE_CODE
    above = (high - middle) / (_LAST_CODE - _MIDDLE_CODE)
    widest = torch.maximum(below, above).clamp(min=_TINY_BFLOAT16)
    step = (widest * (1 + _ROUNDING)).bfloat16().float()  # never less, however it is rounded
    codes = ((groups - middle[..., None]) / step[..., None]).round() + _MIDDLE_CODE
    grids = torch.stack([step, middle], dim=2).bfloat16().transpose(0, 1).contiguous()
    return codes.clamp_(0, _LAST_CODE).to(torch.uint8).flatten(1), grids


def plain_weight(codes: Tensor, grids: Tensor) -> Tensor:
    """Return the weight that codes and grids stand for, float32 [out, in]: the reference."""
    step, middle = grids.float().transpose(0, 1).unbind(dim=2)
    steps = codes.float().unflatten(1, (-1, GROUP)) - _MIDDLE_CODE
    weight: Tensor = steps * step[..., None] + middle[..., None]
    return weight.flatten(1)


@cache
def int4_works(device: torch.device) -> bool:
    """Return whether torch's int4 product works on `device`; the result is cached."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=generator).to(device) for n in (3, 16))
    expected = x @ plain_weight(*quantized_groups(weight)).T
    try:
        found = Int4Weight(weight).linear(x)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return bool((found - expected).norm() < 0.02 * expected.norm())


def _packed(codes: Tensor) -> Tensor:
    packed: Tensor
    if codes.is_cuda:
        # Tiles of 16 columns each that a thread reads together; the even column is the upper half.
        num_tiles = next(n for n in (8, 4, 2) if codes.shape[1] % (16 * n) == 0)
        pairs = codes[:, ::2] << 4 | codes[:, 1::2]
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, num_tiles)
    else:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return packed
