"""EAGLE-3 heads: layers over [norm(embedding) ; norm(hidden)] and an lm_head of their own.

The hidden state is fc of the target's residual stream at three depths, or the head's own output
before its final norm.
Source: github.com/SafeAILab/EAGLE, `eagle/model/cnets.py`; options: SpecForge, vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from serve_spec.core.context import ForwardContext
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.linear import Linear
from serve_spec.layers.module import Destination, named_parts
from serve_spec.layers.norm import RMSNorm
from serve_spec.layers.vocabulary import Embedding, vocab_head
from serve_spec.models.config import positive_integer
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
from serve_spec.models.drafts.features import capture_fact, read_capture
from serve_spec.models.interfaces import FeatureCapture, Target
from serve_spec.models.shape import DecoderShape
from serve_spec.models.weights import Checkpoint
from serve_spec.parallel.group import TensorParallel

_HIDDEN_NORM, _INPUT_NORM = "layers.0.hidden_norm.weight", "input_norm.weight"
_FC_NORM = "fc_norm.0.weight"
_TRAINER_THETA = "10000"
"""Rotary base that the official EAGLE-3 trainer always used."""


class Eagle3Family(DraftFamily):
    """EAGLE-3."""

    looks_like = "an EAGLE-3 head (fc.weight with layers.0.*)"
    renames = (
        *heads.LAYER_NAMES,
        (r"^aux_norm_low\.", "fc_norm.0."),
        (r"^aux_norm_mid\.", "fc_norm.1."),
        (r"^aux_norm_high\.", "fc_norm.2."),
    )
    exporters: ClassVar[Mapping[str, str]] = {
        "midlayer.": "official, SpecForge, AngelSlim",
        "": "vLLM, ModelOpt",
    }

    def detect(self, config: Config, shapes: Shapes) -> Evidence | None:
        if _HIDDEN_NORM in shapes:
            return Evidence([_HIDDEN_NORM])
        query = shapes.get(heads.QUERY, ())
        if heads.reads_two(query, shapes.get(heads.OUTPUT, ())[:1]):
            return Evidence([heads.QUERY], f" reads two states (width {query[1]})")
        return None

    def build(self, file: DraftFile, target: Target, options: DraftOptions) -> Draft:
        shape = read_eagle3_shape(file, target, options)
        ids = heads.read_d2t(file, shape.draft_vocab_size, shape.layers.vocab_size)
        heads.check_embedding(file, target, shape.layers.hidden_size)
        device = target.embed_tokens.weight.device
        with options.defaults(target):
            ids = None if ids is None else ids.to(device)
            return Eagle3(shape, target, ids, options)

    def facts(self, file: DraftFile, target: Target | None, options: DraftOptions) -> Facts:
        shape = heads.layer_shape(file, target, options)
        hint = ""
        if not file.by_speculators and f"{shape.rope_theta:g}" != _TRAINER_THETA:
            hint = (
                f"; the official trainer used {_TRAINER_THETA} even if it wrote another, so "
                f"compare accept lengths with speculative_draft_rope_theta: {_TRAINER_THETA}"
            )
        return {
            **heads.facts(file, shape, options, hint),
            "target layers": capture_fact(file, target, options),
            "norms": _norms(file, options),
        }


@dataclass(frozen=True)
class Eagle3Shape:
    """Shape of an EAGLE-3 head.

    The target's features are hidden states of `target_hidden_size` each. Before `fc` they pass
    `input_norm` (one norm over all) or `fc_norm` (one each), or neither.
    `norm_before_residual`: the first layer adds to the normed hidden state. `norm_output`: the
    normed output is fed back.
    """

    layers: DecoderShape
    capture: FeatureCapture
    target_hidden_size: int
    draft_vocab_size: int
    fc_bias: bool
    input_norm: bool
    fc_norm: bool
    norm_before_residual: bool
    norm_output: bool


def read_eagle3_shape(file: DraftFile, target: Target, options: DraftOptions) -> Eagle3Shape:
    """Read and check all but tensor contents; raise CheckpointError if they do not fit."""
    layers = heads.shape_for(file, target, options)
    shapes = file.shapes
    _check_width(file, target)  # of a draft of another model, layer ids are wrong, too
    capture = read_capture(file, target.spec.num_layers, options)
    _check_features(file, target, capture)
    _refuse_variants(file)
    claimed = file.config.get("draft_vocab_size")
    rows = shapes.get(heads.LM_HEAD, (layers.vocab_size,))[0]
    if file.is_dummy and claimed is not None:
        rows = positive_integer(file.config, "draft_vocab_size")
    elif claimed is not None and claimed != rows:
        why = f"draft_vocab_size={claimed}, but lm_head.weight has {rows} rows"
        raise file.refusal(why, "correct config.json or fetch the matching file")
    return Eagle3Shape(
        layers=layers,
        capture=capture,
        target_hidden_size=target.spec.hidden_size,
        draft_vocab_size=rows,
        fc_bias="fc.bias" in shapes,
        input_norm=_INPUT_NORM in shapes or bool(file.setting("norm_before_fc")),
        fc_norm=_FC_NORM in shapes or bool(file.setting("fc_norm")),
        norm_before_residual=switch(file, options, "norm_before_residual"),
        norm_output=switch(file, options, "norm_output"),
    )


def switch(
    file: DraftFile, options: DraftOptions, name: Literal["norm_before_residual", "norm_output"]
) -> bool:
    """Return a switch of the options, else of the config, else the exporter's default.

    The default is off, except `norm_before_residual` of speculators, as in vLLM and the trainer.
    """
    for value in (getattr(options, name), file.setting(name)):
        if value is not None:
            return bool(value)
    return name == "norm_before_residual" and file.by_speculators


def _refuse_variants(file: DraftFile) -> None:
    refused = (
        ("use_aux_hidden_state", False, "use a head trained on auxiliary hidden states"),
        ("use_mtp_layernorm", True, "use a head without it"),
    )
    for key, value, fix in refused:
        if file.setting(key) is value:
            raise file.refusal(f"{key}={str(value).lower()}: not supported", fix)
    steps = file.setting("parallel_draft_step")
    if steps not in (None, 1):
        why = f"parallel_draft_step={steps!r}: not supported"
        raise file.refusal(why, "use a head that drafts one token a step")
    if file.stores(_INPUT_NORM) and file.stores(_FC_NORM):
        why = "input_norm and fc_norm are both stored, in unknown order"
        raise file.refusal(why, "use a head with one of them")


def _check_width(file: DraftFile, target: Target) -> None:
    """Raise CheckpointError if the head reads hidden states of another width than the target's."""
    wide, found = target.spec.hidden_size, file.shapes.get(heads.FC)
    claimed = file.config.get("target_hidden_size")
    if claimed is not None and claimed != wide:
        why = f"target_hidden_size={claimed}, but the target's hidden size is {wide}"
        raise file.refusal(why)
    if found is not None and found[-1] % wide:
        raise file.refusal(
            f"tensor fc.weight is {list(found)}: it reads features of width {found[-1]}, which "
            f"is no multiple of the target's hidden size {wide}"
        )


def _check_features(file: DraftFile, target: Target, capture: FeatureCapture) -> None:
    wide = target.spec.hidden_size
    number, layers = file.setting("num_aux_hidden_states"), list(capture.layer_ids or ())
    if number is not None and number != len(layers):
        why = f"num_aux_hidden_states={number}, but {layers} are read"
        raise file.refusal(why, "give that many speculative_draft_aux_layer_ids")
    found, expected = file.shapes.get(heads.FC), capture.width(wide)
    if found is not None and found[1:] != (expected,):
        raise file.refusal(
            f"tensor fc.weight is {list(found)}: it reads features of width {found[-1]}, but the "
            f"target gives {len(layers)} x {wide} = {expected}"
        )


def _norms(file: DraftFile, options: DraftOptions) -> str:
    facts = []
    for name in ("norm_before_residual", "norm_output"):
        if getattr(options, name) is not None:
            source = f"speculative_draft_{name}"
        else:
            source = "left out" if file.setting(name) is None else "config.json"
        facts.append(f"{name} {heads.yes_no(switch(file, options, name))} ({source})")
    is_read = options.norm_output is None and not file.by_speculators
    if is_read and switch(file, options, "norm_output"):
        facts[-1] += (
            ": the last norm's output is fed back, as SGLang reads it; SpecForge's class means "
            "only that the norm is there, so if later drafts fail, try "
            "speculative_draft_norm_output: false"
        )
    before = "fc_norm" if file.stores(_FC_NORM) else "none"
    facts.append(f"before fc: {'input_norm' if file.stores(_INPUT_NORM) else before}")
    return ", ".join(facts)


class Eagle3FirstLayer(DecoderLayer):
    """A decoder layer whose attention reads the embedding beside the hidden state (2H wide)."""

    inputs = 2

    def __init__(
        self, shape: Eagle3Shape, parallel: TensorParallel, formats: Formats = PLAIN
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
    """EAGLE-3 head. Uninitialised: `load` fills it."""

    read_elsewhere = (heads.EMBEDDING, "d2t", "t2d")

    def __init__(
        self,
        shape: Eagle3Shape,
        target: Target,
        target_ids: Tensor | None,
        options: DraftOptions,
    ) -> None:
        can_split = shape.layers.divides(target.parallel.size)
        self.parallel = parallel = options.split_over(target, can_split)
        formats = options.formats
        self.shape = layers = shape.layers.on_rank_of(parallel.size)
        super().__init__(
            layers.hidden_size,
            layers.caches,
            shape.capture,
            shape.capture.width(shape.target_hidden_size),
            heads.num_draft_ids(target_ids, layers.num_ids),
        )
        self.options = shape
        self.target_ids = target_ids
        eps = layers.rms_norm_eps
        # The target's embedding is of no use to a head of another width.
        self.is_thin = layers.hidden_size != shape.target_hidden_size
        self.embed_tokens = target.embed_tokens
        if self.is_thin:
            self.embed_tokens = Embedding(layers.vocab_size, layers.hidden_size)
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
            ("embed_tokens.", self.embed_tokens if self.is_thin else None),
            ("", self.fc),
            ("layers.0.", self.first_layer),
            ("input_norm.", self.input_norm),
            *((f"fc_norm.{index}.", norm) for index, norm in enumerate(self.fc_norms)),
            *((f"layers.{index}.", layer) for index, layer in enumerate(self.more_layers, start=1)),
            ("norm.", self.norm),
            ("", self.lm_head),
        )

    def load(self, checkpoint: Checkpoint) -> None:
        """See `DraftHead`; an embedding as wide as the target's is its own if it differs."""
        if not self.is_thin:
            self.embed_tokens = heads.stored_embedding(checkpoint, self.embed_tokens)
        super().load(checkpoint)
