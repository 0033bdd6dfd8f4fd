"""Products of few rows with integers of four bits, which go through registers once.

As in `linear_triton` a block of weight rows is the wide operand, large sums are split over several
programs by the shape alone, and their partial sums are added in a fixed order: a row has the same
bits in a batch of any size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops import int4_gluon
from serve_spec.ops.dispatch import dependent_launch
from serve_spec.ops.dispatch_triton import wait_for_previous
from serve_spec.ops.int4_linear import PLANE, TILE
from serve_spec.ops.linear import Tiles, choose_tiles, is_supported
from serve_spec.ops.linear_triton import silu_and_mul, sum_splits

_OUTPUTS = 64
# Rows of x in a program: the fewest that the tensor cores take, and the most that registers hold.
_FEWEST_ROWS, _MOST_ROWS = 16, 64


def small_int4_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zeros: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """See `int4_linear.small_int4_linear`. Rows of x may be strided, their elements not."""
    out = x.new_empty(len(x), scale.shape[1], dtype=out_dtype or x.dtype)
    tiles = _tiles(x, scale.shape[1])
    if tiles.columns >= x.shape[1] and _is_for_hopper(x, codes, scale):
        int4_gluon.multiply(x, codes, scale, zeros, factors, bias, out, tiles)
        return out
    sum_splits(small_int4_partials(x, codes, scale, zeros, factors), bias, out)
    return out


def small_int4_partials(
    x: Tensor, codes: Tensor, scale: Tensor, zeros: Tensor, factors: Tensor | None = None
) -> Tensor:
    """See `int4_linear.small_int4_partials`. Rows of x may be strided, their elements not."""
    (num_rows, in_features), (num_groups, num_outputs) = x.shape, scale.shape
    tiles = _tiles(x, num_outputs)
    splits = triton.cdiv(in_features, tiles.columns)
    partials = x.new_empty(splits, num_rows, num_outputs, dtype=torch.float32)
    if _is_for_hopper(x, codes, scale):
        int4_gluon.multiply(x, codes, scale, zeros, factors, None, partials, tiles)
        return partials
    rows = min(_MOST_ROWS, max(_FEWEST_ROWS, triton.next_power_of_2(num_rows)))
    grid = triton.cdiv(num_outputs, _OUTPUTS), splits, triton.cdiv(num_rows, rows)
    _int4_kernel[grid](
        x, codes, scale, zeros, factors, partials,
        num_rows, num_outputs, in_features, x.stride(0), codes.stride(0),
        GROUP=in_features // num_groups, SUPER=_columns_of_factors(factors, in_features),
        COLUMNS=tiles.columns, OUTPUTS=_OUTPUTS,
        ROWS=rows, PLANE=PLANE, TILE=TILE,
        num_warps=4, num_stages=4, **dependent_launch(x.device),
    )  # fmt: skip
    return partials


def small_int4_gate_up(
    x: Tensor, codes: Tensor, scale: Tensor, zeros: Tensor, factors: Tensor | None = None
) -> Tensor:
    """See `int4_linear.small_int4_gate_up`. Rows of x may be strided, their elements not."""
    width = scale.shape[1] // 2
    if width % int4_gluon.PAIRS_TOGETHER or not _is_for_hopper(x, codes, scale):
        return silu_and_mul(small_int4_linear(x, codes, scale, zeros, factors=factors))
    out = x.new_empty(len(x), width)
    tiles = _tiles(x, width, gated=True)
    int4_gluon.multiply(x, codes, scale, zeros, factors, None, out, tiles)
    return out


def _tiles(x: Tensor, num_outputs: int, *, gated: bool = False) -> Tiles:
    return choose_tiles(num_outputs, x.shape[1], len(x), gated, bits=4)


def _is_for_hopper(x: Tensor, codes: Tensor, scale: Tensor) -> bool:
    """Return whether `int4_gluon` multiplies them: groups divide a tile, or tiles a group."""
    group = x.shape[1] // len(scale)
    return is_supported(x, codes) and math.gcd(group, TILE) in (group, TILE)


def dequantized(
    codes: Tensor,
    scale: Tensor,
    zeros: Tensor,
    num_columns: int,
    dtype: torch.dtype,
    factors: Tensor | None = None,
) -> Tensor:
    """See `int4_linear.dequantized`."""
    num_groups, num_outputs = scale.shape
    weight = torch.empty(num_outputs, num_columns, dtype=dtype, device=codes.device)
    _dequantize_kernel[(triton.cdiv(num_outputs, _OUTPUTS), triton.cdiv(num_columns, TILE))](
        codes, scale, zeros, factors, weight, num_outputs, num_columns, codes.stride(0),
        GROUP=num_columns // num_groups, SUPER=_columns_of_factors(factors, num_columns),
        OUTPUTS=_OUTPUTS, PLANE=PLANE, TILE=TILE, num_warps=4, **dependent_launch(codes.device),
    )  # fmt: skip
    return weight


def _columns_of_factors(factors: Tensor | None, num_columns: int) -> int:
    return num_columns if factors is None else num_columns // factors.shape[1]


@triton.jit
def _plane_numbers(
    words, plane, column, scale, zeros, factors, outputs, is_used, num_outputs, in_features,
    GROUP: tl.constexpr, SUPER: tl.constexpr,
):  # fmt: skip
    """Return what a plane of words [OUTPUTS, PLANE] stands for: float32, columns `column` on."""
    at = column // GROUP * num_outputs + outputs
    factor = tl.load(scale + at, mask=is_used, other=0).to(tl.float32)
    zero = tl.load(zeros + at, mask=is_used, other=0)
    code = (words >> 4 * plane) & 15
    if factors is not None:
        places = factors + column // SUPER * num_outputs + outputs
        of_zeros = places + in_features // SUPER * num_outputs
        factor *= tl.load(places, mask=is_used, other=0.0).to(tl.float32)
        start = zero.to(tl.float32) * tl.load(of_zeros, mask=is_used, other=0.0).to(tl.float32)
        return code.to(tl.float32) * factor[:, None] + start[:, None]
    if zero.dtype == tl.uint8:
        return (code - zero.to(tl.int32)[:, None]).to(tl.float32) * factor[:, None]
    return code.to(tl.float32) * factor[:, None] + zero.to(tl.float32)[:, None]


@triton.jit
def _dequantize_kernel(
    codes, scale, zeros, factors, weight, num_outputs, in_features, codes_stride,
    GROUP: tl.constexpr, SUPER: tl.constexpr, OUTPUTS: tl.constexpr, PLANE: tl.constexpr,
    TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """weight = the numbers of a block of rows and a tile of columns."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tile, within = tl.program_id(1), tl.arange(0, PLANE)
    is_output = outputs < num_outputs
    wide = outputs.to(tl.int64)[:, None]
    wait_for_previous(DEPENDENT)
    places = codes + wide * codes_stride + tile * PLANE + within[None, :]
    words = tl.load(places, mask=is_output[:, None], other=0)
    for plane in tl.static_range(TILE // PLANE):
        column = tile * TILE + plane * PLANE
        is_used = is_output & (column < in_features)
        numbers = _plane_numbers(
            words, plane, column, scale, zeros, factors, outputs, is_used, num_outputs,
            in_features, GROUP, SUPER,
        )  # fmt: skip
        columns = column + within[None, :]
        is_number = is_output[:, None] & (columns < in_features)
        place = weight + wide * in_features + columns
        tl.store(place, numbers.to(weight.dtype.element_ty), mask=is_number)


@triton.jit
def _int4_kernel(
    x, codes, scale, zeros, factors, partials,
    num_rows, num_outputs, in_features, x_stride, codes_stride,
    GROUP: tl.constexpr, SUPER: tl.constexpr, COLUMNS: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, PLANE: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """partials[split] = x · Wᵀ over the split's columns."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(1)
    rows, within = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, PLANE)
    is_output, is_row = outputs < num_outputs, rows < num_rows
    row_words = codes + outputs.to(tl.int64)[:, None] * codes_stride + within[None, :]
    x_rows = x + rows.to(tl.int64)[None, :] * x_stride + within[:, None]
    wait_for_previous(DEPENDENT)
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    first = split * COLUMNS
    for start in range(first, min(first + COLUMNS, in_features), TILE):
        words = tl.load(row_words + start // TILE * PLANE, mask=is_output[:, None], other=0)
        for plane in tl.static_range(TILE // PLANE):
            column = start + plane * PLANE
            # Past the last column both are 0.
            is_used = is_output & (column < in_features)
            numbers = _plane_numbers(
                words, plane, column, scale, zeros, factors, outputs, is_used, num_outputs,
                in_features, GROUP, SUPER,
            )  # fmt: skip
            is_number = is_row[None, :] & (column + within < in_features)[:, None]
            inputs = tl.load(x_rows + column, mask=is_number, other=0.0)
            total = tl.dot(numbers.to(x.dtype.element_ty), inputs, total)
    place = (split.to(tl.int64) * num_rows + rows[None, :]) * num_outputs + outputs[:, None]
    tl.store(partials + place, total, mask=is_output[:, None] & is_row[None, :])
