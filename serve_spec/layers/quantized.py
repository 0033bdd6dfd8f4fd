"""Matrix products with weights in integers: eight bits on CPUs, four bits on CPUs and GPUs.

Eight bits: by torch's dynamic quantization: a row of the weight has a factor of its own, and what
it is multiplied with goes into eight bits, too, by its range in this call. Rows are brought to one
range before: the first token of a text has numbers so large that all others would be lost beside
them.

Four bits: by torch's own kernels. `GROUP` numbers of a row share a grid of sixteen: each is (code -
8) · step + middle. Groups of 64 would take 4.5 bits a number instead of 5, but a copy of the
shipped target in them makes 79 of 100 choices as the target does, in groups of 32 83.
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
    return _works(Int8Weight, torch.device("cpu"), 0.1)


def _works(kind: type[Int8Weight | Int4Weight], device: torch.device, tolerance: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=generator).to(device) for n in (3, 16))
    try:
        found = kind(weight).linear(x, torch.float32)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    expected = x @ (plain_weight(*quantized_groups(weight)) if kind is Int4Weight else weight).T
    return bool((found - expected).norm() < tolerance * expected.norm())


@cache
def _needs_room() -> bool:
    # Without these instructions sums of two products saturate, unless one bit is left free.
    has_vnni = getattr(torch.cpu, "_is_vnni_supported", lambda: False)
    return not has_vnni()


GROUP = 32
_LAST_CODE, _MIDDLE_CODE = 15, 8
# What the kernel for CPUs cuts a weight's rows into.
_ROWS = 16
# Of bfloat16: the largest share of a number that is rounded away, and the smallest step.
_ROUNDING, _TINY_BFLOAT16 = 2**-8, torch.finfo(torch.bfloat16).tiny
# The oldest GPUs with bfloat16 products.
_MIN_CAPABILITY = (8, 0)


class Int4Weight:
    """A weight [out, in] and its bias, laid out for products on its device."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        codes, self._grids = quantized_groups(weight)
        self._packed = _packed(codes)
        self._bias = bias
        self.num_bytes = self._packed.nbytes + self._grids.nbytes

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Return whether the kernels can cut a weight of this shape into their blocks."""
        num_outputs, in_features = weight.shape
        return num_outputs % _ROWS == 0 and in_features % GROUP == 0

    def linear(self, x: Tensor, out_dtype: torch.dtype) -> Tensor:
        """Return x·Wᵀ + b: [T, in] -> [T, out]; x and the product are rounded to bfloat16."""
        aten = torch.ops.aten
        multiply = aten._weight_int4pack_mm if x.is_cuda else aten._weight_int4pack_mm_for_cpu
        out: Tensor = multiply(x.bfloat16().contiguous(), self._packed, GROUP, self._grids)
        if self._bias is not None:
            out = out + self._bias
        return out.to(out_dtype)


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
    return _works(Int4Weight, device, 0.02)


def _packed(codes: Tensor) -> Tensor:
    packed: Tensor
    if codes.is_cuda:
        # Tiles of 16 columns each that a thread reads at once; the even column is the upper half.
        num_tiles = next(n for n in (8, 4, 2) if codes.shape[1] % (16 * n) == 0)
        pairs = codes[:, ::2] << 4 | codes[:, 1::2]
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, num_tiles)
    else:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return packed
