"""Files of a run: resumable training state, and exported checkpoints in the public layouts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SHARD_BYTES = 16_000_000
# Room for a shard's own header, so that the whole file stays within SHARD_BYTES.
_HEADER_BYTES = 64_000


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write training state atomically: a crash leaves the previous file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load_state(path: Path, device: torch.device) -> dict[str, Any]:
    """Read what `save_state` wrote."""
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return state


def plan_shards(
    sizes: Mapping[str, int], limit: int = SHARD_BYTES - _HEADER_BYTES
) -> list[list[str]]:
    """Split tensors (name -> bytes), in order, into shards of at most `limit` bytes.

    Raises:
        ValueError: when one tensor alone is larger than a shard.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if size > limit:
            raise ValueError(
                f"tensor {name} has {size} bytes, a shard holds {limit}; raise SHARD_BYTES"
            )
        if filled + size > limit and shards[-1]:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def export_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write config.json and safetensors shards of at most SHARD_BYTES bytes each.

    One shard is called model.safetensors; several get numbered names and an index file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    ready = {name: t.detach().to("cpu", dtype).contiguous() for name, t in tensors.items()}
    shards = plan_shards({name: t.numel() * t.element_size() for name, t in ready.items()})
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, members in zip(names, shards, strict=True):
        save_file({m: ready[m] for m in members}, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        total = sum(t.numel() * t.element_size() for t in ready.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {m: n for n, members in zip(names, shards, strict=True) for m in members},
        }
        _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "config.json", config)


def load_tensors(folder: Path, device: torch.device) -> dict[str, Tensor]:
    """All tensors of an exported checkpoint.

    Raises:
        FileNotFoundError: when the folder holds no safetensors file.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no model*.safetensors in {folder}; run the phase that exports it")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(load_file(file, device=str(device)))
    return tensors


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of an exported checkpoint."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
