"""Causal attention of whole texts without a KV pool, for training and measurements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.core.context import Rotation


class Rows:
    """B texts of equal length and equal positions: tokens [B·T] as heads [B, heads, T, D]."""

    def __init__(self, num_rows: int, num_heads: int, num_kv_heads: int) -> None:
        self.num_rows, self.num_heads, self.num_kv_heads = num_rows, num_heads, num_kv_heads

    def split(self, heads: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, from heads [B·T, all, D] of a layer."""
        rows = heads.unflatten(0, (self.num_rows, -1)).transpose(1, 2)
        positions = rotation.positions[: rows.shape[2]]
        cos, sin = (table[positions, 0] for table in (rotation.cos_table, rotation.sin_table))
        num_kv = self.num_kv_heads
        query, key, value = rows.split((self.num_heads, num_kv, num_kv), dim=1)
        return _rotated(query, cos, sin), _rotated(key, cos, sin), value

    def join(self, attended: Tensor) -> Tensor:
        """Return attended heads [B, heads, T, D] as [B·T, heads, D]."""
        return attended.transpose(1, 2).flatten(0, 1)


class CausalAttention(Rows):
    """Causal attention of whole rows (`LayerAttention`); its operations have gradients.

    windows: tokens that each token sees in each layer, itself included; None: all. cache: receives
    (keys, values) per layer.
    """

    def __init__(
        self,
        num_rows: int,
        num_heads: int,
        num_kv_heads: int,
        windows: Sequence[int | None],
        cache: list[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__(num_rows, num_heads, num_kv_heads)
        self._windows, self._cache = windows, cache

    def run(self, layer: int, heads: Tensor, rotation: Rotation) -> Tensor:
        """Return [B·T, heads, D]."""
        query, key, value = self.split(heads, rotation)
        if self._cache is not None:
            self._cache.append((key, value))
        window = self._windows[layer]
        mask = None if window is None else _window_mask(query, window)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return self.join(attended)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate in float32; the first half of every row of `sin` is negated."""
    wide = x.float()
    return (wide * cos + wide.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)


def _window_mask(query: Tensor, window: int) -> Tensor:
    place = torch.arange(query.shape[2], device=query.device)
    distance = place[:, None] - place
    return (distance >= 0) & (distance < window)
