"""Runs one phase on an engine: a fixed number of requests at a time, every round noted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from serve_spec.bench.phases import TextRequest
from serve_spec.bench.waves import heard_rounds
from serve_spec.core.record import StepRecord
from serve_spec.core.request import SamplingParams, TokenDelta
from serve_spec.engine.engine import SpecEngine


@dataclass(frozen=True)
class MeasuredRound:
    """A round as its caller felt it."""

    ms: float
    """Wall time, policy and texts included."""
    record: StepRecord


@dataclass
class PhaseRun:
    """What became of the requests of a phase, and of every round."""

    rounds: list[MeasuredRound] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    """Token ids of every request, in order of the requests."""

    @property
    def decode_rounds(self) -> list[MeasuredRound]:
        """Rounds with decode rows, whether or not prompts shared them."""
        return [r for r in self.rounds if r.record.batch_size]

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
        return sum(r.record.num_output_tokens for r in self.rounds)


def prompt_ms_per_token(runs: Iterable[PhaseRun]) -> float:
    """What a prompt token takes, by the rounds that computed nothing but prompts."""
    alone = [r for run in runs for r in run.rounds if not r.record.batch_size]
    return sum(r.ms for r in alone) / sum(r.record.num_prefill_tokens for r in alone)


class ClosedLoop:
    """A phase on an engine, as far as it got: `batch_size` of its requests are open at any time.

    lengths: tokens that each of `requests` emits.
    """

    def __init__(
        self,
        engine: SpecEngine,
        requests: Sequence[TextRequest],
        batch_size: int,
        lengths: Sequence[int],
    ) -> None:
        self.engine = engine
        self.batch_size = batch_size
        self.lengths = lengths
        self.num_tokens = sum(lengths)
        self.run = PhaseRun(texts=[[] for _ in requests])
        self._waiting = iter(enumerate(requests))
        self._num_open = 0
        self._num_emitted = 0

    def advance(self, num_tokens: int) -> None:
        """Runs rounds until the texts have so many tokens together; all of them end every text.

        The engine must have no other work. Its metrics go to the run meanwhile.
        """
        with heard_rounds(self.engine) as heard:
            while self._num_emitted < num_tokens:
                self._open_requests()
                self._run(self.engine.step, heard)
            self._run(self.engine.drain, heard)

    def _run(self, step: Callable[[], list[TokenDelta]], heard: list[StepRecord]) -> None:
        started = time.perf_counter()
        deltas = step()
        ms = (time.perf_counter() - started) * 1e3
        if heard:
            self.run.rounds.append(MeasuredRound(ms, heard.pop()))
        for delta in deltas:
            self.run.texts[int(delta.request_id)] += delta.token_ids
            self._num_emitted += len(delta.token_ids)
            self._num_open -= delta.finish_reason is not None

    def _open_requests(self) -> None:
        for number, request in islice(self._waiting, self.batch_size - self._num_open):
            asked = _asked(request, self.lengths[number])
            self.engine.add(self.engine.new_sequence(str(number), *asked))
            self._num_open += 1


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
    loop = ClosedLoop(engine, requests, batch_size, lengths)
    loop.advance(loop.num_tokens)
    return loop.run


def _asked(request: TextRequest, num_tokens: int) -> tuple[list[int], SamplingParams]:
    params = SamplingParams(
        max_tokens=num_tokens,
        temperature=request.kind.temperature,
        seed=request.seed,
        ignore_eos=True,
    )
    return list(request.prompt), params
