"""Matrix products. Small ones (few rows) are summed in float32 and rounded once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from serve_spec.core.machine import is_hopper
from serve_spec.ops import linear_tiles
from serve_spec.ops.activation import silu_and_mul
from serve_spec.ops.dispatch import has_kernel


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    eight_bit: EightBit | None = None,
) -> Tensor:
    """Return x·Wᵀ + b in `out_dtype` (default: x's), by the faster of our kernel and torch.

    x: [T, in]; weight: [out, in]; bias: [out]; eight_bit: the weight in eight bits, used if that is
    faster. Returns [T, out]. torch rounds to x's dtype first, except on a GPU without a bias.
    """
    if eight_bit is not None and _is_ours(x, weight, eight_bit=True):
        return small_linear(x, eight_bit.values, bias, out_dtype, eight_bit.scale)
    if _is_ours(x, weight):
        return small_linear(x, weight, bias, out_dtype)
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    if x.is_cuda and bias is None:
        return torch.mm(x, weight.t(), out_dtype=out_dtype)
    return F.linear(x, weight, bias).to(out_dtype)


def addends(x: Tensor, weight: Tensor, eight_bit: EightBit | None = None) -> Tensor:
    """Return x·Wᵀ [T, out], or its addends, which the next kernel sums to save a launch.

    See `whole`. eight_bit: see `linear`.
    """
    if eight_bit is not None and _is_ours(x, weight, eight_bit=True):
        return small_addends(x, eight_bit.values, eight_bit.scale)
    if _is_ours(x, weight):
        return small_addends(x, weight)
    return linear(x, weight)


def gate_up(x: Tensor, weight: Tensor, eight_bit: EightBit | None = None) -> Tensor:
    """Return silu(gate) · up: x [T, in], weight [2·I, in], gate rows first -> [T, I].

    eight_bit: see `linear`.
    """
    if eight_bit is not None and _is_ours(x, weight, gated=True, eight_bit=True):
        return small_gate_up(x, eight_bit.values, eight_bit.scale)
    if _is_ours(x, weight, gated=True):
        return small_gate_up(x, weight)
    return silu_and_mul(linear(x, weight))


def _is_ours(x: Tensor, weight: Tensor, *, gated: bool = False, eight_bit: bool = False) -> bool:
    """Return whether `linear_triton` supports this product and is fastest."""
    return (
        x.is_cuda
        and not is_compiling()
        and linear_tiles.is_ours(x.shape[0], gated=gated, eight_bit=eight_bit)
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.stride(-1) == 1
        and weight.is_contiguous()
        and is_hopper(x.device)
    )


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
def small_addends(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return the addends of `small_linear`: float32 [n, T, out], n by shape."""
    return small_linear(x, weight, None, torch.float32, scale)[None]


def whole(x: Tensor, like: Tensor) -> Tensor:
    """Return x, or if x is addends float32 [n, *like.shape], their sum.

    Added first to last and rounded once, to the dtype of `like`.
    """
    if x.dim() == like.dim():
        return x
    total = x[0]
    for addend in x[1:]:
        total = total + addend
    return total.to(like.dtype)


@has_kernel
def small_gate_up(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return silu(gate) · up of both products, each rounded to x's dtype.

    x: [T, in]; weight: [2·I, in], the rows of the gate first; scale: see `small_linear`. Returns
    [T, I].
    """
    return silu_and_mul(small_linear(x, weight, scale=scale))


@dataclass(frozen=True)
class EightBit:
    """A weight [out, in] in eight bits: values · scale[:, None], values float8_e4m3fn.

    The scale of a row maps its largest value to the largest float8.
    """

    values: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> EightBit:
        """Quantize `weight`, floating point [out, in]."""
        dtype = torch.float8_e4m3fn
        largest = weight.float().abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        scale = largest / torch.finfo(dtype).max
        return cls((weight.float() / scale[:, None]).to(dtype), scale)
