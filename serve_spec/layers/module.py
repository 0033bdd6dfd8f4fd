"""What all layers share: frozen parameters, and names for the tensors they are loaded from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shard:
    """Where one rank's part of a checkpoint tensor goes.

    `tensor` takes what the checkpoint's tensor holds from index `start` of dimension `dim` on;
    `whole` is the size of that dimension in the checkpoint.
    """

    tensor: Tensor
    dim: int
    start: int
    whole: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        return (*self.tensor.shape[: self.dim], self.whole, *self.tensor.shape[self.dim + 1 :])

    @property
    def index(self) -> tuple[slice, ...]:
        """What picks the part out of the checkpoint's tensor."""
        end = self.start + self.tensor.shape[self.dim]
        return (*[slice(None)] * self.dim, slice(self.start, end))


Destination: TypeAlias = Tensor | Shard
"""What a checkpoint tensor fills: a parameter or a view of a part of one, or a shard of it."""


class Layer(nn.Module):
    """A module without gradients, loaded by name.

    Subclasses set `__call__ = forward`: no hooks run here, and the direct call is typed and saves a
    microsecond, which counts when a decode step makes a hundred of them.
    """

    def tensors(self) -> Mapping[str, Destination]:
        """Return destinations by checkpoint name."""
        raise NotImplementedError

    def finish(self) -> None:
        """Derive, once after loading, the layout that this machine computes fastest with."""


def finish_loading(model: Layer) -> None:
    """Let every layer of a loaded model prepare itself."""
    for module in model.modules():
        if isinstance(module, Layer):
            module.finish()


def parameter(*shape: int) -> nn.Parameter:
    """Return an uninitialised frozen parameter of the default dtype and device."""
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def named_parts(*parts: tuple[str, nn.Module | None]) -> dict[str, Destination]:
    """Return the destinations of layers, each name preceded by its layer's prefix."""
    tensors: dict[str, Destination] = {}
    for prefix, part in parts:
        if part is not None:
            assert isinstance(part, Layer), "models are made of layers"
            tensors |= {prefix + name: tensor for name, tensor in part.tensors().items()}
    return tensors


@contextmanager
def tensor_defaults(dtype: torch.dtype, device: torch.device | str) -> Iterator[None]:
    """Give layers created inside this dtype and device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
