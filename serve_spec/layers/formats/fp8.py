"""FP8 with scales per block or per matrix, as DeepSeek, Qwen and Mistral publish it.

Source: transformers, `integrations/finegrained_fp8.py`; arXiv 2412.19437, section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from serve_spec.layers.formats.base import Formats, Matrix, WeightFormat
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.formats.fp8_draft import fp8_rows
from serve_spec.layers.formats.plain import PlainWeight
from serve_spec.layers.formats.scaled import ResidentWeight, ScaledWeight, Scales
from serve_spec.layers.formats.settings import common, is_inside, refused, strings

_SKIPPED_KEYS = ("modules_to_not_convert", "ignored_layers")
# Names of AutoFP8 and vLLM, and the ones that transformers has for them.
_NAMES = {".weight_scale": ".weight_scale_inv", ".input_scale": ".activation_scale"}


class Fp8Formats(Formats):
    """FP8 for all matrices but the skipped, tied and output ones."""

    def __init__(self, scales: Scales, skipped: Sequence[str]) -> None:
        self._scales = scales
        self._skipped = ("lm_head", *skipped)

    def of(self, paths: Sequence[str], matrix: Matrix) -> WeightFormat:
        """See `Formats`."""
        if common(paths, lambda path: is_inside(path, self._skipped)) or matrix.tied is not None:
            return PLAIN.of(paths, matrix)
        return ScaledWeight(matrix, self._scales)

    def renames(self, stored: Iterable[str]) -> dict[str, str | None]:
        """See `Formats`; the names of transformers."""
        return {
            name: name.removesuffix(old) + new
            for name in stored
            for old, new in _NAMES.items()
            if name.endswith(old)
        }


class Fp8OnLoadFormats(Formats):
    """Floats that become FP8 with a scale per row when they are loaded; not output matrices."""

    def of(self, paths: Sequence[str], matrix: Matrix) -> WeightFormat:
        """See `Formats`."""
        is_output = all(is_inside(path, ("lm_head",)) for path in paths)
        if is_output or matrix.tied is not None:
            return PLAIN.of(paths, matrix)
        return PlainWeight(matrix, (_as_rows,))


def _as_rows(plain: PlainWeight) -> WeightFormat:
    values, scale = fp8_rows(plain.weight)
    return ResidentWeight(values, scale[:, None], (1, values.shape[1]), plain.bias)


def formats(settings: Mapping[str, Any]) -> Formats:
    """Return the formats of a `quantization_config`; raise CheckpointError for unknown ones."""
    if settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise refused("fmt", settings["fmt"])
    scheme = settings.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise refused("activation_scheme", scheme, fix="use dynamic or static")
    block = settings.get("weight_block_size")
    if block is not None:
        is_block = isinstance(block, list) and len(block) == 2
        if not is_block or not all(isinstance(size, int) and size > 0 for size in block):
            raise refused("weight_block_size", block, "no rows and columns of a block")
        block = block[0], block[1]
    inputs = "activation_scale" if scheme == "static" else None
    skipped = [name for key in _SKIPPED_KEYS for name in strings(key, settings.get(key) or [])]
    return Fp8Formats(Scales(block=block, name="weight_scale_inv", inputs=inputs), skipped)
