"""Traces of requests for `serve-spec bench mixed`: prompts of different lengths, by a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

from serve_spec.bench.online.load import CompletionRequest
from serve_spec.core.request import SamplingParams

Bounds: TypeAlias = tuple[int, int]
"""Least and most, both included."""


@dataclass(frozen=True)
class PromptPool:
    """Texts that are joined to prompts of any length.

    texts: token ids. before, after: what a chat template puts around a message. about: what they
    are, in words.
    """

    texts: Sequence[Sequence[int]]
    about: str
    before: Sequence[int] = ()
    after: Sequence[int] = ()

    def prompt(self, number: int, num_tokens: int) -> list[int]:
        """Return `num_tokens` ids: the end of text `number`, after the texts before it if short."""
        wanted = max(1, num_tokens - len(self.before) - len(self.after))
        parts: list[Sequence[int]] = []
        while sum(map(len, parts)) < wanted:
            parts.append(self.texts[(number - len(parts)) % len(self.texts)])
        text = list(chain.from_iterable(reversed(parts)))
        return [*self.before, *text[-wanted:], *self.after][-num_tokens:]


@dataclass(frozen=True)
class RequestTrace:
    """Requests with lengths drawn evenly from bounds; `streams` of them run at a time."""

    name: str
    num_requests: int
    prompt_tokens: Bounds
    output_tokens: Bounds
    streams: int

    def scaled(self, factor: float) -> RequestTrace:
        """Return the trace with all counts and lengths times `factor`, at least 1."""

        def times(number: int) -> int:
            return max(1, round(factor * number))

        def both(bounds: Bounds) -> Bounds:
            return times(bounds[0]), times(bounds[1])

        return self.resized(
            times(self.num_requests),
            both(self.prompt_tokens),
            both(self.output_tokens),
            times(self.streams),
        )

    def resized(
        self,
        num_requests: int | None = None,
        prompt_tokens: Bounds | None = None,
        output_tokens: Bounds | None = None,
        streams: int | None = None,
    ) -> RequestTrace:
        """Return the trace with the sizes that are given."""
        return replace(
            self,
            num_requests=num_requests or self.num_requests,
            prompt_tokens=prompt_tokens or self.prompt_tokens,
            output_tokens=output_tokens or self.output_tokens,
            streams=streams or self.streams,
        )

    @property
    def longest(self) -> int:
        """Return the most tokens of a request, prompt and output."""
        return self.prompt_tokens[1] + self.output_tokens[1]

    @property
    def label(self) -> str:
        """Return the sizes in words."""
        prompts, outputs = (f"{a} to {b}" for a, b in (self.prompt_tokens, self.output_tokens))
        return (
            f"{self.name}: {self.num_requests} requests, prompts of {prompts} tokens, outputs of "
            f"{outputs}, {self.streams} at a time"
        )

    def lengths(self, seed: int) -> list[tuple[int, int]]:
        """Return the prompt and output tokens of every request; the same seed gives the same."""
        rng = random.Random(f"{self.name} {seed}")
        sizes = self.prompt_tokens, self.output_tokens
        return [(rng.randint(*sizes[0]), rng.randint(*sizes[1])) for _ in range(self.num_requests)]

    def requests(
        self, pool: PromptPool, *, temperature: float, seed: int
    ) -> Sequence[CompletionRequest]:
        """Return the requests. No text ends before its length, so that all variants do as much."""
        return [
            CompletionRequest(
                pool.prompt(number, num_prompt),
                SamplingParams(
                    max_tokens=num_output,
                    temperature=temperature,
                    seed=10**6 * seed + number,
                    ignore_eos=True,
                    detokenize=False,
                ),
            )
            for number, (num_prompt, num_output) in enumerate(self.lengths(seed))
        ]


TRACES = {
    trace.name: trace
    for trace in (
        RequestTrace("mid", 192, (256, 3840), (64, 320), 64),
        RequestTrace("long", 48, (6000, 14000), (96, 256), 16),
        RequestTrace("chat", 512, (32, 512), (32, 256), 64),
    )
}
"""Traces by name."""
