"""Matrix products; those of a few rows by law: summed in float32, rounded once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.ops.activation import silu_and_mul


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x·Wᵀ + b by torch's library, in `out_dtype` (default: x's).

    x: [T, in]; weight: [out, in]; bias: [out]. Returns [T, out]. A wider dtype than x's holds what
    the library rounded to x's, but on a GPU without a bias it is never rounded.
    """
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    if x.is_cuda and bias is None:
        return torch.mm(x, weight.t(), out_dtype=out_dtype)
    return F.linear(x, weight, bias).to(out_dtype)


def small_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    """x·Wᵀ + b in `out_dtype` (default: x's).

    x: [T, in]; weight: [out, in] with contiguous rows; bias: [out]; scale: what each row of an
    eight-bit weight is to be multiplied with, float32 [out]. Returns [T, out].
    """
    bias = None if bias is None else bias.float()
    whole = weight.float() if scale is None else weight.float() * scale[:, None]
    return F.linear(x.float(), whole, bias).to(out_dtype or x.dtype)


def small_addends(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """What `small_linear` adds up and rounds: float32 [n, T, out], n as suits the shape."""
    return small_linear(x, weight, None, torch.float32, scale)[None]


def whole(x: Tensor, like: Tensor) -> Tensor:
    """x, or where it is addends of what has the dimensions of `like`, float32 [n, ...], their sum.

    Added first to last and rounded once, to the dtype of `like`.
    """
    if x.dim() == like.dim():
        return x
    total = x[0]
    for addend in x[1:]:
        total = total + addend
    return total.to(like.dtype)


def small_gate_up(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """silu(gate) · up of both products at once, each rounded as if it had been stored.

    x: [T, in]; weight: [2·I, in], the rows of the gate first; scale: see `small_linear`. Returns
    [T, I].
    """
    return silu_and_mul(small_linear(x, weight, scale=scale))


@dataclass(frozen=True)
class EightBit:
    """A weight [out, in] in eight bits: values · scale[:, None], values float8_e4m3fn.

    One factor per row, so that the largest number of each is the largest of its kind.
    """

    values: Tensor
    scale: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> EightBit:
        """The nearest to `weight`, floating point [out, in]."""
        dtype = torch.float8_e4m3fn
        largest = weight.float().abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
        scale = largest / torch.finfo(dtype).max
        return cls((weight.float() / scale[:, None]).to(dtype), scale)
