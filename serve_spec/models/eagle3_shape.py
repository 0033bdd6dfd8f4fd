"""What fixes an EAGLE-3 head's computation, read from its config and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from serve_spec.core.errors import CheckpointError
from serve_spec.models.draft_file import DraftFile, DraftOptions
from serve_spec.models.draft_shape import draft_shape
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
    layers = draft_shape(file, target, options)
    shapes = file.checkpoint.shapes
    capture = read_capture(file, target.shape.num_layers, options)
    _check_features(file, target, capture)
    _refuse_variants(file)
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
        norm_before_residual=switch(file, options, "norm_before_residual"),
        norm_output=switch(file, options, "norm_output"),
    )


def switch(
    file: DraftFile,
    options: DraftOptions,
    name: Literal["norm_before_residual", "norm_output"],
) -> bool:
    """The user's word on a switch, else the config's, else what the layout means by silence.

    That is off, but for `norm_before_residual` of speculators: vLLM reads it so, and so do the
    trainer's defaults.
    """
    for said in (getattr(options, name), file.setting(name)):
        if said is not None:
            return bool(said)
    return name == "norm_before_residual" and file.recognition.layout == "speculators"


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
        return _default_layers(num_layers)
    mean = mean or convention(ids, num_layers)[0]
    return tuple(k + 1 for k in ids) if mean == "output" else tuple(ids)


def convention(ids: Sequence[int], num_layers: int) -> tuple[Literal["input", "output"], str]:
    """What a config's ids mean by themselves, and why."""
    if max(ids) == num_layers:
        return "input", f"there is no output of layer {num_layers}"
    if tuple(ids) == _default_layers(num_layers):
        return "input", "they are the default of those who count inputs"
    if tuple(k + 1 for k in ids) == _default_layers(num_layers):
        return "output", "they are the default of those who count outputs"
    return "output", "SpecForge, SGLang and ModelOpt count so; nothing in the file says"


def _default_layers(num_layers: int) -> tuple[int, ...]:
    return (2, num_layers // 2, num_layers - 3)


def aux_layers_mean(file: DraftFile, options: DraftOptions) -> Literal["input", "output"] | None:
    """What is known of the meaning of a config's ids before looking at them."""
    if options.aux_layers_mean is not None:
        return options.aux_layers_mean
    return "input" if file.recognition.layout == "speculators" else None


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


def read_capture(file: DraftFile, num_layers: int, options: DraftOptions) -> FeatureCapture:
    """Which of the target's `num_layers` layers the head reads.

    Raises:
        CheckpointError: ids that are none, or outside the target.
    """
    layers = options.aux_layer_ids
    said = f"speculative_draft_aux_layer_ids={list(layers or ())}"
    if layers is None:
        ids = configured_ids(file)
        layers = capture_layers(ids, num_layers, aux_layers_mean(file, options))
        said = f"eagle_aux_hidden_state_layer_ids={ids}"
    if min(layers) < 0 or max(layers) > num_layers:
        raise CheckpointError(
            f"{file.path}: {said} means the inputs of layers {list(layers)}, but the target has "
            f"{num_layers}; give speculative_draft_aux_layer_ids within 0 .. {num_layers}"
        )
    return FeatureCapture(tuple(layers))


def both_readings(file: DraftFile, num_layers: int) -> tuple[tuple[int, ...], ...]:
    """What the config's ids may mean of a target with `num_layers`: the layers whose inputs, those
    whose outputs they name. Nothing if there are none, or only one of both can be."""
    ids = configured_ids(file)
    if ids is None or max(ids) >= num_layers:
        return ()
    return tuple(capture_layers(ids, num_layers, mean) for mean in ("input", "output"))


def configured_ids(file: DraftFile) -> list[int] | None:
    """`eagle_aux_hidden_state_layer_ids` as the config gives it, whatever it means.

    SGLang reads the nested key, vLLM the one at the top. An empty list is ModelOpt's default, and
    says nothing.

    Raises:
        CheckpointError: not a list of numbers, or two that differ.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    given = [ids for ids in (file.config.get(key), file.nested.get(key)) if ids not in (None, [])]
    if not given:
        return None
    ids, nested = given[0], given[-1]
    if not (isinstance(ids, list) and all(type(k) is int for k in ids)):
        raise CheckpointError(f"{file.path}: {key}={ids!r}; a list of integers from 0 on is needed")
    if nested != ids:
        raise CheckpointError(
            f"{file.path}: {key}={ids} at the top, but {nested} in eagle_config; "
            "remove one of them from config.json"
        )
    return ids


def _refuse_variants(file: DraftFile) -> None:
    refused = (
        ("use_aux_hidden_state", False, "use a head trained on auxiliary hidden states"),
        ("use_mtp_layernorm", True, "use a head without it"),
    )
    for key, value, fix in refused:
        if file.setting(key) is value:
            raise CheckpointError(
                f"{file.path}: {key}={str(value).lower()} is not supported; {fix}"
            )
    steps = file.setting("parallel_draft_step")
    if steps not in (None, 1):
        raise CheckpointError(
            f"{file.path}: parallel_draft_step={steps!r} is not supported; use a head that drafts "
            "one token a step"
        )
    shapes = file.checkpoint.shapes
    if "input_norm.weight" in shapes and "fc_norm.0.weight" in shapes:
        raise CheckpointError(
            f"{file.path}: both input_norm and fc_norm are stored, and what follows what is not "
            "known; use a head with one of them"
        )


def _check_features(file: DraftFile, target: Llama, capture: FeatureCapture) -> None:
    wide = target.shape.hidden_size
    claimed = file.config.get("target_hidden_size")
    if claimed is not None and claimed != wide:
        raise CheckpointError(
            f"{file.path}: target_hidden_size={claimed}, but the target's hidden size is {wide}; "
            "use a head trained for this target"
        )
    number = file.setting("num_aux_hidden_states")
    if number is not None and number != len(capture.layer_ids or ()):
        raise CheckpointError(
            f"{file.path}: num_aux_hidden_states={number}, but {list(capture.layer_ids or ())} are "
            "read; give that many speculative_draft_aux_layer_ids"
        )
    found = file.checkpoint.shapes.get("fc.weight")
    expected = capture.width(wide)
    if found is not None and found[1:] != (expected,):
        raise CheckpointError(
            f"{file.path}: tensor fc.weight is {list(found)}: it reads features of width "
            f"{found[-1]}, but the target gives {len(capture.layer_ids or ())} x {wide} = "
            f"{expected}; use a head trained for this target"
        )
