"""The phases of `bench adaptive`: which texts, how many at a time, for how long."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from serve_spec.bench.phases import CLASSES, TextKind, TextRequest

OUTPUT_TOKENS = 64
"""Mean tokens of a request;"""
CELL_TOKENS = 192
"""of full batches, so that hardly any ends while they are measured."""
SPREAD = 0.5
"""Lengths lie within this share around the mean, so that requests do not end in step."""

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Load:
    """`batch_size` requests of one class at any time; one that ends is replaced."""

    prompt_class: str
    batch_size: int
    num_tokens: int = OUTPUT_TOKENS
    """Tokens a request emits; a mean if `is_steady` is not set."""
    temperature: float | None = None
    """Of all its texts; None: those of the class."""
    is_steady: bool = False
    """All requests start together and are of one length."""

    @property
    def label(self) -> str:
        """Batch size, class and temperatures."""
        temperatures = "/".join(f"{kind.temperature:g}" for kind in self.kinds)
        return f"batch {self.batch_size}, {self.prompt_class} T={temperatures}"

    @property
    def kinds(self) -> list[TextKind]:
        """Kinds of its requests, in turn."""
        kinds = CLASSES[self.prompt_class]
        if self.temperature is None:
            return list(kinds)
        return [TextKind(kind.prompts, self.temperature) for kind in kinds]

    def length(self, request: int) -> int:
        """Return the tokens that request number `request` emits.

        Those of the first batch are cut at all ages, as if the load had run for long.
        """
        if self.is_steady:
            return self.num_tokens
        # Multiples of the golden ratio fill the range evenly, in no order.
        place = 2 * (request * _GOLDEN_RATIO % 1.0) - 1
        length = self.num_tokens * (1 + SPREAD * place)
        if request < self.batch_size:
            length *= (request + 1) / self.batch_size
        return max(1, round(length))

    def requests(
        self, number: int, prompts: Mapping[str, Sequence[Sequence[int]]]
    ) -> Iterator[tuple[TextRequest, int]]:
        """Yield the requests of phase `number` and their lengths, the same every time, endlessly.

        prompts: by source (`TextKind.prompts`), used again and again with other seeds.
        """
        kinds = self.kinds
        for request in count():
            kind = kinds[request % len(kinds)]
            pool = prompts[kind.prompts]
            prompt = pool[(request // len(kinds) + 31 * number) % len(pool)]
            seed = 1_000_000 * number + request
            yield TextRequest(kind, prompt, seed), self.length(request)


def phases(
    batch_sizes: Sequence[int],
    classes: Sequence[str],
    temperatures: Sequence[float | None],
    num_tokens: int = OUTPUT_TOKENS,
) -> list[Load]:
    """Return every text at every batch size, in order; texts backwards once the batch size falls.

    So a text changes within a batch size and a batch size within a text, up and down.
    """
    texts = [(name, temperature) for name in classes for temperature in temperatures]
    loads = []
    for at, batch_size in enumerate(batch_sizes):
        falls = at > 0 and batch_size < batch_sizes[at - 1]
        for name, temperature in reversed(texts) if falls else texts:
            loads.append(Load(name, batch_size, num_tokens, temperature))
    return loads


def cells(
    batch_sizes: Sequence[int],
    classes: Sequence[str],
    temperatures: Sequence[float | None],
    num_tokens: int = CELL_TOKENS,
) -> list[Load]:
    """Return full batches of every text at every batch size, each once."""
    return [
        Load(name, batch_size, num_tokens, temperature, is_steady=True)
        for batch_size in sorted(set(batch_sizes))
        for name in classes
        for temperature in temperatures
    ]
