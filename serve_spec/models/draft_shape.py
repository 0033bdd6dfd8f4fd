"""What fixes the computation of an EAGLE or EAGLE-3 head, read from its config and tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from serve_spec.core.errors import CheckpointError
from serve_spec.layers.vocabulary import Embedding
from serve_spec.models.config import positive_integer
from serve_spec.models.draft_checkpoint import DraftFile, DraftOptions
from serve_spec.models.interfaces import FeatureCapture, Target
from serve_spec.models.shape import DecoderShape, check_sizes, layer_sizes

EMBEDDING = "embed_tokens.weight"


def draft_shape(file: DraftFile, target: Target, options: DraftOptions) -> DecoderShape:
    """Return the shape of the head's layers over `target`'s positions, or raise CheckpointError."""
    shape = layer_shape(file, options, target.spec.vocab_size)
    if shape.vocab_size != target.spec.vocab_size:
        raise file.refusal(
            f"vocab_size={shape.vocab_size}, but the target's is {target.spec.vocab_size}"
        )
    return replace(shape, max_position_embeddings=target.max_model_len, num_ids=target.spec.num_ids)


def layer_shape(
    file: DraftFile, options: DraftOptions, vocab_size: int | None = None
) -> DecoderShape:
    """Return the shape of the head's layers.

    vocab_size: used if the config has none. May raise CheckpointError.
    """
    config, shapes = file.config, file.checkpoint.shapes
    attention = "layers.0.self_attn."
    found = [int(m[1]) for name in shapes if (m := re.match(r"layers\.(\d+)\.", name))]
    num_layers = max(found, default=0) + 1
    shape = DecoderShape(
        **layer_sizes(config),
        num_layers=num_layers,
        vocab_size=positive_integer(config, "vocab_size", vocab_size),
        qkv_bias=attention + "q_proj.bias" in shapes,
        output_bias=attention + "o_proj.bias" in shapes,
        qk_norm=attention + "q_norm.weight" in shapes,
        mlp_bias="layers.0.mlp.down_proj.bias" in shapes,
        windows=(_sliding_window(file),) * num_layers,
    )
    if options.rope_theta is not None:
        shape = replace(shape, rope_theta=options.rope_theta)
    check_sizes(shape, shapes, file.path, "")
    return shape


def own_embedding(file: DraftFile, target: Target) -> Embedding | None:
    """Return a layer with the file's embedding, in the target's dtype; None for the target's own.

    Many files hold a copy of the target's; sharing it saves memory.
    """
    if EMBEDDING not in file.checkpoint:
        return None
    theirs = target.embed_tokens.weight
    own = file.checkpoint.read(EMBEDDING).to(dtype=theirs.dtype, device=theirs.device)
    if target.embed_tokens.holds(own):
        return None
    embedding = Embedding(0, 0)
    embedding.weight = torch.nn.Parameter(own, requires_grad=False)
    return embedding


def check_embedding(file: DraftFile, target: Target, hidden_size: int) -> None:
    """Raise CheckpointError unless the file or the target has an embedding of this width."""
    found, width = file.checkpoint.shapes.get(EMBEDDING), target.spec.hidden_size
    if found is None and hidden_size != width:
        raise file.refusal(
            f"{EMBEDDING} is missing and the target's cannot stand in: hidden_size={hidden_size}, "
            f"target {width}"
        )
    expected = (target.spec.vocab_size, hidden_size)
    if found is not None and found != expected:
        raise file.refusal(f"tensor {EMBEDDING} is {list(found)}, expected {list(expected)}")


def _sliding_window(file: DraftFile) -> int | None:
    """Return how many tokens each draft layer sees, itself included; None: all."""
    config = file.config
    kinds = set(config.get("layer_types") or ())
    is_off = config.get("use_sliding_window") is False or kinds == {"full_attention"}
    if not config.get("sliding_window") or is_off:
        return None
    window = positive_integer(config, "sliding_window")
    if kinds != {"sliding_attention"}:
        raise file.refusal(
            f"sliding_window={window} with layer_types={sorted(kinds)} does not say that all draft "
            "layers have it, and mixed ones are not supported",
            "correct config.json (layer_types, or sliding_window=null), or use a head whose layers "
            "are alike",
        )
    return window


TOKEN_MAP = "token_map"


def read_d2t(file: DraftFile, rows: int, vocab: int) -> Tensor | None:
    """Return the target's id of each of `rows` draft ids, int64 [Vd]; None if they are the same.

    `d2t` holds offsets (target id - draft id); `t2d` marks the target ids that are reached.
    """
    if "d2t" not in file.checkpoint:
        if rows == vocab:
            return None
        why = f"tensor d2t is missing although the head draws from {rows} of {vocab} tokens"
        raise file.refusal(why, "fetch the complete file")
    offsets = file.checkpoint.read("d2t")
    if tuple(offsets.shape) != (rows,) or offsets.is_floating_point():
        raise CheckpointError(
            f"{file.path}: tensor d2t is {list(offsets.shape)} of {offsets.dtype}, expected "
            f"[{rows}] integers"
        )
    if rows == vocab and not offsets.any():
        return None
    ids = torch.arange(rows) + offsets.long()
    _check_target_ids(file, "d2t", ids, vocab)
    return ids


def read_token_map(file: DraftFile, rows: int, vocab: int) -> Tensor | None:
    """Return the target's id of each draft id, int64 [Vd]; None if they are the same.

    rows: output rows, one for each draft id or for each of the target's `vocab` ids.
    """
    if TOKEN_MAP not in file.checkpoint:
        return None
    ids = file.checkpoint.read(TOKEN_MAP)
    is_map = ids.dim() == 1 and ids.numel() > 0 and not ids.is_floating_point()
    if not is_map or rows not in (len(ids), vocab):
        raise CheckpointError(
            f"{file.path}: tensor {TOKEN_MAP} is {list(ids.shape)} of {ids.dtype}, but the output "
            f"has {rows} rows; one integer for each of them, or some of the target's {vocab} ids, "
            "are needed"
        )
    ids = ids.long()
    _check_target_ids(file, TOKEN_MAP, ids, vocab)
    return ids


def _check_target_ids(file: DraftFile, name: str, ids: Tensor, vocab: int) -> None:
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab or ids.unique().numel() != ids.numel():
        raise CheckpointError(
            f"{file.path}: {name} maps draft ids to {low} .. {high}, not to distinct ids below "
            f"{vocab}; d2t must hold offsets (target id - draft id), {TOKEN_MAP} ids of the target"
        )
    if "t2d" not in file.checkpoint:
        return
    reached = file.checkpoint.read("t2d")
    if tuple(reached.shape) != (vocab,):
        raise file.refusal(f"tensor t2d is {list(reached.shape)}, expected [{vocab}]")
    if not torch.equal(reached.nonzero().view(-1), ids.sort().values):
        fix = "d2t must hold offsets (target id - draft id)"
        raise file.refusal("t2d marks other tokens than d2t reaches", fix)


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
    layers = draft_shape(file, target, options)
    shapes = file.checkpoint.shapes
    capture = read_capture(file, target.spec.num_layers, options)
    _check_features(file, target, capture)
    _refuse_variants(file)
    rows = shapes.get("lm_head.weight", (layers.vocab_size,))[0]
    claimed = file.config.get("draft_vocab_size")
    if claimed is not None and claimed != rows:
        why = f"draft_vocab_size={claimed}, but lm_head.weight has {rows} rows"
        raise file.refusal(why, "correct config.json or fetch the matching file")
    return Eagle3Shape(
        layers=layers,
        capture=capture,
        target_hidden_size=target.spec.hidden_size,
        draft_vocab_size=rows,
        fc_bias="fc.bias" in shapes,
        input_norm="input_norm.weight" in shapes or bool(file.setting("norm_before_fc")),
        fc_norm="fc_norm.0.weight" in shapes or bool(file.setting("fc_norm")),
        norm_before_residual=switch(file, options, "norm_before_residual"),
        norm_output=switch(file, options, "norm_output"),
    )


def switch(
    file: DraftFile, options: DraftOptions, name: Literal["norm_before_residual", "norm_output"]
) -> bool:
    """Return a switch of the options, else of the config, else the layout's default.

    The default is off, except `norm_before_residual` of speculators, as in vLLM and the trainer.
    """
    for value in (getattr(options, name), file.setting(name)):
        if value is not None:
            return bool(value)
    return name == "norm_before_residual" and file.recognition.layout == "speculators"


def capture_layers(
    ids: Sequence[int] | None, num_layers: int, mean: str | None = None
) -> tuple[int, ...]:
    """Return the target layers whose inputs the head reads, from the ids of its config.

    Two conventions are in use and no key tells them apart: "output of layer k" (SpecForge, SGLang,
    ModelOpt) and "input of layer k" (vLLM, speculators). `mean` ("input" / "output") decides if
    given, else `convention`.

        no ids, n = 32          -> (2, 16, 29)     the common default, as inputs
        [1, 15, 28], n = 32     -> (2, 16, 29)     SpecForge's default, as outputs
        [2, 16, 29], n = 32     -> (2, 16, 29)     vLLM's default, as inputs
        [2, 16, 32], n = 32     -> (2, 16, 32)     the output of layer 32 does not exist
    """
    if ids is None:
        return _default_layers(num_layers)
    mean = mean or convention(ids, num_layers)[0]
    return tuple(k + 1 for k in ids) if mean == "output" else tuple(ids)


def convention(ids: Sequence[int], num_layers: int) -> tuple[Literal["input", "output"], str]:
    """Return what a config's ids mean, and why: ids that fit one convention decide."""
    if max(ids) == num_layers:
        return "input", f"there is no output of layer {num_layers}"
    if tuple(ids) == _default_layers(num_layers):
        return "input", "they are the default of exporters that count inputs"
    if tuple(k + 1 for k in ids) == _default_layers(num_layers):
        return "output", "they are the default of exporters that count outputs"
    return "output", "as in SpecForge, SGLang and ModelOpt; the file does not tell"


def _default_layers(num_layers: int) -> tuple[int, ...]:
    return (2, num_layers // 2, num_layers - 3)


def aux_layers_mean(file: DraftFile, options: DraftOptions) -> Literal["input", "output"] | None:
    """Return the meaning of a config's ids if options or layout give it, else None."""
    if options.aux_layers_mean is not None:
        return options.aux_layers_mean
    return "input" if file.recognition.layout == "speculators" else None


def num_draft_ids(target_ids: Tensor | None, num_ids: int | None) -> int | None:
    """Return how many draft ids map to real ids of the target (None: all).

    Raises CheckpointError unless they are the first ones.
    """
    if target_ids is None or num_ids is None:
        return num_ids
    is_real = target_ids < num_ids
    count = int(is_real.sum())
    if not is_real[:count].all():
        raise CheckpointError(
            f"d2t mixes ids below num_ids={num_ids} with padding; padding has to come last"
        )
    return count


def read_capture(file: DraftFile, num_layers: int, options: DraftOptions) -> FeatureCapture:
    """Return which of the target's layers the head reads.

    Raises CheckpointError for ids that are not valid or outside the target.
    """
    layers = options.aux_layer_ids
    source = f"speculative_draft_aux_layer_ids={list(layers or ())}"
    if layers is None:
        ids = configured_ids(file)
        layers = capture_layers(ids, num_layers, aux_layers_mean(file, options))
        source = f"eagle_aux_hidden_state_layer_ids={ids}"
    if min(layers) < 0 or max(layers) > num_layers:
        raise CheckpointError(
            f"{file.path}: {source} means the inputs of layers {list(layers)}, but the target has "
            f"{num_layers}; give speculative_draft_aux_layer_ids within 0 .. {num_layers}"
        )
    return FeatureCapture(tuple(layers))


def configured_ids(file: DraftFile) -> list[int] | None:
    """Return `eagle_aux_hidden_state_layer_ids` of the config, or raise CheckpointError.

    SGLang reads the nested key, vLLM the one at the top. ModelOpt's default is an empty list.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    given = [ids for ids in (file.config.get(key), file.nested.get(key)) if ids not in (None, [])]
    if not given:
        return None
    ids, nested = given[0], given[-1]
    if not (isinstance(ids, list) and all(type(k) is int for k in ids)):
        raise CheckpointError(f"{file.path}: {key}={ids!r}; a list of integers from 0 on is needed")
    if nested != ids:
        why = f"{key}={ids} at the top, but {nested} in eagle_config"
        raise file.refusal(why, "remove one of them from config.json")
    return ids


def _refuse_variants(file: DraftFile) -> None:
    refused = (
        ("use_aux_hidden_state", False, "use a head trained on auxiliary hidden states"),
        ("use_mtp_layernorm", True, "use a head without it"),
    )
    for key, value, fix in refused:
        if file.setting(key) is value:
            raise CheckpointError(f"{file.path}: {key}={str(value).lower()}: not supported; {fix}")
    steps = file.setting("parallel_draft_step")
    if steps not in (None, 1):
        why = f"parallel_draft_step={steps!r}: not supported"
        raise file.refusal(why, "use a head that drafts one token a step")
    shapes = file.checkpoint.shapes
    if "input_norm.weight" in shapes and "fc_norm.0.weight" in shapes:
        why = "input_norm and fc_norm are both stored, in unknown order"
        raise file.refusal(why, "use a head with one of them")


def _check_features(file: DraftFile, target: Target, capture: FeatureCapture) -> None:
    wide = target.spec.hidden_size
    claimed = file.config.get("target_hidden_size")
    if claimed is not None and claimed != wide:
        why = f"target_hidden_size={claimed}, but the target's hidden size is {wide}"
        raise file.refusal(why)
    number, layers = file.setting("num_aux_hidden_states"), list(capture.layer_ids or ())
    if number is not None and number != len(layers):
        why = f"num_aux_hidden_states={number}, but {layers} are read"
        raise file.refusal(why, "give that many speculative_draft_aux_layer_ids")
    found, expected = file.checkpoint.shapes.get("fc.weight"), capture.width(wide)
    if found is not None and found[1:] != (expected,):
        raise file.refusal(
            f"tensor fc.weight is {list(found)}: it reads features of width {found[-1]}, but the "
            f"target gives {len(layers)} x {wide} = {expected}"
        )
