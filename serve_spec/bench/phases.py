"""Kinds of text to draft, from easy to hard, and phases of them for the simulator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TextKind:
    """Source of a prompt, and the temperature of its text."""

    prompts: str
    """`code`: held-out source, as the models know it; `shuffled`: its tokens in random order."""
    temperature: float


@dataclass(frozen=True)
class TextRequest:
    """One request of a phase."""

    kind: TextKind
    prompt: Sequence[int]
    seed: int


CLASSES: dict[str, tuple[TextKind, ...]] = {
    "predictable": (TextKind("code", 0.0),),
    "heated": (TextKind("code", 1.0),),
    "mixture": (TextKind("code", 0.0), TextKind("shuffled", 1.0)),
    "unpredictable": (TextKind("shuffled", 1.0),),
}
"""Prompt classes by name. The requests of a phase take the kinds of its class in turn."""


_GOLDEN_RATIO = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Phase:
    """A closed loop: `batch_size` requests run together, the next starts when one ends."""

    prompt_class: str
    batch_size: int
    num_requests: int
    num_tokens: int
    """Tokens a request emits in the mean."""
    spread: float = 0.0
    """Lengths lie within this share around the mean, so that requests do not end in step."""

    @property
    def name(self) -> str:
        """Class and batch size."""
        return f"{self.prompt_class}, batch {self.batch_size}"

    @property
    def total_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(map(self.length, range(self.num_requests)))

    def length(self, request: int) -> int:
        """Return the tokens that request number `request` emits."""
        # Multiples of the golden ratio fill the range evenly, in no order.
        place = 2 * (request * _GOLDEN_RATIO % 1.0) - 1 if self.spread else 0.0
        return max(1, round(self.num_tokens * (1.0 + self.spread * place)))

    @property
    def kinds(self) -> tuple[TextKind, ...]:
        """Kinds of its requests, in turn."""
        return CLASSES[self.prompt_class]

    def kind(self, request: int) -> TextKind:
        """Return the kind of request number `request`."""
        return self.kinds[request % len(self.kinds)]

    def place(self, request: int) -> int:
        """Return how many requests of its kind came before request number `request`."""
        return request // len(self.kinds)


def shuffled(prompts: Sequence[Sequence[int]], seed: int = 0) -> list[list[int]]:
    """Return the same tokens in random order: text of the vocabulary that no model expects."""
    rng = random.Random(seed)
    return [rng.sample(prompt, len(prompt)) for prompt in prompts]
