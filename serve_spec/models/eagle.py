"""EAGLE heads: decoder layers over the next token's embedding and a feature of the target.

EAGLE-1 / EAGLE-2: fc([embedding ; feature]) and the target's lm_head. The feature is the target's
hidden state after its final norm, and the head's output is its estimate of the next one.
EAGLE-3: [norm(embedding) ; norm(hidden)] and its own lm_head. The hidden state is fc of the
target's residual stream at three depths, or the head's own output before its final norm.
MTP of MiMo: fc([norm(hidden) ; norm(embedding)]) and the target's lm_head. The hidden state is the
target's residual stream before its final norm, or the head's own output after its final norm.
Source: github.com/SafeAILab/EAGLE, `eagle/model/cnets1.py`, `cnets.py`; options: SpecForge, vLLM.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from serve_spec.core.context import ForwardContext
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.linear import Linear
from serve_spec.layers.module import Destination, finish_loading, named_parts, tensor_defaults
from serve_spec.layers.norm import RMSNorm, stream_of
from serve_spec.layers.vocabulary import vocab_head
from serve_spec.log import get_logger
from serve_spec.models import draft_shape
from serve_spec.models.decoder import DecoderLayer, without_padding
from serve_spec.models.draft import DraftHead, sharing_ranks
from serve_spec.models.draft_checkpoint import DraftFile, DraftOptions, open_draft
from serve_spec.models.interfaces import FeatureCapture, Target
from serve_spec.models.shape import DecoderShape
from serve_spec.parallel.group import TensorParallel

_log = get_logger(__name__)


class Eagle(DraftHead):
    """EAGLE-1 / EAGLE-2 head. Uninitialised: `load_eagle` fills it.

    `fc_bias`, `input_norm` (a norm before the first layer's attention) and `own_head` follow from
    the tensors of the file.
    """

    read_elsewhere = (draft_shape.EMBEDDING,)

    def __init__(
        self,
        shape: DecoderShape,
        target: Target,
        fc_bias: bool,
        input_norm: bool,
        own_head: bool,
        formats: Formats = PLAIN,
    ) -> None:
        self.parallel = parallel = sharing_ranks(shape, target)
        shape = shape.on_rank_of(parallel.size)
        super().__init__(shape, FeatureCapture(layer_ids=None), shape.hidden_size)
        self.embed_tokens = target.embed_tokens
        self.fc = Linear(
            2 * shape.hidden_size, {"fc": shape.hidden_size}, bias=fc_bias, formats=formats
        )
        self.layers = nn.ModuleList(
            DecoderLayer(
                shape,
                index,
                input_norm=input_norm or index > 0,
                parallel=parallel,
                formats=formats.under(f"layers.{index}."),
            )
            for index in range(shape.num_layers)
        )
        self.own_head = own_head
        self.head_dtype = self.dtype if own_head else target.embed_tokens.weight.dtype
        self.lm_head = target.lm_head
        if own_head:
            self.lm_head = vocab_head(
                shape.hidden_size, shape.vocab_size, parallel, formats=formats
            )
        self.lm_head.out_dtype = torch.float32
        self.rope = shape.rotary()

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


class Mtp(Eagle):
    """MiMo's layer for multi-token prediction. Uninitialised: `load_mtp` fills it."""

    def __init__(self, shape: DecoderShape, target: Target, formats: Formats = PLAIN) -> None:
        super().__init__(
            shape, target, fc_bias=False, input_norm=True, own_head=False, formats=formats
        )
        self.capture = FeatureCapture((target.spec.num_layers,))
        norms = (RMSNorm(shape.hidden_size, shape.rms_norm_eps) for _ in range(3))
        self.token_norm, self.hidden_norm, self.final_norm = norms

    def forward(self, token_ids: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Return next hidden [R, H] from target ids [T] and hidden [T, H]."""
        return self.final_norm(super().forward(token_ids, hidden, ctx))

    __call__ = forward

    def _inputs(self, embedded: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        # The layer was trained without an embedding at position 0.
        embedded = embedded.masked_fill((ctx.positions == 0).unsqueeze(-1), 0.0)
        return torch.cat((self.hidden_norm(hidden), self.token_norm(embedded)), dim=-1)

    def tensors(self) -> dict[str, Destination]:
        """Return destinations by published name, without those shared with the target."""
        norms = named_parts(
            ("layers.0.token_layernorm.", self.token_norm),
            ("layers.0.hidden_layernorm.", self.hidden_norm),
            ("layers.0.final_layernorm.", self.final_norm),
        )
        return {**super().tensors(), **norms}


class Eagle3FirstLayer(DecoderLayer):
    """A decoder layer whose attention reads the embedding beside the hidden state (2H wide)."""

    inputs = 2

    def __init__(
        self, shape: draft_shape.Eagle3Shape, parallel: TensorParallel, formats: Formats = PLAIN
    ) -> None:
        rank_shape = shape.layers.on_rank_of(parallel.size)
        super().__init__(rank_shape, index=0, parallel=parallel, formats=formats)
        self.norm_before_residual = shape.norm_before_residual
        self.hidden_norm = RMSNorm(shape.layers.hidden_size, shape.layers.rms_norm_eps)

    def before_attention(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return (the heads that attend, the residual stream).

        hidden: the token's embedding. residual: the hidden state. Both [T, H].
        """
        assert self.input_norm is not None
        assert residual is not None, "a first layer of EAGLE-3 reads a hidden state"
        num_tokens, width = residual.shape
        inputs = residual.new_empty(num_tokens, 2 * width)
        self.input_norm(hidden, inputs[:, :width])
        normed = self.hidden_norm(residual, inputs[:, width:])
        if self.norm_before_residual:
            residual = normed.contiguous()
        return self.attention.heads(inputs), residual

    def tensors(self) -> dict[str, Destination]:
        """Return destinations by the published names within `midlayer.` / `layers.0.`."""
        return {**super().tensors(), **named_parts(("hidden_norm.", self.hidden_norm))}


class Eagle3(DraftHead):
    """EAGLE-3 head. Uninitialised: `load_eagle3` fills it."""

    read_elsewhere = (draft_shape.EMBEDDING, "d2t", "t2d")

    def __init__(
        self,
        shape: draft_shape.Eagle3Shape,
        target: Target,
        target_ids: Tensor | None,
        formats: Formats = PLAIN,
    ) -> None:
        self.parallel = parallel = sharing_ranks(shape.layers, target)
        layers = shape.layers.on_rank_of(parallel.size)
        super().__init__(layers, shape.capture, shape.capture.width(shape.target_hidden_size))
        self.options = shape
        self.target_ids = target_ids
        self.num_ids = draft_shape.num_draft_ids(target_ids, layers.num_ids)
        eps = layers.rms_norm_eps
        self.embed_tokens = target.embed_tokens
        self.input_norm = RMSNorm(self.feature_dim, eps) if shape.input_norm else None
        normed = shape.capture.layer_ids or () if shape.fc_norm else ()
        self.fc_norms = nn.ModuleList(RMSNorm(shape.target_hidden_size, eps) for _ in normed)
        self.fc = Linear(
            self.feature_dim, {"fc": layers.hidden_size}, bias=shape.fc_bias, formats=formats
        )
        self.first_layer = Eagle3FirstLayer(shape, parallel, formats.under("layers.0."))
        self.more_layers = nn.ModuleList(
            DecoderLayer(
                layers, index, parallel=parallel, formats=formats.under(f"layers.{index}.")
            )
            for index in range(1, layers.num_layers)
        )
        self.norm = RMSNorm(layers.hidden_size, eps, parallel)
        self.lm_head = vocab_head(
            layers.hidden_size, shape.draft_vocab_size, parallel, formats=formats
        )
        self.lm_head.out_dtype = torch.float32
        self.rope = layers.rotary()

    def encode(self, features: Tensor) -> Tensor:
        """Return fc of features [T, F] after optional norms: [T, H]."""
        features = features.to(self.dtype)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norms:
            blocks = features.chunk(len(self.fc_norms), dim=-1)
            normed = [norm(block) for norm, block in zip(self.fc_norms, blocks, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self.fc(features)

    def forward(self, token_ids: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Return next hidden [R, H] from target ids [T] and hidden [T, H]."""
        rotation = self.rope.at(ctx.positions)
        embedded = self.embed_tokens(token_ids, hidden.dtype)
        addend, residual = self.first_layer(embedded, hidden, rotation, ctx)
        for layer in self.more_layers:
            addend, residual = layer(addend, residual, rotation, ctx)
        if not len(residual):
            return residual
        # Partial sums are added in one kernel only together with a norm.
        normed, stream = self.norm.add(addend, residual)
        return normed if self.options.norm_output else stream

    __call__ = forward

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Return logits float32 [R, Vd] of hidden [R, H] as `forward` returned it."""
        normed = hidden if self.options.norm_output else self.norm(hidden)
        return without_padding(self.lm_head(normed), self.num_ids)

    def tensors(self) -> dict[str, Destination]:
        """Return destinations by published name (`layers.0.` for `midlayer.`)."""
        return named_parts(
            ("", self.fc),
            ("layers.0.", self.first_layer),
            ("input_norm.", self.input_norm),
            *((f"fc_norm.{index}.", norm) for index, norm in enumerate(self.fc_norms)),
            *((f"layers.{index}.", layer) for index, layer in enumerate(self.more_layers, start=1)),
            ("norm.", self.norm),
            ("", self.lm_head),
        )


def _load(
    algorithm: str,
    path: Path | str,
    target: Target,
    options: DraftOptions,
    dtype: torch.dtype,
    formats: Formats = PLAIN,
) -> DraftHead:
    """Return the head in `path` for `target`, computing in `dtype`, or raise CheckpointError.

    It gets its own embedding if that differs from the target's.
    """
    file = open_draft(path, algorithm, options.load_format, target.spec)
    head = make_eagle(file, target, options, dtype, formats)
    embedding = draft_shape.own_embedding(file, target)
    if embedding is not None:
        head.embed_tokens = embedding
    file.checkpoint.load_into(head.tensors(), head.read_elsewhere)
    finish_loading(head)
    _log.info(
        "%s head %s: %s, own embedding %s",
        file.recognition.family, file.path, head.shape, embedding is not None,
    )  # fmt: skip
    return head


load_eagle = partial(_load, "EAGLE")
load_eagle3 = partial(_load, "EAGLE3")
load_mtp = partial(_load, "MTP")


def make_eagle(
    file: DraftFile,
    target: Target,
    options: DraftOptions,
    dtype: torch.dtype,
    formats: Formats = PLAIN,
) -> Eagle | Eagle3:
    """Return the head without weights, on the target's device, or raise CheckpointError."""
    device = target.embed_tokens.weight.device
    if file.recognition.family == "EAGLE3":
        eagle3 = draft_shape.read_eagle3_shape(file, target, options)
        target_ids = draft_shape.read_d2t(file, eagle3.draft_vocab_size, eagle3.layers.vocab_size)
        draft_shape.check_embedding(file, target, eagle3.layers.hidden_size)
        with tensor_defaults(dtype, device):
            ids = None if target_ids is None else target_ids.to(device)
            return Eagle3(eagle3, target, ids, formats)
    shape = draft_shape.draft_shape(file, target, options)
    if shape.hidden_size != target.spec.hidden_size:
        raise file.refusal(
            f"hidden_size={shape.hidden_size}, but the target's is {target.spec.hidden_size}"
        )
    draft_shape.check_embedding(file, target, shape.hidden_size)
    with tensor_defaults(dtype, device):
        if file.recognition.family == "MTP":
            return Mtp(shape, target, formats)
        return Eagle(
            shape,
            target,
            fc_bias="fc.bias" in file.checkpoint,
            input_norm="layers.0.input_layernorm.weight" in file.checkpoint,
            own_head="lm_head.weight" in file.checkpoint,
            formats=formats,
        )
