"""What a load run asks, and what became of it; the same for HTTP and for the engine alone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from serve_spec.bench.workload import HELD_OUT_PACKAGES, held_out_prompts
from serve_spec.core.request import SamplingParams

Sample: TypeAlias = Mapping[str, Any]
"""What a replica said of itself at `time_s` of a run; see `online_watch.accounts`."""


@dataclass(frozen=True)
class TextRequest:
    """One completion to ask for."""

    prompt: str
    params: SamplingParams


@dataclass(frozen=True)
class Served:
    """What became of one request. Times are seconds since the run began."""

    due_s: float
    """When it was to be sent: on schedule, or in a closed loop when it was sent."""
    sent_s: float
    ended_s: float
    chunk_s: tuple[float, ...] = ()
    """When each piece came that carried tokens."""
    text: str = ""
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    speculation: Mapping[str, Any] = field(default_factory=dict)
    """`usage.speculation` of the answer; empty where the server does not send it."""
    error: str | None = None
    """Why there is no whole answer: an HTTP status, or a word for what happened."""

    @property
    def ttft_s(self) -> float:
        """Time to first token, from when the request was due."""
        return self.chunk_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        """Time to last token, from when the request was due."""
        return self.chunk_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a text of one token."""
        if self.num_tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_tokens - 1)

    @property
    def chunk_gaps_s(self) -> list[float]:
        """Times between chunks; a chunk holds the tokens of a round, one or many."""
        return [after - before for before, after in pairwise(self.chunk_s)]


@dataclass(frozen=True)
class LoadRun:
    """One load, run once. `served` is in order of the requests."""

    served: Sequence[Served]
    samples: Sequence[Sample] = ()
    client_cpu_share: float | None = None
    """Time on a CPU of this process over wall time: near 1, the client is what is measured."""
    first_token_ms: Mapping[str, float] = field(default_factory=dict)
    """Mean time to first token as the server measures it; see `online_first_tokens`."""

    @property
    def seconds(self) -> float:
        """From the first due time to the last end."""
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
) -> list[TextRequest]:
    """`count` requests of exactly so many characters and tokens, the same every time.

    Prompts are texts, not token ids, because a server is asked in texts and tokenizes them itself.

    mixed: every other one is hard to draft: its words are shuffled, its text is drawn at T = 1.

    Raises:
        ValueError: see `held_out_prompts`.
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
        TextRequest(
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


def _shuffled(text: str, seed: int) -> str:
    words = text.split(" ")
    random.Random(seed).shuffle(words)
    return " ".join(words)
