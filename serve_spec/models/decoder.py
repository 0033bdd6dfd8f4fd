"""Decoders: the layer that targets and drafts share, and the target made of such layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_spec.core.context import ForwardContext, Rotation
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.linear import Linear
from serve_spec.layers.module import Destination, Layer, Span, named_parts, parameter
from serve_spec.layers.norm import JointNorm, RMSNorm
from serve_spec.layers.vocabulary import vocab_embedding, vocab_head
from serve_spec.models.interfaces import FeatureCapture, Target, TargetOutput, TargetSpec
from serve_spec.models.shape import DecoderShape
from serve_spec.parallel.group import SINGLE, TensorParallel


class Attention(Layer):
    """o_proj(attend(rotate(q), rotate(k), v)) of layer `index` of its model's KV pool.

    `shape` is one rank's. `in_features`: width of what enters q/k/v.
    """

    def __init__(
        self,
        shape: DecoderShape,
        in_features: int,
        index: int,
        parallel: TensorParallel = SINGLE,
        formats: Formats = PLAIN,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.index = index
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        parts = {"q_proj": query, "k_proj": key, "v_proj": key}
        self.qkv = Linear(in_features, parts, shape.qkv_bias, parallel, formats=formats)
        self.output = Linear(
            query,
            {"o_proj": shape.hidden_size},
            shape.output_bias,
            parallel,
            is_row_parallel=True,
            formats=formats,
        )
        # One gain for query heads, one for key heads; the index spreads them over all heads, so
        # that queries and keys are normalised and rotated together.
        self.qk_gain = parameter(2, shape.head_dim) if shape.qk_norm else None
        self._gain_of_head = torch.tensor([0] * shape.num_heads + [1] * shape.num_kv_heads)
        self.joint_norm: JointNorm | None = None
        if shape.joint_qk_norm:
            sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim
            self.joint_norm = JointNorm(*sizes, shape.rms_norm_eps, parallel)
        self.sinks = parameter(shape.num_heads) if shape.has_sinks else None
        self._parallel = parallel

    def heads(self, x: Tensor) -> Tensor:
        """Return projected queries, keys and values: [T, in] -> [T, heads + 2·kv_heads, d].

        Or their partial sums (see `ops.linear.sum_partials`), which the rotation adds up.
        """
        shape = self.shape
        is_normed = shape.qk_norm or shape.joint_qk_norm
        projected = self.qkv(x) if is_normed else self.qkv.partials(x)
        num_all = shape.num_heads + 2 * shape.num_kv_heads
        return projected.view(*projected.shape[:-1], num_all, shape.head_dim)

    def attend(self, heads: Tensor, rotation: Rotation, ctx: ForwardContext) -> Tensor:
        """Head norms, rotation, attention; `heads` is used up. Returns [R, heads·d], of the rows
        that are asked for."""
        shape = self.shape
        rotated = heads[:, : shape.num_heads + shape.num_kv_heads]
        if self.joint_norm is not None:
            self.joint_norm(rotated)
        if self.qk_gain is not None:
            normed = F.rms_norm(rotated, (shape.head_dim,), None, shape.rms_norm_eps)
            gain = self.qk_gain.index_select(0, self._gain_of_head)
            torch.mul(normed, gain, out=rotated)
        return ctx.attention.run(self.index, heads, rotation, self.sinks).flatten(1)

    def tensors(self) -> dict[str, Destination]:
        """Return the projections and, if any, gains of query and key heads, and sinks."""
        tensors: dict[str, Destination] = {**self.qkv.tensors(), **self.output.tensors()}
        if self.qk_gain is not None:
            tensors["q_norm.weight"] = self.qk_gain[0]
            tensors["k_norm.weight"] = self.qk_gain[1]
        if self.joint_norm is not None:
            tensors |= self.joint_norm.tensors()
        if self.sinks is not None:
            tensors["sinks"] = Span.shard_of(len(self.sinks), self._parallel).of(self.sinks, 0)
        return tensors


class MLP(Layer):
    """What follows attention in a layer: [T, H] -> [T, H], or its partial sums.

    With several ranks the result is this rank's addend (see `ops.linear.sum_partials`).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the result for every token of x [T, H]."""
        raise NotImplementedError

    def __call__(self, x: Tensor) -> Tensor:
        """See `forward`."""
        return self.forward(x)


class GatedMLP(MLP):
    """down(silu(gate(x)) · up(x)); gate and up are one product. `shape` is one rank's."""

    def __init__(
        self, shape: DecoderShape, parallel: TensorParallel = SINGLE, formats: Formats = PLAIN
    ) -> None:
        super().__init__()
        hidden, inner, bias = shape.hidden_size, shape.intermediate_size, shape.mlp_bias
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up = Linear(hidden, parts, bias, parallel, formats=formats)
        self.down = Linear(
            inner, {"down_proj": hidden}, bias, parallel, is_row_parallel=True, formats=formats
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, H] -> [T, H], or its partial sums (see `ops.linear.sum_partials`)."""
        return self.down.partials(self.gate_up.gate_up(x))

    __call__ = forward

    def tensors(self) -> dict[str, Destination]:
        """Return gate, up and down matrices, and their biases if any."""
        return {**self.gate_up.tensors(), **self.down.tensors()}


class DecoderLayer(Layer):
    """Pre-norm attention and feed-forward, with the residual addition fused into the norms.

    `shape` is one rank's. `input_norm=False` is EAGLE-1's first layer, whose attention reads its
    input without a norm. `inputs`: hidden vectors that attention reads together. `formats`: of this
    layer's matrices, by Hugging Face's names within it. `mlp`: None: a `GatedMLP`.
    """

    inputs = 1

    def __init__(
        self,
        shape: DecoderShape,
        index: int,
        input_norm: bool = True,
        parallel: TensorParallel = SINGLE,
        formats: Formats = PLAIN,
        mlp: MLP | None = None,
    ) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_norm = RMSNorm(hidden, eps, parallel) if input_norm else None
        self.attention = Attention(
            shape, self.inputs * hidden, index, parallel, formats.under("self_attn.")
        )
        self.post_attention_norm = RMSNorm(hidden, eps, parallel)
        self.mlp = GatedMLP(shape, parallel, formats.under("mlp.")) if mlp is None else mlp

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
        return named_parts(
            ("self_attn.", self.attention),
            ("post_attention_layernorm.", self.post_attention_norm),
            ("mlp.", self.mlp),
            ("input_layernorm.", self.input_norm),
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


class Decoder(Target):
    """A decoder-only transformer over a paged KV pool.

    Created with torch's default dtype and device, uninitialised: `load_target` fills it. With
    tied embeddings `lm_head` reads the embedding's matrix. `shape` is that of all ranks,
    `rank_shape` this rank's part, for its KV pool and attention.
    """

    def __init__(
        self,
        shape: DecoderShape,
        spec: TargetSpec,
        layers: Sequence[DecoderLayer],
        *,
        is_tied: bool = False,
        max_model_len: int | None = None,
        parallel: TensorParallel = SINGLE,
        formats: Formats = PLAIN,
    ) -> None:
        super().__init__()
        self.shape, self.spec = shape, spec
        self.dtype = torch.get_default_dtype()
        self.parallel = parallel
        self.rank_shape = shape.on_rank_of(parallel.size)
        self.embed_tokens = vocab_embedding(shape.vocab_size, shape.hidden_size, parallel)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps, parallel)
        self.lm_head = vocab_head(
            shape.hidden_size,
            shape.vocab_size,
            parallel,
            formats=formats,
            tied=self.embed_tokens if is_tied else None,
        )
        self.lm_head.out_dtype = torch.float32
        self.max_model_len = max_model_len or shape.max_position_embeddings
        self.rope = shape.rotary(self.max_model_len)
        # A plain tuple: iterating a ModuleList is slow.
        self._layers = tuple(layers)

    def forward(
        self, token_ids: Tensor, ctx: ForwardContext, capture: FeatureCapture | None = None
    ) -> TargetOutput:
        """Return hidden states of `token_ids` [T] (int64) at the positions of `ctx`."""
        hidden = self.embed_tokens(token_ids)
        residual: Tensor | None = None
        rotation = self.rope.at(ctx.positions)
        wanted = () if capture is None else capture.layer_ids
        streams: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            heads, residual = layer.before_attention(hidden, residual)
            if wanted and index in wanted:
                streams[index] = residual
            attended = layer.attention.attend(heads, rotation, ctx)
            hidden, residual = layer.after_attention(attended, residual)
        assert residual is not None, "a model has at least one layer"
        hidden, residual = self.norm.add(hidden, residual)
        if wanted is None:
            return TargetOutput(hidden, (hidden,))
        streams[len(self._layers)] = residual
        return TargetOutput(hidden, tuple(streams[index] for index in wanted))

    __call__ = forward

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits float32 [R, V] of hidden [R, H]; -inf for padding ids."""
        return without_padding(self.lm_head(hidden), self.spec.num_ids)

    def tensors(self) -> dict[str, Destination]:
        """Return destinations by Hugging Face's names; `lm_head.weight` only if it is not tied."""
        return named_parts(
            ("model.embed_tokens.", self.embed_tokens),
            *((f"model.layers.{index}.", layer) for index, layer in enumerate(self._layers)),
            ("model.norm.", self.norm),
            ("", self.lm_head),
        )


def without_padding(logits: Tensor, num_ids: int | None) -> Tensor:
    """Set `logits` [R, V] of ids from `num_ids` on (None: none) to -inf, in place."""
    if num_ids is not None:
        logits[:, num_ids:] = float("-inf")
    return logits
