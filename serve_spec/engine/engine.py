"""The engine: plan, launch, commit, report."""

from __future__ import annotations

import gc
import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from serve_spec.adaptive import AdaptiveController
from serve_spec.core.grammar import Grammar
from serve_spec.core.plan import BatchResult, ScheduledBatch
from serve_spec.core.record import StepRecord
from serve_spec.core.request import FinishReason, SamplingParams, TokenDelta
from serve_spec.core.sequence import Sequence
from serve_spec.engine.costs import UNUSED, CostSource
from serve_spec.engine.inputs import EngineLimits, InputProcessor
from serve_spec.engine.reporting import (
    EngineCounters,
    StepInFlight,
    scheduler_snapshot,
    step_record,
)
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.log import get_logger
from serve_spec.metrics import MetricsSink, NullSink
from serve_spec.parallel.worker_ranks import WorkerRanks
from serve_spec.scheduler.scheduler import CommittedRequest, Scheduler
from serve_spec.worker.worker import SpecWorker

_DEFAULT_THRESHOLDS = gc.get_threshold()

GC_THRESHOLD = 50_000
"""New objects that trigger a collection. A step of 256 requests has some thousands, without cycles;
with Python's default of 700 every step would be scanned several times."""


def freeze_gc() -> None:
    """Exclude existing objects from collection, and collect rarely.

    A scan of a whole engine takes a tenth of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *_DEFAULT_THRESHOLDS[1:])


def unfreeze_gc() -> None:
    """Restore Python's settings."""
    gc.unfreeze()
    gc.set_threshold(*_DEFAULT_THRESHOLDS)


logger = get_logger(__name__)


class SpecEngine:
    """Runs requests, one step of the batch per call of `step`. Single-threaded; see `EngineServer`.

    It handles tokens only; an `OutputProcessor` handles texts and stop strings.

    With asynchronous scheduling the next step is in flight when `step` returns. Sequences that end
    meanwhile are computed once more; those results are dropped.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: SpecWorker,
        controller: AdaptiveController,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        *,
        metrics: MetricsSink | None = None,
        worker_ranks: WorkerRanks | None = None,
        costs: CostSource | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.controller = controller
        self.tokenizer = tokenizer
        self.limits = limits
        self.counters = EngineCounters()
        self.metrics = metrics or NullSink()
        self.costs = costs
        self._worker_ranks = worker_ranks
        self._in_flight: StepInFlight | None = None
        self._synced_at = 0.0
        self._overhead_s = 0.0
        """Host time after the results of the step before, which the next step waited for."""
        scheduler.on_leave = self._forget

    def step(self) -> list[TokenDelta]:
        """Run one step over the batch. Return what it emitted."""
        entered = time.perf_counter()
        step = self._in_flight or self._launch(self._plan(), entered - self._overhead_s)
        if step is None:
            return []
        self._in_flight = self._launch(self._plan(step.plan), time.perf_counter())
        return self._finish(step)

    def drain(self) -> list[TokenDelta]:
        """Finish the step in flight and launch no other, so that another engine may use the worker.

        Return what the step emitted.
        """
        step, self._in_flight = self._in_flight, None
        deltas = [] if step is None else self._finish(step)
        self.worker.drain()
        return deltas

    def _finish(self, step: StepInFlight) -> list[TokenDelta]:
        """Wait for a step, commit and report it."""
        result = step.pending.result()
        committed = self.scheduler.commit(step.plan, result, Sequence.cut)
        step_ms = self._step_ms(step)
        self._report(step_record(self.scheduler, step, result, committed, step_ms))
        deltas = [self._delta(each, result) for each in committed]
        self._overhead_s = time.perf_counter() - self._synced_at
        return deltas

    @property
    def has_work(self) -> bool:
        """Return whether `step` has anything to do."""
        return self.scheduler.queue.has_work or self._in_flight is not None

    def idle_wait_s(self) -> float | None:
        """Return the seconds until `use_idle_time` has something to do; None: nothing."""
        if self.costs is None or self.costs.is_final or not self.controller.settings.needs_costs:
            return None
        return self.costs.wait_s()

    def use_idle_time(self) -> None:
        """Run one step to measure costs that were not measured at start. Only without work."""
        assert not self.has_work, "a measurement may overwrite pages of requests"
        if self.costs is None or self.idle_wait_s() != 0.0:
            return
        table = self.costs.advance()
        if table is not None:
            self.controller.use_costs(table)
            logger.info("costs: strategy goodput decides from now on")

    def new_sequence(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        emitted: Collection[int] = (),
    ) -> Sequence:
        """Return a checked request for `add`, see `InputProcessor.new_sequence`.

        Raises:
            InvalidRequest: it cannot be served, or its grammar cannot be compiled.
        """
        inputs = InputProcessor(self.tokenizer, self.limits, self.check_grammar)
        if params.grammar is not None:
            inputs.check_grammar(params.grammar)
        return inputs.new_sequence(request_id, prompt, params, emitted)

    def check_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar, which may take a second, and cache it. From any thread.

        Raises:
            InvalidRequest: the grammar cannot be compiled.
        """
        self.worker.grammars.check(grammar)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence made by `new_sequence`."""
        seq.stats.synthetic_acceptance = self.worker.settings.synthetic_acceptance is not None
        self.scheduler.queue.add(seq)

    def abort(self, request_id: str) -> TokenDelta | None:
        """End a request between steps and free its pages; None if it has ended."""
        seq = self.scheduler.queue.abort(request_id)
        if seq is None:
            return None
        return TokenDelta(request_id, (), "", FinishReason.ABORT, seq.stats)

    def snapshot(self) -> dict[str, object]:
        """Return the state for operators, JSON-able: the replica's part of `/server_info`."""
        policy = self.controller.snapshot()
        report = UNUSED
        if self.costs is not None and self.controller.settings.needs_costs:
            report = self.costs.report
        of_policy = policy.get("costs")
        forced = self.worker.settings.synthetic_acceptance
        return {
            **policy,
            "costs": {**report, **(of_policy if isinstance(of_policy, dict) else {})},
            **scheduler_snapshot(self.scheduler, self.counters),
            "synthetic_acceptance": list(forced) if isinstance(forced, tuple) else forced,
        }

    def reconfigure(self, settings: Mapping[str, object]) -> None:
        """Change policy settings between steps; invalid ones change nothing."""
        self.controller.reconfigure(settings)

    def check_health(self) -> None:
        """Raise RankLost if this engine has lost a rank. From any thread."""
        if self._worker_ranks is not None:
            self._worker_ranks.check()

    def give_up(self, reason: str) -> None:
        """Abort a step that waits for a rank that does not answer. From any thread."""
        if self._worker_ranks is not None:
            self._worker_ranks.give_up(reason)

    def shutdown(self) -> None:
        """End the other ranks, if any; no step may run afterwards."""
        if self._worker_ranks is not None:
            self._worker_ranks.stop()
        unfreeze_gc()

    def _forget(self, seq: Sequence) -> None:
        """Drop the state of a sequence that leaves the batch, also by preemption."""
        self.controller.forget(seq.request_id)
        self.worker.grammars.forget(seq.request_id)

    def _plan(self, before: ScheduledBatch | None = None) -> ScheduledBatch | None:
        """Return the next step, or one to launch while `before` is in flight."""
        if before is not None and not self.worker.settings.async_scheduling:
            return None
        return self.scheduler.plan(self.controller.choose_steps, self.worker.max_missing, before)

    def _launch(self, plan: ScheduledBatch | None, started: float) -> StepInFlight | None:
        if plan is None:
            return None
        reason, notes = self.controller.switch_reason, self.controller.notes
        pending = self.worker.submit(plan)
        return StepInFlight(plan, pending, started, reason and reason.value, notes)

    def _step_ms(self, step: StepInFlight) -> float:
        """Return the wall time of a step that has ended, from its start or the last step's end.

        It includes the host's time for planning and reporting, unless the step was launched ahead.
        Without that, plain steps, which have the most of it per token, would look too fast.
        """
        now = time.perf_counter()
        since = max(step.started, self._synced_at)
        self._synced_at = now
        return (now - since) * 1e3

    def _report(self, record: StepRecord) -> None:
        if record.batch_size:
            self.controller.on_verify_complete(record)
        self.counters.observe(record)
        self.metrics.observe(record)

    def _delta(self, committed: CommittedRequest, result: BatchResult) -> TokenDelta:
        seq = committed.seq
        stats = seq.stats if seq.finished else None
        if seq.reports_stats:
            stats = replace(seq.stats, rounds_by_num_steps=seq.stats.rounds_by_num_steps.copy())
        tokens = tuple(committed.token_ids)
        logprobs = result.logprobs.get(seq.request_id)
        is_first = seq.num_output_tokens == len(tokens)
        wants_prompt = is_first and seq.params.prompt_logprobs is not None
        return TokenDelta(
            seq.request_id,
            tokens,
            "",
            seq.finish_reason,
            stats,
            logprobs=None if logprobs is None else logprobs[: len(tokens)],
            prompt_logprobs=(None, *seq.prompt_logprobs) if wants_prompt else None,
            num_cached_tokens=(seq.num_cached_tokens or 0) if is_first else 0,
        )
