"""What a layer keeps of a text, as data: pools and memory plans read nothing else of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of one attention layer, by token, and how the layer attends to them.

    `num_heads`: KV heads of one rank. `key_dim`, `value_dim`: width of a key and of a value.

    `window`: a token sees itself and the `window - 1` entries before it (None: all of them).
    `scale`: factor of the scores (None: key_dim**-0.5). `softcap`: scores become
    softcap · tanh(score / softcap) (None: they stay). `has_sinks`: each query head has one more
    logit in the denominator of its softmax.

    `dtype`: of stored keys and values (None: compute dtype). `key_scale`, `value_scale`: what
    stored keys and values are multiplied by, 1 in the compute dtype.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    has_sinks: bool = False
    dtype: torch.dtype | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def score_scale(self) -> float:
        """Return the factor of the scores of stored keys."""
        scale = self.key_dim**-0.5 if self.scale is None else self.scale
        return scale * self.key_scale

    def bytes_per_token(self, compute_dtype: torch.dtype) -> int:
        """Return the memory of one token's key and value."""
        itemsize = (self.dtype or compute_dtype).itemsize
        return self.num_heads * (self.key_dim + self.value_dim) * itemsize


@dataclass(frozen=True)
class RecurrentCache:
    """State of one recurrent layer, by request, and the inputs of its newest tokens.

    `state`: heads, width of a value, width of a key. `conv`: channels, earlier inputs of each.
    `input_width`: numbers per token that the state is updated with. `dtype`: of all of them.
    """

    state: tuple[int, int, int]
    conv: tuple[int, int]
    input_width: int
    dtype: torch.dtype = torch.float32

    def bytes_per_slot(self, ring: int) -> int:
        """Return the memory of one request; ring: how many tokens' inputs are kept."""
        numbers = math.prod(self.state) + math.prod(self.conv) + ring * self.input_width
        return numbers * self.dtype.itemsize


CacheSpec: TypeAlias = PagedCache | RecurrentCache
"""What one layer keeps."""
