"""The engine: plan, launch, commit, report."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from serve_spec.adaptive import AdaptiveController
from serve_spec.core.errors import BrokenLogits
from serve_spec.core.grammar import Grammar
from serve_spec.core.plan import BatchResult, PendingBatch, ScheduledBatch
from serve_spec.core.record import StepRecord, StepTimes
from serve_spec.core.request import FinishReason, Prompt, SamplingParams, TokenDelta
from serve_spec.core.round import FROM_NGRAM, NO_NOTES, RoundNotes
from serve_spec.core.sequence import Sequence
from serve_spec.engine.inputs import EngineLimits, InputProcessor
from serve_spec.engine.policy_cache import PolicyCache
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.log import get_logger
from serve_spec.metrics import MetricsSink, NullSink
from serve_spec.parallel.worker_ranks import WorkerRanks
from serve_spec.profile.source import UNUSED, CostSource
from serve_spec.scheduler.scheduler import CommittedRequest, Scheduler
from serve_spec.worker.worker import SpecWorker

_DEFAULT_THRESHOLDS = gc.get_threshold()

GC_THRESHOLD = 50_000
"""New objects that trigger a collection. A step of 256 requests has some thousands, without cycles;
with Python's default of 700 every step would be scanned several times."""


def freeze_gc() -> None:
    """Exclude existing objects from collection and collect rarely: a scan takes 0.1 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *_DEFAULT_THRESHOLDS[1:])


def unfreeze_gc() -> None:
    """Restore Python's settings."""
    gc.unfreeze()
    gc.set_threshold(*_DEFAULT_THRESHOLDS)


logger = get_logger(__name__)

IDLE = "idle"
"""Shown in place of the policy's last reason while there are no requests."""
MAX_BROKEN_REQUESTS = 8
"""Requests with NaN logits after which, if none has ended well meanwhile, the model is broken."""


@dataclass
class EngineCounters:
    """Sums since start. `num_decode_requests` sums batch sizes over steps; times in ms."""

    num_steps_executed: int = 0
    num_decode_requests: int = 0
    num_decode_tokens: int = 0
    num_draft_tokens: int = 0
    num_correct_drafts: int = 0
    num_grammar_tokens: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0

    @property
    def accept_length(self) -> float:
        """Tokens per decoding request and step, without grammar drafts."""
        return 1.0 + self.num_correct_drafts / max(1, self.num_decode_requests)

    def observe(self, record: StepRecord) -> None:
        """Add one executed step."""
        self.num_steps_executed += 1
        self.num_decode_requests += record.batch_size
        self.num_decode_tokens += record.num_output_tokens
        self.num_draft_tokens += record.num_draft_tokens
        self.num_correct_drafts += record.num_correct_drafts
        self.num_grammar_tokens += record.num_grammar_tokens
        self.num_prefix_query_tokens += record.num_prefix_query_tokens
        self.num_prefix_hit_tokens += record.num_prefix_hit_tokens
        self.draft_ms += record.draft_ms
        self.verify_ms += record.verify_ms


@dataclass(frozen=True)
class StepInFlight:
    """A step in flight, and the policy's notes on it."""

    plan: ScheduledBatch
    pending: PendingBatch
    started: float
    """When the work for this step began, in s."""
    switch_reason: str | None
    notes: RoundNotes


@dataclass(eq=False, repr=False)
class SpecEngine:
    """Runs requests, one step of the batch per call of `step`. Single-threaded; see `EngineServer`.

    It handles tokens only; an `OutputProcessor` handles texts and stop strings. With asynchronous
    scheduling the next step is in flight when `step` returns: sequences that end meanwhile are
    computed once more, and those results are dropped. A request whose logits are NaN has no last
    delta: see `take_failed`.
    """

    scheduler: Scheduler
    worker: SpecWorker
    controller: AdaptiveController
    tokenizer: Tokenizer
    limits: EngineLimits
    _worker_ranks: WorkerRanks | None = None
    costs: CostSource | None = None
    policy_cache: PolicyCache | None = None

    def __post_init__(self) -> None:
        self.counters = EngineCounters()
        self.metrics: MetricsSink = NullSink()
        self._in_flight: StepInFlight | None = None
        self._num_broken = 0
        """Requests with NaN logits since one ended well."""
        self._synced_at = 0.0
        self._overhead_s = 0.0
        """Host time after the results of the step before, which the next step waited for."""
        self.scheduler.on_leave = self._forget
        self.scheduler.queue.masks = self.worker.grammars

    def step(self) -> list[TokenDelta]:
        """Run one step over the batch. Return what it emitted."""
        entered = time.perf_counter()
        step = self._in_flight or self._launch(None, entered - self._overhead_s)
        if step is None:
            return []
        self._in_flight = None
        if self.worker.settings.async_scheduling:
            self._in_flight = self._launch(step.plan, None)
        return self._finish(step)

    def drain(self) -> list[TokenDelta]:
        """Finish the step in flight, launch no other, and return what it emitted."""
        step, self._in_flight = self._in_flight, None
        deltas = [] if step is None else self._finish(step)
        self.worker.drain()
        return deltas

    def _finish(self, step: StepInFlight) -> list[TokenDelta]:
        result = step.pending.result()
        committed = self.scheduler.commit(step.plan, result, Sequence.cut)
        step_ms = self._step_ms(step)
        record = step_record(self.scheduler, step, result, committed, step_ms)
        if record.batch_size:
            self.controller.on_verify_complete(record)
        self.counters.observe(record)
        self.metrics.observe(record)
        if self.policy_cache is not None:
            self.policy_cache.save_if_due()
        deltas = [self._delta(each, result) for each in committed]
        if record.num_ended:
            self._num_broken = 0
        self._overhead_s = time.perf_counter() - self._synced_at
        return deltas

    def take_failed(self) -> dict[str, Exception]:
        """Return the requests that the last steps ended without an answer, and why."""
        failed = self.scheduler.queue.take_failed()
        self._num_broken += sum(isinstance(why, BrokenLogits) for why in failed.values())
        return failed

    def raise_failed(self) -> None:
        """Raise why a request of the last steps has ended without an answer, if one has."""
        for error in self.take_failed().values():
            raise error

    @property
    def has_work(self) -> bool:
        """Return whether `step` has anything to do."""
        return self.scheduler.queue.has_work or self._in_flight is not None

    def idle_wait_s(self) -> float:
        """Return the seconds until `use_idle_time` has something to do, infinite if nothing."""
        if self.costs is None or self.costs.is_final or not self.controller.settings.needs_costs:
            return math.inf
        return self.costs.wait_s()

    def use_idle_time(self) -> None:
        """Save what the policy has learned, if it is due, and run one step to measure costs.

        Costs are measured if they were not at start. Only without work.
        """
        assert not self.has_work, "a measurement may overwrite pages of requests"
        if self.policy_cache is not None:
            self.policy_cache.save_if_due()
        if self.costs is None or self.idle_wait_s() != 0.0:
            return
        table = self.costs.advance()
        if table is not None:
            self.controller.use_costs(table)
            logger.info("costs: strategy %s uses them", self.controller.settings.strategy)

    def new_sequence(
        self, request_id: str, prompt: Prompt, params: SamplingParams, emitted: Collection[int] = ()
    ) -> Sequence:
        """Return a request for `add`; raise InvalidRequest if it cannot be served."""
        inputs = InputProcessor(self.tokenizer, self.limits, self.check_grammar)
        if params.grammar is not None:
            inputs.check_grammar(params.grammar)
        return inputs.new_sequence(request_id, prompt, params, emitted)

    def check_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar and cache it, from any thread; raise InvalidRequest if that fails."""
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
            "last_reason": policy["last_reason"] if self.has_work else IDLE,
            "costs": {**report, **(of_policy if isinstance(of_policy, dict) else {})},
            **scheduler_snapshot(self.scheduler, self.counters),
            "synthetic_acceptance": list(forced) if isinstance(forced, tuple) else forced,
        }

    def reconfigure(self, settings: Mapping[str, object]) -> None:
        """Change policy settings between steps; invalid ones change nothing."""
        self.controller.reconfigure(settings)

    def flush_cache(self) -> None:
        """Drop the cached prefixes that no request uses."""
        tree = self.scheduler.cache.tree
        tree.evict(tree.num_idle)

    def check_health(self) -> None:
        """Raise RankLost if this engine has lost a rank, BrokenLogits if its model is broken.

        From any thread.
        """
        if self._num_broken >= MAX_BROKEN_REQUESTS:
            raise BrokenLogits
        if self._worker_ranks is not None:
            self._worker_ranks.check()

    def give_up(self, reason: str) -> None:
        """Abort a step that waits for a rank that does not answer. From any thread."""
        if self._worker_ranks is not None:
            self._worker_ranks.give_up(reason)

    def shutdown(self) -> None:
        """Save what the policy has learned and end the other ranks; no step may run afterwards."""
        if self.policy_cache is not None:
            self.policy_cache.close()
        if self._worker_ranks is not None:
            self._worker_ranks.stop()
        self.worker.grammars.close()
        unfreeze_gc()

    def _forget(self, seq: Sequence) -> None:
        """Drop the state of a sequence that leaves the batch, also by preemption."""
        self.controller.forget(seq.request_id)
        self.worker.grammars.forget(seq.request_id)

    def _launch(self, before: ScheduledBatch | None, started: float | None) -> StepInFlight | None:
        """Launch the next step. started: when the work for it began; None: once it is planned."""
        plan = self.scheduler.plan(self.controller.choose_steps, self.worker.max_missing, before)
        if plan is None:
            return None
        started = time.perf_counter() if started is None else started
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

    def _delta(self, committed: CommittedRequest, result: BatchResult) -> TokenDelta:
        seq = committed.seq
        stats = seq.stats if seq.finished else None
        if seq.reports_stats:
            stats = seq.stats.copy()
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
            prefill_s=time.perf_counter() - seq.admitted_at if is_first else 0.0,
        )


def scheduler_snapshot(scheduler: Scheduler, counters: EngineCounters) -> dict[str, object]:
    """Return the requests, pages and sums of an engine, JSON-able."""
    queue, cache = scheduler.queue, scheduler.cache
    return {
        "avg_spec_accept_length": round(counters.accept_length, 4),
        "batch_size": sum(seq.is_decoding for seq in queue.running),
        "num_running": len(queue.running),
        "num_waiting": len(queue.waiting),
        "num_preemptions": queue.num_preemptions,
        "kv": {"free_pages": cache.num_free_pages, "total_pages": cache.num_pages},
        "prefix_cache": {
            "pages": len(cache.tree),
            "idle_pages": cache.tree.num_idle,
            "evicted_pages": cache.tree.num_evicted,
            "query_tokens": counters.num_prefix_query_tokens,
            "hit_tokens": counters.num_prefix_hit_tokens,
        },
        "counters": {
            "steps": counters.num_steps_executed,
            "decode_rows": counters.num_decode_requests,
            "decode_tokens": counters.num_decode_tokens,
            "draft_tokens": counters.num_draft_tokens,
            "correct_drafts": counters.num_correct_drafts,
            "grammar_tokens": counters.num_grammar_tokens,
            "draft_ms": round(counters.draft_ms, 3),
            "verify_ms": round(counters.verify_ms, 3),
        },
    }


def step_record(
    scheduler: Scheduler,
    step: StepInFlight,
    result: BatchResult,
    committed: list[CommittedRequest],
    step_ms: float,
) -> StepRecord:
    """Return the record of a step. One pass per column, because hundreds of requests decode."""
    plan, queue, cache = step.plan, scheduler.queue, scheduler.cache
    planned = plan.decode_requests
    decoded = [each for each in committed if each.scheduled.is_decode]
    live = [each for each in decoded if not each.seq.finished]
    ended = [each.seq for each in committed if each.seq.finished]
    has_model = scheduler.drafts.has_model
    has_both = has_model and scheduler.drafts.ngrams is not None
    drafted = [req.model_steps if has_model else req.guessed_steps for req in planned]
    num_verified = sum([each.num_verified for each in decoded])
    budgeted = [] if plan.budget is None else live
    logprobs = result.draft_logprobs if plan.shape.depth else None
    num_queries, num_hits = queue.take_prefix_counts()
    return StepRecord(
        shape=plan.shape,
        request_ids=tuple([each.seq.request_id for each in live]),
        steps_per_req=tuple([each.reached_steps for each in live]),
        drafted_per_req=tuple([each.scheduled.num_guesses for each in budgeted]),
        draft_logprobs=None if logprobs is None else logprobs[[each.number for each in live]],
        budget=plan.budget,
        correct_per_req=tuple([each.num_correct_drafts for each in live]),
        is_sampled=tuple([not each.scheduled.params.is_greedy for each in live]),
        is_ngram=tuple([each.scheduled.draft_kind == FROM_NGRAM for each in live if has_both]),
        accept_lengths=tuple([len(each.token_ids) - each.num_grammar_tokens for each in decoded]),
        num_draft_tokens=sum([each.num_drafts for each in decoded]),
        **_grammar_columns(decoded, live),
        num_tokens=sum([len(each.seq) - len(each.token_ids) for each in decoded]),
        num_stale_seqs=len(planned) - len(decoded),
        num_stale_drafts=sum(plan.verified_drafts(result)[: len(planned)]) - num_verified,
        num_sampled=sum([not req.params.is_greedy for req in planned]),
        num_drafting=sum([steps > 0 for steps in drafted]),
        deepest=max(drafted, default=0),
        num_ngram_drafts=sum([req.num_ngram_drafts for req in planned]) if has_model else 0,
        num_extend_tokens=sum([len(req.extend_ids) for req in planned if req.model_steps]),
        num_prefill_tokens=plan.num_prefill_tokens,
        num_prefill_pairs=plan.num_prefill_pairs,
        num_ended=len(ended),
        num_ended_prompt_tokens=sum(seq.num_uncached_prompt_tokens for seq in ended),
        num_ended_tokens=sum(seq.num_output_tokens for seq in ended),
        times=StepTimes(result.draft_ms, result.verify_ms, step_ms, result.idle_ms),
        follows=plan.follows,
        was_postponed=plan.was_postponed,
        notes=step.notes if decoded else NO_NOTES,
        switch_reason=step.switch_reason if decoded else None,
        num_broken_drafts=len(result.broken_drafts),
        num_running_seqs=len(queue.running),
        num_waiting_seqs=len(queue.waiting),
        num_used_pages=cache.num_pages - cache.num_free_pages,
        num_pages=cache.num_pages,
        num_prefix_query_tokens=num_queries,
        num_prefix_hit_tokens=num_hits,
    )


def _grammar_columns(
    decoded: list[CommittedRequest], live: list[CommittedRequest]
) -> dict[str, Any]:
    """Return what a record tells of grammar drafts."""
    if not any(each.num_grammar_drafts for each in decoded):
        return {}
    runs = [run for each in decoded for run in each.grammar_drafts if run.was_reached]
    return {
        "first_per_req": tuple([each.grammar_drafts[0].verified for each in live]),
        "num_following_tokens": sum([each.grammar_drafts[1].emitted for each in decoded]),
        "grammar_drafts": tuple([(run.verified, run.accepted) for run in runs]),
        "num_grammar_drafts": sum([each.num_grammar_drafts for each in decoded]),
        "num_grammar_tokens": sum([each.num_grammar_tokens for each in decoded]),
    }
