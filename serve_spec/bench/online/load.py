"""Loads and their requests: closed loops of streams, and open loops on a seeded schedule.

An open loop sends on schedule even if the server stalls, and its latencies count from the schedule
(no coordinated omission). A closed loop sends when the answer before is complete, and its latencies
count from there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle, islice, pairwise
from typing import Any, TypeAlias

from serve_spec.bench.dataset import ChatPrompt, Message
from serve_spec.bench.workload import HELD_OUT_PACKAGES, held_out_prompts
from serve_spec.core.request import SamplingParams

Sample: TypeAlias = Mapping[str, Any]
"""State of a replica at `time_s` of a run, from `/server_info`."""


@dataclass(frozen=True)
class ClosedLoop:
    """Streams with one request at a time each, without pauses."""

    streams: int
    num_replicas: int | None = None
    """Replicas that `streams` is for each of; None: `streams` is for all together."""

    @property
    def name(self) -> str:
        """Return its name in tables."""
        return f"closed {self.streams}" + " a replica" * (self.num_replicas is not None)

    @property
    def num_streams(self) -> int:
        """Return the streams of all replicas together."""
        return self.streams * (self.num_replicas or 1)

    def arrivals(self, count: int, seed: int) -> None:
        """Return None: a request is due when the one before it has ended."""


@dataclass(frozen=True)
class Poisson:
    """Requests with exponential gaps, `rate` per second on average."""

    rate: float
    num_streams = None

    @property
    def name(self) -> str:
        """Return its name in tables."""
        return f"poisson {self.rate:g}/s"

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Return the due times of `count` requests, in seconds from the start, ascending."""
        rng = random.Random(seed)
        return list(accumulate(rng.expovariate(1.0) / self.rate for _ in range(count)))


@dataclass(frozen=True)
class Bursty:
    """Bursts of `burst_size` requests at Poisson times; `rate` is in requests per second."""

    rate: float
    burst_size: int
    num_streams = None

    @property
    def name(self) -> str:
        """Return its name in tables."""
        return f"bursty {self.rate:g}/s x{self.burst_size}"

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Return due times in seconds, ascending; the last burst may be smaller."""
        num_bursts = -(-count // self.burst_size)
        bursts = Poisson(self.rate / self.burst_size).arrivals(num_bursts, seed)
        return [bursts[request // self.burst_size] for request in range(count)]


@dataclass(frozen=True)
class Ramp:
    """A Poisson process whose rate changes linearly from `first_rate` to `last_rate`."""

    first_rate: float
    last_rate: float
    num_streams = None

    @property
    def name(self) -> str:
        """Return its name in tables."""
        return f"ramp {self.first_rate:g}-{self.last_rate:g}/s"

    def seconds(self, count: int) -> float:
        """Return the length of the ramp: `count` requests at the mean of both rates."""
        return 2 * count / (self.first_rate + self.last_rate)

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Return due times in seconds, ascending, all within `seconds(count)`.

        Given their number, the arrivals of a Poisson process are independent draws with density
        proportional to the rate; each is the inverse of a uniform fraction.
        """
        rng = random.Random(seed)
        fractions = sorted(rng.random() for _ in range(count))
        return [self._time_of(fraction) * self.seconds(count) for fraction in fractions]

    def _time_of(self, fraction: float) -> float:
        """Return the part of the ramp, 0 to 1, by which `fraction` of its requests are due."""
        first, last = self.first_rate, self.last_rate
        # The root of (last - first)/2 · x² + first · x = fraction · (first + last)/2. This form
        # also holds for equal rates.
        total = fraction * (first + last)
        return total / (first + math.sqrt(first * first + (last - first) * total))


Load: TypeAlias = ClosedLoop | Poisson | Bursty | Ramp


@dataclass(frozen=True)
class CompletionRequest:
    """A request of the completions API, or with `messages` of the chat completions API.

    prompt: text or token ids; of a chat those that an engine without HTTP gets. category: of a
    dataset.
    """

    prompt: str | list[int]
    params: SamplingParams
    messages: tuple[Message, ...] = ()
    category: str | None = None


Requests: TypeAlias = Sequence[CompletionRequest]


@dataclass(frozen=True)
class Served:
    """The outcome of a request. Times are in seconds since the run began."""

    due_s: float
    """The scheduled time; in a closed loop, the time of sending."""
    sent_s: float
    ended_s: float
    chunk_s: tuple[float, ...] = ()
    """Arrival of every chunk with tokens."""
    text: str = ""
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    speculation: Mapping[str, Any] = field(default_factory=dict)
    """`usage.speculation` of the answer; empty if the server does not send it."""
    token_ids: tuple[int, ...] = ()
    """Empty over HTTP."""
    error: str | None = None
    """Why the answer is incomplete: an HTTP status or a short reason."""

    @property
    def ttft_s(self) -> float:
        """Return the time to first token since the request was due."""
        return self.chunk_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        """Return the time to last token since the request was due."""
        return self.chunk_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Return the time per output token after the first; None for a single token."""
        if self.num_tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_tokens - 1)

    @property
    def chunk_gaps_s(self) -> list[float]:
        """Return the times between chunks; a chunk holds the tokens of a round."""
        return [after - before for before, after in pairwise(self.chunk_s)]


@dataclass(frozen=True)
class LoadRun:
    """A load that ran once. `served` is in the order of the requests."""

    served: Sequence[Served]
    samples: Sequence[Sample] = ()
    client_cpu_fraction: float | None = None
    """CPU time of the client over wall time; near 1, the client is the limit."""

    @property
    def seconds(self) -> float:
        """Return the time from the first due time to the last end."""
        return max(s.ended_s for s in self.served) - min(s.due_s for s in self.served)


def text_requests(
    count: int,
    *,
    prompt_chars: int,
    output_tokens: int,
    temperature: float,
    packages: Sequence[str] = HELD_OUT_PACKAGES,
    seed: int = 0,
    mixed: bool = False,
) -> list[CompletionRequest]:
    """Return `count` requests with held-out prompts of `prompt_chars` characters.

    mixed: every other one is hard to draft.
    """
    prompts = held_out_prompts(
        lambda text: [ord(character) for character in text],
        count=count,
        num_tokens=prompt_chars,
        seed=seed,
        packages=packages,
    )
    texts = ["".join(map(chr, prompt)) for prompt in prompts]
    hard = [mixed and number % 2 == 1 for number in range(count)]
    return [
        CompletionRequest(
            _shuffled(text, number) if is_hard else text,
            SamplingParams(
                max_tokens=output_tokens,
                temperature=1.0 if is_hard else temperature,
                seed=10**6 * seed + number,
                ignore_eos=True,
            ),
        )
        for number, (text, is_hard) in enumerate(zip(texts, hard, strict=True))
    ]


def chat_requests(
    chats: Mapping[str, Sequence[ChatPrompt]],
    count: int,
    *,
    output_tokens: int,
    temperature: float,
    seed: int = 0,
) -> list[CompletionRequest]:
    """Return `count` chats, of each category in turn, again from the first if there are fewer."""
    endless = [cycle(prompts) for prompts in chats.values()]
    in_turn = (next(prompts) for prompts in cycle(endless))
    return [
        CompletionRequest(
            "",
            SamplingParams(
                max_tokens=output_tokens, temperature=temperature, seed=10**6 * seed + n
            ),
            prompt.messages,
            prompt.category,
        )
        for n, prompt in enumerate(islice(in_turn, count))
    ]


def _shuffled(text: str, seed: int) -> str:
    words = text.split(" ")
    random.Random(seed).shuffle(words)
    return " ".join(words)
