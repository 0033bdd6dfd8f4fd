"""EAGLE-1 and EAGLE-2 heads: layers over fc([embedding ; feature]) and the target's lm_head.

The feature is the target's hidden state after its final norm, and the head's output is its estimate
of the next one. Source: github.com/SafeAILab/EAGLE, `eagle/model/cnets1.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from serve_spec.core.context import ForwardContext
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.linear import Linear
from serve_spec.layers.module import Destination, named_parts
from serve_spec.layers.norm import stream_of
from serve_spec.layers.vocabulary import vocab_head
from serve_spec.models.decoder import DecoderLayer, without_padding
from serve_spec.models.drafts import heads
from serve_spec.models.drafts.base import (
    Config,
    Draft,
    DraftFamily,
    DraftFile,
    DraftHead,
    DraftOptions,
    Evidence,
    Facts,
    Shapes,
)
from serve_spec.models.interfaces import FeatureCapture, Target
from serve_spec.models.shape import DecoderShape
from serve_spec.models.weights import Checkpoint

_INPUT_NORM = "layers.0.input_layernorm.weight"


class EagleFamily(DraftFamily):
    """EAGLE-1 and EAGLE-2."""

    looks_like = "an EAGLE head (fc.weight with layers.0.*)"
    renames = heads.LAYER_NAMES
    exporters: ClassVar[Mapping[str, str]] = {"": "official"}

    def detect(self, config: Config, shapes: Shapes) -> Evidence | None:
        if "eagle_linear.weight" in shapes or "layers.0.attention.wq.weight" in shapes:
            raise CheckpointError(
                "its tensors have Mistral's own names (eagle_linear, attention.wq), whose rotary "
                "layout and norms differ; convert it to Hugging Face's names"
            )
        fc = shapes.get(heads.FC, ())
        if not heads.reads_two(fc, fc[:1]):
            return None
        return Evidence([heads.FC], f" reads a token and a feature (width {fc[1]})")

    def build(self, file: DraftFile, target: Target, options: DraftOptions) -> Draft:
        shape = eagle_shape(file, target, options)
        with options.defaults(target):
            return Eagle(
                shape,
                target,
                fc_bias=file.stores("fc.bias", dummy=bool(file.config.get("bias", True))),
                input_norm=file.stores(_INPUT_NORM),
                own_head=file.stores(heads.LM_HEAD),
                options=options,
            )

    def facts(self, file: DraftFile, target: Target | None, options: DraftOptions) -> Facts:
        shape = heads.layer_shape(file, target, options)
        has_norm = heads.yes_no(file.stores(_INPUT_NORM))
        return {
            **heads.facts(file, shape, options),
            "target layers": "the state after the final norm",
            "norms": f"input_layernorm before the first layer {has_norm}, no final norm",
        }


def eagle_shape(file: DraftFile, target: Target, options: DraftOptions) -> DecoderShape:
    """Return the shape of layers as wide as the target's, or raise CheckpointError."""
    shape = heads.shape_for(file, target, options)
    if shape.hidden_size != target.spec.hidden_size:
        raise file.refusal(
            f"hidden_size={shape.hidden_size}, but the target's is {target.spec.hidden_size}"
        )
    heads.check_embedding(file, target, shape.hidden_size)
    return shape


class Eagle(DraftHead):
    """An EAGLE-1 or EAGLE-2 head. Uninitialised: `load` fills it.

    `fc_bias`, `input_norm` (a norm before the first layer's attention) and `own_head` follow from
    the tensors of the file.
    """

    read_elsewhere = (heads.EMBEDDING,)

    def __init__(
        self,
        shape: DecoderShape,
        target: Target,
        fc_bias: bool,
        input_norm: bool,
        own_head: bool,
        options: DraftOptions,
    ) -> None:
        can_split = shape.divides(target.parallel.size)
        self.parallel = parallel = options.split_over(target, can_split)
        formats = options.formats
        self.shape = shape = shape.on_rank_of(parallel.size)
        hidden = shape.hidden_size
        capture = FeatureCapture(layer_ids=None)
        super().__init__(hidden, shape.caches, capture, hidden, shape.num_ids)
        self.embed_tokens = target.embed_tokens
        self.fc = Linear(2 * hidden, {"fc": hidden}, bias=fc_bias, formats=formats)
        self.layers = nn.ModuleList(
            self.layer(index, input_norm or index > 0, formats.under(f"layers.{index}."))
            for index in range(shape.num_layers)
        )
        self.own_head = own_head
        self.head_dtype = self.dtype if own_head else target.embed_tokens.weight.dtype
        self.lm_head = target.lm_head
        if own_head:
            self.lm_head = vocab_head(hidden, shape.vocab_size, parallel, formats=formats)
        self.lm_head.out_dtype = torch.float32
        self.rope = shape.rotary()

    def layer(self, index: int, input_norm: bool, formats: Formats) -> DecoderLayer:
        """Return layer `index`. formats: by names within it."""
        return DecoderLayer(self.shape, index, input_norm, self.parallel, formats)

    def forward(self, token_ids: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Return next hidden [R, H] from target ids [T] and hidden [T, H]."""
        embedded = self.embed_tokens(token_ids, hidden.dtype)
        stream = self.fc(self._inputs(embedded, hidden, ctx))
        residual: Tensor | None = None
        rotation = self.rope.at(ctx.positions)
        for layer in self.layers:
            stream, residual = layer(stream, residual, rotation, ctx)
        assert residual is not None, "a head has at least one layer"
        return stream_of(stream, residual, self.parallel)

    __call__ = forward

    def _inputs(self, embedded: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Return what `fc` reads, [T, 2H]."""
        return torch.cat((embedded, hidden), dim=-1)

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Return logits float32 [R, V] of hidden [R, H], without a norm."""
        return without_padding(self.lm_head(hidden.to(self.head_dtype)), self.num_ids)

    def tensors(self) -> dict[str, Destination]:
        """Return destinations by published name, without those shared with the target."""
        return named_parts(
            ("", self.fc),
            *((f"layers.{index}.", layer) for index, layer in enumerate(self.layers)),
            ("", self.lm_head if self.own_head else None),
        )

    def load(self, checkpoint: Checkpoint) -> None:
        """See `DraftHead`; the embedding is its own if it differs from the target's."""
        self.embed_tokens = heads.stored_embedding(checkpoint, self.embed_tokens)
        super().load(checkpoint)
