"""Layers whose matrices are spread over ranks. Alone, a rank gets the plain layers.

Sizes are this rank's own unless stated otherwise. A column-parallel product computes some of the
outputs, a row-parallel one reads some of the inputs, and the norm that follows it adds up what all
ranks made of theirs: one after the other they exchange one [T, H] tensor. (Megatron-LM, arXiv
1909.08053.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

import torch.nn.functional as F
from torch import Tensor, nn

from serve_spec.layers.embedding import Embedding, is_copy
from serve_spec.layers.linear import Linear
from serve_spec.layers.module import Destination, Shard
from serve_spec.parallel.group import TensorParallel


def column_linear(
    in_features: int, parts: Mapping[str, int], parallel: TensorParallel, bias: bool = False
) -> Linear:
    """Return a product of all inputs with this rank's rows of every part."""
    if parallel.size == 1:
        return Linear(in_features, parts, bias)
    return ColumnParallelLinear(in_features, parts, parallel, bias)


def row_linear(
    in_features: int, parts: Mapping[str, int], parallel: TensorParallel, bias: bool = False
) -> Linear:
    """Return a product of this rank's inputs; the sum over ranks is left to `RMSNorm.add`."""
    if parallel.size == 1:
        return Linear(in_features, parts, bias)
    return RowParallelLinear(in_features, parts, parallel, bias)


def vocab_embedding(vocab_size: int, width: int, parallel: TensorParallel) -> Embedding:
    """Return embeddings of a whole vocabulary of `vocab_size`."""
    if parallel.size == 1:
        return Embedding(vocab_size, width)
    return VocabParallelEmbedding(vocab_size, width, parallel)


def vocab_head(in_features: int, vocab_size: int, parallel: TensorParallel) -> Linear:
    """Return the product `lm_head` over a whole vocabulary of `vocab_size`."""
    if parallel.size == 1:
        return Linear(in_features, {"lm_head": vocab_size})
    return VocabParallelHead(in_features, vocab_size, parallel)


class ColumnParallelLinear(Linear):
    """Rank r holds the r-th share of the rows of every part."""

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        parallel: TensorParallel,
        bias: bool = False,
    ) -> None:
        super().__init__(in_features, parts, bias)
        self.parallel = parallel

    def tensors(self) -> dict[str, Destination]:
        """See `Linear`; of matrices `size` times as high."""
        return {name: _shard(view, 0, self.parallel) for name, view in self.views().items()}


class RowParallelLinear(Linear):
    """Rank r holds the r-th share of the columns: its result is an addend of the whole one."""

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        parallel: TensorParallel,
        bias: bool = False,
    ) -> None:
        super().__init__(in_features, parts, bias)
        self.parallel = parallel

    def tensors(self) -> dict[str, Destination]:
        """See `Linear`; of matrices `size` times as wide."""
        return {
            name: view if view.dim() == 1 else _shard(view, 1, self.parallel)
            for name, view in self.views().items()
        }

    def finish(self) -> None:
        """See `Linear`; leaves the bias to rank 0, so that it is added once."""
        if self.bias is not None and self.parallel.rank:
            self.bias.zero_()
        super().finish()


class VocabParallelEmbedding(Embedding):
    """Rank r looks up the r-th share of the ids; the sum over ranks has every row."""

    def __init__(self, vocab_size: int, width: int, parallel: TensorParallel) -> None:
        share = _VocabShare.of(vocab_size, parallel)
        # A row of zeros before and after the share stands for the ids of other ranks.
        super().__init__(share.height + 2, width)
        self.weight[0].zero_()
        self.weight[1 + share.num_ids :].zero_()
        self.parallel = parallel
        self._share = share

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up tokens: [T] int64 -> [T, width], the same on every rank."""
        rows = (token_ids - (self._share.start - 1)).clamp_(0, self._share.height + 1)
        return self.parallel.all_reduce(F.embedding(rows, self.weight))

    __call__ = forward

    @property
    def matrix(self) -> nn.Parameter:
        """Return this rank's rows, as `VocabParallelHead` has them."""
        return nn.Parameter(self.weight[1:-1], requires_grad=False)

    def holds(self, table: Tensor) -> bool:
        """See `Embedding`; all ranks get the same answer."""
        mine = table.narrow(0, self._share.start, self._share.num_ids)
        return bool(self.parallel.smallest(int(is_copy(mine, self._rows))))

    def tensors(self) -> dict[str, Destination]:
        """Return the table."""
        return {"weight": Shard(self._rows, 0, self._share.start, self._share.vocab_size)}

    @property
    def _rows(self) -> Tensor:
        return self.weight.narrow(0, 1, self._share.num_ids)


class VocabParallelHead(Linear):
    """Rank r computes the r-th share of the logits; all ranks get all of them."""

    def __init__(self, in_features: int, vocab_size: int, parallel: TensorParallel) -> None:
        share = _VocabShare.of(vocab_size, parallel)
        super().__init__(in_features, {"lm_head": share.height})
        self.weight[share.num_ids :].zero_()
        self.parallel = parallel
        self._share = share

    def forward(self, x: Tensor) -> Tensor:
        """Return the product: [R, in] -> [R, vocab_size]."""
        return self.parallel.gather_columns(super().forward(x), self._share.vocab_size)

    __call__ = forward

    def tensors(self) -> dict[str, Destination]:
        """Return `lm_head.weight`."""
        share = self._share
        rows = self.weight.narrow(0, 0, share.num_ids)
        return {"lm_head.weight": Shard(rows, 0, share.start, share.vocab_size)}


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


def _shard(tensor: Tensor, dim: int, parallel: TensorParallel) -> Shard:
    """Return the rank's even share of a checkpoint tensor."""
    length = tensor.shape[dim]
    return Shard(tensor, dim, parallel.rank * length, parallel.size * length)
