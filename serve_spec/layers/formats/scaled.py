"""Numbers of eight bits with scales: per matrix, per row, or per block of rows and columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.layers.formats.base import Matrix, WeightFormat
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.formats.plain import PlainWeight
from serve_spec.layers.module import Destination, Shard, Span, parameter, tensor_defaults

if TYPE_CHECKING:
    from serve_spec.layers.formats.compressed_tensors import WeightArgs


@dataclass(frozen=True)
class Scales:
    """How a matrix [N, K] of eight bits is stored: W = `<part>.weight` · `<part>.<name>`.

    block: rows and columns of one scale: the scales are [⌈N / rows⌉, ⌈K / columns⌉]. None: one
    scale, or with `per_row` [N, 1]. name: of the scales. inputs: that of the scale of static
    activations, one number; None: the file has none.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    block: tuple[int, int] | None = None
    per_row: bool = False
    name: str = "weight_scale"
    inputs: str | None = None


class ScaledWeight(WeightFormat):
    """A matrix as `Scales` says, until it is loaded; then floats of the compute dtype.

    Activations stay floats: a scale of static ones is read, and products do not use it.
    """

    def __init__(self, matrix: Matrix, scales: Scales) -> None:
        super().__init__()
        self._matrix = matrix
        self._scales = scales
        self._dtype = torch.get_default_dtype()
        shape = matrix.out_features, matrix.in_features
        self.values = torch.zeros(shape, dtype=scales.dtype)
        self.input_scale = torch.ones(len(matrix.parts), dtype=torch.float32)
        self.bias: Tensor | None = parameter(shape[0]).zero_() if matrix.bias else None
        # Of each part: its scales, as [rows, columns] of blocks.
        self.scale = [self._empty_scale(rows) for rows in matrix.parts.values()]

    @property
    def num_bytes(self) -> int:
        """Return the memory of numbers and scales."""
        return self.values.nbytes + sum(scale.nbytes for scale in self.scale)

    def tensors(self) -> Mapping[str, Destination]:
        """Return `<part>.weight`, its scales, and `<part>.bias` if there is one."""
        matrix, scales = self._matrix, self._scales
        tensors = matrix.destinations(".weight", self.values)
        parts = zip(matrix.parts.items(), self.scale, self.input_scale.split(1), strict=True)
        for (name, rows), scale, input_scale in parts:
            tensors[f"{name}.{scales.name}"] = self._destination(rows, scale)
            if scales.inputs is not None:
                tensors[f"{name}.{scales.inputs}"] = input_scale
        if self.bias is not None:
            tensors |= matrix.bias_destinations(self.bias)
        return tensors

    def finish(self) -> WeightFormat:
        """Return the weight as floats, in the layout that multiplies fastest here."""
        with tensor_defaults(self._dtype, self.values.device):
            plain = PLAIN.of([*self._matrix.parts], self._matrix)
        assert isinstance(plain, PlainWeight)
        plain.bias = self.bias
        self._dequantize_into(plain.weight)
        return plain.finish()

    def linear(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x·Wᵀ + b: the reference."""
        weight = torch.empty_like(self.values, dtype=x.dtype)
        self._dequantize_into(weight)
        return F.linear(x, weight, self.bias).to(out_dtype or x.dtype)

    def _dequantize_into(self, weight: Tensor) -> None:
        """Write the floats into `weight` [out, in]; no other tensor of that size is made."""
        weight.copy_(self.values)
        columns = torch.arange(weight.shape[1], device=weight.device) + self._matrix.columns.start
        first = 0
        for rows, scale in zip(self._matrix.parts.values(), self.scale, strict=True):
            part = weight[first : first + rows.length]
            first += rows.length
            if self._scales.block is None:
                part.mul_(scale)
            else:
                _scale_blocks(part, scale, self._scales.block, rows.start, columns)

    def _empty_scale(self, rows: Span) -> Tensor:
        """Return room for the scales of the rows and columns of a part that this rank has."""
        if self._scales.block is None:
            return torch.ones(rows.length if self._scales.per_row else 1, 1, dtype=torch.float32)
        height, width = self._scales.block
        shape = _touched(rows, height), _touched(self._matrix.columns, width)
        return torch.ones(shape, dtype=torch.float32)

    def _destination(self, rows: Span, scale: Tensor) -> Destination:
        if self._scales.per_row:
            return rows.of(scale, 0)
        if self._scales.block is None:
            return scale[0]
        height, width = self._scales.block
        # A rank has all rows, or all columns. Neighbours may both have the scales at their edge.
        if rows.length < rows.total:
            return Shard(scale, 0, rows.start // height, -(-rows.total // height))
        if self._matrix.is_row_parallel:
            columns = self._matrix.columns
            return Shard(scale, 1, columns.start // width, -(-columns.total // width))
        return scale


def compressed_weight(args: WeightArgs, matrix: Matrix) -> WeightFormat:
    """Return the weight of compressed-tensors' formats of eight bits.

    Raises CheckpointError for what is not computed.
    """
    if args.num_bits != 8:
        raise args.refused("num_bits", args.num_bits)
    if args.strategy == "group":
        raise args.refused("strategy", args.strategy)
    if not args.symmetric:
        raise args.refused("symmetric", args.symmetric)
    is_float = args.type == "float"
    scales = Scales(
        torch.float8_e4m3fn if is_float else torch.int8,
        block=args.block,
        per_row=args.strategy == "channel",
        inputs="input_scale" if args.has_input_scale else None,
    )
    return ScaledWeight(matrix, scales)


def _touched(indices: Span, size: int) -> int:
    """Return how many blocks of `size` the indices of a span touch."""
    return math.ceil((indices.start + indices.count) / size) - indices.start // size


def _scale_blocks(
    part: Tensor, scale: Tensor, block: tuple[int, int], start: int, columns: Tensor
) -> None:
    """Multiply rows `start`, `start` + 1, ... of a matrix by the scales of the blocks they touch.

    columns: the column of the matrix that each column of `part` is.
    """
    height, width = block
    of_column = columns // width - columns[0] // width
    row = 0
    for scale_row in scale:
        end = row + height - (start + row) % height
        part[row:end].mul_(scale_row[of_column])
        row = end
