"""Tensors of GGUF files by their Hugging Face names, as floats or as the blocks of their types."""

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
from serve_spec.models.weights import Checkpoint, TensorFile, open_weights

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


def is_gguf(folder: Path | str) -> bool:
    """Return whether `gguf_folder` made a folder."""
    return (Path(folder) / INDEX).is_file()


def open_files(folder: Path, load_format: str = "auto") -> Checkpoint:
    """Open a folder's GGUF files, or its other weights, as `model.load_format` says.

    Raises as `open_weights`.
    """
    return (load_format == "auto" and open_gguf(folder)) or open_weights(folder, load_format)


def open_gguf(folder: Path) -> Checkpoint | None:
    """Return the tensors of a folder that `gguf_folder` made; None for another folder."""
    if not is_gguf(folder):
        return None
    index, config = read_json(folder / INDEX), read_json(folder / "config.json")
    heads = {}
    if index["architecture"] in _INTERLEAVED:
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, dict[str, Any]] = index["tensors"]
    files = sorted({entry["file"] for entry in tensors.values()})
    source = (folder / files[0]).resolve()
    types = {
        _name(stored).removesuffix(".weight"): entry["type"]
        for stored, entry in tensors.items()
        if len(entry["shape"]) > 1
    }
    return Checkpoint(
        [
            GGUFFile(folder / file, {k: v for k, v in tensors.items() if v["file"] == file}, heads)
            for file in files
        ],
        source,
        {"quant_method": "gguf", "types": types},
    )


class GGUFFile(TensorFile):
    """One GGUF file, mapped into memory.

    A tensor is dequantized when it is read. One of bytes, uint8 [N, K / columns, bytes], takes its
    blocks as they are.
    """

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

        kind = gguf.GGMLQuantizationType[self._stored[name][1]["type"]]
        values = gguf.dequantize(self._bytes(name), kind)
        return self._in_order(name, torch.from_numpy(np.array(values, dtype=np.float32)))

    def shape_for(self, name: str, destination: Tensor) -> tuple[int, ...]:
        if destination.dtype != torch.uint8:
            return self.shapes[name]
        import gguf

        entry = self._stored[name][1]
        columns, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[entry["type"]]]
        return *entry["shape"][:-1], entry["shape"][-1] // columns, num_bytes

    def _taken(self, name: str, destination: Tensor) -> Tensor:
        if destination.dtype != torch.uint8:
            return super()._taken(name, destination)
        blocks = torch.from_numpy(np.array(self._bytes(name)))
        return self._in_order(name, blocks.view(self.shape_for(name, destination)))

    def _bytes(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the stored bytes of each row, [N, bytes]."""
        entry = self._stored[name][1]
        data = np.memmap(
            self.path, mode="r", offset=entry["offset"], shape=(entry["bytes"],), dtype=np.uint8
        )
        return data.reshape(*entry["shape"][:-1], -1)

    def _in_order(self, name: str, tensor: Tensor) -> Tensor:
        """Return the rows of a tensor in the order of Hugging Face checkpoints."""
        layer = _LAYER.fullmatch(self._stored[name][0])
        heads = None if layer is None else self._heads.get(layer[2])
        return tensor if heads is None else _by_halves(tensor, heads)


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
