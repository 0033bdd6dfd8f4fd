"""Token embeddings and the output matrix, of one rank or spread over several.

Sizes are this rank's own unless stated otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.linear import Linear
from serve_spec.layers.module import Destination, Layer, Span, parameter
from serve_spec.ops.elementwise import embed
from serve_spec.parallel.group import TensorParallel


def vocab_embedding(vocab_size: int, width: int, parallel: TensorParallel) -> Embedding:
    """Return embeddings of all ids of a vocabulary of `vocab_size`."""
    if parallel.size == 1:
        return Embedding(vocab_size, width)
    return VocabParallelEmbedding(vocab_size, width, parallel)


def vocab_head(
    in_features: int,
    vocab_size: int,
    parallel: TensorParallel,
    name: str = "lm_head",
    formats: Formats = PLAIN,
    *,
    tied: Embedding | None = None,
) -> Linear:
    """Return the product `name` over all ids of a vocabulary of `vocab_size`.

    tied: embeddings of the same vocabulary, whose table is the matrix.
    """
    table = None if tied is None else tied.weight
    if parallel.size == 1:
        return Linear(in_features, {name: vocab_size}, formats=formats, tied=table)
    return VocabParallelHead(in_features, vocab_size, parallel, name, formats, table)


class Embedding(Layer):
    """One row per token."""

    def __init__(self, num_embeddings: int, width: int) -> None:
        super().__init__()
        self.weight = parameter(num_embeddings, width)

    def forward(self, token_ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Look up tokens: [T] int64 -> [T, width] in `dtype` (default: that of the table).

        Negative ids, which stand for no token, count as 0.
        """
        return embed(self.weight, token_ids, dtype=dtype)

    __call__ = forward

    def holds(self, table: Tensor) -> bool:
        """Return whether `table` [V, width], of this dtype and device, is equal up to rounding."""
        return is_copy(table, self.weight)

    def tensors(self) -> dict[str, Destination]:
        """Return the table."""
        return {"weight": self.weight}


def is_copy(table: Tensor, original: Tensor) -> bool:
    """Return whether both are the same, but for what a stay in float16 does to numbers."""
    return table.shape == original.shape and torch.allclose(table, original, rtol=1e-2, atol=1e-4)


class VocabParallelEmbedding(Embedding):
    """Rank r looks up the r-th shard of the ids; the sum over ranks has every row."""

    def __init__(self, vocab_size: int, width: int, parallel: TensorParallel) -> None:
        ids = Span.padded_shard_of(vocab_size, parallel)
        super().__init__(ids.length, width)
        self.weight[ids.count :].zero_()
        self.parallel = parallel
        self._ids = ids

    def forward(self, token_ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """See `Embedding`; the same on every rank."""
        return self.parallel.all_reduce(embed(self.weight, token_ids, self._ids.start, dtype))

    __call__ = forward

    def holds(self, table: Tensor) -> bool:
        """See `Embedding`; all ranks get the same answer."""
        ids = self._ids
        mine = table.narrow(0, ids.start, ids.count)
        return bool(self.parallel.smallest(int(is_copy(mine, self.weight[: ids.count]))))

    def tensors(self) -> dict[str, Destination]:
        """Return the table."""
        return {"weight": self._ids.of(self.weight, 0)}


class VocabParallelHead(Linear):
    """Rank r computes the r-th shard of the logits; all ranks get all of them."""

    def __init__(
        self,
        in_features: int,
        vocab_size: int,
        parallel: TensorParallel,
        name: str,
        formats: Formats = PLAIN,
        tied: Tensor | None = None,
    ) -> None:
        rows = Span.padded_shard_of(vocab_size, parallel)
        super().__init__(in_features, {name: rows}, formats=formats, tied=tied)
        self.parallel = parallel
        self._vocab_size = vocab_size

    def forward(self, x: Tensor) -> Tensor:
        """Return the product: [R, in] -> [R, vocab_size]."""
        return self.parallel.gather_columns(super().forward(x), self._vocab_size)

    __call__ = forward
