"""Rotary positions: turning the heads of a forward's rows, and leaving their keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from serve_spec.core.context import Rotation
from serve_spec.ops.dispatch import has_kernel
from serve_spec.ops.linear import whole


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates [T, heads, d] by its rows' positions; float32 inside, x's dtype outside."""
    rolled = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * rotation.cos, rolled, rotation.sin).to(x.dtype)


@has_kernel
def rotate_and_store(
    heads: Tensor, rotation: Rotation, slots: Tensor, keys: Tensor, values: Tensor, num_heads: int
) -> Tensor:
    """Rotates queries and keys, and writes keys and values of one layer to the pool.

    heads: [T, num_heads + 2·kv_heads, d], queries, keys, values as their product leaves them, or
    its addends (see `linear.whole`);
    slots: int64 [T]; keys, values: [num_slots, kv_heads, d]. Returns the rotated queries
    [T, num_heads, d], here a view of queries and keys. Of rows that share a slot any one may win.
    """
    heads = whole(heads, keys)
    num_rotated = num_heads + keys.shape[1]
    rotated = rotate(heads[:, :num_rotated], rotation)
    keys.index_copy_(0, slots, rotated[:, num_heads:])
    values.index_copy_(0, slots, heads[:, num_rotated:])
    return rotated[:, :num_heads]
