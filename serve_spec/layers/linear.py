"""Matrix products, several checkpoint matrices stacked into one where they share their input."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from serve_spec.layers.formats.base import Formats, Matrix, WeightFormat
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.module import Destination, Layer, Span
from serve_spec.parallel.group import SINGLE, TensorParallel


class Linear(Layer):
    """y = x·Wᵀ + b, where W stacks the rows of one or more checkpoint matrices.

    `parts` names these matrices and their numbers of rows, in order: `{"q_proj": 64, "k_proj": 32,
    "v_proj": 32}` makes one [128, in] product of three. How they are stored and multiplied is up to
    `format`, which `formats` chooses by their names.

    Over several ranks (Megatron-LM, arXiv 1909.08053) sizes are this rank's own. A rank has a shard
    of the rows of every part, or if `is_row_parallel` of the columns: then its result is an addend,
    and the norm that follows sums those of all ranks. One after the other they exchange one [T, H]
    tensor. A part with a `Span` has these of its rows instead.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int | Span],
        bias: bool = False,
        parallel: TensorParallel = SINGLE,
        is_row_parallel: bool = False,
        formats: Formats = PLAIN,
        tied: Tensor | None = None,
    ) -> None:
        """Choose the format. tied: see `Matrix`."""
        super().__init__()
        ranks_of_rows = SINGLE if is_row_parallel else parallel
        ranks_of_columns = parallel if is_row_parallel else SINGLE
        rows = {
            name: part if isinstance(part, Span) else Span.shard_of(part, ranks_of_rows)
            for name, part in parts.items()
        }
        columns = Span.shard_of(in_features, ranks_of_columns)
        self.format: WeightFormat = formats.of([*parts], Matrix(rows, columns, bias, tied))
        # Of the result, if not that of the input: a head's logits leave it in float32.
        self.out_dtype: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the product: [T, in] -> [T, out]."""
        return self.format.linear(x, self.out_dtype)

    __call__ = forward

    def partials(self, x: Tensor) -> Tensor:
        """Return `forward`, possibly as partial sums: see `ops.linear.partials`."""
        return self.format.partials(x)

    def gate_up(self, x: Tensor) -> Tensor:
        """Return silu(gate) · up of two parts, the gate's first: [T, in] -> [T, out / 2]."""
        return self.format.gate_up(x)

    def tensors(self) -> Mapping[str, Destination]:
        """Return the format's tensors, such as `<part>.weight` and `<part>.bias`."""
        return self.format.tensors()

    def finish(self) -> None:
        """Replace the loaded format by the one that multiplies, and free what that does not use."""
        self.format = self.format.finish()
