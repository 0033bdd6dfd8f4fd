"""Floats, multiplied as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from serve_spec.layers.formats.base import Matrix, WeightFormat
from serve_spec.layers.module import Destination, parameter
from serve_spec.ops import linear


class PlainWeight(WeightFormat):
    """Floats [out, in] of torch's default dtype: `<part>.weight`, and `<part>.bias` [out].

    conversions: what may take the weight's place after loading; the first that does not return None
    does.
    """

    def __init__(self, matrix: Matrix, conversions: Sequence[Conversion] = ()) -> None:
        super().__init__()
        self._matrix = matrix
        self._conversions = conversions
        self.weight: Tensor = (
            parameter(matrix.out_features, matrix.in_features)
            if matrix.tied is None
            else matrix.tied
        )
        if matrix.has_padding and matrix.tied is None:
            self.weight.zero_()
        self.bias: Tensor | None = parameter(matrix.out_features) if matrix.bias else None
        if self.bias is not None and not matrix.adds_bias:
            self.bias.zero_()

    @property
    def num_bytes(self) -> int:
        """Return the memory of the weight, without a bias."""
        return self.weight.nbytes

    def tensors(self) -> Mapping[str, Destination]:
        """Return `<part>.weight`, unless it is tied, and `<part>.bias` if there is one."""
        tensors: dict[str, Destination] = {}
        if self._matrix.tied is None:
            tensors |= self._matrix.destinations(".weight", self.weight)
        if self.bias is not None:
            tensors |= self._matrix.bias_destinations(self.bias)
        return tensors

    def finish(self) -> WeightFormat:
        """Return the first conversion that takes this weight, or the weight as it is."""
        for convert in self._conversions:
            converted = convert(self)
            if converted is not None:
                return converted
        return self

    def linear(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """See `ops.linear.linear`."""
        return linear.linear(x, self.weight, self.bias, out_dtype)

    def partials(self, x: Tensor) -> Tensor:
        """See `ops.linear.partials`."""
        return linear.partials(x, self.weight) if self.bias is None else self.linear(x)

    def gate_up(self, x: Tensor) -> Tensor:
        """See `ops.linear.gate_up`."""
        return linear.gate_up(x, self.weight) if self.bias is None else super().gate_up(x)


Conversion: TypeAlias = Callable[[PlainWeight], WeightFormat | None]
"""Returns the format that loaded floats become; None if it does not suit them."""
