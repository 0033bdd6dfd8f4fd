"""Self-attention around the KV cache: projections, optional head norms, rotation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.core.context import ForwardContext, Rotation
from serve_spec.layers.module import Destination, Layer, parameter
from serve_spec.layers.parallel import column_linear, row_linear
from serve_spec.parallel.group import SINGLE, TensorParallel


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and options of one attention layer. `in_features`: width of what enters q/k/v.

    Heads are those of one rank.
    """

    in_features: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    rms_norm_eps: float


class Attention(Layer):
    """o_proj(attend(rotate(q), rotate(k), v)) of layer `index` of its model's KV pool."""

    def __init__(
        self, shape: AttentionShape, index: int, parallel: TensorParallel = SINGLE
    ) -> None:
        super().__init__()
        self.shape = shape
        self.index = index
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        parts = {"q_proj": query, "k_proj": key, "v_proj": key}
        self.qkv = column_linear(shape.in_features, parts, parallel, bias=shape.qkv_bias)
        self.output = row_linear(
            query, {"o_proj": shape.hidden_size}, parallel, bias=shape.output_bias
        )
        # One gain for query heads, one for key heads; the index spreads them over all heads, so
        # that queries and keys are normalised and rotated together.
        self.qk_gain = parameter(2, shape.head_dim) if shape.qk_norm else None
        self._gain_of_head = torch.tensor([0] * shape.num_heads + [1] * shape.num_kv_heads)

    def heads(self, x: Tensor) -> Tensor:
        """Return projected queries, keys and values: [T, in] -> [T, heads + 2·kv_heads, d].

        Or their partial sums (see `ops.linear.sum_partials`), which the rotation adds up.
        """
        shape = self.shape
        projected = self.qkv(x) if shape.qk_norm else self.qkv.partials(x)
        num_all = shape.num_heads + 2 * shape.num_kv_heads
        return projected.view(*projected.shape[:-1], num_all, shape.head_dim)

    def attend(self, heads: Tensor, rotation: Rotation, ctx: ForwardContext) -> Tensor:
        """Head norms, rotation, attention; `heads` is used up. Returns [R, heads·d], of the rows
        that are asked for."""
        shape = self.shape
        if self.qk_gain is not None:
            rotated = heads[:, : shape.num_heads + shape.num_kv_heads]
            normed = F.rms_norm(rotated, (shape.head_dim,), None, shape.rms_norm_eps)
            gain = self.qk_gain.index_select(0, self._gain_of_head)
            torch.mul(normed, gain, out=rotated)
        return ctx.attention.run(self.index, heads, rotation).flatten(1)

    def tensors(self) -> dict[str, Destination]:
        """Return the projections and, if any, gains of query and key heads ([head_dim] each)."""
        tensors = {**self.qkv.tensors(), **self.output.tensors()}
        if self.qk_gain is not None:
            tensors["q_norm.weight"] = self.qk_gain[0]
            tensors["k_norm.weight"] = self.qk_gain[1]
        return tensors
