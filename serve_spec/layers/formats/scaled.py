"""Numbers of eight bits with scales: per matrix, per row, or per block of rows and columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from serve_spec.layers.formats.base import Matrix, WeightFormat
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.formats.plain import PlainWeight
from serve_spec.layers.module import Destination, Shard, Span, parameter, tensor_defaults
from serve_spec.ops import linear
from serve_spec.ops.scaled_linear import (
    MAX_ROWS,
    Unit,
    dequantize_into,
    fits_kernel,
    scaled_linear,
)

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
    """A matrix as `Scales` says, until it is loaded; then what this device multiplies fastest.

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
        """Return the numbers as they are where a kernel multiplies them, else floats."""
        scale, unit = self.merged_scale()
        if fits_kernel(self.values.device, unit, self._matrix.in_features):
            return ResidentWeight(self.values, scale, unit, self.bias)
        with tensor_defaults(self._dtype, self.values.device):
            plain = PLAIN.of([*self._matrix.parts], self._matrix)
        assert isinstance(plain, PlainWeight)
        plain.bias = self.bias
        dequantize_into(plain.weight, self.values, scale, unit)
        return plain.finish()

    def linear(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x·Wᵀ + b, before `finish`."""
        return scaled_linear(x, self.values, *self.merged_scale(), self.bias, out_dtype)

    def merged_scale(self) -> tuple[Tensor, Unit]:
        """Return the scales of all parts as one tensor, and the rows and columns of each.

        A rank, or a part, that begins inside a block has smaller ones, which divide what it has.
        """
        matrix, parts = self._matrix, [*self._matrix.parts.values()]
        height, width = self._block(parts[0])
        if self._scales.block is not None:
            lengths = [rows.length for rows in parts[:-1]]
            height = math.gcd(height, *lengths, *(rows.start for rows in parts))
            width = math.gcd(width, matrix.columns.start)
        elif not self._scales.per_row:
            height = math.gcd(*(rows.length for rows in parts))
        merged = [
            scale[_blocks_of(rows, self._block(rows)[0], height)]
            for rows, scale in zip(parts, self.scale, strict=True)
        ]
        columns = _blocks_of(matrix.columns, self._block(parts[0])[1], width)
        return torch.cat(merged)[:, columns].contiguous(), (height, width)

    def _block(self, rows: Span) -> Unit:
        """Return the rows and columns of a block of a part."""
        if self._scales.block is not None:
            return self._scales.block
        return 1 if self._scales.per_row else rows.total, self._matrix.columns.total

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


class ResidentWeight(WeightFormat):
    """Numbers of eight bits and their scales, which products dequantize block by block on a GPU.

    unit: rows and columns of a scale. Products of many rows dequantize the matrix before.
    """

    def __init__(self, values: Tensor, scale: Tensor, unit: Unit, bias: Tensor | None) -> None:
        super().__init__()
        self.values, self.scale, self.unit, self.bias = values, scale, unit, bias

    @property
    def num_bytes(self) -> int:
        """Return the memory of numbers and scales."""
        return self.values.nbytes + self.scale.nbytes

    def linear(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x·Wᵀ + b: [T, in] -> [T, out]."""
        if self._is_fastest(x):
            return linear.small_linear(x, self.values, self.bias, out_dtype, self.scale, self.unit)
        return scaled_linear(x, self.values, self.scale, self.unit, self.bias, out_dtype)

    def partials(self, x: Tensor) -> Tensor:
        """Return `linear(x)`, or partial sums of it."""
        if self.bias is not None or not self._is_fastest(x):
            return self.linear(x)
        return linear.small_partials(x, self.values, self.scale, self.unit)

    def gate_up(self, x: Tensor) -> Tensor:
        """Return silu(gate) · up."""
        if self.bias is not None or not self._is_fastest(x):
            return super().gate_up(x)
        return linear.small_gate_up(x, self.values, self.scale, self.unit)

    def _is_fastest(self, x: Tensor) -> bool:
        return (
            x.shape[0] <= MAX_ROWS
            and self.values.dtype == torch.float8_e4m3fn
            and linear.is_supported(x, self.values, self.unit)
        )


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


def _blocks_of(indices: Span, size: int, unit: int) -> list[int]:
    """Return which block of `size` every `unit` indices of a span are in, from its first block on.

    Indices that stand for nothing count to the last block.
    """
    last = _touched(indices, size) - 1
    at = (indices.start % size + first for first in range(0, indices.length, unit))
    return [min(index // size, last) for index in at]
