"""Matrix products. Small ones (few rows) are summed in float32 and rounded once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from serve_spec.core.machine import is_hopper
from serve_spec.ops.dispatch import has_kernel
from serve_spec.ops.scaled_linear import PER_ROW, Unit, dequantize_into


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return x·Wᵀ + b in `out_dtype` (default: x's), by the faster of our kernel and torch.

    x: [T, in]; weight: [out, in]; bias: [out]. Returns [T, out]. torch rounds to x's dtype first,
    except on a GPU without a bias.
    """
    if _is_fastest(x, weight):
        return small_linear(x, weight, bias, out_dtype)
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    if x.is_cuda and bias is None:
        return torch.mm(x, weight.t(), out_dtype=out_dtype)
    return F.linear(x, weight, bias).to(out_dtype)


def partials(x: Tensor, weight: Tensor) -> Tensor:
    """Return x·Wᵀ [T, out], or its partial sums, which the next kernel sums to save a launch.

    See `sum_partials`.
    """
    return small_partials(x, weight) if _is_fastest(x, weight) else linear(x, weight)


def gate_up(x: Tensor, weight: Tensor) -> Tensor:
    """Return silu(gate) · up: x [T, in], weight [2·I, in], gate rows first -> [T, I]."""
    if _is_fastest(x, weight, gated=True):
        return small_gate_up(x, weight)
    return silu_and_mul(linear(x, weight))


def _is_fastest(x: Tensor, weight: Tensor, *, gated: bool = False) -> bool:
    num_outputs = weight.shape[0] // (2 if gated else 1)
    return is_supported(x, weight) and is_ours(x.shape[0], num_outputs, gated=gated)


def is_supported(x: Tensor, weight: Tensor, unit: Unit = PER_ROW) -> bool:
    """Return whether `linear_triton` multiplies x [T, in] by floats [out, in], or by their fp8.

    unit: of its scales; sums of whole blocks of TILE_DEPTH columns are scaled.
    """
    return (
        x.is_cuda
        and not is_compiling()
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(-1) == 1
        and weight.is_contiguous()
        and weight.shape[1] % 16 == 0  # rows start at multiples of 16 bytes, also in eight bits
        and (unit[1] >= weight.shape[1] or unit[1] % TILE_DEPTH == 0)
        and is_hopper(x.device)
    )


@has_kernel
def small_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    unit: Unit = PER_ROW,
) -> Tensor:
    """Return x·Wᵀ + b in `out_dtype` (default: x's).

    x: [T, in]; weight: [out, in] with contiguous rows; bias: [out]; scale: factors of the units of
    an eight-bit weight, float32, as for `scaled_linear`; see `is_supported`. Returns [T, out].
    """
    bias = None if bias is None else bias.float()
    whole = weight.float()
    if scale is not None:
        whole = dequantize_into(torch.empty_like(whole), weight, scale, unit)
    return F.linear(x.float(), whole, bias).to(out_dtype or x.dtype)


@has_kernel
def small_partials(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, unit: Unit = PER_ROW
) -> Tensor:
    """Return the partial sums of `small_linear`: float32 [n, T, out], n by shape."""
    return small_linear(x, weight, None, torch.float32, scale, unit)[None]


def sum_partials(x: Tensor, like: Tensor) -> Tensor:
    """Return x, or if x is partial sums float32 [n, *like.shape], their sum.

    Added first to last and rounded once, to the dtype of `like`.
    """
    if x.dim() == like.dim():
        return x
    total = x[0]
    for partial in x[1:]:
        total = total + partial
    return total.to(like.dtype)


@has_kernel
def sum_splits(partials: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the sum of partials [splits, T, out], first to last, and the bias into out [T, out]."""
    total = sum_partials(partials, out.float())
    out.copy_(total if bias is None else total + bias)


@has_kernel
def small_gate_up(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, unit: Unit = PER_ROW
) -> Tensor:
    """Return silu(gate) · up of both products, each rounded to x's dtype.

    x: [T, in]; weight: [2·I, in], the rows of the gate first; scale, unit: see `small_linear`.
    Returns [T, I].
    """
    return silu_and_mul(small_linear(x, weight, scale=scale, unit=unit))


@has_kernel
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up, with silu(gate) rounded to the dtype before the product.

    gate_up: [T, 2·I], gates first. Returns [T, I].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@dataclass(frozen=True)
class Tiles:
    """What one program of `linear_gluon` does, a pure function of the shape.

    It multiplies `outputs` weight rows (with a gate: pairs of them) by `rows` rows of x, a power of
    two, and sums over `columns` columns, a multiple of TILE_DEPTH. `stages` blocks of TILE_DEPTH
    columns are in flight: weights are read once, so the speed depends on bytes in flight. Only
    `columns` changes the order of a sum, and so its bits.
    """

    outputs: int
    rows: int
    stages: int
    columns: int


_TILE_OUTPUTS, TILE_DEPTH = 64, 128
_MULTIPROCESSORS = 132
# Blocks in flight by bits of a weight and rows of x, if all programs run in one wave, and else.
# Measured on one H200 with layers of an 8B model, whole and as sharded over two and four ranks.
_STAGES = {
    16: {8: (8, 4), 16: (8, 4), 32: (6, 4), 64: (5, 3), 128: (4, 2)},
    8: {16: (8, 8), 32: (4, 4), 64: (4, 4)},
    4: {16: (12, 8), 32: (8, 6), 64: (6, 4)},
}
_GATED_STAGES = {
    16: {8: (5, 4), 16: (5, 4), 32: (4, 3), 64: (3, 3), 128: (3, 3)},
    8: {16: (4, 4), 32: (3, 3), 64: (3, 3)},
    4: {16: (8, 6), 32: (6, 4), 64: (4, 3)},
}
# Sums are split, into parts of at least _MIN_COLUMNS, until this many programs read the weights;
# beyond that into parts of at least _LONG_SUM, because each part is written and read again.
_ENOUGH_PROGRAMS = 64
_LONG_SUM, _MIN_COLUMNS = 1536, 256
# Two per multiprocessor: converting weights limits one alone.
_CONVERTING_PROGRAMS = 2 * _MULTIPROCESSORS


def is_ours(num_rows: int, num_outputs: int = 1, *, gated: bool = False, bits: int = 16) -> bool:
    """Return whether these kernels, and not the vendor's library, multiply so many rows.

    They are as fast or faster, start early, and the bits of a row do not depend on the batch. The
    library is 3% faster at plain products of many rows in several waves, such as logits.
    """
    if bits < 16:
        return num_rows <= max(_STAGES[bits])
    several_waves = not gated and _ceil(num_outputs, _TILE_OUTPUTS) > _MULTIPROCESSORS
    return num_rows <= (max(_STAGES[16]) // 2 if several_waves else max(_STAGES[16]))


def choose_tiles(
    num_outputs: int, in_features: int, num_rows: int, gated: bool = False, bits: int = 16
) -> Tiles:
    """Return the tiles for x [num_rows, in] by num_outputs weight rows (`gated`: pairs of them).

    bits: 16, 8 or 4, of a number of the weight.

    `columns` does not depend on `num_rows`, so a row is summed in the same order in every batch.
    """
    outputs, num_tiles = _TILE_OUTPUTS, _ceil(num_outputs, _TILE_OUTPUTS)
    is_wide = gated and 2 * num_tiles > _MULTIPROCESSORS
    if gated and not is_wide:
        outputs, num_tiles = outputs // 2, 2 * num_tiles  # so that more multiprocessors read
    # The product of two sums needs both in one program.
    most = _CONVERTING_PROGRAMS if bits < 16 else _MULTIPROCESSORS
    cuts = 1 if gated else _cuts(num_tiles, in_features, most)
    stages = (_GATED_STAGES if is_wide else _STAGES)[bits]
    rows = next((most for most in stages if num_rows <= most), max(stages))
    columns = _ceil(in_features, cuts * TILE_DEPTH) * TILE_DEPTH
    several_waves = num_tiles * cuts > _MULTIPROCESSORS
    return Tiles(outputs, rows, stages[rows][several_waves], columns)


def _cuts(num_tiles: int, in_features: int, most_programs: int) -> int:
    """Return how many programs share a sum, a power of two."""
    cuts = 1
    while 2 * cuts * num_tiles <= most_programs:
        columns = in_features / (2 * cuts)
        enough = cuts * num_tiles >= _ENOUGH_PROGRAMS
        if columns < (_LONG_SUM if enough else _MIN_COLUMNS):
            break
        cuts *= 2
    return cuts


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
