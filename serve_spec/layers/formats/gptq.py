"""Four-bit integers of GPTQ, also with columns ordered by activations (`desc_act`).

Source: github.com/ModelCloud/GPTQModel, `nn_modules/qlinear`; arXiv 2210.17323.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from serve_spec.layers.formats.base import Formats, Matrix, WeightFormat
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.formats.grouped_int4 import (
    WORD,
    Groups,
    TransposedInt4,
    nibbles,
    read_groups,
    shared_groups,
)
from serve_spec.layers.formats.settings import common, is_inside, refused

# What a file's zero points lack, by `checkpoint_format`.
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
# Keys that choose what is not computed, unless they have one of these values.
_FIXED_KEYS: Mapping[str, tuple[object, ...]] = {
    "bits": (4,),
    "dynamic": (None, {}),
    "pack_dtype": (None, "int32"),
    "is_marlin_format": (None, False),
}


class GptqWeight(TransposedInt4):
    """Words along columns, and those of zero points along rows, of a transposed matrix.

    `qweight` int32 [K / 8, N], `qzeros` int32 [G, N / 8], `scales` [G, N], `g_idx` int32 [K].
    """

    def __init__(self, matrix: Matrix, groups: Groups, zero_offset: int) -> None:
        super().__init__(matrix, groups)
        groups.check(matrix, row_unit=WORD, column_unit=WORD)
        rows, columns = matrix.out_features, matrix.in_features
        self.codes = torch.zeros(columns // WORD, rows, dtype=torch.int32)
        self.zeros: Tensor = torch.zeros(self.num_groups, rows // WORD, dtype=torch.int32)
        self.scale = torch.zeros(self.num_groups, rows, dtype=torch.float32)
        self.make_g_idx()
        self._zero_offset = zero_offset

    def unpacked(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `StoredInt4`."""
        zeros = nibbles(self.zeros).T + self._zero_offset
        return nibbles(self.codes.T), self.scale.T.contiguous(), zeros.contiguous()


class GptqFormats(Formats):
    """GPTQ for the matrices it was applied to."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Read a `quantization_config`. Raises CheckpointError for what is not computed."""
        for key, values in _FIXED_KEYS.items():
            if settings.get(key) not in values:
                raise refused(key, settings.get(key))
        form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
        if form not in _ZERO_OFFSETS:
            raise refused("checkpoint_format", form)
        self._zero_offset = _ZERO_OFFSETS[form]
        self._groups = read_groups(settings, "group_size")
        self._is_ordered = bool(settings.get("desc_act"))
        self._has_head = bool(settings.get("lm_head"))
        only = settings.get("modules_in_block_to_quantize")
        self._only = None if not only else [*_names("modules_in_block_to_quantize", only)]
        self._skipped = [*_names("modules_to_not_convert", settings.get("modules_to_not_convert"))]

    def of(self, paths: Sequence[str], matrix: Matrix) -> WeightFormat:
        """See `Formats`."""
        if matrix.tied is not None or not common(paths, self.is_quantized):
            return PLAIN.of(paths, matrix)
        if self._is_ordered and matrix.is_row_parallel and self._groups.size is not None:
            raise shared_groups("desc_act", True)
        return GptqWeight(matrix, self._groups, self._zero_offset)

    def is_quantized(self, path: str) -> bool:
        """Return whether the matrix of a module is stored in four bits."""
        if path == "lm_head":
            return self._has_head
        is_chosen = self._only is None or is_inside(path, self._only)
        return is_chosen and not is_inside(path, self._skipped)


def formats(settings: Mapping[str, Any]) -> Formats:
    """Return the formats that a `quantization_config` asks for; see `GptqFormats`."""
    return GptqFormats(settings)


def _names(key: str, value: object) -> Iterator[str]:
    """Yield the names of a list, or of a list of lists; raise CheckpointError for others."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for entry in value:
            yield from _names(key, entry)
    elif value is not None:
        raise refused(key, value, "no list of names")
