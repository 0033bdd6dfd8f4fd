"""Products with integers of four bits, which are dequantized while they are read.

Of W [N, K] a row's columns are cut into tiles of TILE, the last one filled up. A word (int32) of a
tile holds 8 codes that are PLANE columns apart: bits 4·p .. 4·p + 3 of its word w are the code of
column PLANE·p + w. So a kernel gets PLANE neighbouring columns by one shift, and as groups are
multiples of PLANE columns, these have one scale and one zero point.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.ops import linear
from serve_spec.ops.dispatch import has_kernel

PLANE = 16
"""Columns that a plane of a tile's words holds."""

TILE = 8 * PLANE
"""Columns of a tile."""

# With more rows of x, dequantizing the weight first takes less time than doing it in each program.
_MOST_ROWS = 128


def int4_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zeros: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """Return x·Wᵀ + b in `out_dtype` (default: x's), W's numbers rounded to x's dtype.

    x: [T, K]; codes: `packed_codes`, int32 [N, tiles · PLANE]; bias: [N]. Returns [T, N].
    scale, zeros: [G, N], of K / G columns each. Numbers of W are (code - zero) · scale if zeros are
    uint8, code · scale + zero if they are floats. factors: floats [2, F, N], of K / F columns each,
    F divides G: with them scale and zeros are uint8, and stand for floats, their products.
    """
    if x.shape[0] <= _MOST_ROWS:
        return small_int4_linear(x, codes, scale, zeros, bias, out_dtype, factors)
    weight = dequantized(codes, scale, zeros, x.shape[1], x.dtype, factors)
    return linear.linear(x, weight, bias, out_dtype)


def int4_partials(
    x: Tensor, codes: Tensor, scale: Tensor, zeros: Tensor, factors: Tensor | None = None
) -> Tensor:
    """Return `int4_linear`, or partial sums of it: see `linear.sum_partials`."""
    if x.shape[0] <= _MOST_ROWS:
        return small_int4_partials(x, codes, scale, zeros, factors)
    return int4_linear(x, codes, scale, zeros, factors=factors)


@has_kernel
def small_int4_linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zeros: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """Return `int4_linear` of at most 128 rows, summed in float32 and rounded once."""
    weight = dequantized(codes, scale, zeros, x.shape[1], x.dtype, factors).float()
    bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight, bias).to(out_dtype or x.dtype)


@has_kernel
def small_int4_partials(
    x: Tensor, codes: Tensor, scale: Tensor, zeros: Tensor, factors: Tensor | None = None
) -> Tensor:
    """Return the partial sums of `small_int4_linear`: float32 [n, T, N], n by shape."""
    return small_int4_linear(x, codes, scale, zeros, None, torch.float32, factors)[None]


def int4_gate_up(
    x: Tensor, codes: Tensor, scale: Tensor, zeros: Tensor, factors: Tensor | None = None
) -> Tensor:
    """Return silu(gate) · up of both products, each rounded to x's dtype: [T, N / 2].

    The first half of W's rows is the gate's; the others: see `int4_linear`.
    """
    if x.shape[0] <= _MOST_ROWS:
        return small_int4_gate_up(x, codes, scale, zeros, factors)
    return linear.silu_and_mul(int4_linear(x, codes, scale, zeros, factors=factors))


@has_kernel
def small_int4_gate_up(
    x: Tensor, codes: Tensor, scale: Tensor, zeros: Tensor, factors: Tensor | None = None
) -> Tensor:
    """Return `int4_gate_up` of at most 128 rows."""
    return linear.silu_and_mul(small_int4_linear(x, codes, scale, zeros, factors=factors))


def packed_codes(codes: Tensor) -> Tensor:
    """Return codes uint8 [N, K] of 0 to 15 as words, int32 [N, tiles · PLANE]."""
    num_rows, num_columns = codes.shape
    tiles = F.pad(codes, (0, -num_columns % TILE)).view(num_rows, -1, 4, 2, PLANE)
    pairs = tiles[:, :, :, 0] | tiles[:, :, :, 1] << 4
    # The lowest byte of a word comes first.
    return pairs.transpose(2, 3).contiguous().view(torch.int32).view(num_rows, -1)


def unpacked_codes(words: Tensor, num_columns: int) -> Tensor:
    """Return the codes uint8 [N, K] that `packed_codes` laid out."""
    pairs = words.view(torch.uint8).view(words.shape[0], -1, PLANE, 4).transpose(2, 3)
    return torch.stack([pairs & 15, pairs >> 4], dim=3).flatten(1)[:, :num_columns]


@has_kernel
def dequantized(
    codes: Tensor,
    scale: Tensor,
    zeros: Tensor,
    num_columns: int,
    dtype: torch.dtype,
    factors: Tensor | None = None,
) -> Tensor:
    """Return W [N, K] in `dtype`, see `int4_linear`, computed in float32."""
    groups = unpacked_codes(codes, num_columns).float().unflatten(1, (len(scale), -1))
    if factors is not None:
        pair = factors.float().repeat_interleave(len(scale) // factors.shape[1], dim=1)
        scale, zeros = pair[0] * scale, pair[1] * zeros
    factor, zero = scale.T.float()[:, :, None], zeros.T.float()[:, :, None]
    if zeros.is_floating_point():
        groups.mul_(factor).add_(zero)
    else:
        groups.sub_(zero).mul_(factor)
    weight: Tensor = groups.flatten(1).to(dtype)
    return weight
