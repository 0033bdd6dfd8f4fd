"""What the ranks that share one model exchange while they compute: the interface."""

from __future__ import annotations

from torch import Tensor

from serve_spec.ops import elementwise
from serve_spec.ops.linear import sum_partials


class TensorParallel:
    """One of `size` ranks; all of them make the same calls in the same order.

    This class is the only rank of one: every call hands back what it was given.
    """

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace x by the sum of all ranks' x, equal to the last bit on every rank."""
        return x

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return `add_rms_norm(all_reduce(x), residual, weight, eps)`; x may be overwritten.

        residual: [T, width]; x: the same, or its partial sums (see `linear.sum_partials`).
        Both are contiguous.
        """
        if self.size > 1:
            x = self.all_reduce(sum_partials(x, residual))
        return elementwise.add_rms_norm(x, residual, weight, eps)

    def gather_columns(self, x: Tensor, width: int) -> Tensor:
        """Return [R, width], in which each rank's x (of one shape) follows the one before.

        The last columns of x may be too many. The result is valid until the next call.
        """
        return x

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Replace x by rank `source`'s x."""
        return x

    def smallest(self, value: int) -> int:
        """Return the least of all ranks' values. The host waits for it."""
        return value

    def close(self) -> None:
        """End the exchange; whatever still waits for another rank fails."""


SINGLE = TensorParallel()
"""One rank alone."""
