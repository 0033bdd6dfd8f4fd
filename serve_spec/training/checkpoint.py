"""Files of a run: resumable training state, and exported checkpoints in the public layouts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

SHARD_BYTES = 16_000_000
# Reserved for the header of a shard, so that the file stays within SHARD_BYTES.
_HEADER_BYTES = 64_000


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write training state atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load_state(path: Path, device: torch.device) -> dict[str, Any]:
    """Return the training state in a file."""
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return state


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
    ready = {name: tensor.detach().to("cpu", dtype) for name, tensor in tensors.items()}
    save_torch_state_dict(ready, folder, max_shard_size=SHARD_BYTES - _HEADER_BYTES)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
