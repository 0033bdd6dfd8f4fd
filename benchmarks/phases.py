"""Phases of load for the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from serve_spec.bench.workload import CLASSES, TextKind

_GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Phase:
    """A closed loop: `batch_size` requests run together, and the next starts when one ends."""

    prompt_class: str
    batch_size: int
    num_requests: int
    num_tokens: int
    """Mean output tokens of a request."""
    spread: float = 0.0
    """Lengths lie within this share around the mean, so that requests do not end together."""

    @property
    def name(self) -> str:
        """Return class and batch size."""
        return f"{self.prompt_class}, batch {self.batch_size}"

    @property
    def total_tokens(self) -> int:
        """Return the tokens of all requests."""
        return sum(map(self.length, range(self.num_requests)))

    def length(self, request: int) -> int:
        """Return the output tokens of request number `request`."""
        # Multiples of the golden ratio fill the range evenly, in no order.
        place = 2 * (request * _GOLDEN_RATIO % 1.0) - 1 if self.spread else 0.0
        return max(1, round(self.num_tokens * (1.0 + self.spread * place)))

    @property
    def kinds(self) -> tuple[TextKind, ...]:
        """Return the kinds of its requests, in turn."""
        return CLASSES[self.prompt_class]

    def kind(self, request: int) -> TextKind:
        """Return the kind of request number `request`."""
        return self.kinds[request % len(self.kinds)]

    def place(self, request: int) -> int:
        """Return how many requests of its kind came before request number `request`."""
        return request // len(self.kinds)
