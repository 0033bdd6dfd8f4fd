"""Differentiable attention backends (`LayerAttention`) for training the inference models.

Models take flat tokens [B·T]; these backends compute on [B, heads, T, D].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.core.context import ForwardContext, Rotation
from serve_spec.layers.causal import CausalAttention, Rows
from serve_spec.models import ModelShape


class UnrollCache(NamedTuple):
    """Keys and values of an unroll: step 0 [B, kv_heads, T, D], steps 1.. [B, kv_heads, S, T, D].

    The newest step comes first in `own_k` and `own_v`; places of later steps are zero.
    """

    context_k: Tensor
    context_v: Tensor
    own_k: Tensor
    own_v: Tensor


class UnrolledAttention(Rows):
    """Attention of one unroll step of a one-layer draft; see `unroll.py`.

    `cache`: None at step 0; `run` replaces it. `live` [S]: the places of `own_k` in use.
    """

    def __init__(
        self, shape: ModelShape, num_rows: int, cache: UnrollCache | None, live: Tensor
    ) -> None:
        super().__init__(num_rows, shape.num_heads, shape.num_kv_heads)
        self.cache = cache
        self._live = live

    def run(self, layer: int, heads: Tensor, rotation: Rotation) -> Tensor:
        """Return [B·T, heads, D]; see `LayerAttention`."""
        assert layer == 0, "drafts trained here have one layer"
        query, key, value = self.split(heads, rotation)
        if self.cache is None:
            places = len(self._live)
            own_k, own_v = (x.new_zeros(x.shape).unsqueeze(2) for x in (key, value))
            own_k, own_v = own_k.repeat(1, 1, places, 1, 1), own_v.repeat(1, 1, places, 1, 1)
            self.cache = UnrollCache(key, value, own_k, own_v)
        else:
            context_k, context_v, own_k, own_v = self.cache
            own_k = torch.cat([key.unsqueeze(2), own_k[:, :, :-1]], dim=2)
            own_v = torch.cat([value.unsqueeze(2), own_v[:, :, :-1]], dim=2)
            self.cache = UnrollCache(context_k, context_v, own_k, own_v)
        return self.join(attend(query, *self.cache, self._live))


def attend(
    q: Tensor, context_k: Tensor, context_v: Tensor, own_k: Tensor, own_v: Tensor, live: Tensor
) -> Tensor:
    """Attend causally to the keys of step 0 and, per row, to its own drafted keys.

    Args:
        q: queries [B, heads, T, D].
        context_k, context_v: step 0, [B, kv_heads, T, D].
        own_k, own_v: steps 1..S, [B, kv_heads, S, T, D]; unused places may hold anything.
        live: [S] bool, which of the S places are in use.

    Returns:
        [B, heads, T, D]. Softmax in float32.
    """
    kv_heads, length, dim = context_k.shape[1], q.shape[2], q.shape[3]
    grouped = q.unflatten(1, (kv_heads, -1))
    rows = grouped.flatten(2, 3)
    scores = (rows @ context_k.mT).unflatten(2, (-1, length)).float() * dim**-0.5
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    own = (grouped.unsqueeze(3).float() * own_k.unsqueeze(2).float()).sum(-1) * dim**-0.5
    own = own.masked_fill(~live[:, None], -torch.inf)
    peak = torch.maximum(scores.amax(-1), own.amax(3)).detach()
    weights = (scores - peak.unsqueeze(-1)).exp()
    own_weights = (own - peak.unsqueeze(3)).exp()
    total = weights.sum(-1) + own_weights.sum(3)
    mixed = (weights.to(q.dtype).flatten(2, 3) @ context_v).unflatten(2, (-1, length)).float()
    mixed = mixed + (own_weights.unsqueeze(-1) * own_v.unsqueeze(2).float()).sum(3)
    attended: Tensor = mixed / total.unsqueeze(-1)
    return attended.to(q.dtype).flatten(1, 2)


class CachedAttention(Rows):
    """Attention of one new token per row over a static cache; see `sampling.py`."""

    def __init__(self, shape: ModelShape, keys: Tensor, values: Tensor, place: int) -> None:
        """Take keys and values [layers, B, kv_heads, length, D], filled up to `place`."""
        super().__init__(keys.shape[1], shape.num_heads, shape.num_kv_heads)
        self._keys, self._values, self._place = keys, values, place
        self._first = max(0, place + 1 - shape.sliding_window) if shape.sliding_window else 0

    def run(self, layer: int, heads: Tensor, rotation: Rotation) -> Tensor:
        """Return [B, heads, D]; see `LayerAttention`."""
        query, key, value = self.split(heads, rotation)
        keys, values = self._keys[layer], self._values[layer]
        keys[:, :, self._place : self._place + 1] = key
        values[:, :, self._place : self._place + 1] = value
        # Query heads of one KV head become query rows, so that keys are read once.
        grouped = query.unflatten(1, (keys.shape[1], -1)).squeeze(3)
        seen = slice(self._first, self._place + 1)
        out = F.scaled_dot_product_attention(grouped, keys[:, :, seen], values[:, :, seen])
        return out.flatten(1, 2)


def row_positions(num_rows: int, row_tokens: int, device: torch.device, first: int = 0) -> Tensor:
    """Return positions first .. first + row_tokens - 1 of every row, [B·T]."""
    return torch.arange(first, first + row_tokens, device=device).repeat(num_rows)


def causal_context(
    shape: ModelShape, tokens: Tensor, cache: list[tuple[Tensor, Tensor]] | None = None
) -> ForwardContext:
    """Return the context of whole rows `tokens` [B, T] from position 0; see `CausalAttention`."""
    num_rows, row_tokens = tokens.shape
    attention = CausalAttention(
        num_rows, shape.num_heads, shape.num_kv_heads, shape.sliding_window, cache
    )
    return ForwardContext(row_positions(num_rows, row_tokens, tokens.device), attention)
