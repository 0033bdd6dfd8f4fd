"""Attention of decode and verification rows over lanes: nothing is planned on the host."""

from __future__ import annotations

from torch import Tensor

from serve_spec.core.context import Rotation
from serve_spec.kvcache.pool import PagedKVPool
from serve_spec.ops import fast
from serve_spec.ops.paged_attention import PagedLayout


class LaneAttention:
    """A `LayerAttention` that reads its layout from device tensors when it runs.

    So a CUDA graph of it serves every round of its size. slots: int64 [T], where each row's key and
    value go; rows that no sequence owns need one too that nobody reads. Everything else: see
    `PagedLayout`.
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
        usual_query_len: int | None = None,
        window: int | None = None,
        tree_mask: Tensor | None = None,
        tree_len: int | None = None,
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._layout = PagedLayout(
            tables,
            query_starts,
            kv_lens,
            pool.page_size,
            max_query_len,
            window,
            tree_mask,
            usual_query_len,
            tree_len,
        )

    def run(self, layer: int, heads: Tensor, rotation: Rotation) -> Tensor:
        """See `LayerAttention`: [T, num_heads + 2·kv_heads, d] -> [T, num_heads, d]."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        num_heads = heads.shape[-2] - 2 * keys.shape[1]
        query = fast.rotate_and_store(heads, rotation, self._slots, keys, values, num_heads)
        return fast.paged_attention(query, keys, values, self._layout)
