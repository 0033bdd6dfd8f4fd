"""Attention of one forward over the paged KV pool, with its layout on the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from serve_spec.core.context import Rotation, TokenIndex
from serve_spec.kvcache.pool import PagedKVPool
from serve_spec.ops import paged_attention, rotary
from serve_spec.ops.paged_attention import AttentionKind, AttentionPlan


class SlotAttention:
    """A `LayerAttention` whose layout is in device tensors, so that a CUDA graph can replay it.

    kinds: how each layer attends. slots: int64 [T], KV slots of the tokens; padding tokens write to
    a scratch slot. queries: the tokens that attend, as in `plan`; None: all.
    """

    def __init__(
        self,
        pool: PagedKVPool,
        kinds: Sequence[AttentionKind],
        slots: Tensor,
        plan: AttentionPlan,
        queries: TokenIndex | None = None,
    ) -> None:
        self._pool = pool
        self._kinds = kinds
        self._slots = slots
        self._plan = plan
        self._queries = queries

    def run(self, layer: int, heads: Tensor, rotation: Rotation) -> Tensor:
        """See `LayerAttention`: [T, num_heads + 2·kv_heads, d] -> [R, num_heads, d]."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        num_heads = heads.shape[-2] - 2 * keys.shape[1]
        query = rotary.rotate_and_store(heads, rotation, self._slots, keys, values, num_heads)
        if self._queries is not None:
            query = query[self._queries]
        if not len(query):
            return query
        return paged_attention.paged_attention(query, keys, values, self._plan, self._kinds[layer])
