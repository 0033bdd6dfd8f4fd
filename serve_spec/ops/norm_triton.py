"""RMS norms: one program per row, one pass over memory."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops.dependent_launch import dependent_launch
from serve_spec.ops.linear_triton import load_whole


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `norm.rms_norm`. The rows of x may be strided, their elements not."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    _launch(rows, None, weight, out, None, eps)
    return out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `norm.add_rms_norm`. Rows may be strided, their elements not."""
    rows = residual.reshape(-1, residual.shape[-1])
    addends = x if x.dim() > residual.dim() else x[None]
    addends = addends.reshape(len(addends), *rows.shape)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    _launch(addends[0], rows, weight, out, total, eps, addends.stride(0), len(addends))
    return out.view(residual.shape), total.view(residual.shape)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor | None,
    eps: float,
    addend_stride: int = 0,
    num_addends: int = 1,
) -> None:
    """Launch the kernel. x: the first addend."""
    num_rows, width = x.shape
    block = triton.next_power_of_2(width)
    dependent = dependent_launch(x.device)
    _rms_norm_kernel[(num_rows,)](
        x, residual, weight, out, total, width,
        x.stride(0), 0 if residual is None else residual.stride(0), addend_stride, eps,
        NUM_ADDENDS=num_addends, BLOCK=block, DEPENDENT=dependent,
        num_warps=min(max(block // 512, 1), 16), launch_pdl=dependent,
    )  # fmt: skip


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, total, width, x_stride, residual_stride, addend_stride, eps,
    NUM_ADDENDS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    gain = tl.load(weight + at, mask=inside, other=0.0)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    places = x + row * x_stride + at
    values = load_whole(places, inside, addend_stride, NUM_ADDENDS, out.dtype.element_ty)
    if residual is not None:
        addend = tl.load(residual + row * residual_stride + at, mask=inside, other=0.0)
        values = (values.to(tl.float32) + addend.to(tl.float32)).to(values.dtype)
        tl.store(total + row * width + at, values, mask=inside)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / width + eps)
    tl.store(out + row * width + at, values * scale * gain.to(tl.float32), mask=inside)
