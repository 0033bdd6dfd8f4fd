"""What the engine reports: names, units and meaning. How it travels is the sink's business.

Names end in their unit; counters only grow; a label has few values (never a request id).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from serve_spec.core.record import StepRecord


@dataclass(frozen=True)
class Metric:
    """One time series: how to declare it wherever metrics are kept."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def batch_size_bucket(batch_size: int) -> int:
    """The power of two at or below `batch_size` ≥ 1: sizes that are compared with each other."""
    return 1 << (batch_size.bit_length() - 1)


class MetricsSink(Protocol):
    """Takes one round's figures. Must not block the engine and must not raise."""

    def observe(self, record: StepRecord) -> None:
        """Record a round."""
        ...


class NullSink:
    """Keeps nothing: the offline API, tests."""

    def observe(self, record: StepRecord) -> None:
        """Drop the round."""


_MS_BUCKETS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)

NUM_STEPS = Metric("serve_spec_num_steps", "gauge", "Tier of the last round: drafts per sequence.")
BATCH_SIZE = Metric("serve_spec_batch_size", "gauge", "Decoding sequences of the last round.")
ROUNDS = Metric(
    "serve_spec_rounds",
    "counter",
    "Decode rounds by draft shape: drafts per sequence, or levels x drafts of trees.",
    ("num_steps",),
)
BATCH_SIZE_ROUNDS = Metric(
    "serve_spec_batch_size_rounds",
    "counter",
    "Decode rounds by batch size (powers of two at or below it).",
    ("batch_size",),
)
SWITCHES = Metric("serve_spec_tier_switches", "counter", "Tier changes by reason.", ("reason",))
PROBE_ROUNDS = Metric("serve_spec_probe_rounds", "counter", "Rounds taken to learn something.")
DRAFT_TOKENS = Metric("serve_spec_draft_tokens", "counter", "Drafts the target verified.")
CORRECT_DRAFTS = Metric("serve_spec_correct_drafts", "counter", "Drafts the target kept.")
POSITION_PROPOSED = Metric(
    "serve_spec_position_proposed_tokens",
    "counter",
    "Drafts made, by position; those outside the budget are not verified.",
    ("position",),
)
POSITION_DRAFTED = Metric(
    "serve_spec_position_drafted_tokens", "counter", "Drafts verified, by position.", ("position",)
)
POSITION_REACHED = Metric(
    "serve_spec_position_reached_tokens",
    "counter",
    "Drafts before which all were kept, by position; what kept drafts are to be divided by.",
    ("position",),
)
POSITION_ACCEPTED = Metric(
    "serve_spec_position_accepted_tokens", "counter", "Drafts kept, by position.", ("position",)
)
DRAFT_BUDGET = Metric(
    "serve_spec_draft_budget_tokens",
    "gauge",
    "Most drafts that the last round with a budget verified.",
)
BUDGET_ROUNDS = Metric(
    "serve_spec_budget_rounds", "counter", "Decode rounds whose budget left drafts unverified."
)
UNVERIFIED_DRAFTS = Metric(
    "serve_spec_unverified_draft_tokens", "counter", "Drafts made but not verified: outside budget."
)
EXPECTED_DRAFTS = Metric(
    "serve_spec_expected_correct_drafts",
    "counter",
    "Drafts expected to be accepted, in rounds for which the policy predicts it.",
)
OBSERVED_DRAFTS = Metric(
    "serve_spec_observed_correct_drafts", "counter", "Drafts accepted in the same rounds."
)
OUTPUT_TOKENS = Metric(
    "serve_spec_output_tokens", "counter", "Tokens emitted by decoding requests."
)
PREFILL_TOKENS = Metric("serve_spec_prefill_tokens", "counter", "Prompt tokens computed.")
PREFIX_QUERY_TOKENS = Metric(
    "serve_spec_prefix_cache_query_tokens", "counter", "Tokens that admitted requests came with."
)
PREFIX_HIT_TOKENS = Metric(
    "serve_spec_prefix_cache_hit_tokens",
    "counter",
    "Of those, the tokens whose pages others had left: they are not computed anew.",
)
ACCEPT_LENGTH_ROWS = Metric(
    "serve_spec_accept_length_rows",
    "counter",
    "Decoding requests by the tokens they emitted in a round: correct drafts and the bonus token.",
    ("accept_length",),
)
DRAFT_MS = Metric(
    "serve_spec_draft_ms", "histogram", "Drafting of one round, in ms.", buckets=_MS_BUCKETS
)
VERIFY_MS = Metric(
    "serve_spec_verify_ms", "histogram", "Target forward of one round, in ms.", buckets=_MS_BUCKETS
)
IDLE_MS = Metric(
    "serve_spec_device_idle_ms",
    "histogram",
    "What the device waited for the host before one round, in ms.",
    buckets=_MS_BUCKETS,
)
BROKEN_DRAFTS = Metric(
    "serve_spec_broken_drafts",
    "counter",
    "Sequences that stopped drafting because their draft gave NaN or no token.",
)
STEP_MS = Metric("serve_spec_step_ms", "histogram", "One whole round, in ms.", buckets=_MS_BUCKETS)
PREDICTED_MS = Metric(
    "serve_spec_predicted_step_ms",
    "histogram",
    "Predicted time of a round without prompts, in ms.",
    buckets=_MS_BUCKETS,
)
MEASURED_MS = Metric(
    "serve_spec_measured_step_ms",
    "histogram",
    "Measured time of the rounds whose time was predicted, in ms.",
    buckets=_MS_BUCKETS,
)
OVERHEAD = Metric(
    "serve_spec_overhead_ratio",
    "gauge",
    "Time of drafting over time of verification, last round without prompts.",
)
SPEEDUP = Metric(
    "serve_spec_effective_speedup_ratio",
    "gauge",
    "Measured speed of drafting rounds over measured plain ones, by batch size (powers of two).",
    ("batch_size",),
)
EMA_ACCEPT_LENGTH = Metric(
    "serve_spec_ema_accept_length_tokens",
    "gauge",
    "Average of correct drafts per request that a batch-size slot decides by.",
    ("slot",),
)
RUNNING_SEQS = Metric("serve_spec_running_seqs", "gauge", "Sequences in the batch.")
WAITING_SEQS = Metric(
    "serve_spec_waiting_seqs", "gauge", "Sequences that wait for pages or request slots."
)
KV_USAGE = Metric("serve_spec_kv_usage_ratio", "gauge", "Share of KV pages in use, 0..1.")
KV_PAGES = Metric("serve_spec_kv_pages", "gauge", "KV pages by state: used or free.", ("state",))

ROUND_METRICS = (
    NUM_STEPS,
    BATCH_SIZE,
    ROUNDS,
    BATCH_SIZE_ROUNDS,
    SWITCHES,
    PROBE_ROUNDS,
    DRAFT_TOKENS,
    CORRECT_DRAFTS,
    POSITION_PROPOSED,
    POSITION_DRAFTED,
    POSITION_REACHED,
    POSITION_ACCEPTED,
    DRAFT_BUDGET,
    BUDGET_ROUNDS,
    UNVERIFIED_DRAFTS,
    EXPECTED_DRAFTS,
    OBSERVED_DRAFTS,
    OUTPUT_TOKENS,
    PREFILL_TOKENS,
    PREFIX_QUERY_TOKENS,
    PREFIX_HIT_TOKENS,
    ACCEPT_LENGTH_ROWS,
    DRAFT_MS,
    VERIFY_MS,
    STEP_MS,
    IDLE_MS,
    BROKEN_DRAFTS,
    PREDICTED_MS,
    MEASURED_MS,
    OVERHEAD,
    SPEEDUP,
    EMA_ACCEPT_LENGTH,
    RUNNING_SEQS,
    WAITING_SEQS,
    KV_USAGE,
    KV_PAGES,
)
"""What rounds report."""

PREDICTED_GOODPUT = Metric(
    "serve_spec_predicted_goodput_tokens_per_ms",
    "gauge",
    "Predicted tokens per ms of every draft shape for the current batch.",
    ("num_steps",),
)
LAST_REASON = Metric(
    "serve_spec_last_reason",
    "gauge",
    "1 for the reason of the policy's last decision, 0 for those before it.",
    ("reason",),
)
SLOT = Metric(
    "serve_spec_slot", "gauge", "Smallest batch size of the batch-size slot that decided last."
)
FORCED_ACCEPTANCE = Metric(
    "serve_spec_forced_acceptance",
    "gauge",
    "1 while acceptance is forced for a load test: what is kept, and how fast, is of no real text.",
)
STATE_METRICS = (PREDICTED_GOODPUT, LAST_REASON, SLOT, FORCED_ACCEPTANCE)
"""What is read off an engine's snapshot now and then."""

# Every latency has a histogram for its quantiles, and counters for its mean: exporters that
# rebuild a histogram from its buckets know the sum only to a bucket's width.
TTFT_MS = Metric(
    "serve_spec_time_to_first_token_ms",
    "histogram",
    "From arrival (at the router, or at the engine) to the first tokens, in ms.",
    ("measured_at",),
    buckets=(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 6e4),
)
TPOT_MS = Metric(
    "serve_spec_time_per_output_token_ms",
    "histogram",
    "Mean time of a request's tokens after its first ones, in ms.",
    ("measured_at",),
    buckets=(0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 200.0, 500.0, 1e3),
)
FIRST_TOKEN_WAIT_MS = Metric(
    "serve_spec_first_token_wait_ms",
    "counter",
    "Times to first token added up, in ms; at the router less at the engine is the framework's.",
    ("measured_at",),
)
FIRST_TOKENS = Metric(
    "serve_spec_first_tokens", "counter", "Requests that got to a first token.", ("measured_at",)
)
LATER_TOKENS_WAIT_MS = Metric(
    "serve_spec_later_tokens_wait_ms",
    "counter",
    "Times from the first tokens of a request to its last, added up, in ms.",
    ("measured_at",),
)
LATER_TOKENS = Metric(
    "serve_spec_later_tokens",
    "counter",
    "Tokens of requests after their first ones.",
    ("measured_at",),
)
REQUESTS = Metric(
    "serve_spec_requests",
    "counter",
    "Requests that ended, by how: done, refused, failed or left.",
    ("measured_at", "outcome"),
)
LATENCY_METRICS = (
    TTFT_MS,
    TPOT_MS,
    FIRST_TOKEN_WAIT_MS,
    FIRST_TOKENS,
    LATER_TOKENS_WAIT_MS,
    LATER_TOKENS,
    REQUESTS,
)
"""What requests report, where they arrive and where they run."""

QUEUE_LEN = Metric("serve_spec_queue_len", "gauge", "Requests that wait in the router.")
IN_FLIGHT = Metric("serve_spec_in_flight_requests", "gauge", "Requests handed to replicas.")
REJECTED = Metric("serve_spec_rejected_requests", "counter", "Requests answered 429 by the router.")
RESUMED = Metric(
    "serve_spec_resumed_requests",
    "counter",
    "Requests that a replica took over from one that had failed them.",
)
SUBMISSIONS = Metric(
    "serve_spec_submissions",
    "counter",
    "Hand-overs to replicas by how many requests went together (at most, powers of two).",
    ("size",),
)
ROUTER_METRICS = (QUEUE_LEN, IN_FLIGHT, REJECTED, RESUMED, SUBMISSIONS)
"""What the router reports of its queue."""

METRICS = (*ROUND_METRICS, *STATE_METRICS, *LATENCY_METRICS, *ROUTER_METRICS)
"""Every metric, for the exporters that declare them."""


@dataclass(frozen=True)
class Reading:
    """One value for one metric: added to a counter, set on a gauge, put in a histogram."""

    metric: Metric
    value: float
    labels: dict[str, str] = field(default_factory=dict)


def readings(record: StepRecord) -> Iterator[Reading]:
    """What one round adds. Counters get no zeros: several exporters refuse them."""
    yield Reading(STEP_MS, record.step_ms)
    if record.idle_ms:
        yield Reading(IDLE_MS, record.idle_ms)
    if record.num_broken_drafts:
        yield Reading(BROKEN_DRAFTS, record.num_broken_drafts)
    yield Reading(RUNNING_SEQS, record.num_running_seqs)
    yield Reading(WAITING_SEQS, record.num_waiting_seqs)
    yield Reading(KV_USAGE, record.num_used_pages / record.num_pages)
    yield Reading(KV_PAGES, record.num_used_pages, {"state": "used"})
    yield Reading(KV_PAGES, record.num_pages - record.num_used_pages, {"state": "free"})
    if record.num_prefill_tokens:
        yield Reading(PREFILL_TOKENS, record.num_prefill_tokens)
    if record.num_prefix_query_tokens:
        yield Reading(PREFIX_QUERY_TOKENS, record.num_prefix_query_tokens)
    if record.num_prefix_hit_tokens:
        yield Reading(PREFIX_HIT_TOKENS, record.num_prefix_hit_tokens)
    if record.batch_size:
        yield from _decode_readings(record)
        yield from _position_readings(record)
        yield from _policy_readings(record)
        yield from _budget_readings(record)


RequestCounts: TypeAlias = Mapping[tuple[int, int, int], int]
"""Requests by their drafts in a round: made, verified and accepted; of trees, levels."""


class PositionCounts(NamedTuple):
    """Drafts at one position. A draft is reached if all before it were accepted."""

    proposed: int
    """Made by the draft model or found in the text."""
    verified: int
    reached: int
    accepted: int


_POSITION_METRICS = (POSITION_PROPOSED, POSITION_DRAFTED, POSITION_REACHED, POSITION_ACCEPTED)


def request_counts(record: StepRecord) -> Counter[tuple[int, int, int]]:
    """Count the requests of a round by their drafts."""
    # Levels of a tree are not counted by the drafts of a budget.
    proposed = record.drafted_per_req if record.shape.is_chain else ()
    reqs = zip(
        proposed or record.steps_per_req,
        record.steps_per_req,
        record.correct_per_req,
        strict=True,
    )
    return Counter(reqs)


def position_counts(counts: RequestCounts) -> list[PositionCounts]:
    """Return the counts of every position, from the first."""
    deepest = max((proposed for proposed, _, _ in counts), default=0)
    return [_counts_at(position, counts) for position in range(1, deepest + 1)]


def _counts_at(position: int, counts: RequestCounts) -> PositionCounts:
    verified = {req: n for req, n in counts.items() if req[1] >= position}
    return PositionCounts(
        proposed=sum(n for (proposed, _, _), n in counts.items() if proposed >= position),
        verified=sum(verified.values()),
        reached=sum(n for (_, _, correct), n in verified.items() if correct >= position - 1),
        accepted=sum(n for (_, _, correct), n in verified.items() if correct >= position),
    )


def unverified_drafts(record: StepRecord) -> int:
    """Return how many drafts of a round were made but not verified.

    Of trees a lower bound: drafts of requests that ended in the round count as verified.
    """
    if not record.drafted_per_req:
        return 0
    verified = sum(record.steps_per_req) if record.shape.is_chain else record.num_draft_tokens
    return max(0, sum(record.drafted_per_req) - verified)


def expected_drafts(record: StepRecord) -> float | None:
    """Return how many of a round's `num_correct_drafts` were expected; None if not predicted.

    The prediction is of all planned requests, which include those that ended meanwhile.
    """
    expected = record.notes.expected_drafts
    if expected is None or not record.batch_size:
        return None
    return expected * record.batch_size / record.num_planned_seqs


def _decode_readings(record: StepRecord) -> Iterator[Reading]:
    yield Reading(NUM_STEPS, record.shape.depth)
    yield Reading(BATCH_SIZE, record.batch_size)
    yield Reading(ROUNDS, 1, {"num_steps": str(record.shape)})
    bucket = batch_size_bucket(record.batch_size)
    yield Reading(BATCH_SIZE_ROUNDS, 1, {"batch_size": str(bucket)})
    yield Reading(VERIFY_MS, record.verify_ms)
    if record.switch_reason is not None:
        yield Reading(SWITCHES, 1, {"reason": record.switch_reason})
    if record.num_draft_tokens:
        yield Reading(DRAFT_TOKENS, record.num_draft_tokens)
        yield Reading(DRAFT_MS, record.draft_ms)
    if record.num_correct_drafts:
        yield Reading(CORRECT_DRAFTS, record.num_correct_drafts)
    if record.num_output_tokens:
        yield Reading(OUTPUT_TOKENS, record.num_output_tokens)
    for length, num_rows in Counter(record.accept_lengths).items():
        yield Reading(ACCEPT_LENGTH_ROWS, num_rows, {"accept_length": str(length)})


def _position_readings(record: StepRecord) -> Iterator[Reading]:
    for position, counts in enumerate(position_counts(request_counts(record)), start=1):
        label = {"position": str(position)}
        counted = zip(_POSITION_METRICS, counts, strict=True)
        yield from (Reading(metric, count, label) for metric, count in counted if count)


def _policy_readings(record: StepRecord) -> Iterator[Reading]:
    notes = record.notes
    if notes.is_probe:
        yield Reading(PROBE_ROUNDS, 1)
    if notes.slot is not None and notes.ema_accept_length is not None:
        yield Reading(EMA_ACCEPT_LENGTH, notes.ema_accept_length, {"slot": notes.slot})
    if record.speedup is not None:
        bucket = batch_size_bucket(record.batch_size)
        yield Reading(SPEEDUP, record.speedup, {"batch_size": str(bucket)})
    if record.decodes_only:
        yield Reading(OVERHEAD, record.overhead_ratio)
        if notes.predicted_ms is not None:
            yield Reading(PREDICTED_MS, notes.predicted_ms)
            yield Reading(MEASURED_MS, record.step_ms)


def _budget_readings(record: StepRecord) -> Iterator[Reading]:
    if record.budget is not None:
        yield Reading(DRAFT_BUDGET, record.budget)
        yield Reading(BUDGET_ROUNDS, 1)
        if unverified := unverified_drafts(record):
            yield Reading(UNVERIFIED_DRAFTS, unverified)
    expected = expected_drafts(record)
    if expected is not None:
        if expected > 0:
            yield Reading(EXPECTED_DRAFTS, expected)
        if record.num_correct_drafts:
            yield Reading(OBSERVED_DRAFTS, record.num_correct_drafts)
