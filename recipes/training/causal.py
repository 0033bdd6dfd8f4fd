"""Causal attention of complete texts without a KV pool; its operations have gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve_spec.core.caches import PagedCache
from serve_spec.core.context import ForwardContext, Rotation
from serve_spec.models.shape import DecoderShape
from serve_spec.ops.attention import attend
from serve_spec.ops.elementwise import rotate


class Rows:
    """B texts of equal length and equal positions: tokens [B·T] as heads [B, heads, T, D].

    caches: of the layers, in order.
    """

    def __init__(self, num_rows: int, caches: Sequence[PagedCache]) -> None:
        self.num_rows, self.caches = num_rows, caches

    def split(self, layer: int, heads: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, from heads [B·T, all, D] of a layer."""
        rows = heads.unflatten(0, (self.num_rows, -1)).transpose(1, 2)
        positions = rotation.positions[: rows.shape[2]]
        cos, sin = (table[positions, 0] for table in (rotation.cos_table, rotation.sin_table))
        num_kv = self.caches[layer].num_heads
        rotated, value = rows.split((rows.shape[1] - num_kv, num_kv), dim=1)
        rotated = rotate(rotated, cos, sin, rotation.is_interleaved)
        return rotated[:, :-num_kv], rotated[:, -num_kv:], value

    def join(self, attended: Tensor) -> Tensor:
        """Return attended heads [B, heads, T, D] as [B·T, heads, D]."""
        return attended.transpose(1, 2).flatten(0, 1)


class CausalAttention(Rows):
    """Causal attention of complete texts (`LayerAttention`); its operations have gradients.

    kept: receives (keys, values) per layer.
    """

    def __init__(
        self,
        num_rows: int,
        caches: Sequence[PagedCache],
        kept: list[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__(num_rows, caches)
        self._kept = kept

    def run(
        self, layer: int, heads: Tensor, rotation: Rotation, sinks: Tensor | None = None
    ) -> Tensor:
        """Return [B·T, heads, D]."""
        query, key, value = self.split(layer, heads, rotation)
        if self._kept is not None:
            self._kept.append((key, value))
        cache = self.caches[layer]
        mask = None if cache.window is None else _window_mask(query, cache.window)
        attended = attend(
            query,
            key,
            value,
            cache,
            mask=mask,
            is_causal=mask is None,
            sinks=None if sinks is None else sinks[:, None, None],
        )
        return self.join(attended)


def row_positions(num_rows: int, row_tokens: int, device: torch.device, first: int = 0) -> Tensor:
    """Return positions first .. first + row_tokens - 1 of every row, [B·T]."""
    return torch.arange(first, first + row_tokens, device=device).repeat(num_rows)


def causal_context(
    shape: DecoderShape, tokens: Tensor, kept: list[tuple[Tensor, Tensor]] | None = None
) -> ForwardContext:
    """Return the context of texts `tokens` [B, T] from position 0; see `CausalAttention`."""
    num_rows, row_tokens = tokens.shape
    attention = CausalAttention(num_rows, shape.caches, kept)
    return ForwardContext(row_positions(num_rows, row_tokens, tokens.device), attention)


def _window_mask(query: Tensor, window: int) -> Tensor:
    """Return what is added to the scores [T, T] of a window."""
    place = torch.arange(query.shape[2], device=query.device)
    distance = place[:, None] - place
    hidden = (distance < 0) | (distance >= window)
    return query.new_zeros(hidden.shape).masked_fill(hidden, float("-inf"))
