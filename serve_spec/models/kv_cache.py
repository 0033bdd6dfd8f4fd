"""FP8 KV caches of targets: who asks for one, and the scales that a checkpoint has for it.

Keys and values are stored in float8_e4m3fn, each divided by one scale of its layer. Draft models
keep theirs in the compute dtype: one layer takes little memory, and rounding would only lower the
acceptance of drafts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch

from serve_spec.config.base import ConfigError
from serve_spec.config.checkpoint import text_config
from serve_spec.core.caches import PagedCache
from serve_spec.core.context import torch_dtype
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats.registry import formats_of
from serve_spec.models.config import read_config
from serve_spec.models.interfaces import Target
from serve_spec.models.weights import Checkpoint
from serve_spec.ops.scaled_linear import converts_fp8

CacheScales: TypeAlias = Mapping[int, tuple[float, float]]
"""Scales of keys and of values by layer; other layers have 1."""

_FP8 = ("fp8", "fp8_e4m3")

# Names of llm-compressor, Model Optimizer, AutoFP8 and vLLM: `self_attn.k_scale`,
# `self_attn.k_proj.k_scale`, `self_attn.k_proj.output_scale`, `self_attn.k_cache.scale`, ... Old
# files have one `kv_scale`. Those of `q` and `prob`, queries and weights, are not used.
_NAME = re.compile(
    r"(?:^|\.)self_attn\.(?:"
    r"(?:(?:attn|qkv_proj|[kqv]_proj)\.)?(?P<name>q|k|v|kv|prob)(?:_output)?_"
    r"|(?P<part>[qkv])_(?:proj\.output_|cache\.))(?P<kind>scale|zero_point)$"
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def cache_dtype(
    name: str, path: Path | str, compute_dtype: torch.dtype | None, device: torch.device | None
) -> torch.dtype | None:
    """Return the dtype of stored keys and values for `model.kv_cache_dtype`; None: as computed.

    auto: as in vLLM, FP8 if the checkpoint in `path` asks for it. compute_dtype, device: None is
    any. Raises ConfigError: another float than the compute dtype, or the device lacks FP8.
    """
    if name == "auto":
        formats = formats_of(text_config(read_config(path)))
        if formats is None or formats.cache_dtype is None:
            return None
        given = "kv_cache_dtype='auto': the checkpoint asks for FP8"
    elif name in _FP8:
        given = f"kv_cache_dtype={name!r}"
    else:
        if compute_dtype not in (None, torch_dtype(name)):
            computed = str(compute_dtype).removeprefix("torch.")
            why = f"kv_cache_dtype={name!r}: the compute dtype is {computed}"
            raise ConfigError(f"{why}; use auto, fp8 or {computed}")
        return None
    if device is not None and device.type == "cuda" and not converts_fp8(device):
        why = f"{given}: only GPUs of compute capability 8.9 or newer are supported"
        raise ConfigError(f"{why}, and this is {device}; set kv_cache_dtype to the compute dtype")
    return torch.float8_e4m3fn


def store_in(dtype: torch.dtype | None, target: Target) -> None:
    """Let the caches of a target keep keys and values in `dtype`, with its scales if that is FP8.

    None: in its compute dtype.
    """
    caches = list(target.spec.caches)
    for layer, cache in enumerate(caches):
        if dtype is not None and isinstance(cache, PagedCache):
            key_scale, value_scale = target.cache_scales.get(layer, (1.0, 1.0))
            caches[layer] = replace(
                cache, dtype=dtype, key_scale=key_scale, value_scale=value_scale
            )
    target.spec = replace(target.spec, caches=tuple(caches))


def take_scales(checkpoint: Checkpoint) -> CacheScales:
    """Remove the scales of FP8 caches from a checkpoint, and return them.

    Raises CheckpointError: a scale is not one positive number, is given twice, or there is a zero
    point.
    """
    found: dict[tuple[int, str], float] = {}
    names = [(name, match) for name in checkpoint.shapes if (match := _NAME.search(name))]
    for name, match in names:
        layer = _LAYER.search(name)
        parts = {"k", "v"} & {*(match["name"] or match["part"])}
        if layer is None or not parts:
            continue
        number = _number(checkpoint, name, match["kind"])
        for part in parts if match["kind"] == "scale" else ():
            before = found.setdefault((int(layer[1]), part), number)
            if before != number:
                why = f"tensor {name} is {number}, but another scale of it is {before}"
                raise CheckpointError(f"{checkpoint.directory}: {why}; keep one")
    checkpoint.rename({name: None for name, _ in names})
    layers = {layer for layer, _ in found}
    return {n: (found.get((n, "k"), 1.0), found.get((n, "v"), 1.0)) for n in layers}


def _number(checkpoint: Checkpoint, name: str, kind: str) -> float:
    """Return a scale, or a zero point, which is 0; raise as `take_scales`."""
    tensor = checkpoint.read(name)
    of_layer = "keys and values have one scale per layer"
    if kind == "zero_point":
        if bool(tensor.float().any()):
            raise CheckpointError(f"{checkpoint.directory}: tensor {name}: not 0; {of_layer} only")
        return 0.0
    if tensor.numel() != 1:
        why = f"tensor {name} is {list(tensor.shape)}: not supported"
        raise CheckpointError(f"{checkpoint.directory}: {why}; {of_layer}")
    number = float(tensor)
    if not 0.0 < number < math.inf:
        why = f"tensor {name} is {number}; a scale is a positive number: fetch it again"
        raise CheckpointError(f"{checkpoint.directory}: {why}")
    return number
