"""SwiGLU activation in one pass."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops.dependent_launch import dependent_launch

_BLOCK = 1024


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `activation.silu_and_mul`. Rows may be strided, their elements not."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    dependent = dependent_launch(gate_up.device)
    _silu_and_mul_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
        gate_up, out, width, gate_up.stride(0),
        BLOCK=_BLOCK, DEPENDENT=dependent, num_warps=4, launch_pdl=dependent,
    )  # fmt: skip
    return out


@triton.jit
def _silu_and_mul_kernel(gate_up, out, width, stride, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * stride + width + at, mask=inside, other=0.0)
    tl.store(out + row * width + at, gated(gate, up), mask=inside)


@triton.jit
def gated(gate, up):
    """Return silu(gate) · up, with silu(gate) rounded to the dtype first."""
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
