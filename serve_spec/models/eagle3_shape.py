"""What fixes an EAGLE-3 head's computation, read from its config and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_spec.core.errors import CheckpointError
from serve_spec.models.draft_file import DraftFile, DraftOptions, draft_shape
from serve_spec.models.llama import FeatureCapture, Llama
from serve_spec.models.shape import ModelShape


@dataclass(frozen=True)
class Eagle3Shape:
    """The head around its layers.

    The target's features are `num_features` hidden states of `target_hidden_size` each. Before
    `fc` they pass `input_norm` (one norm over all) or `fc_norm` (one each), or neither.
    `norm_before_residual`: the first layer adds to the normed hidden state. `norm_output`: the
    normed output is fed back.
    """

    layers: ModelShape
    capture: FeatureCapture
    target_hidden_size: int
    num_features: int
    draft_vocab_size: int
    fc_bias: bool
    input_norm: bool
    fc_norm: bool
    norm_before_residual: bool
    norm_output: bool


def read_eagle3_shape(file: DraftFile, target: Llama, options: DraftOptions) -> Eagle3Shape:
    """Reads and checks everything but tensor contents.

    Raises:
        CheckpointError: a head for another target, or a variant not supported.
    """
    layers = draft_shape(file, target, options, "EAGLE3")
    shapes = file.checkpoint.shapes
    capture = _capture(file, target.shape.num_layers, options)
    _check_features(file, target, capture)
    rows = shapes.get("lm_head.weight", (layers.vocab_size,))[0]
    claimed = file.config.get("draft_vocab_size")
    if claimed is not None and claimed != rows:
        raise CheckpointError(
            f"{file.path}: draft_vocab_size={claimed}, but lm_head.weight has {rows} rows; "
            "correct config.json or fetch the matching file"
        )
    return Eagle3Shape(
        layers=layers,
        capture=capture,
        target_hidden_size=target.shape.hidden_size,
        num_features=len(capture.layer_ids or ()),
        draft_vocab_size=rows,
        fc_bias="fc.bias" in shapes,
        input_norm="input_norm.weight" in shapes or bool(file.setting("norm_before_fc")),
        fc_norm="fc_norm.0.weight" in shapes or bool(file.setting("fc_norm")),
        norm_before_residual=_switch(
            options.norm_before_residual, file.setting("norm_before_residual")
        ),
        norm_output=_switch(options.norm_output, file.setting("norm_output")),
    )


def capture_layers(
    ids: Sequence[int] | None, num_layers: int, mean: str | None = None
) -> tuple[int, ...]:
    """The target layers whose inputs the head reads, from the ids its config gives (or not).

    Two conventions are in use and no key tells them apart: "output of layer k" (SpecForge, SGLang,
    ModelOpt) and "input of layer k" (vLLM, speculators). `mean` ("input" / "output") decides if
    given; else ids that fit only one of them, or its defaults, do; else "output".

        no ids, n = 32          -> (2, 16, 29)     everyone's default, as inputs
        [1, 15, 28], n = 32     -> (2, 16, 29)     SpecForge's default, as outputs
        [2, 16, 29], n = 32     -> (2, 16, 29)     vLLM's default, as inputs
        [2, 16, 32], n = 32     -> (2, 16, 32)     the output of layer 32 does not exist
    """
    if ids is None:
        return (2, num_layers // 2, num_layers - 3)
    if mean is None:
        is_input = max(ids) == num_layers or list(ids) == [2, num_layers // 2, num_layers - 3]
        mean = "input" if is_input else "output"
    return tuple(k + 1 for k in ids) if mean == "output" else tuple(ids)


def read_target_ids(file: DraftFile, shape: Eagle3Shape) -> Tensor | None:
    """int64 [Vd], the target's id of each draft id; None when they are the same.

    `d2t` holds offsets (target id - draft id); `t2d` marks the target ids that are reached.

    Raises:
        CheckpointError: no map for a reduced vocabulary, or maps that contradict each other.
    """
    rows, vocab = shape.draft_vocab_size, shape.layers.vocab_size
    if "d2t" not in file.checkpoint:
        if rows == vocab:
            return None
        raise CheckpointError(
            f"{file.path}: tensor d2t is missing although the head draws from {rows} of {vocab} "
            "tokens; fetch the complete file"
        )
    offsets = file.checkpoint.read("d2t")
    if tuple(offsets.shape) != (rows,) or offsets.is_floating_point():
        raise CheckpointError(
            f"{file.path}: tensor d2t is {list(offsets.shape)} of {offsets.dtype}, expected "
            f"[{rows}] integers"
        )
    if rows == vocab and not offsets.any():
        return None
    ids = torch.arange(rows) + offsets.long()
    _check_target_ids(file, ids, vocab)
    return ids


def num_draft_ids(target_ids: Tensor | None, num_ids: int | None) -> int | None:
    """How many draft ids stand for ids of the target below `num_ids`; None when all do.

    Raises:
        CheckpointError: they are not the first ones.
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


def _check_target_ids(file: DraftFile, ids: Tensor, vocab: int) -> None:
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or ids.unique().numel() != ids.numel():
        raise CheckpointError(
            f"{file.path}: d2t maps draft ids to {int(ids.min())} .. {int(ids.max())}, not to "
            f"distinct ids below {vocab}; it must hold offsets (target id - draft id)"
        )
    if "t2d" not in file.checkpoint:
        return
    reached = file.checkpoint.read("t2d")
    if tuple(reached.shape) != (vocab,):
        raise CheckpointError(
            f"{file.path}: tensor t2d is {list(reached.shape)}, expected [{vocab}]; "
            "use a head trained for this target"
        )
    if not torch.equal(reached.nonzero().view(-1), ids.sort().values):
        raise CheckpointError(
            f"{file.path}: t2d marks other tokens than d2t reaches; d2t must hold offsets "
            "(target id - draft id)"
        )


def _capture(file: DraftFile, num_layers: int, options: DraftOptions) -> FeatureCapture:
    if file.setting("use_aux_hidden_state") is False:
        raise CheckpointError(
            f"{file.path}: use_aux_hidden_state=false is not supported; "
            "use a head trained on auxiliary hidden states"
        )
    ids = file.setting("eagle_aux_hidden_state_layer_ids")
    if ids is not None and not (ids and isinstance(ids, list) and all(type(k) is int for k in ids)):
        raise CheckpointError(
            f"{file.path}: eagle_aux_hidden_state_layer_ids={ids!r}; a list of integers within "
            f"0 .. {num_layers} is needed"
        )
    layers = options.aux_layer_ids or capture_layers(ids, num_layers, options.aux_layers_mean)
    if not layers or min(layers) < 0 or max(layers) > num_layers:
        raise CheckpointError(
            f"{file.path}: eagle_aux_hidden_state_layer_ids={ids} means the inputs of layers "
            f"{list(layers)}, but the target has {num_layers}; give aux_layer_ids within 0 .. "
            f"{num_layers}"
        )
    return FeatureCapture(layers)


def _check_features(file: DraftFile, target: Llama, capture: FeatureCapture) -> None:
    wide = target.shape.hidden_size
    claimed = file.config.get("target_hidden_size")
    if claimed is not None and claimed != wide:
        raise CheckpointError(
            f"{file.path}: target_hidden_size={claimed}, but the target's hidden size is {wide}; "
            "use a head trained for this target"
        )
    found = file.checkpoint.shapes.get("fc.weight")
    expected = capture.width(wide)
    if found is not None and found[1:] != (expected,):
        raise CheckpointError(
            f"{file.path}: tensor fc.weight is {list(found)}: it reads features of width "
            f"{found[-1]}, but the target gives {len(capture.layer_ids or ())} x {wide} = "
            f"{expected}; use a head trained for this target"
        )


def _switch(override: bool | None, configured: bool | None) -> bool:
    return bool(configured) if override is None else override
