"""A histogram of batch sizes, for operators."""

from __future__ import annotations

from collections import Counter


class SizeHistogram:
    """Counts sizes ≥ 1 by powers of two."""

    def __init__(self) -> None:
        self.last = 0
        """The size counted last; 0 before the first."""
        self._counts: Counter[int] = Counter()

    def add(self, size: int) -> None:
        """Counts one size."""
        self.last = size
        self._counts[1 << (size - 1).bit_length()] += 1

    def as_dict(self) -> dict[str, int]:
        """JSON-able; keys are inclusive upper bounds, ascending."""
        return {str(bound): count for bound, count in sorted(self._counts.items())}
