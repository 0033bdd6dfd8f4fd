"""What a model's forward needs to know about its batch: layout, attention, KV pool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Rows: TypeAlias = slice | Tensor
"""Which rows of a tensor: a slice, or their numbers, int64 [R]."""


@dataclass(frozen=True)
class RaggedBatch:
    """Rows of several sequences, one after another, without padding.

    `positions` [T] and `slots` [T] (int64, on the device) give each row's absolute position and
    its place in the KV pool. Sequence b owns `query_lens[b]` consecutive rows; its cache holds
    `kv_lens[b]` entries once these rows are written. Row p of `slot_table` [B, >= max kv_len]
    lists the pool slots of entries 0, 1, ... of that sequence, which are its positions, but for
    trees.

    The last `tree_lens[b]` entries of a sequence may be a tree, its newest rows among them. Then
    bit j of a row's `tree_mask` [T] (int64) says that it sees entry j of those, itself included;
    all entries before them are seen. 0: its rows are a chain, and their masks say nothing.

    `asked` says which of the T rows attend (None: all). The others only leave their keys and
    values, and `query_lens` and `tree_mask` are without them.
    """

    positions: Tensor
    slots: Tensor
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    slot_table: Tensor
    tree_mask: Tensor | None = None
    tree_lens: tuple[int, ...] = ()
    asked: Rows | None = None

    def asking(self, rows: Rows, query_lens: tuple[int, ...]) -> RaggedBatch:
        """The same, but only `rows` attend: so many of each sequence, its last ones.

        Sequences without any are left out: their caches are of no matter.
        """
        there = [b for b, query_len in enumerate(query_lens) if query_len]
        kv_lens = tuple(self.kv_lens[b] for b in there)
        table = self.slot_table if len(there) == len(query_lens) else self.slot_table[there]
        lens = tuple(query_lens[b] for b in there)
        return replace(self, query_lens=lens, kv_lens=kv_lens, slot_table=table, asked=rows)


@dataclass(frozen=True)
class Rotation:
    """The rotary angles of one forward's rows: rows `positions` [T] (int64) of two tables.

    `cos_table`, `sin_table`: float32 [max_len, 1, d]. The first half of every row of sines is
    negated, so that a rotation is x·cos + roll(x, d/2)·sin.
    """

    cos_table: Tensor
    sin_table: Tensor
    positions: Tensor

    @cached_property
    def cos(self) -> Tensor:
        """The rows' cosines [T, 1, d]: gathered once, for all layers."""
        return self.cos_table.index_select(0, self.positions)

    @cached_property
    def sin(self) -> Tensor:
        """The rows' signed sines [T, 1, d]."""
        return self.sin_table.index_select(0, self.positions)


class LayerAttention(Protocol):
    """Attention of one forward, planned for one batch."""

    def run(self, layer: int, heads: Tensor, rotation: Rotation) -> Tensor:
        """Rotates, writes keys and values of `layer` to the pool, attends causally.

        heads: [T, num_heads + 2·kv_heads, d]: queries, keys, values, none of them rotated; or
        their addends (see `ops.linear.whole`). Returns [R, num_heads, d] in the pool's dtype, of
        the rows it was planned to be asked for: all T, if nothing was said.
        """
        ...


class KVPool(Protocol):
    """The keys and values of one model, all layers, addressed by slot.

    A page is `page_size` consecutive slots.
    """

    keys: Tensor
    values: Tensor
    page_size: int


class AttentionBackend(Protocol):
    """Plans attention over one model's pool."""

    name: str

    def plan(self, batch: RaggedBatch, pool: KVPool) -> LayerAttention:
        """Prepares what all layers of one forward share."""
        ...


@dataclass(frozen=True)
class ForwardContext:
    """Where the rows of one forward are, and how they attend. Passed along, never global.

    `positions` int64 [T]: absolute. `asked`: which rows the outcome is asked of (None: all); for
    models of one layer only, whose `attention` is planned for these. Of the others the layer's
    keys and values are all that is made.
    """

    positions: Tensor
    attention: LayerAttention
    asked: Rows | None = None

    def of_asked(self, x: Tensor) -> Tensor:
        """The rows [R, ...] of x [T, ...] that are asked for."""
        return x if self.asked is None else x[self.asked]


def torch_dtype(name: str) -> torch.dtype:
    """`float32` / `bfloat16` / `float16` as a torch dtype.

    Raises:
        ValueError: any other name.
    """
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ValueError(f"dtype={name!r} is not supported; use one of {sorted(dtypes)}")
    return dtypes[name]
