"""What a weight format is: the tensors of a matrix in a file, and the products with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from serve_spec.layers.module import Destination, Shard, Span
from serve_spec.ops.linear import silu_and_mul


@dataclass(frozen=True)
class Matrix:
    """The matrix W [out, in] of one product, as one rank holds it.

    parts: the rows of each checkpoint matrix that W stacks, by its name, in order. columns: the
    columns. bias: whether each part has one, [out]. tied: a loaded tensor [out, in] that the
    product reads, such as token embeddings; the checkpoint then has no own one.
    """

    parts: Mapping[str, Span]
    columns: Span
    bias: bool = False
    tied: Tensor | None = None

    @property
    def out_features(self) -> int:
        """Return the number of rows, over all parts."""
        return sum(rows.length for rows in self.parts.values())

    @property
    def in_features(self) -> int:
        """Return the number of columns."""
        return self.columns.length

    @property
    def has_padding(self) -> bool:
        """Return whether some rows are not filled by the checkpoint."""
        return any(rows.count < rows.length for rows in self.parts.values())

    @property
    def is_row_parallel(self) -> bool:
        """Return whether this rank has some of the columns, so that results are summed."""
        return self.columns.length < self.columns.total

    @property
    def adds_bias(self) -> bool:
        """Return whether this rank adds the bias: of ranks whose results are summed one does."""
        return self.bias and not self.columns.start

    def destinations(
        self, suffix: str, tensor: Tensor, rows: int = 0, columns: int | None = 1
    ) -> dict[str, Destination]:
        """Return `<part><suffix>`: where each part goes in `tensor`, with this rank's columns.

        rows, columns: the dimensions of `tensor` that W's rows and columns run along (columns None:
        none does). An element of it may stand for several of them, such as eight packed numbers of
        four bits, or a group with one scale.
        """
        rows_of_one = self.out_features // tensor.shape[rows]
        found: dict[str, Destination] = {}
        start = 0
        for name, part in self.parts.items():
            kept = part.packed(rows_of_one)
            view = tensor.narrow(rows, start, kept.length)
            start += kept.length
            found[name + suffix] = kept.of(view, rows)
            if columns is not None and self.is_row_parallel:
                columns_of_one = self.in_features // tensor.shape[columns]
                found[name + suffix] = self.columns.packed(columns_of_one).of(view, columns)
        return found

    def bias_destinations(self, bias: Tensor) -> dict[str, Destination]:
        """Return `<part>.bias`: where each part goes in `bias` [out].

        A rank that does not add it (see `adds_bias`) reads none of it.
        """
        if self.adds_bias:
            return self.destinations(".bias", bias, columns=None)
        return {
            f"{name}.bias": Shard(bias[:0], 0, 0, rows.total) for name, rows in self.parts.items()
        }


class WeightFormat(nn.Module):
    """How one matrix W [out, in] is stored, and the products with it.

    A `Linear` calls these methods, in any order of products after `finish`. What is derived from a
    loaded weight is a format, too: `finish` returns it.
    """

    @property
    def num_bytes(self) -> int:
        """Return the memory of the weight."""
        raise NotImplementedError

    def tensors(self) -> Mapping[str, Destination]:
        """Return destinations by checkpoint name within the layer, such as `q_proj.weight`.

        Called before `finish` only. A destination takes the dtypes of `dtypes_taken`.
        """
        raise NotImplementedError

    def finish(self) -> WeightFormat:
        """Return the format for products, once the tensors are loaded; by default this one.

        The layer drops this one, so a tensor that the result does not hold is freed before the next
        matrix is finished. A finished format returns itself.
        """
        return self

    def linear(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x·Wᵀ + b: [T, in] -> [T, out] in `out_dtype` (default: x's)."""
        raise NotImplementedError

    def partials(self, x: Tensor) -> Tensor:
        """Return `linear(x)`, or partial sums of it (see `ops.linear.sum_partials`)."""
        return self.linear(x)

    def gate_up(self, x: Tensor) -> Tensor:
        """Return silu(gate) · up, where the first half of W's rows is the gate's: [T, out / 2]."""
        return silu_and_mul(self.linear(x))


class Formats:
    """The format of every matrix of a model.

    cache_dtype: of keys and values as the checkpoint asks for them; None: compute dtype.
    """

    cache_dtype: torch.dtype | None = None

    def of(self, paths: Sequence[str], matrix: Matrix) -> WeightFormat:
        """Return the format of `matrix`, without its tensors yet, on torch's default device.

        paths: the module path of each of its parts, e.g. `model.layers.3.mlp.gate_proj` and
        `model.layers.3.mlp.up_proj`, or `lm_head`.
        """
        raise NotImplementedError

    def renames(self, stored: Iterable[str]) -> Mapping[str, str | None]:
        """Return the names in `WeightFormat.tensors` of tensors that a checkpoint stores by others.

        None: the tensor is left out. stored: the names of all tensors.
        """
        return {}

    def report(self) -> str:
        """Return a line for the log on what was made of the matrices so far; empty: nothing."""
        return ""

    def under(self, prefix: str) -> Formats:
        """Return the same formats for a module whose matrices' paths begin with `prefix`."""
        return _Under(self, prefix)


class _Under(Formats):
    def __init__(self, formats: Formats, prefix: str) -> None:
        self._formats = formats
        self._prefix = prefix

    def of(self, paths: Sequence[str], matrix: Matrix) -> WeightFormat:
        return self._formats.of([self._prefix + path for path in paths], matrix)
