"""What a model's forward needs to know about its batch: layout, attention, KV pool."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

Rows: TypeAlias = slice | Tensor
"""Which rows of a tensor: a slice, or their numbers, int64 [R]."""


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


class KVShape(NamedTuple):
    """What one layer keeps of a token: heads, width of a key, width of a value."""

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def numel(self) -> int:
        """Numbers per token."""
        return self.num_heads * (self.key_dim + self.value_dim)


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
