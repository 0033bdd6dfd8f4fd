"""Strict loading of Hugging Face weight files into a model.

A tensor that is missing, surplus or of another shape is refused by name, and so is a file that is
absent, damaged or contradicts its index.
"""

from __future__ import annotations

import inspect
import re
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from serve_spec.config.base import ConfigError
from serve_spec.config.plugins import is_plugin_name, load_plugin
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.module import FLOATS, Destination, Shard, dtypes_taken
from serve_spec.models.config import read_json

# Rotary frequencies some exporters store; they follow from the config.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_MAX_NAMED = 5


class Checkpoint:
    """The tensors of one directory by name; contents are read on demand.

    quantization: a `quantization_config` that the files tell themselves, beside config.json.
    """

    def __init__(
        self,
        files: Iterable[TensorFile],
        directory: Path,
        quantization: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = directory
        self.quantization = quantization
        self._homes: dict[str, tuple[TensorFile, str]] = {}
        for file in files:
            for name in file.shapes:
                if name in self._homes:
                    first = self._homes[name][0].path.name
                    why = f"{directory}: tensor {name} is in both {first} and {file.path.name}"
                    raise CheckpointError(f"{why}; remove the stale file")
                self._homes[name] = (file, name)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, by name."""
        return {name: file.shapes[stored] for name, (file, stored) in self._homes.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._homes

    def read(self, name: str) -> Tensor:
        """Return one tensor, on the CPU, in its stored dtype.

        Raises CheckpointError: no such tensor, or it cannot be read.
        """
        file, stored = self._home(name)
        return file.read(stored)

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of one tensor, without reading it; None: not known.

        Raises CheckpointError: no such tensor.
        """
        file, stored = self._home(name)
        return file.dtype(stored)

    def rename(self, new_names: Mapping[str, str | None]) -> None:
        """Rename tensors (None drops one); raise CheckpointError if two would share a name."""
        homes: dict[str, tuple[TensorFile, str]] = {}
        for name, home in self._homes.items():
            known_as = new_names.get(name, name)
            if known_as is None:
                continue
            if known_as in homes:
                why = f"tensors {homes[known_as][1]} and {home[1]} both mean {known_as}"
                raise CheckpointError(f"{self.directory}: {why}; keep one")
            homes[known_as] = home
        self._homes = homes

    def load_into(
        self, destinations: Mapping[str, Destination], read_elsewhere: Collection[str] = ()
    ) -> None:
        """Copy every tensor, or a shard of it, to its destination, cast to its dtype and device.

        Raises as `check`, and CheckpointError for a dtype that a destination does not take.
        read_elsewhere: names of tensors that the caller reads itself.
        """
        self.check(destinations, read_elsewhere)
        for name, destination in destinations.items():
            self.copy_into(name, destination)

    def copy_into(self, name: str, destination: Destination) -> None:
        """Copy one tensor, or a shard of it, as `load_into` does; its shape fits."""
        file, stored = self._home(name)
        if isinstance(destination, Shard):
            file.copy_shard(stored, destination)
        else:
            file.copy_into(stored, destination)

    def check(
        self, destinations: Mapping[str, Destination], read_elsewhere: Collection[str] = ()
    ) -> None:
        """Raise CheckpointError for a tensor that is missing, surplus or of another kind.

        Its kind is its shape, and its dtype unless the file finds that out by reading the tensor.
        """
        shapes = self.shapes
        missing = [name for name in destinations if name not in shapes]
        if missing:
            fix = "the files are incomplete or config.json describes another model"
            raise CheckpointError(f"{self.directory}: missing {_listed(missing)}; {fix}")
        surplus = [
            name
            for name in shapes
            if name not in destinations
            and name not in read_elsewhere
            and not self._is_harmless(name)
        ]
        if surplus:
            raise CheckpointError(
                f"{self.directory}: surplus {_listed(surplus)}; the model has no place for "
                "them: correct config.json, or use a supported architecture"
            )
        for name, destination in destinations.items():
            wanted, (file, stored) = tuple(destination.shape), self._homes[name]
            found = file.shape_for(stored, _tensor_of(destination))
            # Exporters do not agree on the shape of one number.
            if found != wanted and (found, wanted) != ((), (1,)):
                raise CheckpointError(
                    f"{self.directory}: tensor {name} is {list(found)}, expected "
                    f"{list(wanted)}; correct config.json or fetch the right file"
                )
            file.check_dtype(stored, file.dtype(stored), _tensor_of(destination))

    def _is_harmless(self, name: str) -> bool:
        """Return whether a tensor without a place changes nothing.

        Exporters of GPTQ write a bias for every matrix: 0 if the model has none there.
        """
        if _HARMLESS.search(name):
            return True
        module, _, last = name.rpartition(".")
        return last == "bias" and f"{module}.qweight" in self and not bool(self.read(name).any())

    def _home(self, name: str) -> tuple[TensorFile, str]:
        if name not in self._homes:
            raise CheckpointError(f"{self.directory}: tensor {name} is missing; fetch it again")
        return self._homes[name]


def open_weights(path: Path | str, load_format: str = "auto") -> Checkpoint:
    """Open the weights in `path` as `model.load_format` says; read none of them.

    load_format: MODULE:FUNCTION of a function from a folder to its Checkpoint; any other value
    stands for `open_checkpoint`.
    Raises CheckpointError: as the function. ConfigError: it is no such function.
    """
    directory = Path(path)
    if not is_plugin_name(load_format):
        return open_checkpoint(directory)
    field = "model.load_format"
    function = load_plugin(field, load_format)
    fix = "name a function that takes a folder and returns a serve_spec.models.weights.Checkpoint"
    try:
        inspect.signature(function).bind(directory)
    except (TypeError, ValueError) as error:
        why = f"cannot be called with a folder ({error})"
        raise ConfigError(f"{field}={load_format!r}: {why}; {fix}") from None
    opened = function(directory)
    if not isinstance(opened, Checkpoint):
        why = f"returned {type(opened).__name__} for {directory}"
        raise ConfigError(f"{field}={load_format!r}: {why}; {fix}")
    return opened


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open `model.safetensors`, `pytorch_model.bin` or their shards; CheckpointError without them.

    Reads no weight, but a pickle older than torch 1.6.
    """
    directory = Path(path)
    kinds: tuple[tuple[str, type[TensorFile]], ...] = (
        ("model.safetensors", SafetensorsFile),
        ("pytorch_model.bin", PickleFile),
    )
    for name, kind in kinds:
        if (directory / name).exists():
            return Checkpoint([kind(directory / name)], directory)
        if (index := directory / f"{name}.index.json").exists():
            return Checkpoint(_shards(index, kind), directory)
    found = sorted(p.name for p in directory.iterdir()) if directory.is_dir() else "no directory"
    fix = "model.safetensors or pytorch_model.bin, or their .index.json with all shards, is needed"
    raise CheckpointError(f"{directory}: no weights (found {found}); {fix}")


class TensorFile(Protocol):
    """One file of tensors; contents are read on demand."""

    path: Path
    shapes: dict[str, tuple[int, ...]]

    def __init__(self, path: Path) -> None: ...

    def read(self, name: str) -> Tensor:
        """Return the tensor on the CPU, in its stored dtype."""

    def copy_into(self, name: str, destination: Tensor) -> None:
        """Fill `destination`, of the tensor's shape, in its own dtype and on its device.

        Raises CheckpointError for a dtype that it does not take.
        """
        destination.copy_(self._taken(name, destination))

    def copy_shard(self, name: str, shard: Shard) -> None:
        """Fill a part of a parameter, as `copy_into`."""
        shard.tensor.copy_(self._taken(name, shard.tensor)[shard.index])

    def shape_for(self, name: str, destination: Tensor) -> tuple[int, ...]:
        """Return the shape in which a tensor fills `destination`."""
        return self.shapes[name]

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a tensor, without reading it; None: not known."""
        return None

    def check_dtype(self, name: str, dtype: torch.dtype | None, destination: Tensor) -> None:
        """Raise CheckpointError for a dtype that `destination` does not take; None is any."""
        if dtype is None or dtype in dtypes_taken(destination):
            return
        fix = (
            "quantised weights are not supported, use the float32, bfloat16 or float16 checkpoint"
            if destination.dtype in FLOATS
            else f"expected {destination.dtype}; correct config.json or fetch the right file"
        )
        raise CheckpointError(f"{self.path}: tensor {name} is of {dtype}; {fix}")

    def _taken(self, name: str, destination: Tensor) -> Tensor:
        """Return the tensor, of a dtype that `destination` takes."""
        tensor = self.read(name)
        self.check_dtype(name, tensor.dtype, destination)
        return tensor


class BuiltFile(TensorFile):
    """Tensors that are built whole on their device, so that all ranks draw the same noise."""

    def copy_shard(self, name: str, shard: Shard) -> None:
        tensor = shard.tensor
        entire = torch.empty(self.shapes[name], dtype=tensor.dtype, device=tensor.device)
        self.copy_into(name, entire)
        tensor.copy_(entire[shard.index])


class SafetensorsFile(TensorFile):
    """One safetensors file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: Any = safe_open(path, framework="pt", device="cpu")
            names = self._file.keys()
            slices = {name: self._file.get_slice(name) for name in names}
            self.shapes = {name: tuple(each.get_shape()) for name, each in slices.items()}
            self._dtypes = {name: _DTYPES.get(each.get_dtype()) for name, each in slices.items()}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged or cut short ({error}); {_AGAIN}") from error

    def dtype(self, name: str) -> torch.dtype | None:
        return self._dtypes[name]

    def read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path}: tensor {name}: {error}; {_AGAIN}") from error
        return tensor


class PickleFile(TensorFile):
    """One `torch.save` file of tensors; code in it never runs (`weights_only`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Only the zip format (torch >= 1.6) can be mapped; older files are read whole.
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
        except (UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(f"{path} cannot be read ({reason}); {_AGAIN}") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds {type(content).__name__}, not named tensors")
        strangers = [name for name, value in content.items() if not isinstance(value, Tensor)]
        if strangers:
            raise CheckpointError(
                f"{path}: {_listed(strangers)} not tensors; save the model's state_dict alone"
            )
        self._tensors: dict[str, Tensor] = content
        self.shapes = {name: tuple(tensor.shape) for name, tensor in content.items()}

    def dtype(self, name: str) -> torch.dtype | None:
        return self._tensors[name].dtype

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


_AGAIN = "fetch it again"
# Dtypes by the names of safetensors.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _tensor_of(destination: Destination) -> Tensor:
    return destination.tensor if isinstance(destination, Shard) else destination


def _shards(index_path: Path, kind: type[TensorFile]) -> list[TensorFile]:
    directory = index_path.parent
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path} has no weight_map; {_AGAIN}")
    names = sorted({str(name) for name in weight_map.values()})
    absent = [name for name in names if not (directory / name).exists()]
    if absent:
        raise CheckpointError(f"{index_path} points to absent {_listed(absent)}; fetch them")
    shards = {name: kind(directory / name) for name in names}
    for tensor, shard in weight_map.items():
        if tensor not in shards[shard].shapes:
            raise CheckpointError(
                f"{index_path} places tensor {tensor} in {shard}, which lacks it; {_AGAIN}"
            )
    return list(shards.values())


def _listed(names: Collection[Any]) -> str:
    """Return the first few of many names, and their number."""
    shown = ", ".join(str(name) for name in list(names)[:_MAX_NAMED])
    return shown if len(names) <= _MAX_NAMED else f"{shown}, ... ({len(names)} in all)"
