"""Matrix products. Small ones (few rows) are summed in float32 and rounded once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from serve_spec.core.machine import is_hopper
from serve_spec.ops.dispatch import has_kernel


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    fp8: Fp8Weight | None = None,
) -> Tensor:
    """Return x·Wᵀ + b in `out_dtype` (default: x's), by the faster of our kernel and torch.

    x: [T, in]; weight: [out, in]; bias: [out]; fp8: the weight in eight bits, used if that is
    faster. Returns [T, out]. torch rounds to x's dtype first, except on a GPU without a bias.
    """
    ours = _our_weight(x, weight, fp8)
    if ours is not None:
        return small_linear(x, ours[0], bias, out_dtype, ours[1])
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    if x.is_cuda and bias is None:
        return torch.mm(x, weight.t(), out_dtype=out_dtype)
    return F.linear(x, weight, bias).to(out_dtype)


def partials(x: Tensor, weight: Tensor, fp8: Fp8Weight | None = None) -> Tensor:
    """Return x·Wᵀ [T, out], or its partial sums, which the next kernel sums to save a launch.

    See `sum_partials`. fp8: see `linear`.
    """
    ours = _our_weight(x, weight, fp8)
    return linear(x, weight) if ours is None else small_partials(x, *ours)


def gate_up(x: Tensor, weight: Tensor, fp8: Fp8Weight | None = None) -> Tensor:
    """Return silu(gate) · up: x [T, in], weight [2·I, in], gate rows first -> [T, I].

    fp8: see `linear`.
    """
    ours = _our_weight(x, weight, fp8, gated=True)
    return silu_and_mul(linear(x, weight)) if ours is None else small_gate_up(x, *ours)


def _our_weight(
    x: Tensor, weight: Tensor, fp8: Fp8Weight | None, *, gated: bool = False
) -> tuple[Tensor, Tensor | None] | None:
    """Return the weight and its scale for `linear_triton`; None if it is not the fastest."""
    is_supported = (
        x.is_cuda
        and not is_compiling()
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(-1) == 1
        and weight.is_contiguous()
        and is_hopper(x.device)
    )
    if is_supported and fp8 is not None and is_ours(x.shape[0], gated=gated, fp8=True):
        return fp8.values, fp8.scale
    return (weight, None) if is_supported and is_ours(x.shape[0], gated=gated) else None


@has_kernel
def small_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """Return x·Wᵀ + b in `out_dtype` (default: x's).

    x: [T, in]; weight: [out, in] with contiguous rows; bias: [out]; scale: factor of each row of an
    eight-bit weight, float32 [out]. Returns [T, out].
    """
    bias = None if bias is None else bias.float()
    whole = weight.float() if scale is None else weight.float() * scale[:, None]
    return F.linear(x.float(), whole, bias).to(out_dtype or x.dtype)


@has_kernel
def small_partials(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return the partial sums of `small_linear`: float32 [n, T, out], n by shape."""
    return small_linear(x, weight, None, torch.float32, scale)[None]


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
def small_gate_up(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return silu(gate) · up of both products, each rounded to x's dtype.

    x: [T, in]; weight: [2·I, in], the rows of the gate first; scale: see `small_linear`. Returns
    [T, I].
    """
    return silu_and_mul(small_linear(x, weight, scale=scale))


@dataclass(frozen=True)
class Fp8Weight:
    """A weight [out, in] in eight bits: values · scale[:, None], values float8_e4m3fn.

    The scale of a row maps its largest value to the largest float8.
    """

    values: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Fp8Weight:
        """Quantize `weight`, floating point [out, in]."""
        dtype = torch.float8_e4m3fn
        largest = weight.float().abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        scale = largest / torch.finfo(dtype).max
        return cls((weight.float() / scale[:, None]).to(dtype), scale)


@has_kernel
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up, with silu(gate) rounded to the dtype before the product.

    gate_up: [T, 2·I], gates first. Returns [T, I].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@dataclass(frozen=True)
class _Block:
    """Constants of a tile; see `Tiles`."""

    outputs: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles(_Block):
    """What one program of `linear_triton` does, a pure function of the shape.

    The weights are read once, so the speed depends on bytes in flight: a program for every
    multiprocessor, all resident at once, each with a deep pipeline. Constants were measured on one
    H200 with the products of an 8B model and its draft.

    It multiplies `outputs` weight rows (with a gate: that many pairs) by `rows` rows of x, both
    powers of two, and sums over `columns` columns, a multiple of `depth`. `stages` blocks of
    `depth` columns are in flight. Only `columns` changes the order of a sum, and so its bits.
    """

    rows: int
    columns: int


# By the most rows of x. For products of more programs than multiprocessors.
_PLAIN = {
    16: _Block(outputs=64, depth=128, warps=4, stages=5),
    32: _Block(outputs=128, depth=128, warps=8, stages=3),
    64: _Block(outputs=128, depth=128, warps=8, stages=4),
}
# Replaces the first if that would leave some multiprocessors with twice the work.
_FINE = _Block(outputs=32, depth=128, warps=4, stages=6)
_GATED = {
    16: _Block(outputs=32, depth=128, warps=4, stages=5),
    32: _Block(outputs=64, depth=128, warps=4, stages=4),
    64: _Block(outputs=64, depth=128, warps=4, stages=4),
    128: _Block(outputs=128, depth=64, warps=8, stages=4),
}
# For one program per multiprocessor.
_PLAIN_ALONE = {
    16: _Block(outputs=64, depth=128, warps=4, stages=7),
    32: _Block(outputs=64, depth=128, warps=4, stages=5),
    64: _Block(outputs=64, depth=128, warps=4, stages=5),
}
_GATED_ALONE = {
    16: _Block(outputs=64, depth=128, warps=4, stages=5),
    32: _Block(outputs=64, depth=128, warps=4, stages=3),
    64: _Block(outputs=64, depth=64, warps=4, stages=5),
    128: _Block(outputs=64, depth=64, warps=8, stages=7),
}
# For fewer programs than multiprocessors: each keeps more bytes in flight.
_PLAIN_SPARSE = {
    16: _Block(outputs=128, depth=128, warps=4, stages=5),
    32: _Block(outputs=128, depth=128, warps=4, stages=5),
    64: _Block(outputs=128, depth=128, warps=8, stages=4),
}
_GATED_SPARSE = {
    16: _Block(outputs=64, depth=128, warps=4, stages=5),
    32: _Block(outputs=64, depth=128, warps=4, stages=5),
    64: _Block(outputs=64, depth=64, warps=4, stages=7),
    128: _Block(outputs=64, depth=64, warps=8, stages=7),
}
# Where two tiles of 64 rows run at once, they are faster than one of 128.
_GATED_HALF = {rows: block for rows, block in _GATED_SPARSE.items() if rows <= 64}
# For eight-bit weights. At most 32 outputs use the older tensor core instructions, whose operands
# need less shuffling.
_PLAIN_FP8 = {
    16: _Block(outputs=32, depth=512, warps=2, stages=3),
    32: _Block(outputs=128, depth=128, warps=4, stages=5),
    64: _Block(outputs=64, depth=128, warps=4, stages=5),
}
_GATED_FP8 = {
    16: _Block(outputs=32, depth=256, warps=4, stages=5),
    32: _Block(outputs=64, depth=128, warps=4, stages=4),
    64: _Block(outputs=64, depth=128, warps=4, stages=4),
}
_MULTIPROCESSORS = 132
_MAX_UNEVENNESS = 1.2
# Sums are split while there is a multiprocessor for each program of so many outputs.
_CUT_OUTPUTS = 64
_CUT_OUTPUTS_FP8 = 128
# A product is sparse if it uses less than this share of the multiprocessors.
_SPARSE = 0.75
# Sparse sums are split once more if the parts are at least this long.
_LONG_SUM = 2048
# Fewest columns of a part of a sum: a multiple of every depth.
_MIN_COLUMNS = 256


def is_ours(num_rows: int, *, gated: bool = False, fp8: bool = False) -> bool:
    """Return whether these kernels, and not the vendor's library, multiply so many rows.

    Up to 64 rows of a plain product they are faster, or a few percent slower, and the bits of a row
    do not depend on the batch. A gated product saves a kernel and is faster up to 128 rows.
    """
    if fp8:
        return num_rows <= max(_GATED_FP8 if gated else _PLAIN_FP8)
    return num_rows <= max(_GATED if gated else _PLAIN)


def choose_tiles(
    num_outputs: int,
    in_features: int,
    num_rows: int,
    gated: bool = False,
    fp8: bool = False,
) -> Tiles:
    """Return the tiles for x [num_rows, in] by num_outputs weight rows (`gated`: pairs of them).

    `columns` does not depend on `num_rows`, so a row is summed in the same order in every batch,
    except for eight-bit weights, which only drafts have.
    """
    blocks, cuts = _blocks_and_cuts(num_outputs, in_features, gated, fp8)
    rows = next((most for most in blocks if num_rows <= most), max(blocks))
    block = blocks[rows]
    if block is _PLAIN[16] and _unevenness(num_outputs, block) > _MAX_UNEVENNESS:
        block = _FINE
    finest = max(_MIN_COLUMNS, block.depth)
    columns = _ceil(in_features, cuts * finest) * finest
    return Tiles(block.outputs, block.depth, block.warps, block.stages, rows, columns)


def _blocks_and_cuts(
    num_outputs: int, in_features: int, gated: bool, fp8: bool
) -> tuple[dict[int, _Block], int]:
    """Return blocks by rows, and the number of programs that share a sum, a power of two."""
    if fp8:
        cuts = 1 if gated else _cuts(num_outputs, _CUT_OUTPUTS_FP8)
        return _GATED_FP8 if gated else _PLAIN_FP8, cuts
    # The product of two sums needs both in one program.
    cuts = 1 if gated else _cuts(num_outputs, _CUT_OUTPUTS)
    share = _ceil(num_outputs, _CUT_OUTPUTS) * cuts / _MULTIPROCESSORS
    if share > 1:
        return _GATED if gated else _PLAIN, cuts
    if gated and share <= 0.5:
        return _GATED_HALF, cuts
    if gated:
        return _GATED_SPARSE if share < _SPARSE else _GATED_ALONE, cuts
    if share < _SPARSE and in_features >= 2 * cuts * _LONG_SUM:
        return _PLAIN_SPARSE, 2 * cuts
    return _PLAIN_ALONE, cuts


def _cuts(num_outputs: int, outputs: int) -> int:
    """Return how many programs share a sum while each has a multiprocessor, a power of two."""
    cuts = 1
    while 2 * cuts * _ceil(num_outputs, outputs) <= _MULTIPROCESSORS:
        cuts *= 2
    return cuts


def _unevenness(num_outputs: int, block: _Block) -> float:
    """Return the busiest multiprocessor's programs over the mean, ≥ 1."""
    programs = _ceil(num_outputs, block.outputs)
    return _ceil(programs, _MULTIPROCESSORS) * _MULTIPROCESSORS / programs


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
