"""Which layers of the target a head reads: `eagle_aux_hidden_state_layer_ids` and its meanings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from serve_spec.core.errors import CheckpointError
from serve_spec.models.drafts.base import DraftFile, DraftOptions
from serve_spec.models.interfaces import FeatureCapture, Target


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
    """Return the meaning of a config's ids if options or exporter give it, else None."""
    if options.aux_layers_mean is not None:
        return options.aux_layers_mean
    return "input" if file.by_speculators else None


def capture_fact(file: DraftFile, target: Target | None, options: DraftOptions) -> str:
    """Describe which layers are read, and why; without a target only what the config says."""
    if options.aux_layer_ids is not None:
        return f"inputs of {list(options.aux_layer_ids)}, from speculative_draft_aux_layer_ids"
    ids = configured_ids(file)
    given = "config.json names none" if ids is None else f"config.json: {ids}"
    if target is None:
        return f"{given}; its meaning depends on the target: name a configuration file"
    num_layers = target.spec.num_layers
    mean = aux_layers_mean(file, options)
    resolved = f"inputs of {list(capture_layers(ids, num_layers, mean))} of {num_layers}"
    if ids is None:
        return f"{resolved}, the common default; {given}"
    if options.aux_layers_mean is not None:
        why = "set by speculative_draft_aux_layers_mean"
    elif mean is not None:
        why = "as in speculators"
    else:
        mean, why = convention(ids, num_layers)
    return f"{resolved}; {given}, read as {mean}s: {why}"
