"""The tensors that pages index: keys and values of one model, features of the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from serve_spec.core.caches import CacheSpec, PagedCache


def check_caches(caches: Sequence[CacheSpec]) -> tuple[PagedCache, ...]:
    """Return the caches of all layers; raise ValueError for one that no pool holds."""
    for layer, cache in enumerate(caches):
        if not isinstance(cache, PagedCache):
            why = f"layer {layer} keeps recurrent state: not supported"
            raise ValueError(f"{why}; use a model whose layers all attend")
        if cache.dtype not in (None, torch.float8_e4m3fn):
            name = str(cache.dtype).removeprefix("torch.")
            why = f"layer {layer} keeps keys and values in {name}: not supported"
            raise ValueError(f"{why}; only the compute dtype and float8_e4m3fn are")
    return tuple(cache for cache in caches if isinstance(cache, PagedCache))


class PagedKVPool:
    """Keys and values of all layers; `keys[layer]` is [num_slots, num_heads, key_dim].

    Slot `page · page_size + offset` holds one token; all models use the same page ids. Slots start
    as zeros, because masked slots are still multiplied and must be finite. One scratch page more
    than the allocator's takes the writes of padding.

    `caches`: of the layers, in order. Layers of equal heads, widths and dtype have their keys in
    one tensor [layers, num_slots, num_heads, dim], and their values in another; `tensors` lists
    these. `dtype`: compute dtype, of layers whose cache names no other.
    """

    def __init__(
        self,
        caches: Sequence[CacheSpec],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Create zeros; raise ValueError as `check_caches`."""
        self.caches = check_caches(caches)
        self.dtype = dtype
        self.page_size = page_size
        self.scratch_page = num_pages
        self.scratch_slot = num_pages * page_size
        self.device = torch.device(device)
        self.tensors: list[Tensor] = []
        num_slots = (num_pages + 1) * page_size
        kinds = [
            (cache.dtype or dtype, cache.num_heads, cache.key_dim, cache.value_dim)
            for cache in self.caches
        ]
        layers = {}
        for kind, num_layers in Counter(kinds).items():
            stored_in, num_heads, *widths = kind
            shape = num_layers, num_slots, num_heads
            pair = [torch.zeros(*shape, width, dtype=stored_in, device=device) for width in widths]
            self.tensors += pair
            layers[kind] = zip(*(tensor.unbind(0) for tensor in pair), strict=True)
        pairs = [next(layers[kind]) for kind in kinds]
        self.keys: list[Tensor] = [keys for keys, _ in pairs]
        self.values: list[Tensor] = [values for _, values in pairs]


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
