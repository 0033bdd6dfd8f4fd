"""Token embeddings; RMS norm, alone or after an addition; rotary embedding with KV writes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.core.context import Rotation
from serve_spec.ops.dispatch import has_kernel
from serve_spec.ops.linear import sum_partials


@has_kernel
def embed(
    weight: Tensor, token_ids: Tensor, first_id: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the rows of tokens, [T, width] in `dtype` (default: that of the weight).

    weight: [n, width], of ids `first_id` .. `first_id + n - 1`; other ids get zeros. None: of all
    ids. token_ids: int64 [T]; negative ones count as 0.
    """
    rows = token_ids.clamp_min(0)
    if first_id is None:
        return F.embedding(rows, weight).to(dtype or weight.dtype)
    rows = rows - first_id
    is_other = (rows < 0) | (rows >= len(weight))
    found = F.embedding(rows.masked_fill(is_other, 0), weight)
    return found.masked_fill(is_other.unsqueeze(1), 0.0).to(dtype or weight.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)).

    On CPUs torch's own sigmoid rounds the last few numbers of a tensor otherwise than the rest.
    """
    return (1 + x.neg().exp()).reciprocal()


@has_kernel
def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight, in float32, rounded once to x's dtype.

    x: [..., width]; weight: [width]. out: where to write it, [T, width] as x; rows may be strided.
    """
    normed = F.rms_norm(x, weight.shape, weight, eps)
    return normed if out is None else out.copy_(normed)


@has_kernel
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual); the sum is rounded before the norm.

    residual: [..., width]; x: the same, or its partial sums (see `linear.sum_partials`).
    """
    total = residual + sum_partials(x, residual)
    return rms_norm(total, weight, eps), total


def rotate(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
    """Return x [..., d] with its first `rotary_dim` numbers rotated, computed in float32.

    cos, sin: float32 [..., rotary_dim], from the tables of `Rotation`; they broadcast to x.
    """
    width = cos.shape[-1]
    rotated = x[..., :width]
    if is_interleaved:
        partners = rotated.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partners = rotated.roll(width // 2, -1)
    rotated = torch.addcmul(rotated * cos, partners, sin).to(x.dtype)
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), dim=-1)


@has_kernel
def rotate_and_store(
    heads: Tensor,
    rotation: Rotation,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    dtype: torch.dtype,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Rotate queries and keys, and write keys and values of one layer to the pool.

    heads: [T, num_heads + 2·kv_heads, d], queries, keys and values, or their partial sums (see
    `linear.sum_partials`); slots: int64 [T]; keys, values: [num_slots, kv_heads, d], of `dtype` or
    float8_e4m3fn. dtype: compute dtype. scales: of keys and values in FP8, which are divided by
    them and rounded to the nearest number, of large ones to the largest. Returns the rotated
    queries [T, num_heads, d]. Of tokens that share a slot any one may win.
    """
    heads = sum_partials(heads, heads.new_empty((0, 0, 0), dtype=dtype))
    num_rotated = num_heads + keys.shape[1]
    cos, sin = rotation.cos, rotation.sin
    rotated = rotate(heads[:, :num_rotated], cos, sin, rotation.is_interleaved)
    _store(keys, slots, rotated[:, num_heads:], scales[0])
    _store(values, slots, heads[:, num_rotated:], scales[1])
    return rotated[:, :num_heads]


def _store(pool: Tensor, slots: Tensor, rows: Tensor, scale: float) -> None:
    if pool.dtype != torch.float8_e4m3fn:
        pool.index_copy_(0, slots, rows)
        return
    largest = torch.finfo(pool.dtype).max
    stored = (rows.float() / scale).clamp(-largest, largest).to(pool.dtype)
    # torch copies no numbers of eight bits by index.
    pool.view(torch.uint8).index_copy_(0, slots, stored.view(torch.uint8))
