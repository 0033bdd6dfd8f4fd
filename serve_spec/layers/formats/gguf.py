"""Integers of GGUF files: types Q4_0, Q4_1, Q4_K, Q5_0, Q6_K and Q8_0.

They stay as they are on GPUs, for products in 16 bits. Elsewhere the file is read as floats, and so
are matrices of other types.

Source: github.com/ggml-org/ggml, `src/ggml-common.h` and `dequantize_row_*` of `ggml-quants.c`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from serve_spec.layers.formats import grouped_int4
from serve_spec.layers.formats.base import Formats, Matrix, WeightFormat
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.formats.grouped_int4 import PackedInt4, narrowest
from serve_spec.layers.formats.scaled import ResidentWeight
from serve_spec.layers.module import Destination, Span, parameter

GROUP = 32
"""Columns of a scale; of Q6_K half as many."""


@dataclass(frozen=True)
class BlockType:
    """How a file stores so many columns of a row together, in so many bytes.

    unpacked: returns what multiplies, from blocks uint8 [N, K / columns, bytes] and a bias [N].
    """

    columns: int
    num_bytes: int
    unpacked: Callable[[Tensor, Tensor | None], WeightFormat]

    def divides(self, columns: Span) -> bool:
        """Return whether a rank's columns begin and end with a block."""
        return not any(at % self.columns for at in (columns.start, columns.length, columns.total))


class BlockWeight(WeightFormat):
    """A matrix as blocks of a file, `<part>.weight` uint8 [N, K / columns, bytes]."""

    def __init__(self, matrix: Matrix, block: BlockType) -> None:
        super().__init__()
        self._matrix, self._block = matrix, block
        shape = matrix.out_features, matrix.in_features // block.columns, block.num_bytes
        self.blocks = torch.zeros(shape, dtype=torch.uint8)
        self.bias: Tensor | None = parameter(shape[0]).zero_() if matrix.bias else None

    @property
    def num_bytes(self) -> int:
        """Return the memory of the blocks."""
        return self.blocks.nbytes

    def tensors(self) -> Mapping[str, Destination]:
        """Return `<part>.weight`, and `<part>.bias` if there is one."""
        tensors = self._matrix.destinations(".weight", self.blocks)
        if self.bias is not None:
            tensors |= self._matrix.bias_destinations(self.bias)
        return tensors

    def finish(self) -> WeightFormat:
        """Return the codes and scales in the layout of the products."""
        return self._block.unpacked(self.blocks, self.bias)

    def linear(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x·Wᵀ + b, before `finish`."""
        return self.finish().linear(x, out_dtype)


class StackedWeight(WeightFormat):
    """A product of parts in several formats, one below the other."""

    def __init__(self, formats: Sequence[WeightFormat]) -> None:
        super().__init__()
        self._formats: Sequence[WeightFormat] = nn.ModuleList(formats)  # type: ignore[assignment]

    @property
    def num_bytes(self) -> int:
        """Return the memory of all parts."""
        return sum(each.num_bytes for each in self._formats)

    def tensors(self) -> Mapping[str, Destination]:
        """Return the tensors of all parts."""
        return {name: to for each in self._formats for name, to in each.tensors().items()}

    def finish(self) -> WeightFormat:
        """Return this weight, with the format for products of every part."""
        for index, each in enumerate(self._formats):
            self._formats[index] = each.finish()  # type: ignore[index]
        return self

    def linear(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x·Wᵀ + b: [T, in] -> [T, out]."""
        return torch.cat([each.linear(x, out_dtype) for each in self._formats], dim=1)


class GgufFormats(Formats):
    """The types that a file's matrices have, by module path, as far as this device keeps them."""

    def __init__(self, types: Mapping[str, str]) -> None:
        self._types = types
        self._num_matrices: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()

    def of(self, paths: Sequence[str], matrix: Matrix) -> WeightFormat:
        """See `Formats`. Neighbouring parts of one type are one product."""
        device, dtype = torch.get_default_device(), torch.get_default_dtype()
        if matrix.tied is not None or not grouped_int4.stays_packed(device, dtype):
            return PLAIN.of(paths, matrix)
        parts = zip(paths, matrix.parts, strict=True)
        formats = [
            self._of_type(kind, matrix, dict(run))
            for kind, run in groupby(parts, lambda part: self._type_of(part[0], matrix))
        ]
        return formats[0] if len(formats) == 1 else StackedWeight(formats)

    def report(self) -> str:
        """See `Formats`."""
        packed = ", ".join(
            f"{count} in {kind} ({self._num_bytes[kind] / 2**20:.1f} MiB)"
            for kind, count in sorted(self._num_matrices.items())
        )
        floats = Counter(self._types.values()) - self._num_matrices
        others = ", ".join(f"{count} in {kind}" for kind, count in sorted(floats.items()))
        return f"matrices kept as in the file: {packed or 'none'}; made floats: {others or 'none'}"

    def _type_of(self, path: str, matrix: Matrix) -> str | None:
        """Return the type of blocks that a part keeps; None: it becomes floats."""
        kind = self._types.get(path, "")
        block = BLOCKS.get(kind)
        return kind if block is not None and block.divides(matrix.columns) else None

    def _of_type(self, kind: str | None, matrix: Matrix, names: Mapping[str, str]) -> WeightFormat:
        """Return the format of some parts. names: of the parts, by path."""
        rows = {name: matrix.parts[name] for name in names.values()}
        some = Matrix(rows, matrix.columns, matrix.bias)
        if kind is None:
            return PLAIN.of([*names], some)
        weight = BlockWeight(some, BLOCKS[kind])
        self._num_matrices[kind] += len(rows)
        self._num_bytes[kind] += weight.num_bytes
        return weight


def formats(settings: Mapping[str, Any]) -> Formats:
    """Return the formats of a GGUF file. settings: `types`, by the paths of modules."""
    return GgufFormats(settings["types"])


def _halves(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 that begins at a byte of each block, as float32 [N, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(pairs: Tensor, width: int) -> Tensor:
    """Return the lower halves of so many bytes each, then the upper: [N, B, C] -> [N, 2BC]."""
    runs = pairs.unflatten(2, (-1, width))
    return torch.stack([runs & 15, runs >> 4], dim=3).flatten(1)


def _q4_0(blocks: Tensor, bias: Tensor | None) -> WeightFormat:
    """Bytes: scale, 16 pairs."""
    scale = _halves(blocks, 0)
    middle = torch.full_like(scale, 8, dtype=torch.uint8)
    return PackedInt4(_nibbles(blocks[..., 2:], 16), scale, middle, bias)


def _q4_1(blocks: Tensor, bias: Tensor | None) -> WeightFormat:
    """Bytes: scale, minimum, 16 pairs."""
    scale, minimum = _halves(blocks, 0), _halves(blocks, 2)
    return PackedInt4(_nibbles(blocks[..., 4:], 16), scale, minimum, bias)


def _q4_k(blocks: Tensor, bias: Tensor | None) -> WeightFormat:
    """Bytes: factors of scales and of minima, 12 with 8 of each in six bits, 4 times 32 pairs."""
    low_scales, low_minima, upper = blocks[..., 4:16].split(4, dim=-1)
    scales = torch.cat([low_scales & 63, upper & 15 | low_scales >> 6 << 4], dim=-1)
    minima = torch.cat([low_minima & 63, upper >> 4 | low_minima >> 6 << 4], dim=-1)
    factors = torch.stack([_halves(blocks, 0), -_halves(blocks, 2)])
    codes = _nibbles(blocks[..., 16:], 32)
    return PackedInt4(codes, scales.flatten(1), minima.flatten(1), bias, factors=factors)


def _q5_0(blocks: Tensor, bias: Tensor | None) -> WeightFormat:
    """Bytes: scale, 4 with the upper bits of 32 numbers, 16 pairs."""
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    high = (blocks[..., 2:6, None] >> places & 1).flatten(1)
    values = (_nibbles(blocks[..., 6:], 16) | high << 4).to(torch.int8).sub_(16)
    return ResidentWeight(values, narrowest(_halves(blocks, 0)), (1, GROUP), bias)


def _q6_k(blocks: Tensor, bias: Tensor | None) -> WeightFormat:
    """Bytes: 2 times 64 pairs of lower bits, 2 times 32 fours of upper bits, 16 scales, factor."""
    low, fours = _nibbles(blocks[..., :128], 64), blocks[..., 128:192].unflatten(2, (2, 1, 32))
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = (fours >> places[:, None] & 3).flatten(1)
    values = (low | high << 4).to(torch.int8).sub_(32)
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    scale = (_halves(blocks, 208)[..., None] * scales).flatten(1)
    return ResidentWeight(values, narrowest(scale), (1, GROUP // 2), bias)


def _q8_0(blocks: Tensor, bias: Tensor | None) -> WeightFormat:
    """Bytes: scale, 32 integers."""
    values = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
    return ResidentWeight(values, narrowest(_halves(blocks, 0)), (1, GROUP), bias)


BLOCKS = {
    "Q4_0": BlockType(GROUP, 18, _q4_0),
    "Q4_1": BlockType(GROUP, 20, _q4_1),
    "Q4_K": BlockType(8 * GROUP, 144, _q4_k),
    "Q5_0": BlockType(GROUP, 22, _q5_0),
    "Q6_K": BlockType(8 * GROUP, 210, _q6_k),
    "Q8_0": BlockType(GROUP, 34, _q8_0),
}
"""Types whose matrices stay as they are."""
