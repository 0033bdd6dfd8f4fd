"""A closed loop on an engine: a fixed number of open requests, one that ends is replaced."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from serve_spec.adaptive import AdaptiveController
from serve_spec.bench.phases import TextRequest
from serve_spec.bench.waves import heard_rounds
from serve_spec.core.record import StepRecord
from serve_spec.core.request import SamplingParams, TokenDelta
from serve_spec.engine.engine import SpecEngine
from serve_spec.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class MeasuredRound:
    """A step as its caller saw it."""

    ms: float
    """Wall time, policy included."""
    record: StepRecord


@dataclass
class PhaseRun:
    """All rounds and texts of a closed loop of so many requests."""

    rounds: list[MeasuredRound] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    """Token ids of every request, in order of the requests."""

    @property
    def decode_rounds(self) -> list[MeasuredRound]:
        """Rounds in which requests decode, with or without prompt tokens."""
        return [r for r in self.rounds if r.record.batch_size]


class ClosedLoop:
    """A closed loop, as far as it got. It may stop after any step and go on later.

    requests: each with the number of tokens it emits; may be endless.
    """

    def __init__(
        self, engine: SpecEngine, requests: Iterable[tuple[TextRequest, int]], batch_size: int
    ) -> None:
        self.engine = engine
        self.batch_size = batch_size
        self.texts: list[list[int]] = []
        """Token ids of every request that was opened, in order."""
        self.num_emitted = 0
        self._waiting: Iterator[tuple[TextRequest, int]] = iter(requests)
        self._open: set[str] = set()

    def fill(self) -> list[MeasuredRound]:
        """Run the prompts of the first batch."""
        return self._run(lambda: not self.texts or not all(self.texts[: self.batch_size]))

    def advance(self, num_tokens: int) -> list[MeasuredRound]:
        """Run until the texts have so many tokens together, or all requests have ended.

        The engine must have no other work, and has no step in flight afterwards.
        """
        return self._run(lambda: self.num_emitted < num_tokens)

    def close(self) -> None:
        """Abort the open requests."""
        for request_id in self._open:
            self.engine.abort(request_id)
        self._open.clear()

    def _run(self, goes_on: Callable[[], bool]) -> list[MeasuredRound]:
        rounds: list[MeasuredRound] = []
        with heard_rounds(self.engine) as heard:
            while goes_on() and self._open_requests():
                rounds += self._step(self.engine.step, heard)
            return rounds + self._step(self.engine.drain, heard)

    def _step(
        self, step: Callable[[], list[TokenDelta]], heard: list[StepRecord]
    ) -> list[MeasuredRound]:
        started = time.perf_counter()
        deltas = step()
        ms = (time.perf_counter() - started) * 1e3
        for delta in deltas:
            self.texts[int(delta.request_id)] += delta.token_ids
            self.num_emitted += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._open.remove(delta.request_id)
        return [MeasuredRound(ms, heard.pop())] if heard else []

    def _open_requests(self) -> bool:
        """Replace the requests that ended; return whether any is open."""
        for request, num_tokens in islice(self._waiting, self.batch_size - len(self._open)):
            request_id = str(len(self.texts))
            params = SamplingParams(
                max_tokens=num_tokens,
                temperature=request.kind.temperature,
                seed=request.seed,
                ignore_eos=True,
            )
            self.engine.add(self.engine.new_sequence(request_id, list(request.prompt), params))
            self._open.add(request_id)
            self.texts.append([])
        return bool(self._open)


def run_phase(
    engine: SpecEngine, requests: Sequence[TextRequest], batch_size: int, num_tokens: int
) -> PhaseRun:
    """Run `requests` to `num_tokens` tokens each, `batch_size` at a time, on an idle engine."""
    loop = ClosedLoop(engine, ((request, num_tokens) for request in requests), batch_size)
    rounds = loop.advance(num_tokens * len(requests))
    return PhaseRun(rounds, loop.texts)


def engine_beside(engine: SpecEngine, controller: AdaptiveController) -> SpecEngine:
    """Return an engine with requests and a policy of its own, on the worker and pages of `engine`.

    Each has to be drained before another one runs.
    """
    of = engine.scheduler
    return SpecEngine(
        Scheduler(
            of.limits,
            of.cache,
            text_drafter=None if of.text_drafts is None else copy.deepcopy(of.text_drafts.drafter),
            first_draft_entry=of.first_draft_entry,
            has_draft_model=of.has_draft_model,
            vocab_size=of.vocab_size,
        ),
        engine.worker,
        controller,
        engine.tokenizer,
        eos_token_ids=engine.eos_token_ids,
        max_model_len=engine.max_model_len,
    )
