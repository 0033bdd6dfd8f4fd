"""Random weights in the shape of a config.json, for load tests without a weight file.

Texts are noise. A tensor's values depend on its name and shape alone, so all ranks and replicas of
one kind of device have the same model.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serve_spec.models.config import positive_integer
from serve_spec.models.interfaces import TargetSpec
from serve_spec.models.shape import layer_sizes
from serve_spec.models.weights import BuiltFile, Checkpoint

Shapes = dict[str, tuple[int, ...]]


def dummy_checkpoint(directory: Path, shapes: Shapes) -> Checkpoint:
    """Return random tensors of these shapes in place of the weights in `directory`."""
    return Checkpoint([_RandomFile(directory / "config.json", shapes)], directory)


class _RandomFile(BuiltFile):
    """Matrices that keep the variance of their input, gains of 1, biases of 0, and id maps."""

    def __init__(self, path: Path, shapes: Shapes) -> None:
        self.path = path
        self.shapes = shapes

    def read(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if name == "d2t":  # offsets: draft id = target id
            return torch.zeros(shape, dtype=torch.int64)
        if name == "t2d":
            return torch.arange(shape[0]) < self.shapes["d2t"][0]
        tensor = torch.empty(shape)
        self.copy_into(name, tensor)
        return tensor

    def copy_into(self, name: str, destination: Tensor) -> None:
        if destination.dim() == 1:
            destination.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        generator = torch.Generator(destination.device).manual_seed(zlib.crc32(name.encode()))
        destination.normal_(0.0, destination.shape[1] ** -0.5, generator=generator)


def draft_tensors(config: Mapping[str, Any], algorithm: str, target: TargetSpec) -> Shapes:
    """Return the tensor shapes of a head by current name; CheckpointError if one is unknown."""
    if algorithm == "MEDUSA":
        return _medusa(config, target)
    hidden, vocab = positive_integer(config, "hidden_size"), target.vocab_size
    shapes: Shapes = {}
    if algorithm == "MTP":
        norms = [f"{name}_layernorm.weight" for name in ("token", "hidden", "input", "final")]
        layer = {**_layer(config, hidden), **dict.fromkeys(norms, (hidden,))}
        shapes = {f"layers.0.{name}": shape for name, shape in layer.items()}
        return {**shapes, "fc.weight": (hidden, 2 * hidden)}
    is_eagle3 = algorithm == "EAGLE3"
    for index in range(positive_integer(config, "num_hidden_layers", 1)):
        reads_two = is_eagle3 and index == 0
        layer = _layer(config, 2 * hidden if reads_two else hidden)
        if is_eagle3 or index:
            layer["input_layernorm.weight"] = (hidden,)
        if reads_two:
            layer["hidden_norm.weight"] = (hidden,)
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    if not is_eagle3:
        bias: Shapes = {"fc.bias": (hidden,)} if config.get("bias", True) else {}
        return {**shapes, **bias, "fc.weight": (hidden, 2 * hidden)}
    return shapes | _eagle3(config, hidden, vocab, target.hidden_size)


def _eagle3(config: Mapping[str, Any], hidden: int, vocab: int, target_hidden: int) -> Shapes:
    nested = config.get("eagle_config") or {}
    settings = {**nested, **{key: value for key, value in config.items() if value is not None}}
    num_features = len(settings.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0))
    rows = positive_integer(settings, "draft_vocab_size", vocab)
    shapes: Shapes = {
        "fc.weight": (hidden, num_features * target_hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (rows, hidden),
    }
    if settings.get("norm_before_fc"):
        shapes["input_norm.weight"] = (num_features * target_hidden,)
    if settings.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (target_hidden,) for index in range(num_features)}
    if hidden != target_hidden:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if rows != vocab:
        shapes |= {"d2t": (rows,), "t2d": (vocab,)}
    return shapes


def _layer(config: Mapping[str, Any], inputs: int) -> Shapes:
    sizes = layer_sizes(config)
    hidden, inner, width = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    rows = {"q": sizes["num_heads"] * width, "k": sizes["num_kv_heads"] * width}
    rows["v"] = rows["k"]
    shapes: Shapes = {f"self_attn.{part}_proj.weight": (n, inputs) for part, n in rows.items()}
    shapes |= {
        "self_attn.o_proj.weight": (hidden, rows["q"]),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config.get("attention_bias"):
        shapes |= {f"self_attn.{part}_proj.bias": (n,) for part, n in rows.items()}
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.get("model_type") == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
    return shapes


def _medusa(config: Mapping[str, Any], target: TargetSpec) -> Shapes:
    hidden = target.hidden_size
    num_heads = positive_integer(config, "num_heads", config.get("medusa_num_heads", 5))
    num_blocks = positive_integer(config, "num_hidden_layers", config.get("medusa_num_layers", 1))
    shapes: Shapes = {}
    for head in range(num_heads):
        shapes[f"lm_heads.{head}.weight"] = (target.vocab_size, hidden)
        for block in range(num_blocks):
            shapes[f"blocks.{head}.layers.{block}.weight"] = (hidden, hidden)
    return shapes
