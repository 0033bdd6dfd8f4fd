"""The product of a few rows with a weight, on the tensor cores of Hopper.

A Triton kernel loads nothing before it waits for the kernel before it. In Gluon a program first
starts copying as many blocks of weights as its shared memory holds, and then waits for its input.
So the weights of the next product arrive while norms, exchanges and attention leave the memory
idle.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from serve_spec.ops.dispatch import dependent_launch
from serve_spec.ops.dispatch_triton import widened
from serve_spec.ops.linear import TILE_DEPTH, Tiles
from serve_spec.ops.scaled_linear import Unit

# Renamed in Triton 3.9.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
PAIRS_TOGETHER = 8
"""Gates in a row, followed by their ups. A thread holds the sums of rows that are 8 apart."""

_TOGETHER = gl.constexpr(PAIRS_TOGETHER)
WARPS = 4  # of one group, whose tensor cores multiply 64 weight rows together


def multiply(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    unit: Unit,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
    is_gated: bool = False,
) -> None:
    """Write out [T, out], or [splits, T, out] if several programs share a sum.

    scale, unit: see `linear.small_linear`.

    Rows of x may be strided; x is copied if they do not start at multiples of 16 bytes. is_gated:
    see `linear.small_gate_up`; the outputs are a multiple of PAIRS_TOGETHER.
    """
    if not x.numel():
        return
    num_outputs, (num_rows, in_features) = out.shape[-1], x.shape
    _product_kernel[grid_of(out, in_features, tiles)](
        weight_blocks(weight, tiles, is_gated), input_blocks(x, tiles),
        scale, bias, out, num_rows, num_outputs, in_features, tiles.columns,
        0 if scale is None else scale.stride(0), unit[0], unit[1] // TILE_DEPTH,
        STAGES=tiles.stages, GATED=is_gated, PER_BLOCK=unit[1] < in_features,
        num_warps=WARPS, **dependent_launch(x.device),
    )  # fmt: skip


def grid_of(out: Tensor, in_features: int, tiles: Tiles) -> tuple[int, int, int]:
    """Return the programs of a product."""
    num_rows, num_outputs = out.shape[-2:]
    return (
        triton.cdiv(num_rows, tiles.rows),
        triton.cdiv(num_outputs, tiles.outputs),
        triton.cdiv(in_features, tiles.columns),
    )


def input_blocks(x: Tensor, tiles: Tiles) -> TensorDescriptor:
    """Return the blocks of x that programs copy."""
    num_rows, in_features = x.shape
    if (x.data_ptr() | (num_rows > 1) * x.stride(0) * x.itemsize) % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    # The stride of a single row may be anything.
    x = x.as_strided(x.shape, (x.stride(0) if num_rows > 1 else in_features, 1))
    return _blocks(x, tiles.rows, TILE_DEPTH)


def weight_blocks(
    weight: Tensor, tiles: Tiles, is_gated: bool, depth: int = TILE_DEPTH
) -> TensorDescriptor:
    """Return the blocks of a weight that programs copy, `depth` elements of each row."""
    if not is_gated:
        return _blocks(weight, tiles.outputs, depth)
    # Gates and ups alternate.
    weight = weight.unflatten(0, (2, -1, PAIRS_TOGETHER)).transpose(0, 1)
    return _blocks(weight, tiles.outputs // PAIRS_TOGETHER, 2, PAIRS_TOGETHER, depth)


def _blocks(tensor: Tensor, *block: int) -> TensorDescriptor:
    """Return a TMA descriptor; elements outside are read as zeros."""
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, block[-1] * tensor.itemsize),
        element_bitwidth=8 * tensor.itemsize,
        rank=len(block),
    )
    return TensorDescriptor(tensor, [*tensor.shape], [*tensor.stride()], [*block], layout)


# Not specialized: kernels for 1 and for 16 rows would only take longer to compile.
@gluon.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    weight, x, scale, bias, out, num_rows, num_outputs, in_features, columns,
    scale_stride, unit_rows, unit_blocks,
    STAGES: gl.constexpr, GATED: gl.constexpr, PER_BLOCK: gl.constexpr, DEPENDENT: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """out[split, row, output] = Σ over the split's columns of x[row] · weight[output].

    GATED: see `linear.small_gate_up`. Eight-bit weights are converted to the dtype of x, which
    holds them exactly. PER_BLOCK: `unit_blocks` blocks of DEPTH columns share a scale, and sums
    are scaled block by block; else a row has one.
    """
    ROWS: gl.constexpr = x.block_shape[0]
    DEPTH: gl.constexpr = x.block_shape[1]
    WEIGHTS: gl.constexpr = weight.block_type.numel // DEPTH
    BYTES: gl.constexpr = weight.block_type.nbytes + x.block_type.nbytes
    first_row = gl.program_id(0) * ROWS
    tile = gl.program_id(1)
    split = gl.program_id(2)
    first = split * columns
    num_blocks = gl.cdiv(gl.minimum(columns, in_features - first), DEPTH)

    weights = gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_shape, weight.layout)  # noqa: RUF005
    inputs = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, DEPTH], x.layout)
    arrivals = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrivals.index(stage), count=1)
    if DEPENDENT:
        gdc_launch_dependents()
    for stage in gl.static_range(STAGES):
        fetch_weights(weight, weights, arrivals, stage, tile, first + stage * DEPTH,
                       stage < num_blocks, BYTES)  # fmt: skip
    if DEPENDENT:
        gdc_wait()
    for stage in gl.static_range(STAGES):
        load(
            x, [first_row, first + stage * DEPTH], arrivals.index(stage), inputs.index(stage),
            pred=stage < num_blocks,
        )  # fmt: skip

    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, ROWS, 16]
    )
    sums = gl.zeros((WEIGHTS, ROWS), gl.float32, layout)
    _, weight_row = places(sums, tile, num_outputs, GATED)
    is_row = weight_row < num_outputs * (2 if GATED else 1)
    factors = scale
    if scale is not None:
        factors += weight_row // unit_rows * scale_stride
    for block in range(num_blocks):
        slot = block % STAGES
        mbarrier.wait(arrivals.index(slot), (block // STAGES) & 1)
        rows = weights.index(slot).reshape((WEIGHTS, DEPTH))
        columns_of_x = inputs.index(slot).permute((1, 0))
        if PER_BLOCK:
            factor = gl.load(factors + (first // DEPTH + block) // unit_blocks, mask=is_row)
            nothing = gl.zeros((WEIGHTS, ROWS), gl.float32, layout)
            sums += _multiplied(rows, columns_of_x, nothing) * factor[:, None]
        else:
            sums = _multiplied(rows, columns_of_x, sums)
        following = block + STAGES
        column = first + following * DEPTH
        fetch_weights(weight, weights, arrivals, slot, tile, column, following < num_blocks, BYTES)
        load(
            x, [first_row, column], arrivals.index(slot), inputs.index(slot),
            pred=following < num_blocks,
        )  # fmt: skip

    if scale is not None and not PER_BLOCK:
        sums *= gl.load(factors, mask=is_row)[:, None]
    out += split.to(gl.int64) * num_rows * num_outputs
    write(sums, bias, out, first_row, tile, num_rows, num_outputs, GATED)


@gluon.jit
def _multiplied(rows, columns, sums):
    """Return sums + rows · columns; rows that are converted go through registers."""
    if rows.dtype == columns.dtype:
        sums = warpgroup_mma(rows, columns, sums, is_async=True)
    else:
        operand: gl.constexpr = gl.DotOperandLayout(0, sums.type.layout, k_width=2)
        numbers = widened(rows.load(operand), columns.dtype)
        sums = warpgroup_mma(numbers, columns, sums, is_async=True)
    return warpgroup_mma_wait(0, deps=(sums,))


@gluon.jit
def fetch_weights(weight, weights, arrivals, stage, tile, column, is_inside, BYTES: gl.constexpr):
    """Start copying a block of weights. The barrier of the stage expects BYTES, with those of x."""
    arrival = arrivals.index(stage)
    mbarrier.expect(arrival, BYTES, pred=is_inside)
    first = tile * weight.block_shape[0]
    if len(weight.block_shape) == 2:
        load(weight, [first, column], arrival, weights.index(stage), pred=is_inside)
    else:
        load(weight, [first, 0, 0, column], arrival, weights.index(stage), pred=is_inside)


@gluon.jit
def places(sums, tile, num_outputs, GATED: gl.constexpr):
    """Return the outputs that the rows of a tile of sums belong to, and the weight rows."""
    WEIGHTS: gl.constexpr = sums.shape[0]
    place = gl.arange(0, WEIGHTS, layout=gl.SliceLayout(1, sums.type.layout))
    if GATED:
        output = tile * (WEIGHTS // 2) + place // (2 * _TOGETHER) * _TOGETHER + place % _TOGETHER
        # Ups follow all gates; those past the last stand for nothing.
        is_up = place // _TOGETHER % 2
        weight_row = gl.where(output < num_outputs, output + is_up * num_outputs, 2 * num_outputs)
        return output, weight_row
    output = tile * WEIGHTS + place
    return output, output


@gluon.jit
def write(sums, bias, out, first_row, tile, num_rows, num_outputs, GATED: gl.constexpr):
    """Write out[row, output] of a tile of sums [weight rows, rows of x]."""
    WEIGHTS: gl.constexpr = sums.shape[0]
    ROWS: gl.constexpr = sums.shape[1]
    output, weight_row = places(sums, tile, num_outputs, GATED)
    if bias is not None:
        sums += gl.load(bias + weight_row, mask=output < num_outputs).to(gl.float32)[:, None]
    results = sums.to(out.dtype.element_ty)
    OUTPUTS: gl.constexpr = WEIGHTS // (2 if GATED else 1)
    if GATED:
        # Both numbers of a pair are in one thread. As `linear_triton.gated`.
        pairs = results.reshape((OUTPUTS // _TOGETHER, 2, _TOGETHER, ROWS)).permute((0, 2, 3, 1))
        gates, ups = gl.split(pairs.reshape((OUTPUTS, ROWS, 2)))
        gates = gates.to(gl.float32)
        silu = (gates / (1.0 + gl.exp(-gates))).to(results.dtype)
        results = (silu.to(gl.float32) * ups.to(gl.float32)).to(results.dtype)
    layout: gl.constexpr = results.type.layout
    output = tile * OUTPUTS + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))
    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    at = row.to(gl.int64)[None, :] * num_outputs + output[:, None]
    gl.store(out + at, results, mask=(output < num_outputs)[:, None] & (row < num_rows)[None, :])
