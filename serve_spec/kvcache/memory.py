"""How much memory caches take: the plan from which the number of pages is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from serve_spec.core.caches import CacheSpec, PagedCache


@dataclass(frozen=True)
class CacheMemory:
    """Bytes that caches take: `per_page` of tokens, and `per_slot`, of a request."""

    per_page: int = 0
    per_slot: int = 0

    @staticmethod
    def of(
        caches: Sequence[CacheSpec], page_size: int, compute_dtype: torch.dtype, ring: int
    ) -> CacheMemory:
        """Return the memory of a model's caches, of all layers.

        page_size: tokens. ring: tokens of a request whose inputs recurrent layers keep.
        """
        paged = [cache for cache in caches if isinstance(cache, PagedCache)]
        recurrent = [cache for cache in caches if not isinstance(cache, PagedCache)]
        return CacheMemory(
            per_page=page_size * sum(cache.bytes_per_token(compute_dtype) for cache in paged),
            per_slot=sum(cache.bytes_per_slot(ring) for cache in recurrent),
        )

    def __add__(self, other: CacheMemory) -> CacheMemory:
        return CacheMemory(self.per_page + other.per_page, self.per_slot + other.per_slot)

    def total(self, num_pages: int, num_slots: int) -> int:
        """Return the bytes of so many pages and request slots."""
        return num_pages * self.per_page + num_slots * self.per_slot

    def most_pages(self, budget: float, num_slots: int) -> int:
        """Return how many pages fit into `budget` bytes beside the request slots; 0: none."""
        return max(0, int((budget - num_slots * self.per_slot) // self.per_page))
