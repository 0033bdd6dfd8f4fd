"""FP8 of NVIDIA's Model Optimizer, whose settings may be in `hf_quant_config.json`.

Source: github.com/NVIDIA/Model-Optimizer, `export/quant_utils.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from serve_spec.layers.formats.base import Formats, Matrix, WeightFormat
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.formats.scaled import ScaledWeight, Scales
from serve_spec.layers.formats.settings import (
    cache_dtype,
    common,
    is_inside,
    refused,
    stored_paths,
    strings,
)


class ModelOptFormats(Formats):
    """FP8 for all matrices but the skipped and tied ones."""

    def __init__(self, skipped: Sequence[str]) -> None:
        self._skipped = skipped

    def of(self, paths: Sequence[str], matrix: Matrix) -> WeightFormat:
        """See `Formats`."""
        if common(paths, self._is_skipped) or matrix.tied is not None:
            return PLAIN.of(paths, matrix)
        return ScaledWeight(matrix, Scales(inputs="input_scale"))

    def _is_skipped(self, path: str) -> bool:
        """Return whether a name, or a pattern with `*`, is that of the module or around it."""
        names = stored_paths(path)
        fits = any(fnmatchcase(name, pattern) for name in names for pattern in self._skipped)
        return fits or is_inside(path, self._skipped)


def formats(settings: Mapping[str, Any]) -> Formats:
    """Return the formats of a `quantization_config`; raise CheckpointError for unknown ones."""
    algorithm = settings.get("quant_algo")
    if algorithm != "FP8":
        raise refused("quant_algo", algorithm)
    key = "exclude_modules" if settings.get("exclude_modules") else "ignore"
    found = ModelOptFormats(strings(key, settings.get(key) or []))
    found.cache_dtype = cache_dtype(settings.get("kv_cache_scheme"))
    cache = settings.get("kv_cache_quant_algo")
    if cache not in (None, "FP8"):
        raise refused("kv_cache_quant_algo", cache)
    if cache is not None:
        found.cache_dtype = torch.float8_e4m3fn
    return found
