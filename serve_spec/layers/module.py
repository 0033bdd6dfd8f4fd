"""What all layers share: frozen parameters, and names for the tensors they are loaded from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self, TypeAlias

import torch
from torch import Tensor, nn

from serve_spec.parallel.group import TensorParallel

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes that are cast to each other."""


@dataclass(frozen=True)
class Shard:
    """Where one rank's part of a checkpoint tensor goes.

    `tensor` takes what the checkpoint's tensor holds from index `start` of dimension `dim` on;
    `total` is the size of that dimension in the checkpoint.
    """

    tensor: Tensor
    dim: int
    start: int
    total: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        return (*self.tensor.shape[: self.dim], self.total, *self.tensor.shape[self.dim + 1 :])

    @property
    def index(self) -> tuple[slice, ...]:
        """What picks the part out of the checkpoint's tensor."""
        end = self.start + self.tensor.shape[self.dim]
        return (*[slice(None)] * self.dim, slice(self.start, end))


Destination: TypeAlias = Tensor | Shard
"""What a checkpoint tensor fills: a parameter or a view of a part of one, or a shard of it."""


def dtypes_taken(destination: Tensor) -> tuple[torch.dtype, ...]:
    """Return the dtypes of checkpoint tensors that may fill `destination`.

    One of `FLOATS` takes them all, and powers of two, which are scales; every other dtype takes
    only itself.
    """
    is_float = destination.dtype in FLOATS
    return (*FLOATS, torch.float8_e8m0fnu) if is_float else (destination.dtype,)


@dataclass(frozen=True)
class Span:
    """The indices `start .. start + length - 1` of a dimension of `total`, which one rank holds.

    Those past the end stand for nothing: they make the spans of all ranks equally long.
    """

    length: int
    start: int
    total: int

    @classmethod
    def shard_of(cls, length: int, parallel: TensorParallel) -> Self:
        """Return this rank's part of a dimension of which every rank has `length`."""
        return cls(length, parallel.rank * length, parallel.size * length)

    @classmethod
    def padded_shard_of(cls, total: int, parallel: TensorParallel) -> Self:
        """Return this rank's part of a dimension of any size."""
        length = -(-total // parallel.size)
        return cls(length, min(parallel.rank * length, total), total)

    @property
    def count(self) -> int:
        """Return how many of the indices exist."""
        return min(self.length, self.total - self.start)

    def packed(self, size: int) -> Span:
        """Return the span in elements that hold `size` indices each."""
        is_even = all(indices % size == 0 for indices in (self.length, self.start, self.total))
        assert is_even, f"elements of {size} indices do not divide {self}"
        return Span(self.length // size, self.start // size, self.total // size)

    def of(self, tensor: Tensor, dim: int) -> Destination:
        """Return what a checkpoint tensor fills of `tensor`, whose `dim` has this span's length."""
        if self.length == self.total:
            return tensor
        return Shard(tensor.narrow(dim, 0, self.count), dim, self.start, self.total)


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
