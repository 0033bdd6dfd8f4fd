"""Attention of decode and verification rows over lanes: nothing is planned on the host."""

from __future__ import annotations

from torch import Tensor

from serve_spec.core.context import Rotation, Rows
from serve_spec.kvcache.pool import PagedKVPool
from serve_spec.ops import rotary
from serve_spec.ops.paged_attention import PagedLayout, paged_attention


class LaneAttention:
    """A `LayerAttention` that reads its layout from device tensors when it runs.

    So a CUDA graph of it serves every round of its size. slots: int64 [T], where each row's key and
    value go; rows that no sequence owns need one too that nobody reads. asked: which of them attend
    (None: all). Everything else: see `PagedLayout`, whose rows are those that attend.
    """

    def __init__(
        self,
        pool: PagedKVPool,
        tables: Tensor,
        query_starts: Tensor,
        kv_lens: Tensor,
        slots: Tensor,
        *,
        max_query_len: int,
        asked: Rows | None = None,
        window: int | None = None,
        tree_mask: Tensor | None = None,
        tree_len: int | None = None,
        groups: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._asked = asked
        self._layout = PagedLayout(
            tables,
            query_starts,
            kv_lens,
            pool.page_size,
            max_query_len,
            window,
            tree_mask,
            tree_len,
            groups,
        )

    def run(self, layer: int, heads: Tensor, rotation: Rotation) -> Tensor:
        """See `LayerAttention`: [T, num_heads + 2·kv_heads, d] -> [R, num_heads, d]."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        num_heads = heads.shape[-2] - 2 * keys.shape[1]
        query = rotary.rotate_and_store(heads, rotation, self._slots, keys, values, num_heads)
        if self._asked is not None:
            query = query[self._asked]
        return paged_attention(query, keys, values, self._layout) if len(query) else query
