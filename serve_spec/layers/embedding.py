"""Token embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_spec.layers.module import Destination, Layer, parameter


class Embedding(Layer):
    """One row per token."""

    def __init__(self, num_embeddings: int, width: int) -> None:
        super().__init__()
        self.weight = parameter(num_embeddings, width)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Look up tokens: [T] int64 -> [T, width]."""
        return F.embedding(token_ids, self.weight)

    __call__ = forward

    @property
    def matrix(self) -> nn.Parameter:
        """Return the table, for a head that shares it."""
        return self.weight

    def holds(self, table: Tensor) -> bool:
        """Return whether `table` [V, width], of this dtype and device, is equal up to rounding."""
        return is_copy(table, self.weight)

    def tensors(self) -> dict[str, Destination]:
        """Return the table."""
        return {"weight": self.weight}


def is_copy(table: Tensor, original: Tensor) -> bool:
    """Return whether both are the same, but for what a stay in float16 does to numbers."""
    return table.shape == original.shape and torch.allclose(table, original, rtol=1e-2, atol=1e-4)
