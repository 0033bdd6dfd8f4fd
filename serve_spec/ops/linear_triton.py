"""Matrix products of a few rows at the speed of memory.

A block of weight rows is the wide operand, the rows of x (padded to 8, 16, ...) the narrow one, so
the tensor cores read every weight once. Large sums are split over several programs (split-K), whose
partial sums a second kernel adds in a fixed order, without atomics. So a row has the same bits on
every run and in a batch of any size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops.dispatch import dependent_launch
from serve_spec.ops.dispatch_triton import wait_for_previous
from serve_spec.ops.linear import choose_tiles
from serve_spec.ops.linear_gluon import PAIRS_TOGETHER, multiply
from serve_spec.ops.scaled_linear import PER_ROW, Unit

_SUM_BLOCK = 512


def small_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    unit: Unit = PER_ROW,
) -> Tensor:
    """See `linear.small_linear`. Rows of x may be strided, their elements not."""
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype or x.dtype)
    num_outputs, in_features = weight.shape
    tiles = choose_tiles(num_outputs, in_features, x.shape[0], bits=8 * weight.itemsize)
    if tiles.columns >= in_features:
        multiply(x, weight, scale, unit, bias, out, tiles)
        return out
    sum_splits(small_partials(x, weight, scale, unit), bias, out)
    return out


def sum_splits(partials: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """See `linear.sum_splits`."""
    _sum_kernel[(triton.cdiv(out.numel(), _SUM_BLOCK),)](
        partials, bias, out, out.numel(), out.shape[1],
        SPLITS=len(partials), BLOCK=_SUM_BLOCK,
        num_warps=4, **dependent_launch(out.device),
    )  # fmt: skip


def small_partials(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, unit: Unit = PER_ROW
) -> Tensor:
    """See `linear.small_partials`; a sum in one program is returned whole. Rows may be strided."""
    num_outputs, in_features = weight.shape
    tiles = choose_tiles(num_outputs, in_features, x.shape[0], bits=8 * weight.itemsize)
    splits = triton.cdiv(in_features, tiles.columns)
    if splits == 1:
        return small_linear(x, weight, scale=scale, unit=unit)
    partials = x.new_empty(splits, x.shape[0], num_outputs, dtype=torch.float32)
    multiply(x, weight, scale, unit, None, partials, tiles)
    return partials


def small_gate_up(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, unit: Unit = PER_ROW
) -> Tensor:
    """See `linear.small_gate_up`. Rows of x may be strided, their elements not."""
    width, in_features = weight.shape[0] // 2, weight.shape[1]
    if width % PAIRS_TOGETHER:
        return silu_and_mul(small_linear(x, weight, scale=scale, unit=unit))
    out = x.new_empty(x.shape[0], width)
    tiles = choose_tiles(width, in_features, x.shape[0], gated=True, bits=8 * weight.itemsize)
    multiply(x, weight, scale, unit, None, out, tiles, is_gated=True)
    return out


@triton.jit
def load_sum(places, mask, partial_stride, NUM_PARTIALS: tl.constexpr, dtype: tl.constexpr):
    """See `linear.sum_partials`; places: pointers into the first partial sum."""
    numbers = tl.load(places, mask=mask, other=0.0)
    for index in tl.static_range(1, NUM_PARTIALS):
        numbers += tl.load(places + index * partial_stride, mask=mask, other=0.0)
    return numbers.to(dtype)


@triton.jit
def _sum_kernel(
    parts, bias, out, size, num_outputs,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = Σ parts[split] + bias, first to last."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    wait_for_previous(DEPENDENT)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in tl.static_range(SPLITS):
        total += tl.load(parts + at, mask=inside, other=0.0)
        parts += size
    if bias is not None:
        total += tl.load(bias + at % num_outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


_ACTIVATION_BLOCK = 1024


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `linear.silu_and_mul`. Rows may be strided, their elements not."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    _silu_and_mul_kernel[(num_rows, triton.cdiv(width, _ACTIVATION_BLOCK))](
        gate_up, out, width, gate_up.stride(0),
        BLOCK=_ACTIVATION_BLOCK, num_warps=4, **dependent_launch(gate_up.device),
    )  # fmt: skip
    return out


@triton.jit
def _silu_and_mul_kernel(gate_up, out, width, stride, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    wait_for_previous(DEPENDENT)
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + width + at, mask=inside, other=0.0)
    tl.store(out + row * width + at, gated(gate, up), mask=inside)


@triton.jit
def gated(gate, up):
    """Return silu(gate) · up, with silu(gate) rounded to the dtype first."""
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
