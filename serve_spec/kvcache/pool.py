"""The tensors that pages index: keys and values of one model, features of the target."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from serve_spec.core.context import KVShape


class PagedKVPool:
    """Keys and values of all layers; `keys[layer]` is [num_slots, num_heads, key_dim].

    Slot `page · page_size + offset` holds one token; all models use the same page ids. Slots start
    as zeros, because masked slots are still multiplied and must be finite. One scratch page more
    than the allocator's takes the writes of padding.

    Neighbouring layers of one shape share a tensor [layers, num_slots, num_heads, dim]; `tensors`
    lists these.
    """

    def __init__(
        self,
        layers: Sequence[KVShape],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.page_size = page_size
        self.scratch_page = num_pages
        self.scratch_slot = num_pages * page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.tensors: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        num_slots = (num_pages + 1) * page_size
        for shape, group in groupby(layers):
            size = len([*group]), num_slots, shape.num_heads
            for width, by_layer in ((shape.key_dim, self.keys), (shape.value_dim, self.values)):
                tensor = torch.zeros(*size, width, dtype=dtype, device=device)
                self.tensors.append(tensor)
                by_layer += tensor.unbind(0)

    @staticmethod
    def bytes_per_page(layers: Sequence[KVShape], page_size: int, dtype: torch.dtype) -> int:
        """Return the memory one page takes over all layers, keys and values together."""
        return page_size * sum(shape.numel for shape in layers) * dtype.itemsize


class FeaturePool:
    """Target features by slot: written by the target's forward, read by draft extend."""

    def __init__(
        self, num_slots: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.features = torch.zeros((num_slots, width), dtype=dtype, device=device)

    def write(self, slots: Tensor, features: Tensor) -> None:
        """Keep `features` [T, F] at `slots` [T] (int64)."""
        self.features.index_copy_(0, slots, features)

    def read(self, slots: Tensor) -> Tensor:
        """Return the features at `slots` [T]: [T, F]."""
        return self.features.index_select(0, slots)
