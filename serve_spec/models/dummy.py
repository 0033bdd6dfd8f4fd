"""Random weights in the shape of a config.json, for load tests without a weight file.

Texts are noise. A tensor's values depend on its name and shape alone, so all ranks and replicas of
one kind of device have the same model.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from serve_spec.core.errors import CheckpointError
from serve_spec.layers.module import FLOATS, Destination
from serve_spec.models.weights import BuiltFile, Checkpoint


def dummy_checkpoint(directory: Path, destinations: Mapping[str, Destination]) -> Checkpoint:
    """Return random tensors for these destinations in place of the weights in `directory`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in destinations.items()}
    return Checkpoint([_RandomFile(directory / "config.json", shapes)], directory)


class _RandomFile(BuiltFile):
    """Matrices that keep the variance of their input, gains of 1 and biases of 0.

    Matrices of codes have any, with random scales.
    """

    def __init__(self, path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
        self.path = path
        self.shapes = shapes

    def read(self, name: str) -> Tensor:
        tensor = torch.empty(self.shapes[name])
        self.copy_into(name, tensor)
        return tensor

    def copy_into(self, name: str, destination: Tensor) -> None:
        is_float = destination.dtype.is_floating_point
        if destination.dim() == 1 and not is_float:
            why = f"tensor {name} is of {destination.dtype}"
            raise CheckpointError(f"load_format='dummy': {why}; use floats, fp8 or awq")
        if destination.dim() == 1 or name.endswith(("_scale", "_scale_inv")):
            destination.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        generator = torch.Generator(destination.device).manual_seed(zlib.crc32(name.encode()))
        if not is_float:  # codes of any bits
            limits = torch.iinfo(destination.dtype)
            destination.random_(limits.min, limits.max, generator=generator)
            return
        drawn = destination
        if destination.dtype not in FLOATS:  # of eight bits
            drawn = torch.empty(destination.shape, dtype=torch.float32, device=destination.device)
        elif not destination.is_contiguous():  # it would take the noise in another order
            drawn = torch.empty_like(destination, memory_format=torch.contiguous_format)
        drawn.normal_(0.0, destination.shape[1] ** -0.5, generator=generator)
        if drawn is not destination:
            destination.copy_(drawn)
