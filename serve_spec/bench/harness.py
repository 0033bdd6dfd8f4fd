"""Run closed loops and steady-state batches on an engine, with interleaved variants.

Every variant has its own policy and, in closed loops, its own requests; all share one worker.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean, harmonic_mean

from serve_spec.adaptive import AdaptiveController
from serve_spec.bench.workload import TextRequest
from serve_spec.config import SchedulerConfig, ServeSpecConfig
from serve_spec.core.record import StepRecord
from serve_spec.core.request import SamplingParams, TokenDelta
from serve_spec.core.sequence import Sequence as EngineSequence
from serve_spec.engine.engine import SpecEngine
from serve_spec.scheduler.scheduler import Scheduler

MIN_BATCHED_TOKENS = 2048
WARM_UP_STEPS = 2
"""Full steps of a batch that are not counted: drafts are extended over the prompts there."""


@dataclass(frozen=True)
class MeasuredStep:
    """A step and its wall time."""

    ms: float
    """Wall time, policy included."""
    record: StepRecord


class _Recorder(list[StepRecord]):
    observe = list.append


@contextmanager
def recorded_steps(engine: SpecEngine) -> Iterator[list[StepRecord]]:
    """Yield a list that receives every step; restore metrics and policy afterwards."""
    records = _Recorder()
    sink, controller = engine.metrics, engine.controller
    engine.metrics = records
    try:
        yield records
    finally:
        engine.metrics, engine.controller = sink, controller


def room(
    config: ServeSpecConfig, batch_size: int, num_tokens: int, depth: int, num_batches: int = 1
) -> dict[str, int]:
    """Return sizes for batches of full depth, of `num_tokens` per request, drafts included."""
    num_batched = max(MIN_BATCHED_TOKENS, 2 * batch_size * (depth + 1))
    sizes = {
        "max_num_seqs": batch_size,
        "max_num_batched_tokens": max(config.scheduler.max_num_batched_tokens, num_batched),
    }
    if config.cache.num_pages is not None:
        num_pages = num_batches * batch_size * -(-num_tokens // config.cache.page_size)
        sizes["num_pages"] = max(config.cache.num_pages, num_pages)
    return sizes


def engine_beside(
    engine: SpecEngine, controller: AdaptiveController, limits: SchedulerConfig | None = None
) -> SpecEngine:
    """Return an engine with its own requests and policy that shares `engine`'s worker and pages.

    Drain one before the other runs. limits: of its scheduler, within those of `engine`; None: the
    same.
    """
    of = engine.scheduler
    ngrams = of.drafts.ngrams
    return SpecEngine(
        Scheduler(
            limits or of.limits,
            of.cache,
            ngram_drafter=None if ngrams is None else copy.deepcopy(ngrams.drafter),
            model_drafts=of.drafts.model,
            vocab_size=of.vocab_size,
        ),
        engine.worker,
        controller,
        engine.tokenizer,
        engine.limits,
    )


class ClosedLoop:
    """A fixed number of open requests; a request that ends is replaced.

    It can stop after any step and continue later.

    requests: (request, output tokens); may be infinite.
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

    def fill(self) -> list[MeasuredStep]:
        """Run the prompts of the first batch."""
        return self._run(lambda: not self.texts or not all(self.texts[: self.batch_size]))

    def advance(self, num_tokens: int) -> list[MeasuredStep]:
        """Run until `num_tokens` tokens were emitted in total, or all requests have ended.

        The engine must have no other work. No step is in flight afterwards.
        """
        return self._run(lambda: self.num_emitted < num_tokens)

    def close(self) -> None:
        """Abort the open requests."""
        for request_id in self._open:
            self.engine.abort(request_id)
        self._open.clear()

    def _run(self, goes_on: Callable[[], bool]) -> list[MeasuredStep]:
        steps: list[MeasuredStep] = []
        with recorded_steps(self.engine) as records:
            while goes_on() and self._open_requests():
                steps += self._step(self.engine.step, records)
            return steps + self._step(self.engine.drain, records)

    def _step(
        self, step: Callable[[], list[TokenDelta]], records: list[StepRecord]
    ) -> list[MeasuredStep]:
        started = time.perf_counter()
        deltas = step()
        ms = (time.perf_counter() - started) * 1e3
        for delta in deltas:
            self.texts[int(delta.request_id)] += delta.token_ids
            self.num_emitted += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._open.remove(delta.request_id)
        return [MeasuredStep(ms, records.pop())] if records else []

    def _open_requests(self) -> bool:
        """Replace the requests that ended; return whether any is open."""
        for request, num_tokens in islice(self._waiting, self.batch_size - len(self._open)):
            request_id = str(len(self.texts))
            self.engine.add(new_sequence(self.engine, request_id, request, num_tokens))
            self._open.add(request_id)
            self.texts.append([])
        return bool(self._open)


@dataclass(frozen=True)
class SteadyBatch:
    """Requests that decode as one full batch."""

    engine: SpecEngine
    sequences: list[EngineSequence]
    records: list[StepRecord]

    @property
    def num_remaining(self) -> int:
        """Return the fewest output tokens that any request lacks."""
        return min(sequence.num_remaining for sequence in self.sequences)

    def step(self, controller: AdaptiveController) -> StepRecord | None:
        """Run a step; return its record if all requests decoded in it, without prompt tokens.

        A step launched ahead has the policy of the step before.
        """
        self.engine.controller = controller
        self.records.clear()
        self.engine.step()
        self.engine.raise_failed()
        full = [r for r in self.records if is_full(r, len(self.sequences))]
        return full[-1] if full else None


@contextmanager
def steady_batch(
    engine: SpecEngine, requests: Sequence[tuple[TextRequest, int]], plain: AdaptiveController
) -> Iterator[SteadyBatch]:
    """Compute the prompts on an idle engine without drafts; yield the batch; abort it at the end.

    requests: (request, output tokens).
    """
    sequences = [new_sequence(engine, f"steady-{i}", *each) for i, each in enumerate(requests)]
    with recorded_steps(engine) as records:
        try:
            for sequence in sequences:
                engine.add(sequence)
            batch = SteadyBatch(engine, sequences, records)
            while not all(sequence.is_decoding for sequence in sequences):
                batch.step(plain)
            yield batch
        finally:
            for sequence in sequences:
                engine.abort(sequence.request_id)
            while engine.has_work:  # a step may be in flight
                engine.step()


def is_full(record: StepRecord, batch_size: int) -> bool:
    """Return whether a step decoded a full batch and computed no prompt tokens."""
    return record.decodes_only and record.batch_size == batch_size


def full_batch_speed(batch_size: int, batches: Iterable[Sequence[StepRecord]]) -> float | None:
    """Return the decode speed in tokens/s of batches that ran from their prompts to the last end.

    In a batch that is refilled, a slow request stays for more steps. So the speed is
    batch_size · H / T: H is the harmonic mean of the requests' tokens per step, T the mean time of
    a step, both over the steps in which all requests decode. None if there is none.
    """
    tokens_per_step: list[float] = []
    step_ms: list[float] = []
    for records in batches:
        counted = [r for r in records if is_full(r, batch_size)][WARM_UP_STEPS:]
        # No request has ended, so each has the same place in every step.
        tokens_per_step += map(fmean, zip(*(r.accept_lengths for r in counted), strict=True))
        step_ms += (r.step_ms for r in counted)
    if not step_ms:
        return None
    return batch_size * harmonic_mean(tokens_per_step) / fmean(step_ms) * 1e3


def equal_prefixes(texts: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    """Return how many texts equal the expected ones as far as both were generated."""
    pairs = zip(texts, expected, strict=False)
    return sum(all(a == b for a, b in zip(*pair, strict=False)) for pair in pairs)


def sampling_params(request: TextRequest, num_tokens: int) -> SamplingParams:
    """Return the parameters of a request with `num_tokens` output tokens, unless it may stop."""
    params = SamplingParams(num_tokens, request.kind.temperature, seed=request.seed)
    return replace(params, ignore_eos=not request.may_stop)


def new_sequence(
    engine: SpecEngine, request_id: str, request: TextRequest, num_tokens: int
) -> EngineSequence:
    """Return a request with `num_tokens` output tokens, unless it may stop."""
    params = sampling_params(request, num_tokens)
    return engine.new_sequence(request_id, list(request.prompt), params)
