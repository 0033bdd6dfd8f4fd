"""Trainable float32 weights for the inference models of `serve_spec.models`.

An inference model fuses several checkpoint matrices into one parameter without gradients. Here
every checkpoint tensor is a parameter, and `bind` sets the model's weights to the fused tensors, so
that the model's own forward is differentiable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn

from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.module import Layer, tensor_defaults
from serve_spec.models.decoder import Decoder
from serve_spec.models.loader import load_target
from serve_spec.models.registry import find_family


@dataclass(frozen=True)
class _Slot:
    """A fused weight: the modules that hold it and its checkpoint tensors."""

    holders: tuple[tuple[nn.Module, str], ...]
    names: tuple[str, ...]
    shape: torch.Size


class MasterWeights:
    """The float32 parameters of `model` by checkpoint name.

    model: before `finish_loading`, because packed weights have no gradient.
    stored_name: maps a name of `model.tensors()` to the name in the exported file.
    """

    def __init__(self, model: Layer, stored_name: Callable[[str], str] = str) -> None:
        views: dict[str, Tensor] = {}
        for name, view in model.tensors().items():
            assert isinstance(view, Tensor), "one rank trains"
            views[stored_name(name)] = view
        self.parameters = {
            name: nn.Parameter(torch.zeros(view.shape, device=view.device))
            for name, view in views.items()
        }
        self._slots = _slots(model, views)
        self._dtype = next(iter(views.values())).dtype

    def bind(self) -> None:
        """Set the model's weights from the parameters; call before each forward with gradients."""
        for slot in self._slots:
            parts = [self.parameters[name].to(self._dtype) for name in slot.names]
            weight = (parts[0] if len(parts) == 1 else torch.cat(parts)).view(slot.shape)
            for module, attribute in slot.holders:
                setattr(module, attribute, weight)

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` into the parameters of these names."""
        for name, tensor in tensors.items():
            self.parameters[name].copy_(tensor)


def _slots(model: Layer, views: Mapping[str, Tensor]) -> list[_Slot]:
    """Return the fused weights of `views`; remove them from the model's parameters."""
    slots: dict[int, _Slot] = {}
    for module in model.modules():
        for attribute, weight in list(module.named_parameters(recurse=False)):
            storage = weight.untyped_storage().data_ptr()
            parts = {n: v for n, v in views.items() if v.untyped_storage().data_ptr() == storage}
            if not parts:
                continue
            names = tuple(sorted(parts, key=lambda name: int(parts[name].storage_offset())))
            known = slots.get(storage)
            holders = (*(known.holders if known else ()), (module, attribute))
            slots[storage] = _Slot(holders, names, weight.shape)
            delattr(module, attribute)
    return list(slots.values())


def new_llama(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return a Llama of this config.json without weights."""
    with tensor_defaults(dtype, device):
        family, text = find_family(config)
        model = family.build(text)
    assert isinstance(model, Decoder)
    # On GPUs, products with another output dtype have no gradient.
    model.lm_head.out_dtype = None
    return model


def initialise(masters: MasterWeights, num_layers: int, generator: torch.Generator) -> None:
    """Draw N(0, 0.02) matrices, smaller by sqrt(2 layers) where a branch joins the residual."""
    joined = 0.02 / (2 * num_layers) ** 0.5
    for name, weight in masters.parameters.items():
        if weight.ndim < 2:
            masters.fill({name: torch.ones_like(weight)})
            continue
        std = joined if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        masters.fill({name: torch.randn(weight.shape, generator=generator) * std})


def load_frozen(folder: Path, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Return the target in `folder` with plain weights, so gradients flow through its lm_head."""
    model = load_target(folder, dtype, device, finish=False, formats=PLAIN)
    assert isinstance(model, Decoder)
    model.lm_head.out_dtype = None
    return model.requires_grad_(False)


SHARD_BYTES = 16_000_000
# Room for the header of a shard, so that the whole file stays within SHARD_BYTES.
_HEADER_BYTES = 64_000


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write training state atomically: a crash leaves the previous file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load_state(path: Path, device: torch.device) -> dict[str, Any]:
    """Return what `save_state` wrote."""
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return state


def export_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write config.json and safetensors shards of at most SHARD_BYTES bytes each.

    dtype: of the floats; other tensors keep theirs.
    One shard is called model.safetensors; several get numbered names and an index file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    ready = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors.items()
    }
    save_torch_state_dict(ready, folder, max_shard_size=SHARD_BYTES - _HEADER_BYTES)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
