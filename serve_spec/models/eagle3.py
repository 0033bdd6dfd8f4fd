"""EAGLE-3 heads: decoder layers over [norm(embedding) ; norm(hidden)], an lm_head of their own.

The hidden state is fc of the target's residual stream at three depths, or, while drafting ahead,
the head's own output before its final norm.
Source: github.com/SafeAILab/EAGLE, `eagle/model/cnets.py`; options: SpecForge, vLLM.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from serve_spec.core.context import ForwardContext, Rotation
from serve_spec.layers.attention import Attention
from serve_spec.layers.linear import Linear
from serve_spec.layers.mlp import GatedMLP
from serve_spec.layers.module import Destination, Layer, finish_loading, prefixed, tensor_defaults
from serve_spec.layers.norm import RMSNorm, stream_of
from serve_spec.layers.rope import RotaryTable
from serve_spec.log import get_logger
from serve_spec.models.decoder import DecoderLayer, attention_shape
from serve_spec.models.draft_file import DraftFile, DraftOptions, open_draft
from serve_spec.models.draft_ids import read_d2t
from serve_spec.models.draft_shape import embedding_of, has_embedding, own_embedding
from serve_spec.models.eagle3_shape import Eagle3Shape, num_draft_ids, read_eagle3_shape
from serve_spec.models.llama import Llama, without_padding

_log = get_logger(__name__)

READ_ELSEWHERE = ("embed_tokens.weight", "d2t", "t2d")
"""Tensors of a file that `Eagle3.tensors` does not name."""


class Eagle3FirstLayer(Layer):
    """A decoder layer whose attention reads the embedding beside the hidden state (2H wide)."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        layers = shape.layers
        hidden, eps = layers.hidden_size, layers.rms_norm_eps
        self.norm_before_residual = shape.norm_before_residual
        self.input_norm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.attention = Attention(attention_shape(layers, 2 * hidden), index=0)
        self.post_attention_norm = RMSNorm(hidden, eps)
        self.mlp = GatedMLP(hidden, layers.intermediate_size)

    def forward(
        self, embedded: Tensor, hidden: Tensor, rotation: Rotation, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Both inputs [T, H] -> (last addend, residual stream before it) [R, H]: `DecoderLayer`."""
        heads, residual = self.before_attention(embedded, hidden)
        attended = self.attention.attend(heads, rotation, ctx)
        residual = ctx.select_queries(residual)
        if not len(residual):
            return residual, residual
        return self.after_attention(attended, residual)

    __call__ = forward

    def before_attention(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(the heads that attend, the residual stream)."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        inputs = torch.cat((self.input_norm(embedded), normed), dim=-1)
        return self.attention.heads(inputs), residual

    def after_attention(self, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` returns, from what the heads saw, [T, heads·d]."""
        projected = self.attention.output.addends(attended)
        normed, residual = self.post_attention_norm.add(projected, residual)
        return self.mlp(normed), residual

    def tensors(self) -> dict[str, Destination]:
        """The published names within `midlayer.` / `layers.0.`."""
        return {
            **prefixed("input_layernorm.", self.input_norm.tensors()),
            **prefixed("hidden_norm.", self.hidden_norm.tensors()),
            **prefixed("self_attn.", self.attention.tensors()),
            **prefixed("post_attention_layernorm.", self.post_attention_norm.tensors()),
            **prefixed("mlp.", self.mlp.tensors()),
        }


class Eagle3(Layer):
    """See `DraftHead`. Uninitialised: `load_eagle3` fills it."""

    def __init__(self, shape: Eagle3Shape, target: Llama, target_ids: Tensor | None) -> None:
        super().__init__()
        self.options = shape
        self.shape = layers = shape.layers
        self.capture = shape.capture
        self.shift = 0
        self.ends_early = layers.num_layers == 1
        self.max_steps = None
        self.hidden_size = layers.hidden_size
        self.feature_dim = shape.num_features * shape.target_hidden_size
        self.target_ids = target_ids
        self.num_ids = num_draft_ids(target_ids, layers.num_ids)
        self.dtype = torch.get_default_dtype()
        eps = layers.rms_norm_eps
        self.embed_tokens = target.embed_tokens
        self.input_norm = RMSNorm(self.feature_dim, eps) if shape.input_norm else None
        num_fc_norms = shape.num_features if shape.fc_norm else 0
        self.fc_norms = nn.ModuleList(
            RMSNorm(shape.target_hidden_size, eps) for _ in range(num_fc_norms)
        )
        self.fc = Linear(self.feature_dim, {"fc": layers.hidden_size}, bias=shape.fc_bias)
        self.first_layer = Eagle3FirstLayer(shape)
        self.more_layers = nn.ModuleList(
            DecoderLayer(layers, index) for index in range(1, layers.num_layers)
        )
        self.norm = RMSNorm(layers.hidden_size, eps)
        self.lm_head = Linear(layers.hidden_size, {"lm_head": shape.draft_vocab_size})
        self.lm_head.out_dtype = torch.float32
        self.rope = RotaryTable(
            layers.head_dim, layers.rope_theta, layers.rope_scaling, layers.max_position_embeddings
        )

    def encode(self, features: Tensor) -> Tensor:
        """[T, F] -> [T, H]: optional norms, then fc."""
        features = features.to(self.dtype)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norms:
            blocks = features.chunk(len(self.fc_norms), dim=-1)
            normed = [norm(block) for norm, block in zip(self.fc_norms, blocks, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self.fc(features)

    def forward(self, token_ids: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] target ids, [T, H] -> [R, H]."""
        rotation = self.rope.at(ctx.positions)
        embedded = self.embed_tokens(token_ids).to(hidden.dtype)
        addend, residual = self.first_layer(embedded, hidden, rotation, ctx)
        for layer in self.more_layers:
            addend, residual = layer(addend, residual, rotation, ctx)
        stream = stream_of(addend, residual)
        return self.norm(stream) if self.options.norm_output else stream

    __call__ = forward

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """[R, H] as `forward` returned it -> float32 [R, Vd]."""
        normed = hidden if self.options.norm_output else self.norm(hidden)
        return without_padding(self.lm_head(normed), self.num_ids)

    def tensors(self) -> dict[str, Destination]:
        """The published names, with `layers.0.` for `midlayer.`; no shared tensors, no id maps."""
        tensors = {**self.fc.tensors(), **prefixed("layers.0.", self.first_layer.tensors())}
        if self.input_norm is not None:
            tensors |= prefixed("input_norm.", self.input_norm.tensors())
        for index, norm in enumerate(self.fc_norms):
            assert isinstance(norm, RMSNorm)
            tensors |= prefixed(f"fc_norm.{index}.", norm.tensors())
        for index, layer in enumerate(self.more_layers, start=1):
            assert isinstance(layer, DecoderLayer)
            tensors |= prefixed(f"layers.{index}.", layer.tensors())
        return {**tensors, **prefixed("norm.", self.norm.tensors()), **self.lm_head.tensors()}


def load_eagle3(
    path: Path | str, target: Llama, options: DraftOptions, dtype: torch.dtype
) -> Eagle3:
    """Builds and fills the EAGLE-3 head in `path` for `target`, computing in `dtype`.

    Raises:
        CheckpointError: as `open_draft`; a head for another target, or tensors that do not fit.
    """
    file = open_draft(path, "EAGLE3")
    head = make_eagle3(file, target, options, dtype)
    embedding = own_embedding(file, target, head.hidden_size)
    if embedding is not None:
        head.embed_tokens = embedding_of(embedding)
    file.checkpoint.load_into(head.tensors(), READ_ELSEWHERE)
    finish_loading(head)
    _log.info(
        "EAGLE-3 head %s: %s, own embedding %s", file.path, head.options, embedding is not None
    )
    return head


def make_eagle3(
    file: DraftFile, target: Llama, options: DraftOptions, dtype: torch.dtype
) -> Eagle3:
    """The head in `file` without its weights, on the target's device.

    Raises:
        CheckpointError: a head for another target, or id maps that contradict each other.
    """
    shape = read_eagle3_shape(file, target, options)
    target_ids = read_d2t(file, shape.draft_vocab_size, shape.layers.vocab_size)
    has_embedding(file, target, shape.layers.hidden_size)
    device = target.embed_tokens.weight.device
    if target_ids is not None:
        target_ids = target_ids.to(device)
    with tensor_defaults(dtype, device):
        return Eagle3(shape, target, target_ids)
