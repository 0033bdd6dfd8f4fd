"""Runs one phase on an engine: a fixed number of requests at a time, every round noted."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from serve_spec.bench.phases import TextRequest
from serve_spec.core.request import SamplingParams
from serve_spec.engine.engine import SpecEngine
from serve_spec.metrics import StepStats


@dataclass(frozen=True)
class MeasuredRound:
    """A round as its caller felt it."""

    ms: float
    """Wall time, policy and texts included."""
    stats: StepStats


@dataclass
class PhaseRun:
    """What became of the requests of a phase, and of every round."""

    rounds: list[MeasuredRound] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    """Token ids of every request, in order of the requests."""

    @property
    def decode_rounds(self) -> list[MeasuredRound]:
        """Rounds with decode rows, whether or not prompts shared them."""
        return [r for r in self.rounds if r.stats.batch_size]

    @property
    def wall_ms(self) -> float:
        """All rounds."""
        return sum(r.ms for r in self.rounds)

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(len(text) for text in self.texts)

    @property
    def num_decode_tokens(self) -> int:
        """Without the first of each text, which its prompt's round draws."""
        return sum(r.stats.num_output_tokens for r in self.rounds)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens computed."""
        return sum(r.stats.num_prefill_tokens for r in self.rounds)


def prompt_ms_per_token(runs: Iterable[PhaseRun]) -> float:
    """What a prompt token takes, by the rounds that computed nothing but prompts."""
    alone = [r for run in runs for r in run.rounds if not r.stats.batch_size]
    return sum(r.ms for r in alone) / sum(r.stats.num_prefill_tokens for r in alone)


def run_phase(
    engine: SpecEngine,
    requests: Sequence[TextRequest],
    batch_size: int,
    num_tokens: int | Sequence[int],
) -> PhaseRun:
    """Runs `requests` to `num_tokens` tokens (of all, or of each), `batch_size` at a time.

    The engine must be idle. Its metrics go to the run meanwhile, and to their sink afterwards.
    """
    lengths = [num_tokens] * len(requests) if isinstance(num_tokens, int) else num_tokens
    run = PhaseRun(texts=[[] for _ in requests])
    heard: list[StepStats] = []
    sink, engine.metrics = engine.metrics, _Listener(heard)
    waiting = iter(enumerate(requests))
    num_open = 0
    try:
        while True:
            for number, request in islice(waiting, batch_size - num_open):
                engine.add(engine.new_sequence(str(number), *_asked(request, lengths[number])))
                num_open += 1
            if not num_open:
                return run
            started = time.perf_counter()
            deltas = engine.step()
            ms = (time.perf_counter() - started) * 1e3
            run.rounds.append(MeasuredRound(ms, heard.pop()))
            for delta in deltas:
                run.texts[int(delta.request_id)] += delta.token_ids
                num_open -= delta.finish_reason is not None
    finally:
        engine.metrics = sink


@dataclass(frozen=True)
class _Listener:
    heard: list[StepStats]

    def observe(self, stats: StepStats) -> None:
        self.heard.append(stats)


def _asked(request: TextRequest, num_tokens: int) -> tuple[list[int], SamplingParams]:
    params = SamplingParams(
        max_tokens=num_tokens,
        temperature=request.kind.temperature,
        seed=request.seed,
        ignore_eos=True,
    )
    return list(request.prompt), params
