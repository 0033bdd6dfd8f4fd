"""Token embeddings and the output matrix, of one rank or spread over several.

Sizes are this rank's own unless stated otherwise.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor

from serve_spec.layers.linear import Linear
from serve_spec.layers.module import Destination, Layer, Shard, parameter
from serve_spec.ops.elementwise import embed
from serve_spec.parallel.group import TensorParallel


def vocab_embedding(vocab_size: int, width: int, parallel: TensorParallel) -> Embedding:
    """Return embeddings of a whole vocabulary of `vocab_size`."""
    if parallel.size == 1:
        return Embedding(vocab_size, width)
    return VocabParallelEmbedding(vocab_size, width, parallel)


def vocab_head(
    in_features: int, vocab_size: int, parallel: TensorParallel, name: str = "lm_head"
) -> Linear:
    """Return the product `name` over a whole vocabulary of `vocab_size`."""
    if parallel.size == 1:
        return Linear(in_features, {name: vocab_size})
    return VocabParallelHead(in_features, vocab_size, parallel, name)


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
    """Rank r looks up the r-th share of the ids; the sum over ranks has every row."""

    def __init__(self, vocab_size: int, width: int, parallel: TensorParallel) -> None:
        share = _VocabShare.of(vocab_size, parallel)
        super().__init__(share.height, width)
        self.weight[share.num_ids :].zero_()
        self.parallel = parallel
        self._share = share

    def forward(self, token_ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """See `Embedding`; the same on every rank."""
        return self.parallel.all_reduce(embed(self.weight, token_ids, self._share.start, dtype))

    __call__ = forward

    def holds(self, table: Tensor) -> bool:
        """See `Embedding`; all ranks get the same answer."""
        mine = table.narrow(0, self._share.start, self._share.num_ids)
        return bool(self.parallel.smallest(int(is_copy(mine, self._rows))))

    def tensors(self) -> dict[str, Destination]:
        """Return the table."""
        return {"weight": Shard(self._rows, 0, self._share.start, self._share.vocab_size)}

    @property
    def _rows(self) -> Tensor:
        return self.weight.narrow(0, 0, self._share.num_ids)


class VocabParallelHead(Linear):
    """Rank r computes the r-th share of the logits; all ranks get all of them."""

    def __init__(
        self, in_features: int, vocab_size: int, parallel: TensorParallel, name: str
    ) -> None:
        share = _VocabShare.of(vocab_size, parallel)
        super().__init__(in_features, {name: share.height})
        self.weight[share.num_ids :].zero_()
        self.parallel = parallel
        self._share = share

    def forward(self, x: Tensor) -> Tensor:
        """Return the product: [R, in] -> [R, vocab_size]."""
        return self.parallel.gather_columns(super().forward(x), self._share.vocab_size)

    __call__ = forward

    def tensors(self) -> dict[str, Destination]:
        """Return the whole matrix's shard, by its name."""
        share, (name,) = self._share, self.parts
        rows = self.weight.narrow(0, 0, share.num_ids)
        return {f"{name}.weight": Shard(rows, 0, share.start, share.vocab_size)}


class _VocabShare(NamedTuple):
    """Ids `start .. start + num_ids - 1` of a vocabulary; `height` is the same on every rank."""

    vocab_size: int
    start: int
    num_ids: int
    height: int

    @classmethod
    def of(cls, vocab_size: int, parallel: TensorParallel) -> Self:
        height = -(-vocab_size // parallel.size)
        start = min(parallel.rank * height, vocab_size)
        return cls(vocab_size, start, min(height, vocab_size - start), height)
