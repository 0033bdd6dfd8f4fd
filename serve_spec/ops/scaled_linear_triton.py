"""Products of a few rows with eight-bit weights and scales of blocks.

A block of weight rows is the wide operand, as in `linear_triton`; it is converted to the dtype of
x, which holds it exactly, and sums of the columns that have one scale are scaled in float32. How a
sum is split depends on the shape of the weight alone, so a row has the same bits in every batch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops.dispatch import dependent_launch
from serve_spec.ops.dispatch_triton import wait_for_previous, widened
from serve_spec.ops.linear import choose_tiles
from serve_spec.ops.linear_triton import sum_splits
from serve_spec.ops.scaled_linear import MAX_ROWS, Unit, depth, dequantize_into

_OUTPUTS, _FEWEST_ROWS, _MOST_ROWS = 64, 16, 64


def scaled_linear(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    unit: Unit,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `scaled_linear.scaled_linear`. Rows of x may be strided, their elements not."""
    num_rows, (num_outputs, in_features) = x.shape[0], values.shape
    if num_rows > MAX_ROWS:
        weight = dequantize_into(torch.empty_like(values, dtype=x.dtype), values, scale, unit)
        return F.linear(x, weight, bias).to(out_dtype or x.dtype)
    out = x.new_empty(num_rows, num_outputs, dtype=out_dtype or x.dtype)
    if not num_rows:
        return out
    columns = choose_tiles(num_outputs, in_features, num_rows, bits=8).columns
    splits = triton.cdiv(in_features, columns)
    parts = out if splits == 1 else out.new_empty(splits, *out.shape, dtype=torch.float32)
    rows = min(_MOST_ROWS, max(_FEWEST_ROWS, triton.next_power_of_2(num_rows)))
    grid = triton.cdiv(num_outputs, _OUTPUTS), splits, triton.cdiv(num_rows, rows)
    _product_kernel[grid](
        x, values, scale, bias if splits == 1 else None, parts,
        num_rows, num_outputs, in_features, columns, x.stride(0), *unit, scale.stride(0),
        ROWS=rows, OUTPUTS=_OUTPUTS, DEPTH=depth(unit, in_features),
        IS_ONE=unit[1] >= in_features, num_warps=4, **dependent_launch(x.device),
    )  # fmt: skip
    if splits > 1:
        sum_splits(parts, bias, out)
    return out


# Not specialized: kernels for 1 and for 16 rows would only take longer to compile.
@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x, values, scale, bias, out, num_rows, num_outputs, in_features, columns, x_stride,
    unit_rows, unit_columns, scale_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, IS_ONE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out[split, row, output] = Σ over the split's columns of x[row] · values[output] · scale.

    IS_ONE: whether all columns of a row have one scale.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_output, is_row = output < num_outputs, row < num_rows
    scales = scale + (output // unit_rows).to(tl.int64) * scale_stride
    first = split * columns
    sums = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    wait_for_previous(DEPENDENT)
    for start in range(first, tl.minimum(first + columns, in_features), DEPTH):
        column = start + tl.arange(0, DEPTH)
        is_column = column < in_features
        numbers = tl.load(
            values + output.to(tl.int64)[:, None] * in_features + column[None, :],
            mask=is_output[:, None] & is_column[None, :], other=0.0,
        )  # fmt: skip
        inputs = tl.load(
            x + row.to(tl.int64)[None, :] * x_stride + column[:, None],
            mask=is_row[None, :] & is_column[:, None], other=0.0,
        )  # fmt: skip
        if numbers.dtype == tl.int8:
            numbers = numbers.to(tl.float32)
        products = tl.dot(widened(numbers, inputs.dtype), inputs, input_precision="ieee")
        if IS_ONE:
            sums += products
        else:
            at = start // unit_columns
            sums += products * tl.load(scales + at, mask=is_output, other=0.0)[:, None]
    if IS_ONE:
        sums *= tl.load(scales, mask=is_output, other=0.0)[:, None]
    if bias is not None:
        sums += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    place = (split.to(tl.int64) * num_rows + row.to(tl.int64))[None, :] * num_outputs
    tl.store(
        out + place + output[:, None], sums.to(out.dtype.element_ty),
        mask=is_output[:, None] & is_row[None, :],
    )  # fmt: skip
