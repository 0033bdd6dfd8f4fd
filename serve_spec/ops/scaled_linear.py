"""Products with matrices of eight bits, in which a block of rows and columns shares a scale."""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel

Unit = tuple[int, int]
"""Rows and columns that have one scale; past the last row or column it may stand for nothing."""

PER_ROW: Unit = (1, 1 << 30)
"""Every row has one scale."""

MAX_ROWS = 128
"""Rows of x above which the weight is dequantized whole."""

_LEAST_DEPTH = 16
_FP8_CAPABILITY = (8, 9)


@has_kernel
def scaled_linear(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    unit: Unit,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x·Wᵀ + b in `out_dtype` (default: x's), with W = values · scale.

    x: [T, in]; values: float8_e4m3fn or int8 [out, in]; scale: float32 [⌈out / rows⌉,
    ⌈in / columns⌉] of a unit; bias: [out]. Returns [T, out]. Products are of floats of x's dtype.
    A row has the same bits among any number of others up to MAX_ROWS.
    """
    weight = dequantize_into(torch.empty_like(values, dtype=x.dtype), values, scale, unit)
    return F.linear(x, weight, bias).to(out_dtype or x.dtype)


def dequantize_into(weight: Tensor, values: Tensor, scale: Tensor, unit: Unit) -> Tensor:
    """Write values · scale into `weight` [out, in], rounded once, and return it."""
    (num_rows, num_columns), (rows, columns) = weight.shape, unit
    weight.copy_(values)
    scale = scale.view(len(scale), -1)
    numbers, factors = weight, scale
    if scale.shape[1] > 1 and num_columns % columns == 0:
        numbers, factors = weight.unflatten(1, (-1, columns)), scale[:, :, None]
    elif scale.shape[1] > 1:
        factors = scale[:, torch.arange(num_columns, device=weight.device) // columns]
    whole, rest = divmod(num_rows, rows)
    if whole:
        numbers[: whole * rows].unflatten(0, (whole, rows)).mul_(factors[:whole, None])
    if rest:
        numbers[whole * rows :].mul_(factors[whole])
    return weight


def depth(unit: Unit, in_features: int) -> int:
    """Return how many columns are summed before they are scaled, a power of two."""
    return 128 if unit[1] >= in_features else math.gcd(unit[1], 128)


def fits_kernel(device: torch.device, unit: Unit, in_features: int) -> bool:
    """Return whether matrices stay as they are there: a GPU that converts FP8."""
    return converts_fp8(device) and depth(unit, in_features) >= _LEAST_DEPTH


@cache
def converts_fp8(device: torch.device) -> bool:
    """Return whether `device` is a GPU that converts FP8."""
    is_gpu = device.type == "cuda"
    return is_gpu and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY
