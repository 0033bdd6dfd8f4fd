"""The decoder layer that targets and drafts share, and its compilation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from serve_spec.core.context import ForwardContext, Rotation
from serve_spec.layers.attention import Attention, AttentionShape
from serve_spec.layers.mlp import GatedMLP
from serve_spec.layers.module import Destination, Layer, prefixed
from serve_spec.layers.norm import RMSNorm
from serve_spec.models.shape import ModelShape
from serve_spec.parallel.group import SINGLE, TensorParallel


class DecoderLayer(Layer):
    """Pre-norm attention and feed-forward, with the residual addition fused into the norms.

    `shape` is one rank's. `input_norm=False` is EAGLE-1's first layer, whose attention reads its
    input without a norm. `inputs`: hidden vectors that attention reads at once.
    """

    inputs = 1

    def __init__(
        self,
        shape: ModelShape,
        index: int,
        input_norm: bool = True,
        parallel: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_norm = RMSNorm(hidden, eps, parallel) if input_norm else None
        self.attention = Attention(attention_shape(shape, self.inputs * hidden), index, parallel)
        self.post_attention_norm = RMSNorm(hidden, eps, parallel)
        self.mlp = GatedMLP(hidden, shape.intermediate_size, parallel)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rotation: Rotation, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Return (this layer's last addend, residual stream before it), both [R, H] of the queries.

        The stream entering the layer is `hidden + residual`; `residual=None` stands for zero. With
        several ranks the addend is this rank's: the next norm sums them.
        """
        heads, residual = self.before_attention(hidden, residual)
        attended = self.attention.attend(heads, rotation, ctx)
        residual = ctx.select_queries(residual)
        if not len(residual):
            return residual, residual
        return self.after_attention(attended, residual)

    __call__ = forward

    def before_attention(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (the heads that attend, the residual stream)."""
        if residual is None:
            residual = hidden
            normed = hidden if self.input_norm is None else self.input_norm(hidden)
        else:
            assert self.input_norm is not None, "only a first layer may go without input norm"
            normed, residual = self.input_norm.add(hidden, residual)
        return self.attention.heads(normed), residual

    def after_attention(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result of `forward` from attended heads [T, heads·d]."""
        projected = self.attention.output.partials(attended)
        normed, residual = self.post_attention_norm.add(projected, residual)
        return self.mlp(normed), residual

    def tensors(self) -> dict[str, Destination]:
        """Return destinations by Hugging Face's names within one layer."""
        tensors = {
            **prefixed("self_attn.", self.attention.tensors()),
            **prefixed("post_attention_layernorm.", self.post_attention_norm.tensors()),
            **prefixed("mlp.", self.mlp.tensors()),
        }
        if self.input_norm is not None:
            tensors |= prefixed("input_layernorm.", self.input_norm.tensors())
        return tensors


def attention_shape(shape: ModelShape, in_features: int) -> AttentionShape:
    """Return the attention part of a model's shape, for inputs of width `in_features`."""
    return AttentionShape(
        in_features=in_features,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        qkv_bias=shape.qkv_bias,
        output_bias=shape.output_bias,
        qk_norm=shape.qk_norm,
        rms_norm_eps=shape.rms_norm_eps,
    )


_REGIONS = ("before_attention", "after_attention")

# Compiled variants of one region, over all models of a process. Above it a region runs eagerly, on
# our kernels; torch's default of 8 is too few for a target and a draft.
_MAX_COMPILED = 64


def compile_layers(model: object, backend: str = "inductor") -> None:
    """Compile the regions of all decoder layers of `model`, in place.

    A region is everything before a layer's attention, or everything after it; the compiler traces
    the reference implementations of `ops`. It is compiled when it first runs: once for one token
    and once for any larger number (each again for inputs made outside inference mode), and equal
    layers share the code. No CUDA graphs are made here, so that a stage can be captured around the
    compiled code. backend: of torch.compile; inductor cannot compile `Linear` on CPUs.
    """
    assert isinstance(model, nn.Module), "models are made of layers"
    torch._dynamo.config.recompile_limit = _MAX_COMPILED
    # An epsilon is a constant; `dynamic` is meant for tokens, and would make it an input.
    torch._dynamo.config.specialize_float = True
    for layer in model.modules():
        if all(hasattr(layer, region) for region in _REGIONS):
            for region in _REGIONS:
                written = getattr(layer, region)
                setattr(layer, region, torch.compile(written, dynamic=True, backend=backend))
