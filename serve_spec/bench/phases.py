"""Phases of a trace: how many requests run together, and how easy their text is to draft."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TextKind:
    """Where a prompt comes from and how hot its text is drawn."""

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

CPU_BATCH_SIZES = (1, 4, 16, 64, 16, 4, 1)
GPU_BATCH_SIZES = (1, 8, 32, 64, 128, 256, 128, 64, 32, 8, 1)
MIN_TOKENS, USUAL_TOKENS, MAX_TOKENS = 32, 64, 96
SPREAD = 0.5
LONGEST_TOKENS = round(MAX_TOKENS * (1 + SPREAD))
MIN_WAVES = 2
"""Batches that follow each other in a phase, at least; or its thinning end would be most of it."""

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
"""Tokens per request."""


@dataclass(frozen=True)
class Phase:
    """A closed loop: `batch_size` requests run together, the next starts when one ends."""

    prompt_class: str
    batch_size: int
    num_requests: int
    num_tokens: int
    """Tokens a request emits in the mean."""
    spread: float = 0.0
    """Lengths lie within this share around the mean. Of equal lengths, plain decoding would start
    and end a batch in step, and nothing that speculates could."""

    @property
    def name(self) -> str:
        """For people: class and batch size."""
        return f"{self.prompt_class}, batch {self.batch_size}"

    @property
    def total_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens of every request."""
        return [self.length(request) for request in range(self.num_requests)]

    def length(self, request: int) -> int:
        """Tokens request number `request` emits."""
        # Multiples of the golden ratio fill the range evenly, in no order.
        place = 2 * (request * _GOLDEN_RATIO % 1.0) - 1 if self.spread else 0.0
        return max(1, round(self.num_tokens * (1 + self.spread * place)))

    @property
    def kinds(self) -> tuple[TextKind, ...]:
        """What its requests ask for, in turn."""
        return CLASSES[self.prompt_class]

    def kind(self, request: int) -> TextKind:
        """What request number `request` asks for."""
        return self.kinds[request % len(self.kinds)]

    def place(self, request: int) -> int:
        """How many requests of its kind came before request number `request`."""
        return request // len(self.kinds)


def phase_trace(
    batch_sizes: Sequence[int],
    classes: Sequence[str],
    plain_round_ms: Mapping[int, float],
    seconds_per_phase: float,
) -> list[Phase]:
    """Every class at every batch size, in order; classes backwards once the batch size falls.

    So a class changes within a batch size (its text, its temperature) and a batch size within a
    class, up and down.

    plain_round_ms: of a round without drafts, by batch size; sizes a phase for `seconds_per_phase`
        of plain decoding.
    """
    phases = []
    for at, batch_size in enumerate(batch_sizes):
        falls = at > 0 and batch_size < batch_sizes[at - 1]
        num_rounds = seconds_per_phase * 1e3 / plain_round_ms[batch_size]
        waves = max(MIN_WAVES, round(num_rounds / USUAL_TOKENS))
        num_tokens = min(MAX_TOKENS, max(MIN_TOKENS, round(num_rounds / waves)))
        phases += [
            Phase(name, batch_size, waves * batch_size, num_tokens, SPREAD)
            for name in (reversed(classes) if falls else classes)
        ]
    return phases


def phase_requests(
    phase: Phase, index: int, prompts: Mapping[str, Sequence[Sequence[int]]]
) -> list[TextRequest]:
    """The requests of phase number `index` of a trace; the same ones every time.

    prompts: by source (`TextKind.prompts`); they come again when used up, with other seeds.
    """
    requests = []
    for number in range(phase.num_requests):
        kind = phase.kind(number)
        pool = prompts[kind.prompts]
        prompt = pool[(phase.place(number) + 31 * index) % len(pool)]
        requests.append(TextRequest(kind, prompt, seed=100_000 * index + number))
    return requests


def shuffled(prompts: Sequence[Sequence[int]], seed: int = 0) -> list[list[int]]:
    """The same tokens in random order: text of the vocabulary that no model expects."""
    rng = random.Random(seed)
    return [rng.sample(prompt, len(prompt)) for prompt in prompts]
