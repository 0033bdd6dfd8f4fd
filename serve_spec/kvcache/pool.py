"""The tensors that pages address: keys and values of one model, features of the target."""

from __future__ import annotations

import torch
from torch import Tensor


class PagedKVPool:
    """Keys and values of all layers: [num_layers, num_slots, num_kv_heads, head_dim] each.

    Slot `page · page_size + offset` is one token's place; the pages of one sequence serve every
    model that shares the allocator. Zero at first, because masked slots are still multiplied: what
    they hold must be finite. One page more than the allocator's takes what padding rows write.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.page_size = page_size
        self.scratch_page = num_pages
        self.scratch_slot = num_pages * page_size
        shape = (num_layers, (num_pages + 1) * page_size, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    def bytes_per_page(
        num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Memory one page takes over all layers, keys and values together."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize


class FeaturePool:
    """Target features by slot: written by the target's forward, read by the draft's catch-up."""

    def __init__(
        self, num_slots: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.features = torch.zeros((num_slots, width), dtype=dtype, device=device)

    def write(self, slots: Tensor, features: Tensor) -> None:
        """Keeps `features` [T, F] at `slots` [T] (int64)."""
        self.features.index_copy_(0, slots, features)

    def read(self, slots: Tensor) -> Tensor:
        """The features at `slots` [T]: [T, F]."""
        return self.features.index_select(0, slots)
