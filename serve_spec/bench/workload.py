"""Workloads of benchmarks: held-out prompts, kinds of text by predictability, and loads."""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as naturals
from pathlib import Path
from typing import TypeAlias

HELD_OUT_PACKAGES = ("networkx", "aiohttp")
"""Packages outside the corpus of the shipped pair that torch and Ray depend on."""
PROMPT_TOKENS = 128
"""Tokens of a prompt from source files."""
OUTPUT_TOKENS = 64
"""Mean output tokens of a request in a closed loop."""
STEADY_TOKENS = 192
"""Output tokens of a request in a steady-state batch: few requests end while it is measured."""
SPREAD = 0.5
"""Lengths lie within this share around the mean, so that requests do not end together."""

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2

Prompts: TypeAlias = Mapping[str, Sequence[Sequence[int]]]
"""Prompts by source (`TextKind.prompts`)."""


def place_of(request: int) -> float:
    """Return the place of a request's length in its range, from -1 to 1."""
    # Multiples of the golden ratio fill the range evenly, in no order.
    return 2 * (request * _GOLDEN_RATIO % 1.0) - 1


@dataclass(frozen=True)
class TextKind:
    """The source of a prompt and the sampling temperature."""

    prompts: str
    """`code`: held-out source files; `shuffled`: their tokens in random order. Else a category of
    a dataset."""
    temperature: float


@dataclass(frozen=True)
class TextRequest:
    """A request of token ids."""

    kind: TextKind
    prompt: Sequence[int]
    seed: int
    may_stop: bool = False
    """Whether the model may end the text; else it has exactly the wanted tokens."""


CLASSES: dict[str, tuple[TextKind, ...]] = {
    "predictable": (TextKind("code", 0.0),),
    "heated": (TextKind("code", 1.0),),
    "mixture": (TextKind("code", 0.0), TextKind("shuffled", 1.0)),
    "unpredictable": (TextKind("shuffled", 1.0),),
}
"""Classes of text by name. Requests of a class cycle through its kinds."""


@dataclass(frozen=True)
class Load:
    """`batch_size` open requests of one class; a request that ends is replaced.

    prompt_class: one of `CLASSES`, or a category of a dataset.
    """

    prompt_class: str
    batch_size: int
    num_tokens: int = OUTPUT_TOKENS
    """Output tokens of a request; a mean unless `is_steady`."""
    temperature: float | None = None
    """Temperature of all texts; None: those of the class."""
    is_steady: bool = False
    """All requests start together and have the same length."""
    may_stop: bool = False
    """Whether the model may end a text before its length; not if `is_steady`."""

    @property
    def label(self) -> str:
        """Return batch size, class and temperatures."""
        temperatures = "/".join(f"{kind.temperature:g}" for kind in self.kinds)
        return f"batch {self.batch_size}, {self.prompt_class} T={temperatures}"

    @property
    def kinds(self) -> list[TextKind]:
        """Return the kinds of its requests, in turn."""
        kinds = CLASSES.get(self.prompt_class, (TextKind(self.prompt_class, 0.0),))
        if self.temperature is None:
            return list(kinds)
        return [TextKind(kind.prompts, self.temperature) for kind in kinds]

    def length(self, request: int) -> int:
        """Return the output tokens of request number `request`.

        Requests of the first batch are shortened as if the load had been running for a while.
        """
        if self.is_steady:
            return self.num_tokens
        length = self.num_tokens * (1 + SPREAD * place_of(request))
        if request < self.batch_size:
            length *= (request + 1) / self.batch_size
        return max(1, round(length))

    def requests(self, number: int, prompts: Prompts) -> Iterator[tuple[TextRequest, int]]:
        """Yield the requests of phase `number` and their lengths, without end.

        The same number gives the same requests. Prompts repeat with other seeds.
        """
        kinds = self.kinds
        for request in naturals():
            kind = kinds[request % len(kinds)]
            pool = prompts[kind.prompts]
            prompt = pool[(request // len(kinds) + 31 * number) % len(pool)]
            seed, may_stop = 1_000_000 * number + request, self.may_stop and not self.is_steady
            yield TextRequest(kind, prompt, seed, may_stop), self.length(request)


def phases(
    batch_sizes: Sequence[int],
    classes: Sequence[str],
    temperatures: Sequence[float | None],
    num_tokens: int = OUTPUT_TOKENS,
) -> list[Load]:
    """Return every text at every batch size, in order; in reverse while the batch size falls.

    Each change is either of the text or of the batch size.
    """
    texts = [(name, temperature) for name in classes for temperature in temperatures]
    loads = []
    for at, batch_size in enumerate(batch_sizes):
        falls = at > 0 and batch_size < batch_sizes[at - 1]
        for name, temperature in reversed(texts) if falls else texts:
            loads.append(Load(name, batch_size, num_tokens, temperature))
    return loads


def steady_batches(
    batch_sizes: Sequence[int],
    classes: Sequence[str],
    temperatures: Sequence[float | None],
    num_tokens: int = STEADY_TOKENS,
) -> list[Load]:
    """Return a steady-state batch of every text at every batch size."""
    return [
        Load(name, batch_size, num_tokens, temperature, is_steady=True)
        for batch_size in sorted(set(batch_sizes))
        for name in classes
        for temperature in temperatures
    ]


def prompts_by_source(
    encode: Callable[[str], list[int]], *, count: int, num_tokens: int
) -> dict[str, list[list[int]]]:
    """Return held-out prompts (see `held_out_prompts`), and the same with shuffled tokens."""
    code = held_out_prompts(encode, count=count, num_tokens=num_tokens)
    rng = random.Random(0)  # text that no model can predict
    return {"code": code, "shuffled": [rng.sample(prompt, len(prompt)) for prompt in code]}


def held_out_prompts(
    encode: Callable[[str], list[int]],
    *,
    count: int,
    num_tokens: int,
    seed: int = 0,
    packages: Sequence[str] = HELD_OUT_PACKAGES,
) -> list[list[int]]:
    """Return `count` prompts of `num_tokens` ids, from random lines of source files.

    Raises ValueError if no file is long enough or no package installed.
    """
    files = [path for package in packages for path in _source_files(package)]
    if not files:
        raise ValueError(f"packages={list(packages)}: none is installed; give installed ones")
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(count * 50):
        lines = rng.choice(files).read_text(encoding="utf-8").splitlines(keepends=True)
        if len(lines) < 40:
            continue
        start = rng.randrange(len(lines) - 20)
        ids = encode("".join(lines[start : start + num_tokens]))
        if len(ids) >= num_tokens:
            prompts.append(ids[:num_tokens])
        if len(prompts) == count:
            return prompts
    raise ValueError(f"num_tokens={num_tokens}: no held-out file is that long; lower it")


def _source_files(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    root = Path(spec.submodule_search_locations[0])
    return sorted(path for path in root.rglob("*.py") if "tests" not in path.parts)
