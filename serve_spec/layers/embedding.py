"""Token embeddings."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from serve_spec.layers.module import Layer, parameter


class Embedding(Layer):
    """One row per token."""

    def __init__(self, num_embeddings: int, width: int) -> None:
        super().__init__()
        self.weight = parameter(num_embeddings, width)

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, width]."""
        return F.embedding(token_ids, self.weight)

    __call__ = forward

    def tensors(self) -> dict[str, Tensor]:
        """The table."""
        return {"weight": self.weight}
