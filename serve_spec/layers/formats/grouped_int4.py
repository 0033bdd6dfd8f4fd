"""Integers of four bits with a scale and a zero point per row and group of columns.

Each kind of file has a `StoredInt4` that says how they are packed there. What multiplies is the
same for all: on a GPU one packed layout, elsewhere floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats.base import Matrix, WeightFormat
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.formats.plain import PlainWeight
from serve_spec.layers.formats.settings import FLOATS_INSTEAD, refused
from serve_spec.layers.module import Destination, Span, parameter, tensor_defaults
from serve_spec.ops.int4_linear import int4_gate_up, int4_linear, int4_partials, packed_codes

WORD = 8
"""Codes in a word, an int32: the first in its lowest bits."""

# Groups of other sizes are not computed on GPUs: see `ops.int4_linear`.
_SIZE_UNIT = 16
_MOST_RANKS = 16
_ROWS_TOGETHER = 256


@dataclass(frozen=True)
class Groups:
    """The groups of columns of a row: `size` columns each, None: all of them in one.

    key: of `quantization_config`, which says so.
    """

    size: int | None
    key: str = "group_size"

    def count(self, columns: int) -> int:
        """Return how many groups so many columns are."""
        return 1 if self.size is None else columns // self.size

    def check(self, matrix: Matrix, row_unit: int = 1, column_unit: int = 1) -> None:
        """Raise CheckpointError if a rank's part of `matrix` begins or ends inside a unit.

        A unit is a group, or a word of so many rows or columns.
        """
        for name, rows in matrix.parts.items():
            self._check(f"rows of {name}", rows, row_unit, "word")
        columns = f"columns of {', '.join(matrix.parts)}"
        self._check(columns, matrix.columns, column_unit, "word")
        if self.size is not None:
            self._check(columns, matrix.columns, self.size, "group")

    def _check(self, what: str, span: Span, unit: int, name: str) -> None:
        if span.total % unit:
            raise self.refused(f"{span.total} {what} are no multiple of a {name} of {unit}")
        if span.length % unit or span.start % unit:
            ranks = [n for n in range(1, _MOST_RANKS + 1) if span.total % (n * unit) == 0]
            why = f"a rank's {span.length} of {span.total} {what} cut a {name} of {unit}"
            raise self.refused(why, f"use tensor_parallel_size {', '.join(map(str, ranks))}")

    def refused(self, why: str, fix: str = FLOATS_INSTEAD) -> CheckpointError:
        """Return the refusal of this size."""
        return refused(self.key, -1 if self.size is None else self.size, why, fix)


def read_groups(settings: Mapping[str, Any], key: str) -> Groups:
    """Return the groups that a size in `quantization_config` stands for; -1: one of all columns.

    Raises CheckpointError: it is no size.
    """
    size = settings.get(key)
    if isinstance(size, bool) or not isinstance(size, int):
        raise refused(key, size, "no number of columns")
    if size != -1 and (size <= 0 or size % _SIZE_UNIT):
        raise refused(key, size, f"no multiple of {_SIZE_UNIT}, nor -1")
    return Groups(None if size == -1 else size, key)


@dataclass(frozen=True)
class Int4Matrix:
    """The matrix [N, K] of numbers (code - zero) · scale.

    codes: uint8 [N, K], 0 to 15. scale: float32 [N, G] and zeros: uint8 [N, G], of a row and
    group. group: of each column, int64 [P, K], for P parts of so many `rows`.
    """

    codes: Tensor
    scale: Tensor
    zeros: Tensor
    group: Tensor
    rows: tuple[int, ...]

    def dequantize_into(self, weight: Tensor) -> None:
        """Write the floats into `weight` [N, K]."""
        first = 0
        for rows, group in zip(self.rows, self.group, strict=True):
            # A few rows together, as the floats of all would take much memory.
            for start in range(first, first + rows, _ROWS_TOGETHER):
                part = slice(start, min(start + _ROWS_TOGETHER, first + rows))
                steps = self.codes[part].float().sub_(self.zeros[part].float()[:, group])
                weight[part] = steps.mul_(self.scale[part][:, group])
            first += rows

    def order(self) -> Tensor | None:
        """Return the columns group by group, int64 [K]; None if they are stored so.

        Raises CheckpointError if groups are not equally large, or parts differ.
        """
        num_columns, num_groups = self.group.shape[1], self.scale.shape[1]
        order = self.group[0].argsort(stable=True)
        sizes = self.group[0].bincount(minlength=num_groups)
        if bool((sizes != num_columns // num_groups).any() | (self.group != self.group[0]).any()):
            why = "g_idx: the parts of one product differ, or groups are not equally large"
            raise CheckpointError(f"{why}; {FLOATS_INSTEAD}")
        return None if torch.equal(order, torch.arange(num_columns, device=order.device)) else order


class StoredInt4(WeightFormat):
    """A matrix as a file packs it, until it is loaded."""

    codes: Tensor
    scale: Tensor
    zeros: Tensor | None

    def __init__(self, matrix: Matrix, groups: Groups) -> None:
        """Make room for what all files have. Subclasses make `codes`, `scale` and `zeros`."""
        super().__init__()
        self.matrix = matrix
        self.groups = groups
        self.num_groups = groups.count(matrix.in_features)
        self.g_idx: Tensor | None = None
        self.bias: Tensor | None = parameter(matrix.out_features).zero_() if matrix.bias else None
        self._dtype = torch.get_default_dtype()

    @property
    def num_bytes(self) -> int:
        """Return the memory of codes, scales and zero points."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.nbytes + self.scale.nbytes + zeros

    def group_destinations(
        self, suffix: str, tensor: Tensor, rows: int, columns: int
    ) -> dict[str, Destination]:
        """Return `Matrix.destinations` of what groups have; one of all columns is on all ranks."""
        along = None if self.groups.size is None else columns
        return self.matrix.destinations(suffix, tensor, rows, along)

    def make_g_idx(self) -> None:
        """Make room for `<part>.g_idx`: the group of each column."""
        sizes = len(self.matrix.parts), self.matrix.in_features
        self.g_idx = torch.zeros(sizes, dtype=torch.int32)

    def common_tensors(self, g_idx: str = ".g_idx") -> dict[str, Destination]:
        """Return the destinations of biases and `g_idx`, as far as there are any."""
        tensors: dict[str, Destination] = {}
        if self.bias is not None:
            tensors |= self.matrix.bias_destinations(self.bias)
        if self.g_idx is not None:
            for name, groups in zip(self.matrix.parts, self.g_idx, strict=True):
                tensors[name + g_idx] = self.matrix.columns.of(groups, 0)
        return tensors

    def unpacked(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scale and zeros of `Int4Matrix`."""
        raise NotImplementedError

    def finish(self) -> WeightFormat:
        """Return the packed weight on a GPU, for products in 16 bits; else floats."""
        matrix = self.int4_matrix()
        if stays_packed(self.codes.device, self._dtype):
            return PackedInt4.of(matrix, self.bias)
        with tensor_defaults(self._dtype, self.codes.device):
            plain = PLAIN.of([*self.matrix.parts], self.matrix)
        assert isinstance(plain, PlainWeight)
        matrix.dequantize_into(plain.weight)
        plain.bias = self.bias
        return plain.finish()

    def linear(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x·Wᵀ + b: the reference."""
        weight = x.new_empty(self.matrix.out_features, self.matrix.in_features)
        self.int4_matrix().dequantize_into(weight)
        return F.linear(x, weight, self.bias).to(out_dtype or x.dtype)

    def int4_matrix(self) -> Int4Matrix:
        """Return what was loaded; raise CheckpointError if the tensors contradict each other."""
        codes, scale, zeros = self.unpacked()
        sizes = tuple(rows.length for rows in self.matrix.parts.values())
        return Int4Matrix(codes, scale, zeros, self._group_of_columns(), sizes)

    def _group_of_columns(self) -> Tensor:
        """Return `Int4Matrix.group`; raise CheckpointError if this rank lacks a column's group."""
        columns, size = self.matrix.columns, self.groups.size
        if self.g_idx is None:
            every = columns.length // self.num_groups
            group = torch.arange(columns.length, device=self.codes.device) // every
            return group.expand(len(self.matrix.parts), -1)
        first = 0 if size is None else columns.start // size
        group = self.g_idx.long() - first
        for name, groups in zip(self.matrix.parts, group, strict=True):
            if not bool(((groups >= 0) & (groups < self.num_groups)).all()):
                if self.matrix.is_row_parallel:
                    raise shared_groups("g_idx", f"of {name}")
                why = f"g_idx of {name} names groups beyond {self.num_groups}"
                raise CheckpointError(f"{why}; fetch the checkpoint again")
        return group


class TransposedInt4(StoredInt4):
    """A matrix whose file has it transposed: `qweight`, `qzeros` and `scales`."""

    zeros: Tensor

    def tensors(self) -> Mapping[str, Destination]:
        """See `WeightFormat`."""
        tensors = self.matrix.destinations(".qweight", self.codes, rows=1, columns=0)
        tensors |= self.group_destinations(".qzeros", self.zeros, 1, 0)
        tensors |= self.group_destinations(".scales", self.scale, 1, 0)
        return tensors | self.common_tensors()


def stays_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether matrices keep their codes there: on GPUs, for products in 16 bits."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def shared_groups(key: str, value: object) -> CheckpointError:
    """Return the refusal of groups of columns that ranks would have to share."""
    why = "columns of one group are on several ranks"
    return refused(key, value, why, "use tensor_parallel_size=1")


class PackedInt4(WeightFormat):
    """Codes of four bits in the layout of `ops.int4_linear`, dequantized while they are read.

    codes: uint8 [N, K], of groups of neighbours. scale: float32 [N, G]; zeros: [N, G], uint8, the
    code of 0, or float32, what code 0 stands for. factors: float32 [2, N, F]; with them scale and
    zeros are uint8. bias: [N]. order: the column of x that each column of codes is multiplied by;
    None: its own.
    """

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        zeros: Tensor,
        bias: Tensor | None = None,
        order: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._codes = packed_codes(codes)
        self._scale, self._zeros = (narrowest(each.T.contiguous()) for each in (scale, zeros))
        self._factors = None if factors is None else narrowest(factors.mT.contiguous())
        self._bias = bias
        self._order = order

    @classmethod
    def of(cls, matrix: Int4Matrix, bias: Tensor | None = None) -> PackedInt4:
        """Lay out a matrix; raise CheckpointError for groups that the product cannot have."""
        order = matrix.order()
        codes = matrix.codes if order is None else matrix.codes[:, order]
        return cls(codes, matrix.scale, matrix.zeros, bias, order)

    @property
    def num_bytes(self) -> int:
        """Return the memory of codes, scales and zero points."""
        factors = 0 if self._factors is None else self._factors.nbytes
        return self._codes.nbytes + self._scale.nbytes + self._zeros.nbytes + factors

    def linear(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x·Wᵀ + b; numbers of W are rounded to x's dtype."""
        stored = self._codes, self._scale, self._zeros
        return int4_linear(self._ordered(x), *stored, self._bias, out_dtype, self._factors)

    def partials(self, x: Tensor) -> Tensor:
        """Return `linear(x)`, or partial sums of it."""
        if self._bias is not None:
            return self.linear(x)
        stored = self._codes, self._scale, self._zeros
        return int4_partials(self._ordered(x), *stored, self._factors)

    def gate_up(self, x: Tensor) -> Tensor:
        """Return silu(gate) · up."""
        if self._bias is not None:
            return super().gate_up(x)
        stored = self._codes, self._scale, self._zeros
        return int4_gate_up(self._ordered(x), *stored, self._factors)

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self._order is None else x[:, self._order]


def nibbles(words: Tensor) -> Tensor:
    """Return the codes of words int32 [A, W], lowest bits first: uint8 [A, 8 · W]."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(1)


def narrowest(scale: Tensor) -> Tensor:
    """Return float32 scales in 16 bits if these hold them, as they do if the file had 16.

    Integers are returned as they are.
    """
    if not scale.is_floating_point():
        return scale
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scale.to(dtype).float(), scale):
            return scale.to(dtype)
    return scale
