"""Four-bit integers of compressed-tensors' format pack-quantized.

Source: github.com/vllm-project/compressed-tensors, `compressors/pack_quantized`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats.base import Matrix, WeightFormat
from serve_spec.layers.formats.compressed_tensors import WeightArgs
from serve_spec.layers.formats.grouped_int4 import (
    WORD,
    Groups,
    StoredInt4,
    nibbles,
    read_groups,
    shared_groups,
)
from serve_spec.layers.formats.settings import FLOATS_INSTEAD, refused
from serve_spec.layers.module import Destination

# The code of 0 without zero points.
_MIDDLE = 8
_ORDERED_IN_FILE = ("weight", "static")


class PackQuantizedWeight(StoredInt4):
    """Words along columns, and those of zero points along rows.

    `weight_packed` int32 [N, K / 8], `weight_scale` [N, G], `weight_shape` int64 [2]; with
    `has_zeros` `weight_zero_point` int32 [N / 8, G]; with `has_order` `weight_g_idx` int32 [K].
    """

    def __init__(self, matrix: Matrix, groups: Groups, has_zeros: bool, has_order: bool) -> None:
        super().__init__(matrix, groups)
        groups.check(matrix, row_unit=WORD if has_zeros else 1, column_unit=WORD)
        rows, columns = matrix.out_features, matrix.in_features
        self.codes = torch.zeros(rows, columns // WORD, dtype=torch.int32)
        self.scale = torch.zeros(rows, self.num_groups, dtype=torch.float32)
        self.zeros = None
        if has_zeros:
            self.zeros = torch.zeros(rows // WORD, self.num_groups, dtype=torch.int32)
        if has_order:
            self.make_g_idx()
        self._shapes = torch.zeros(len(matrix.parts), 2, dtype=torch.int64)

    def tensors(self) -> Mapping[str, Destination]:
        """See `WeightFormat`."""
        tensors = self.matrix.destinations(".weight_packed", self.codes)
        tensors |= self.group_destinations(".weight_scale", self.scale, 0, 1)
        if self.zeros is not None:
            tensors |= self.group_destinations(".weight_zero_point", self.zeros, 0, 1)
        for name, shape in zip(self.matrix.parts, self._shapes, strict=True):
            tensors[f"{name}.weight_shape"] = shape
        return tensors | self.common_tensors(".weight_g_idx")

    def unpacked(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `StoredInt4`; raise CheckpointError if `weight_shape` is another."""
        for (name, rows), shape in zip(self.matrix.parts.items(), self._shapes, strict=True):
            expected = [rows.total, self.matrix.columns.total]
            if shape.tolist() != expected:
                why = f"{name}.weight_shape is {shape.tolist()}, expected {expected}"
                raise CheckpointError(f"{why}; {FLOATS_INSTEAD}")
        if self.zeros is None:
            zeros = torch.full_like(self.scale, _MIDDLE, dtype=torch.uint8)
        else:
            zeros = nibbles(self.zeros.T).T
        return nibbles(self.codes), self.scale, zeros


def packed_weight(args: WeightArgs, matrix: Matrix) -> WeightFormat:
    """Return the weight of format pack-quantized; raise CheckpointError if it is not computed."""
    if args.num_bits != 4:
        raise args.refused("num_bits", args.num_bits)
    if args.type != "int":
        raise args.refused("type", args.type)
    if args.strategy not in ("group", "channel"):
        raise args.refused("strategy", args.strategy)
    if args.has_input_scale:
        raise refused(f"config_groups.{args.group}.input_activations.dynamic", False)
    has_order = args.actorder not in (None, *_ORDERED_IN_FILE)
    if has_order and matrix.is_row_parallel:
        raise shared_groups(f"config_groups.{args.group}.weights.actorder", args.actorder)
    key = f"config_groups.{args.group}.weights.group_size"
    size = -1 if args.strategy == "channel" else args.group_size
    groups = read_groups({key: size}, key)
    return PackQuantizedWeight(matrix, groups, not args.symmetric, has_order)
