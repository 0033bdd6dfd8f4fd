"""Tensors of GGUF files by their Hugging Face names, as floats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serve_spec.config.gguf import INDEX
from serve_spec.models.config import read_json
from serve_spec.models.weights import Checkpoint, TensorFile

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Architectures whose q and k rotate neighbours; here the halves of a head rotate.
_INTERLEAVED = ("llama",)


def open_gguf(folder: Path) -> Checkpoint | None:
    """Return the tensors of a folder that `gguf_folder` made; None for another folder."""
    if not (folder / INDEX).is_file():
        return None
    index, config = read_json(folder / INDEX), read_json(folder / "config.json")
    heads = {}
    if index["architecture"] in _INTERLEAVED:
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, dict[str, Any]] = index["tensors"]
    files = sorted({entry["file"] for entry in tensors.values()})
    source = (folder / files[0]).resolve()
    return Checkpoint(
        [
            GGUFFile(folder / file, {k: v for k, v in tensors.items() if v["file"] == file}, heads)
            for file in files
        ],
        source,
    )


class GGUFFile(TensorFile):
    """One GGUF file, mapped into memory; a tensor is dequantized when it is read."""

    def __init__(
        self, path: Path, tensors: Mapping[str, Mapping[str, Any]], heads: Mapping[str, int]
    ) -> None:
        """Open a file. heads: number of heads by the name of a matrix whose rows interleave."""
        self.path = path.resolve()
        self._stored = {_name(stored): (stored, entry) for stored, entry in tensors.items()}
        self._heads = heads
        self.shapes = {name: tuple(entry["shape"]) for name, (_, entry) in self._stored.items()}

    def read(self, name: str) -> Tensor:
        import gguf

        stored, entry = self._stored[name]
        kind = gguf.GGMLQuantizationType[entry["type"]]
        data = np.memmap(
            self.path, mode="r", offset=entry["offset"], shape=(entry["bytes"],), dtype=np.uint8
        )
        rows = data.reshape(*entry["shape"][:-1], -1)
        values = torch.from_numpy(np.array(gguf.dequantize(rows, kind), dtype=np.float32))
        layer = _LAYER.fullmatch(stored)
        heads = None if layer is None else self._heads.get(layer[2])
        return values if heads is None else _by_halves(values, heads)


def _by_halves(values: Tensor, heads: int) -> Tensor:
    """Return rows with the even ones of each head first, then the odd ones."""
    pairs = values.view(heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).flatten(0, 2)


def _name(stored: str) -> str:
    """Return a tensor's Hugging Face name; its own if it has none."""
    layer = _LAYER.fullmatch(stored)
    if layer is not None and layer[2] in _OF_LAYER:
        return f"model.layers.{layer[1]}.{_OF_LAYER[layer[2]]}.{layer[3]}"
    stem, _, end = stored.rpartition(".")
    return f"{_NAMES[stem]}.{end}" if stem in _NAMES else stored
