"""Inputs of a model's forward: positions and attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

TokenIndex: TypeAlias = slice | Tensor
"""Some of the tokens of a forward: a slice, or their indices, int64 [R]."""


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding of the tokens at `positions` [T] (int64).

    `cos_table`, `sin_table`: float32 [max_len, 1, rotary_dim]. The first `rotary_dim` numbers of a
    head are rotated, in pairs: numbers i and i + rotary_dim/2, or 2i and 2i + 1 if `is_interleaved`
    (as in GPT-J). The sine of the first of a pair is negated, so that a rotation is x·cos + y·sin,
    where y has the numbers of each pair exchanged.
    """

    cos_table: Tensor
    sin_table: Tensor
    positions: Tensor
    is_interleaved: bool = False

    @cached_property
    def cos(self) -> Tensor:
        """Cosines [T, 1, rotary_dim], gathered once for all layers."""
        return self.cos_table.index_select(0, self.positions)

    @cached_property
    def sin(self) -> Tensor:
        """Signed sines [T, 1, rotary_dim]."""
        return self.sin_table.index_select(0, self.positions)


class LayerAttention(Protocol):
    """Attention of one forward, planned for one batch."""

    def run(
        self, layer: int, heads: Tensor, rotation: Rotation, sinks: Tensor | None = None
    ) -> Tensor:
        """Rotate, write keys and values of `layer` to the pool, attend causally.

        heads: [T, num_heads + 2·kv_heads, d]: queries, keys and values before rotation; or their
        partial sums (see `ops.linear.sum_partials`). sinks: float [num_heads], of a layer that has
        them (see `PagedCache`). Returns [R, num_heads, d] in the compute dtype, for the tokens in
        `ForwardContext.queries`.
        """


@dataclass(frozen=True)
class ForwardContext:
    """Positions and attention of one forward over T tokens.

    `positions` int64 [T]: absolute. `queries`: the tokens whose hidden states are computed (None:
    all). Only for models of one layer: the other tokens get keys and values only.
    """

    positions: Tensor
    attention: LayerAttention
    queries: TokenIndex | None = None

    def select_queries(self, x: Tensor) -> Tensor:
        """Return x [T, ...] of the query tokens only, [R, ...]."""
        return x if self.queries is None else x[self.queries]


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype `float32`, `bfloat16` or `float16`; raise ValueError for other names."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ValueError(f"dtype={name!r} is not supported; use one of {sorted(dtypes)}")
    return dtypes[name]
