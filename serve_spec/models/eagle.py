"""EAGLE heads: decoder layers over the next token's embedding and a feature of the target.

EAGLE-1 / EAGLE-2: fc([embedding ; feature]) and the target's lm_head. The feature is the target's
hidden state after its final norm, and the head's output is its estimate of the next one.
EAGLE-3: [norm(embedding) ; norm(hidden)] and its own lm_head. The hidden state is fc of the
target's residual stream at three depths, or the head's own output before its final norm.
Source: github.com/SafeAILab/EAGLE, `eagle/model/cnets1.py`, `cnets.py`; options: SpecForge, vLLM.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from serve_spec.core.context import ForwardContext, Rotation
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.attention import Attention
from serve_spec.layers.linear import Linear
from serve_spec.layers.mlp import GatedMLP
from serve_spec.layers.module import Destination, Layer, finish_loading, prefixed, tensor_defaults
from serve_spec.layers.norm import RMSNorm, stream_of
from serve_spec.layers.rope import RotaryTable
from serve_spec.log import get_logger
from serve_spec.models.decoder import DecoderLayer, attention_shape
from serve_spec.models.draft_checkpoint import DraftFile, DraftOptions, open_draft
from serve_spec.models.draft_shape import (
    Eagle3Shape,
    draft_shape,
    embedding_of,
    has_embedding,
    num_draft_ids,
    own_embedding,
    read_d2t,
    read_eagle3_shape,
)
from serve_spec.models.llama import FeatureCapture, Llama, without_padding
from serve_spec.models.shape import ModelShape

_log = get_logger(__name__)

EAGLE_ELSEWHERE = ("embed_tokens.weight",)
"""Tensors of a file that `Eagle.tensors` does not name."""

EAGLE3_ELSEWHERE = (*EAGLE_ELSEWHERE, "d2t", "t2d")
"""Tensors of a file that `Eagle3.tensors` does not name."""


class Eagle(Layer):
    """See `DraftHead`. Uninitialised: `load_eagle` fills it.

    `fc_bias`, `input_norm` (a norm before the first layer's attention) and `own_head` follow from
    the tensors of the file.
    """

    target_ids: Tensor | None = None

    def __init__(
        self, shape: ModelShape, target: Llama, fc_bias: bool, input_norm: bool, own_head: bool
    ) -> None:
        super().__init__()
        self.shape = shape
        self.num_ids = shape.num_ids
        self.capture = FeatureCapture(layer_ids=None)
        self.shift = 0
        self.ends_early = shape.num_layers == 1
        self.max_steps = None
        self.feature_dim = self.hidden_size = shape.hidden_size
        self.embed_tokens = target.embed_tokens
        self.fc = Linear(2 * shape.hidden_size, {"fc": shape.hidden_size}, bias=fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(shape, index, input_norm=input_norm or index > 0)
            for index in range(shape.num_layers)
        )
        self.dtype = torch.get_default_dtype()
        self.own_head = own_head
        self.head_dtype = self.dtype if own_head else target.embed_tokens.weight.dtype
        self.lm_head = (
            Linear(shape.hidden_size, {"lm_head": shape.vocab_size}) if own_head else target.lm_head
        )
        self.lm_head.out_dtype = torch.float32
        self.rope = RotaryTable(
            shape.head_dim, shape.rope_theta, shape.rope_scaling, shape.max_position_embeddings
        )

    def encode(self, features: Tensor) -> Tensor:
        """The feature is the hidden state: [T, H] -> [T, H]."""
        return features.to(self.dtype)

    def forward(self, token_ids: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """[T] target ids, [T, H] -> [R, H]."""
        embedded = self.embed_tokens(token_ids).to(hidden.dtype)
        stream = self.fc(torch.cat((embedded, hidden), dim=-1))
        residual: Tensor | None = None
        rotation = self.rope.at(ctx.positions)
        for layer in self.layers:
            stream, residual = layer(stream, residual, rotation, ctx)
        assert residual is not None, "a head has at least one layer"
        return stream_of(stream, residual)

    __call__ = forward

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """[R, H] -> float32 [R, V], without a norm."""
        return without_padding(self.lm_head(hidden.to(self.head_dtype)), self.num_ids)

    def tensors(self) -> dict[str, Destination]:
        """The published names; what is shared with the target is not among them."""
        tensors = self.fc.tensors()
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            tensors |= prefixed(f"layers.{index}.", layer.tensors())
        return tensors | (self.lm_head.tensors() if self.own_head else {})


def load_eagle(path: Path | str, target: Llama, options: DraftOptions, dtype: torch.dtype) -> Eagle:
    """Return the EAGLE head in `path` for `target`, computing in `dtype`.

    Raises:
        CheckpointError: as `open_draft`; a head for another target, or tensors that do not fit.
    """
    file = open_draft(path, "EAGLE")
    head = make_eagle(file, target, options, dtype)
    _fill(head, file, target, EAGLE_ELSEWHERE)
    return head


def make_eagle(file: DraftFile, target: Llama, options: DraftOptions, dtype: torch.dtype) -> Eagle:
    """The head in `file` without its weights, on the target's device.

    Raises:
        CheckpointError: a head for another target.
    """
    shape = draft_shape(file, target, options)
    if shape.hidden_size != target.shape.hidden_size:
        raise CheckpointError(
            f"{file.path}: hidden_size={shape.hidden_size}, but the target's is "
            f"{target.shape.hidden_size}; use a head trained for this target"
        )
    has_embedding(file, target, shape.hidden_size)
    with tensor_defaults(dtype, target.embed_tokens.weight.device):
        return Eagle(
            shape,
            target,
            fc_bias="fc.bias" in file.checkpoint,
            input_norm="layers.0.input_layernorm.weight" in file.checkpoint,
            own_head="lm_head.weight" in file.checkpoint,
        )


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
    """Return the EAGLE-3 head in `path` for `target`, computing in `dtype`.

    Raises:
        CheckpointError: as `open_draft`; a head for another target, or tensors that do not fit.
    """
    file = open_draft(path, "EAGLE3")
    head = make_eagle3(file, target, options, dtype)
    _fill(head, file, target, EAGLE3_ELSEWHERE)
    return head


def _fill(
    head: Eagle | Eagle3, file: DraftFile, target: Llama, read_elsewhere: tuple[str, ...]
) -> None:
    """Load the head's weights, and its own embedding if it differs from the target's."""
    embedding = own_embedding(file, target, head.hidden_size)
    if embedding is not None:
        head.embed_tokens = embedding_of(embedding)
    file.checkpoint.load_into(head.tensors(), read_elsewhere)
    finish_loading(head)
    _log.info(
        "%s head %s: %s, own embedding %s",
        file.recognition.family, file.path, head.shape, embedding is not None,
    )  # fmt: skip


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
