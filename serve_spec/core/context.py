"""What a model's forward needs to know about its batch: layout, attention, KV pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class RaggedBatch:
    """Rows of several sequences, one after another, without padding.

    `positions` [T] and `slots` [T] (int64, on the device) give each row's absolute position and
    its place in the KV pool. Sequence b owns `query_lens[b]` consecutive rows; its cache holds
    `kv_lens[b]` entries once these rows are written. Row p of `slot_table` [B, >= max kv_len]
    lists the pool slots of positions 0, 1, ... of that sequence.
    """

    positions: Tensor
    slots: Tensor
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    slot_table: Tensor


class LayerAttention(Protocol):
    """Attention of one forward, planned for one batch."""

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Writes key/value [T, kv_heads, d] of `layer` to the pool and attends causally.

        query: [T, heads, d], rotated. Returns [T, heads, d] in query's dtype.
        """
        ...


class KVPool(Protocol):
    """The keys and values of one model, all layers, addressed by slot."""

    keys: Tensor
    values: Tensor


class AttentionBackend(Protocol):
    """Plans attention over one model's pool."""

    def plan(self, batch: RaggedBatch, pool: KVPool) -> LayerAttention:
        """Prepares what all layers of one forward share."""
        ...


@dataclass(frozen=True)
class ForwardContext:
    """Where the rows of one forward are, and how they attend. Passed along, never global.

    `positions` int64 [T]: absolute.
    """

    positions: Tensor
    attention: LayerAttention


def torch_dtype(name: str) -> torch.dtype:
    """`float32` / `bfloat16` / `float16` as a torch dtype.

    Raises:
        ValueError: any other name.
    """
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ValueError(f"dtype={name!r} is not supported; use one of {sorted(dtypes)}")
    return dtypes[name]
