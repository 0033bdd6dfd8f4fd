"""Running a model over a paged pool with scattered pages, in any pieces, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from serve_spec.attention import create_attention_backend
from serve_spec.core.context import ForwardContext, RaggedBatch, Rotation
from serve_spec.kvcache.pool import PagedKVPool


class PagedSequences:
    """A pool and several sequences in it; `lengths[b]` entries of sequence b are computed.

    Pages are drawn at random, so neighbours in a sequence are strangers in the pool. The pool is
    filled with large values first: what a mask must hide is far from harmless.
    """

    def __init__(
        self,
        shape: Any,
        num_sequences: int,
        max_len: int,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        pages_each = -(-max_len // page_size)
        num_pages = num_sequences * pages_each + 1
        self.pool = PagedKVPool(
            num_layers=shape.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            device=device,
        )
        self.pool.keys.fill_(50.0)
        self.pool.values.fill_(50.0)
        generator = torch.Generator().manual_seed(seed)
        pages = 1 + torch.randperm(num_pages - 1, generator=generator)
        self.pages = pages.view(num_sequences, pages_each)
        self.page_size = page_size
        self.device = device
        self.lengths = [0] * num_sequences
        self.backend = create_attention_backend("torch", shape)

    def extend(
        self, pieces: Sequence[tuple[int, int]], asked: Sequence[int] | None = None
    ) -> ForwardContext:
        """The context of a forward that adds `count` rows to each (sequence, count).

        asked: for each, whether its last row is asked for; None: all rows are.
        """
        batch = self.batch(pieces)
        if asked is not None:
            ends = torch.tensor(batch.query_lens).cumsum(0) - 1
            batch = batch.asking(ends[torch.tensor(asked).bool()].to(self.device), tuple(asked))
        for index, count in pieces:
            self.lengths[index] += count
        return ForwardContext(batch.positions, self.backend.plan(batch, self.pool), batch.asked)

    def batch(self, pieces: Sequence[tuple[int, int]]) -> RaggedBatch:
        """The layout of these rows, written as plainly as possible."""
        tables = [self._slots(index) for index, _ in pieces]
        positions, slots = [], []
        for (index, count), table in zip(pieces, tables, strict=True):
            for position in range(self.lengths[index], self.lengths[index] + count):
                positions.append(position)
                slots.append(int(table[position]))
        return RaggedBatch(
            positions=torch.tensor(positions, device=self.device),
            slots=torch.tensor(slots, device=self.device),
            query_lens=tuple(count for _, count in pieces),
            kv_lens=tuple(self.lengths[index] + count for index, count in pieces),
            slot_table=torch.stack(tables).to(self.device),
        )

    def _slots(self, index: int) -> Tensor:
        offsets = torch.arange(self.page_size)
        return (self.pages[index].unsqueeze(1) * self.page_size + offsets).view(-1)


def unrotated(heads: Tensor) -> Rotation:
    """A rotation that leaves heads [T, ..., d] as they are."""
    positions = torch.zeros(len(heads), dtype=torch.int64, device=heads.device)
    ones = torch.ones(1, 1, heads.shape[-1], device=heads.device)
    return Rotation(ones, torch.zeros_like(ones), positions)
