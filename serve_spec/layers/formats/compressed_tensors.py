"""FP8, INT8 and INT4 of llm-compressor, which has a scheme for each group of modules.

Source: github.com/vllm-project/compressed-tensors, `quant_config.py` and `quant_args.py`. Weights
are multiplied by floats: schemes of activations say only which tensors a file holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from serve_spec.core.registry import import_object
from serve_spec.layers.formats.base import Formats, Matrix, WeightFormat
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.formats.settings import (
    cache_dtype,
    common,
    refused,
    stored_paths,
    strings,
)

Strategy: TypeAlias = Literal["tensor", "channel", "group", "block"]
"""What one scale belongs to: a matrix, a row, some columns of a row, or a block."""

_EIGHT_BITS = "serve_spec.layers.formats.scaled:compressed_weight"
# What makes a weight from `WeightArgs` and a `Matrix`, by `format`.
_PLACES = {
    "float-quantized": _EIGHT_BITS,
    "int-quantized": _EIGHT_BITS,
    "naive-quantized": _EIGHT_BITS,
    "pack-quantized": "serve_spec.layers.formats.packed_int4:packed_weight",
}
_REGEX = "re:"


@dataclass(frozen=True)
class WeightArgs:
    """How a matrix is stored: `weights` of its group in `config_groups`, and the group's `format`.

    group: the group's name, for refusals (see `refused`). group_size: columns of one scale, for
    strategy "group". block: rows and columns of one, for "block". actorder: "group" or
    "dynamic" if columns are in groups by `weight_g_idx`. input_bits: of its activations; None:
    floats. has_input_scale: whether the file has `input_scale`, that of static activations.
    """

    group: str
    format: str
    num_bits: int
    type: Literal["int", "float"]
    strategy: Strategy
    group_size: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool = True
    actorder: str | None = None
    input_bits: int | None = None
    has_input_scale: bool = False

    def refused(self, key: str, value: object, why: str = "not supported") -> Exception:
        """Return the refusal of a key of `weights`."""
        return refused(f"config_groups.{self.group}.weights.{key}", value, why)


class CompressedTensors(Formats):
    """The format of every matrix by its module's path; `PLAIN` for ignored and tied ones."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Read a `quantization_config`. Raises CheckpointError for what is not computed."""
        for key in ("sparsity_config", "transform_config"):
            value = settings.get(key)
            if value and value != {"format": "dense"}:
                raise refused(key, value)
        self.cache_dtype = cache_dtype(settings.get("kv_cache_scheme"))
        groups = settings.get("config_groups")
        if groups in (None, {}) and self.cache_dtype is not None:
            groups = {}  # only keys and values are quantized
        elif not isinstance(groups, Mapping) or not groups:
            raise refused("config_groups", groups, "names no group of modules")
        self._ignored = _patterns("ignore", settings.get("ignore") or [])
        self._schemes: dict[str, WeightArgs | None] = {}
        for name, group in groups.items():
            key = f"config_groups.{name}"
            if not isinstance(group, Mapping):
                raise refused(key, group, "no scheme")
            args = _read_group(name, group, group.get("format") or settings.get("format"))
            for target in _patterns(f"{key}.targets", group.get("targets")):
                if self._schemes.setdefault(target, args) != args:
                    raise refused(f"{key}.targets", target, "also the target of another group")

    def of(self, paths: Sequence[str], matrix: Matrix) -> WeightFormat:
        """See `Formats`."""
        args = None if matrix.tied is not None else common(paths, self.scheme)
        if args is None:
            return PLAIN.of(paths, matrix)
        weight: WeightFormat = import_object(_PLACES[args.format])(args, matrix)
        return weight

    def scheme(self, path: str) -> WeightArgs | None:
        """Return how the matrix of a module is stored; None: as floats.

        The module's own path goes before patterns, and these before the class `Linear`.
        """
        names = stored_paths(path)
        if any(_fits(entry, names) for entry in self._ignored):
            return None
        targets = sorted(self._schemes, key=lambda target: target.startswith(_REGEX))
        for target in targets:
            if _fits(target, names):
                return self._schemes[target]
        return self._schemes.get("Linear")


def formats(settings: Mapping[str, Any]) -> Formats:
    """Return the formats that a `quantization_config` asks for; see `CompressedTensors`."""
    return CompressedTensors(settings)


def _fits(entry: str, names: Sequence[str]) -> bool:
    """Return whether a path or `re:` pattern is one of the names of a module."""
    if not entry.startswith(_REGEX):
        return entry in names
    return any(re.match(entry.removeprefix(_REGEX), name) for name in names)


def _patterns(key: str, value: object) -> list[str]:
    """Return a list of names and `re:` patterns; raise CheckpointError if it is none."""
    entries = strings(key, value)
    for entry in entries:
        if entry.startswith(_REGEX):
            try:
                re.compile(entry.removeprefix(_REGEX))
            except re.error as error:
                raise refused(key, entry, f"no pattern ({error})", "correct it") from error
    return entries


def _read_group(name: str, group: Mapping[str, Any], form: object) -> WeightArgs | None:
    key, weights = f"config_groups.{name}", group.get("weights")
    if group.get("output_activations"):
        raise refused(f"{key}.output_activations", group["output_activations"])
    if weights is None:
        return None
    if form not in _PLACES:
        raise refused("format", form)
    if not isinstance(weights, Mapping):
        raise refused(f"{key}.weights", weights, "no scheme")
    inputs = group.get("input_activations") or {}
    is_dynamic = inputs.get("dynamic", False)
    if is_dynamic not in (True, False):
        raise refused(f"{key}.input_activations.dynamic", is_dynamic)
    if inputs and not is_dynamic and not inputs.get("symmetric", True):
        raise refused(f"{key}.input_activations.symmetric", False)
    _check_weights(key, weights)
    strategy = _strategy(weights)
    return WeightArgs(
        group=name,
        format=str(form),
        num_bits=int(weights.get("num_bits", 8)),
        type=weights.get("type", "int"),
        strategy=strategy,
        group_size=weights.get("group_size") if strategy == "group" else None,
        block=_block(key, weights) if strategy == "block" else None,
        symmetric=bool(weights.get("symmetric", True)),
        actorder=weights.get("actorder"),
        input_bits=int(inputs.get("num_bits", 8)) if inputs else None,
        has_input_scale=bool(inputs) and not is_dynamic,
    )


def _check_weights(key: str, weights: Mapping[str, Any]) -> None:
    kind, strategy = weights.get("type", "int"), _strategy(weights)
    if kind not in ("int", "float"):
        raise refused(f"{key}.weights.type", kind)
    if strategy not in get_args(Strategy):
        raise refused(f"{key}.weights.strategy", strategy)
    if weights.get("dynamic"):
        raise refused(f"{key}.weights.dynamic", weights["dynamic"])
    size = weights.get("group_size")
    if strategy == "group" and (not isinstance(size, int) or size < 1):
        raise refused(f"{key}.weights.group_size", size, "no size of a group")


def _strategy(weights: Mapping[str, Any]) -> Any:
    """Return the strategy, which follows from `group_size` if it is left out."""
    size = weights.get("group_size")
    by_size = "tensor" if size is None else "channel" if size == -1 else "group"
    return weights.get("strategy") or by_size


def _block(key: str, weights: Mapping[str, Any]) -> tuple[int, int]:
    """Return rows and columns of a block, written `[128, 128]` or `"128x128"`."""
    found: Any = weights.get("block_structure")
    sizes = found.split("x") if isinstance(found, str) else found
    try:
        rows, columns = (int(size) for size in sizes)
        if rows > 0 and columns > 0:
            return rows, columns
    except (TypeError, ValueError):
        pass
    raise refused(f"{key}.weights.block_structure", found, "no rows and columns of a block")
