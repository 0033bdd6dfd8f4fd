"""What an engine reports: sums since start, the record of each step, a snapshot for operators."""

from __future__ import annotations

from dataclasses import dataclass

from serve_spec.core.plan import BatchResult, PendingBatch, ScheduledBatch
from serve_spec.core.record import StepRecord, StepTimes
from serve_spec.core.round import NO_NOTES, RoundNotes
from serve_spec.scheduler.scheduler import CommittedRequest, Scheduler


@dataclass
class EngineCounters:
    """Sums since start. `num_decode_requests` sums batch sizes over steps; times in ms."""

    num_steps_executed: int = 0
    num_decode_requests: int = 0
    num_decode_tokens: int = 0
    num_draft_tokens: int = 0
    num_correct_drafts: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0

    @property
    def accept_length(self) -> float:
        """Tokens per decoding request and step."""
        requests = self.num_decode_requests
        return self.num_decode_tokens / requests if requests else 1.0

    def observe(self, record: StepRecord) -> None:
        """Add one executed step."""
        self.num_steps_executed += 1
        self.num_decode_requests += record.batch_size
        self.num_decode_tokens += record.num_output_tokens
        self.num_draft_tokens += record.num_draft_tokens
        self.num_correct_drafts += record.num_correct_drafts
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
    has_model, has_texts = scheduler.drafts.has_model, scheduler.drafts.texts is not None
    drafted = [req.model_steps if has_model else req.num_steps for req in planned]
    num_drafts = sum([each.num_drafts for each in decoded])
    numbers = [each.number for each in live]
    shares = result.draft_shares if plan.shape.depth else None
    prefix = queue.take_prefix_counts()
    return StepRecord(
        shape=plan.shape,
        request_ids=tuple([each.seq.request_id for each in live]),
        steps_per_req=tuple([each.num_steps for each in live]),
        drafted_per_req=tuple([each.scheduled.num_draft_tokens for each in live])
        if plan.budget is not None
        else (),
        draft_shares=None if shares is None else shares[numbers],
        budget=plan.budget,
        correct_per_req=tuple([each.num_correct_drafts for each in live]),
        is_sampled=tuple([not each.scheduled.params.is_greedy for each in live]),
        is_from_text=tuple([bool(each.scheduled.draft_ids) for each in live])
        if has_texts and has_model
        else (),
        accept_lengths=tuple([len(each.token_ids) for each in decoded]),
        num_draft_tokens=num_drafts,
        num_tokens=sum([len(each.seq) - len(each.token_ids) for each in decoded]),
        num_stale_seqs=len(planned) - len(decoded),
        num_stale_drafts=sum(plan.verified_drafts(result)[: len(planned)]) - num_drafts,
        num_sampled=sum([not req.params.is_greedy for req in planned]),
        num_drafting=sum([steps > 0 for steps in drafted]),
        deepest=max(drafted, default=0),
        num_text_drafts=sum([len(req.draft_ids) for req in planned]) if has_model else 0,
        num_extend_tokens=sum([len(req.extend_ids) for req in planned if req.model_steps]),
        num_prefill_tokens=plan.num_prefill_tokens,
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
        num_prefix_query_tokens=prefix.num_query_tokens,
        num_prefix_hit_tokens=prefix.num_hit_tokens,
    )
