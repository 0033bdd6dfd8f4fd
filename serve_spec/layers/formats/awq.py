"""Four-bit integers of AWQ, in the layout of its GEMM kernels.

Source: github.com/casper-hansen/AutoAWQ, `awq/modules/linear/gemm.py`; arXiv 2306.00978.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
)
from serve_spec.layers.formats.settings import common, is_inside, refused, strings

# Where the bits of each of eight neighbouring columns are in a word: the kernel takes even ones
# from its lower half.
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]

_SKIPPED = "modules_to_not_convert"


class AwqWeight(TransposedInt4):
    """Words along rows, of a transposed matrix.

    `qweight` int32 [K, N / 8], `qzeros` int32 [G, N / 8], `scales` [G, N].
    """

    def __init__(self, matrix: Matrix, groups: Groups) -> None:
        super().__init__(matrix, groups)
        groups.check(matrix, row_unit=WORD)
        rows, columns = matrix.out_features, matrix.in_features
        self.codes = torch.zeros(columns, rows // WORD, dtype=torch.int32)
        self.zeros: Tensor = torch.zeros(self.num_groups, rows // WORD, dtype=torch.int32)
        self.scale = torch.zeros(self.num_groups, rows, dtype=torch.float32)

    def unpacked(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `StoredInt4`."""
        codes, zeros = (_in_order(nibbles(words)).T for words in (self.codes, self.zeros))
        return codes.contiguous(), self.scale.T.contiguous(), zeros.contiguous()


class AwqFormats(Formats):
    """AWQ for all matrices but the skipped, tied and output ones."""

    def __init__(self, groups: Groups, skipped: Sequence[str]) -> None:
        self._groups = groups
        self._skipped = ("lm_head", *skipped)

    def of(self, paths: Sequence[str], matrix: Matrix) -> WeightFormat:
        """See `Formats`."""
        if common(paths, lambda path: is_inside(path, self._skipped)) or matrix.tied is not None:
            return PLAIN.of(paths, matrix)
        return AwqWeight(matrix, self._groups)


def formats(settings: Mapping[str, Any]) -> Formats:
    """Return the formats of a `quantization_config`; raise CheckpointError for unknown ones."""
    # AutoAWQ's own quant_config.json has other names for two keys.
    bits = "w_bit" if "w_bit" in settings else "bits"
    size = "q_group_size" if "q_group_size" in settings else "group_size"
    if settings.get(bits) != 4:
        raise refused(bits, settings.get(bits))
    if str(settings.get("version", "gemm")).lower() != "gemm":
        raise refused("version", settings["version"])
    if settings.get("zero_point", True) is not True:
        raise refused("zero_point", settings["zero_point"])
    if settings.get("lm_head"):
        raise refused("lm_head", settings["lm_head"])
    skipped = strings(_SKIPPED, settings.get(_SKIPPED) or [])
    return AwqFormats(read_groups(settings, size), skipped)


def _in_order(codes: Tensor) -> Tensor:
    """Return codes [A, B] of words with those of each eight columns in order."""
    in_order: Tensor = codes.unflatten(1, (-1, WORD))[:, :, _PLACES].flatten(1)
    return in_order
