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
from serve_spec.ops.linear import TILE_DEPTH, TILE_OUTPUTS, Tiles

# Renamed in Triton 3.9.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_WARPS = 4  # of one group, whose tensor cores multiply TILE_OUTPUTS rows at once


def multiply(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
    is_gated: bool = False,
) -> None:
    """Write out [T, out], or [splits, T, out] if several programs share a sum.

    Rows of x may be strided; x is copied if they do not start at multiples of 16 bytes.
    """
    if not x.numel():
        return
    num_rows, in_features = x.shape
    if (x.data_ptr() | (num_rows > 1) * x.stride(0) * x.itemsize) % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    num_outputs = out.shape[-1]
    grid = (
        triton.cdiv(num_rows, tiles.rows),
        triton.cdiv(num_outputs, TILE_OUTPUTS),
        triton.cdiv(in_features, tiles.columns),
    )
    _product_kernel[grid](
        _blocks(weight, TILE_OUTPUTS), _blocks(x, tiles.rows),
        scale, bias, out, num_rows, num_outputs, in_features, tiles.columns,
        STAGES=tiles.stages, GATED=is_gated, num_warps=_WARPS, **dependent_launch(x.device),
    )  # fmt: skip


def _blocks(tensor: Tensor, rows: int) -> TensorDescriptor:
    """Return a TMA descriptor of a matrix; elements outside of it are read as zeros."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * tensor.itemsize)
    # The stride of a single row may be anything.
    stride = tensor.stride(0) if len(tensor) > 1 else tensor.shape[1]
    return TensorDescriptor(tensor, [*tensor.shape], [stride, 1], [rows, TILE_DEPTH], layout)


# Not specialized: kernels for 1 and for 16 rows would only take longer to compile.
@gluon.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    weight, x, scale, bias, out, num_rows, num_outputs, in_features, columns,
    STAGES: gl.constexpr, GATED: gl.constexpr, DEPENDENT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[split, row, output] = Σ over the split's columns of x[row] · weight[output].

    Eight-bit weights are converted to the dtype of x, which holds them exactly.
    """
    OUTPUTS: gl.constexpr = weight.block_shape[0]
    ROWS: gl.constexpr = x.block_shape[0]
    DEPTH: gl.constexpr = x.block_shape[1]
    BYTES: gl.constexpr = weight.block_type.nbytes * (2 if GATED else 1) + x.block_type.nbytes
    first_row = gl.program_id(0) * ROWS
    first_output = gl.program_id(1) * OUTPUTS
    split = gl.program_id(2)
    first = split * columns
    num_blocks = gl.cdiv(gl.minimum(columns, in_features - first), DEPTH)

    weights = gl.allocate_shared_memory(weight.dtype, [STAGES, OUTPUTS, DEPTH], weight.layout)
    ups = weights
    if GATED:
        ups = gl.allocate_shared_memory(weight.dtype, [STAGES, OUTPUTS, DEPTH], weight.layout)
    inputs = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, DEPTH], x.layout)
    arrivals = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrivals.index(stage), count=1)
    if DEPENDENT:
        gdc_launch_dependents()
    for stage in gl.static_range(STAGES):
        _fetch_weights(weight, weights, ups, arrivals, stage, first_output, num_outputs,
                       first + stage * DEPTH, stage < num_blocks, BYTES, GATED)  # fmt: skip
    if DEPENDENT:
        gdc_wait()
    for stage in gl.static_range(STAGES):
        _load(
            x, [first_row, first + stage * DEPTH], arrivals.index(stage), inputs.index(stage),
            pred=stage < num_blocks,
        )  # fmt: skip

    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, ROWS, 16]
    )
    sums = gl.zeros((OUTPUTS, ROWS), gl.float32, layout)
    up_sums = gl.zeros((OUTPUTS, ROWS), gl.float32, layout)
    for block in range(num_blocks):
        slot = block % STAGES
        mbarrier.wait(arrivals.index(slot), (block // STAGES) & 1)
        columns_of_x = inputs.index(slot).permute((1, 0))
        sums = _multiply_block(weights.index(slot), columns_of_x, sums, x.dtype)
        if GATED:
            up_sums = _multiply_block(ups.index(slot), columns_of_x, up_sums, x.dtype)
            sums, up_sums = warpgroup_mma_wait(0, deps=(sums, up_sums))
        else:
            sums = warpgroup_mma_wait(0, deps=(sums,))
        following = block + STAGES
        column = first + following * DEPTH
        _fetch_weights(weight, weights, ups, arrivals, slot, first_output, num_outputs,
                       column, following < num_blocks, BYTES, GATED)  # fmt: skip
        _load(
            x, [first_row, column], arrivals.index(slot), inputs.index(slot),
            pred=following < num_blocks,
        )  # fmt: skip

    _write(sums, up_sums, scale, bias, out + split.to(gl.int64) * num_rows * num_outputs,
           first_row, first_output, num_rows, num_outputs, GATED)  # fmt: skip


@gluon.jit
def _fetch_weights(
    weight, weights, ups, arrivals, stage, first_output, num_outputs, column, is_inside,
    BYTES: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Start copying a block of weights. The barrier of the stage expects BYTES, with those of x."""
    arrival = arrivals.index(stage)
    mbarrier.expect(arrival, BYTES, pred=is_inside)
    _load(weight, [first_output, column], arrival, weights.index(stage), pred=is_inside)
    if GATED:
        _load(
            weight, [num_outputs + first_output, column], arrival, ups.index(stage), pred=is_inside
        )


@gluon.jit
def _multiply_block(block, columns_of_x, sums, dtype: gl.constexpr):
    """Add a block's products to the sums; the caller waits for them."""
    if block.dtype == dtype:
        return warpgroup_mma(block, columns_of_x, sums, is_async=True)
    operand: gl.constexpr = gl.DotOperandLayout(0, sums.type.layout, k_width=2)
    return warpgroup_mma(block.load(operand).to(dtype), columns_of_x, sums, is_async=True)


@gluon.jit
def _write(
    sums, up_sums, scale, bias, out, first_row, first_output, num_rows, num_outputs,
    GATED: gl.constexpr,
):  # fmt: skip
    """Write out[row, output] of a tile of sums [outputs, rows]."""
    layout: gl.constexpr = sums.type.layout
    output = first_output + gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, layout))
    row = first_row + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout))
    is_output = output < num_outputs
    if scale is not None:
        sums *= gl.load(scale + output, mask=is_output)[:, None]
        if GATED:
            up_sums *= gl.load(scale + num_outputs + output, mask=is_output)[:, None]
    if bias is not None:
        sums += gl.load(bias + output, mask=is_output).to(gl.float32)[:, None]
    results = sums.to(out.dtype.element_ty)
    if GATED:
        # As `linear_triton.gated`.
        gate = results.to(gl.float32)
        silu = (gate / (1.0 + gl.exp(-gate))).to(results.dtype)
        up = up_sums.to(results.dtype).to(gl.float32)
        results = (silu.to(gl.float32) * up).to(results.dtype)
    at = row.to(gl.int64)[None, :] * num_outputs + output[:, None]
    gl.store(out + at, results, mask=is_output[:, None] & (row < num_rows)[None, :])
