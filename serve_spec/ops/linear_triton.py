"""Matrix products of a few rows at the speed of memory.

A block of weight rows is the wide operand, the rows of x (padded to 16, 32, ...) the narrow one, so
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
from serve_spec.ops.linear import Tiles, choose_tiles

# Columns of each weight row that a program prefetches while the kernel before still runs.
_PREFETCH = 256
_SUM_BLOCK = 512


def small_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """See `linear.small_linear`. Rows of x may be strided, their elements not."""
    out = x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype or x.dtype)
    num_outputs, in_features = weight.shape
    tiles = choose_tiles(num_outputs, in_features, x.shape[0], fp8=scale is not None)
    _multiply(x, weight, scale, bias, out, tiles)
    return out


def small_partials(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """See `linear.small_partials`; a sum in one program is returned whole. Rows may be strided."""
    num_outputs, in_features = weight.shape
    tiles = choose_tiles(num_outputs, in_features, x.shape[0], fp8=scale is not None)
    splits = triton.cdiv(in_features, tiles.columns)
    if splits == 1:
        return small_linear(x, weight, scale=scale)
    partials = x.new_empty(splits, x.shape[0], num_outputs, dtype=torch.float32)
    _multiply_only(x, weight, scale, None, partials, tiles)
    return partials


def small_gate_up(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """See `linear.small_gate_up`. Rows of x may be strided, their elements not."""
    width, in_features = weight.shape[0] // 2, weight.shape[1]
    out = x.new_empty(x.shape[0], width)
    fp8 = scale is not None
    tiles = choose_tiles(width, in_features, x.shape[0], gated=True, fp8=fp8)
    _multiply(x, weight, scale, None, out, tiles, is_gated=True)
    return out


def _multiply(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
    is_gated: bool = False,
) -> None:
    num_rows, in_features = x.shape
    splits = triton.cdiv(in_features, tiles.columns)
    if splits == 1:
        _multiply_only(x, weight, scale, bias, out, tiles, is_gated)
        return
    sums = x.new_empty(splits, num_rows, out.shape[1], dtype=torch.float32)
    _multiply_only(x, weight, scale, None, sums, tiles)
    _sum_kernel[(triton.cdiv(out.numel(), _SUM_BLOCK),)](
        sums, bias, out, out.numel(), out.shape[1],
        SPLITS=splits, BLOCK=_SUM_BLOCK,
        num_warps=4, **dependent_launch(x.device),
    )  # fmt: skip


def _multiply_only(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
    is_gated: bool = False,
) -> None:
    """Write out [T, out], or [splits, T, out] if several programs share a sum."""
    num_rows, in_features = x.shape
    num_outputs = out.shape[-1]
    splits = triton.cdiv(in_features, tiles.columns)
    grid = (triton.cdiv(num_rows, tiles.rows), triton.cdiv(num_outputs, tiles.outputs), splits)
    _product_kernel[grid](
        x, weight, scale, bias, out,
        num_rows, num_outputs, in_features, tiles.columns, x.stride(0),
        OUTPUTS=tiles.outputs, ROWS=tiles.rows, DEPTH=tiles.depth, GATED=is_gated,
        EVEN=in_features % tiles.depth == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else None,
        PREFETCH=_PREFETCH if in_features % 8 == 0 and in_features >= _PREFETCH else 0,
        BLOCKS=max(32 * tiles.warps, tiles.outputs),
        num_warps=tiles.warps, num_stages=tiles.stages, **dependent_launch(x.device),
    )  # fmt: skip


# Not specialized: kernels for 1 and for 16 rows would only take longer to compile.
@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x, weight, scale, bias, out, num_rows, num_outputs, in_features, columns, x_stride,
    OUTPUTS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr, BLOCKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[split, row, output] = Σ over the split's columns of x[row] · weight[output].

    Eight-bit weights are converted to the dtype of x, which holds them exactly. Conversion to
    float16 is one instruction; to bfloat16 it is so many that nothing is gained.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_output = tl.program_id(1) * OUTPUTS
    split = tl.program_id(2)
    first = split * columns
    last = tl.minimum(first + columns, in_features)
    tl.assume(first < last)  # Else ptxas runs the tensor cores one instruction at a time.

    # Rows past the end repeat the last one and are not stored.
    output = first_output + tl.arange(0, OUTPUTS)
    weight_row = tl.minimum(output, num_outputs - 1).to(tl.int64)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            last_output = num_outputs - 1
            _prefetch(weight, first_output, last_output, first, in_features,
                      OUTPUTS, PREFETCH, BLOCKS)  # fmt: skip
            if GATED:
                _prefetch(weight, num_outputs + first_output, num_outputs + last_output, first,
                          in_features, OUTPUTS, PREFETCH, BLOCKS)  # fmt: skip
        tl.extra.cuda.gdc_wait()

    column = tl.arange(0, DEPTH)
    x_rows = x + row.to(tl.int64)[None, :] * x_stride + column[:, None]
    weight_rows = weight + weight_row[:, None] * in_features + column[None, :]
    up_rows = weight + (weight_row + num_outputs)[:, None] * in_features + column[None, :]
    is_row = (row < num_rows)[None, :]
    sums = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    up_sums = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for start in tl.range(first, last, DEPTH):
        inside = start + column < in_features
        x_mask = is_row if EVEN else is_row & inside[:, None]
        x_block = tl.load(x_rows + start, mask=x_mask, other=0.0)
        block = _load_weights(weight_rows + start, inside, x.dtype.element_ty, EVEN)
        sums = tl.dot(block, x_block, sums, input_precision=PRECISION)
        if GATED:
            block = _load_weights(up_rows + start, inside, x.dtype.element_ty, EVEN)
            up_sums = tl.dot(block, x_block, up_sums, input_precision=PRECISION)

    is_output = (output < num_outputs)[:, None]
    if scale is not None:
        sums *= tl.load(scale + weight_row)[:, None]
        if GATED:
            up_sums *= tl.load(scale + num_outputs + weight_row)[:, None]
    if bias is not None:
        sums += tl.load(bias + output, mask=output < num_outputs).to(tl.float32)[:, None]
    at = (split * num_rows + row).to(tl.int64)[None, :] * num_outputs + output[:, None]
    results = sums.to(out.dtype.element_ty)
    if GATED:
        results = gated(results, up_sums.to(out.dtype.element_ty))
    tl.store(out + at, results, mask=is_row & is_output)


@triton.jit
def _load_weights(weights, inside, dtype: tl.constexpr, EVEN: tl.constexpr):
    """Return a block of weights in the dtype of x; 0 in columns that are not inside."""
    block = tl.load(weights) if EVEN else tl.load(weights, mask=inside[None, :], other=0.0)
    return block.to(dtype)


@triton.jit
def load_sum(places, mask, partial_stride, NUM_PARTIALS: tl.constexpr, dtype: tl.constexpr):
    """See `linear.sum_partials`; places: pointers into the first partial sum."""
    numbers = tl.load(places, mask=mask, other=0.0)
    for index in tl.static_range(1, NUM_PARTIALS):
        numbers += tl.load(places + index * partial_stride, mask=mask, other=0.0)
    return numbers.to(dtype)


@triton.jit
def _prefetch(
    weight, first_output, last_output, first, in_features,
    OUTPUTS: tl.constexpr, PREFETCH: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Prefetch the first columns of every weight row to L2: one bulk request per thread."""
    number = tl.arange(0, BLOCKS)
    row = tl.minimum(first_output + number % OUTPUTS, last_output)
    columns: tl.constexpr = PREFETCH * OUTPUTS // BLOCKS
    column = tl.minimum(first + number // OUTPUTS * columns, in_features - columns)
    address = weight + row.to(tl.int64) * in_features + column
    size = tl.full((BLOCKS,), columns * (weight.dtype.element_ty.primitive_bitwidth // 8), tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0", "=r,l,r",
        [address.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


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
