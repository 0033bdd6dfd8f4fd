"""EAGLE-1 / EAGLE-2 heads: one decoder layer over fc([embedding ; feature]), the target's lm_head.

The feature is the target's hidden state after its final norm, and the head's output is the estimate
of the next one: it is fed back, and read by the lm_head, as it is.
Source: github.com/SafeAILab/EAGLE, `eagle/model/cnets1.py`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from serve_spec.core.context import ForwardContext
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.linear import Linear
from serve_spec.layers.module import Destination, Layer, finish_loading, prefixed, tensor_defaults
from serve_spec.layers.norm import stream_of
from serve_spec.layers.rope import RotaryTable
from serve_spec.log import get_logger
from serve_spec.models.decoder import DecoderLayer
from serve_spec.models.draft_file import DraftFile, DraftOptions, open_draft
from serve_spec.models.draft_shape import draft_shape, embedding_of, has_embedding, own_embedding
from serve_spec.models.llama import FeatureCapture, Llama, without_padding
from serve_spec.models.shape import ModelShape

_log = get_logger(__name__)

READ_ELSEWHERE = ("embed_tokens.weight",)
"""Tensors of a file that `Eagle.tensors` does not name."""


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
    """Builds and fills the EAGLE head in `path` for `target`, computing in `dtype`.

    Raises:
        CheckpointError: as `open_draft`; a head for another target, or tensors that do not fit.
    """
    file = open_draft(path, "EAGLE")
    head = make_eagle(file, target, options, dtype)
    embedding = own_embedding(file, target, head.hidden_size)
    if embedding is not None:
        head.embed_tokens = embedding_of(embedding)
    file.checkpoint.load_into(head.tensors(), READ_ELSEWHERE)
    finish_loading(head)
    _log.info(
        "EAGLE head %s: %d layers, theta %g, fc bias %s, own embedding %s",
        file.path, head.shape.num_layers, head.shape.rope_theta, head.fc.bias is not None,
        embedding is not None,
    )  # fmt: skip
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
