"""Reading `quantization_config`: refusals, and which modules its lists name."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from serve_spec.core.errors import CheckpointError

FLOATS_INSTEAD = "use the float32, bfloat16 or float16 checkpoint"
"""What remains if a quantized checkpoint cannot be computed."""

# What multimodal checkpoints have before the paths of the text model's modules.
_WRAPPERS = ("language_model.", "model.language_model.")

# What is computed of keys of `kv_cache_scheme`; the first value stands for a missing key.
_CACHE_SCHEME: Mapping[str, tuple[object, ...]] = {
    "num_bits": (8,),
    "type": ("float",),
    "strategy": ("tensor", None),
    "symmetric": (True,),
    "dynamic": (False,),
}
_NO_CACHE = "remove it, or export FP8 with one scale per layer"

T = TypeVar("T", bound=Hashable)


def refused(
    key: str, value: object, why: str = "not supported", fix: str = FLOATS_INSTEAD
) -> CheckpointError:
    """Return the refusal of a key of `quantization_config`."""
    return CheckpointError(f"config.json: quantization_config.{key}={value!r}: {why}; {fix}")


def cache_dtype(scheme: object) -> torch.dtype | None:
    """Return the dtype of keys and values for a `kv_cache_scheme`; None without one.

    Raises CheckpointError: it is not FP8 with one scale for the keys and one for the values of a
    layer.
    """
    if not scheme:
        return None
    if not isinstance(scheme, Mapping):
        raise refused("kv_cache_scheme", scheme, fix=_NO_CACHE)
    for key, known in _CACHE_SCHEME.items():
        value = scheme.get(key, known[0])
        if value not in known:
            raise refused(f"kv_cache_scheme.{key}", value, fix=_NO_CACHE)
    return torch.float8_e4m3fn


def strings(key: str, value: object) -> list[str]:
    """Return the value of a key that has a list of names; raise CheckpointError if it is none."""
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise refused(key, value, "no list of names", "correct config.json or fetch it again")
    return value


def stored_paths(path: str) -> tuple[str, ...]:
    """Return the names that a module of the text model may have in its checkpoint."""
    first, second = _WRAPPERS
    return path, first + path, second + path.removeprefix("model.")


def is_inside(path: str, modules: Iterable[str]) -> bool:
    """Return whether a module is one of `modules`, or lies in one of them.

    A part of a path, such as `gate_proj` or `mlp`, stands for all modules of that name.
    """
    stored = [f".{each}." for each in stored_paths(path)]
    return any(f".{name}." in each for name in modules for each in stored)


def common(paths: Sequence[str], scheme_of: Callable[[str], T]) -> T:
    """Return the scheme of the parts of one product; CheckpointError if they differ."""
    first, *others = paths
    scheme = scheme_of(first)
    for other in others:
        if scheme_of(other) != scheme:
            why = f"{first} and {other} are one product, and their schemes differ"
            fix = "quantize all its parts alike, or none"
            raise CheckpointError(f"config.json: quantization_config: {why}; {fix}")
    return scheme
