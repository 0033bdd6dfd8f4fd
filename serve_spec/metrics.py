"""What the engine reports: names, units and meaning. How it travels is the sink's business.

Names end in their unit; counters only grow; a label has few values (never a request id).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

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
        """Records a round."""
        ...


class NullSink:
    """Keeps nothing: the offline API, tests."""

    def observe(self, record: StepRecord) -> None:
        """Drops the round."""


_MS_BUCKETS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)

NUM_STEPS = Metric("serve_spec_num_steps", "gauge", "Tier of the last round: drafts per sequence.")
BATCH_SIZE = Metric("serve_spec_batch_size", "gauge", "Decoding sequences of the last round.")
ROUNDS = Metric(
    "serve_spec_rounds",
    "counter",
    "Decode rounds by tier: drafts per sequence, or of trees their levels x drafts.",
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
OUTPUT_TOKENS = Metric("serve_spec_output_tokens", "counter", "Tokens emitted by decoding rows.")
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
    "Decoding rows by the tokens they emitted in a round: correct drafts and the final token.",
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
    "What the policy expected of a round without prompts, in ms.",
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
    "Average of correct drafts per row that a batch-size slot decides by.",
    ("slot",),
)
RUNNING_SEQS = Metric("serve_spec_running_seqs", "gauge", "Sequences in the batch.")
WAITING_SEQS = Metric("serve_spec_waiting_seqs", "gauge", "Sequences that wait for pages or rows.")
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
    POSITION_DRAFTED,
    POSITION_REACHED,
    POSITION_ACCEPTED,
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
    "What the policy expects of every tier at the batch of now.",
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
    "From arrival (at the door, or at the engine) to the first tokens, in ms.",
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
    "Times to first token added up, in ms; at the door less at the engine is the framework's.",
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

QUEUE_LEN = Metric("serve_spec_queue_len", "gauge", "Requests that wait at the door.")
IN_FLIGHT = Metric("serve_spec_in_flight_requests", "gauge", "Requests handed to replicas.")
REJECTED = Metric("serve_spec_rejected_requests", "counter", "Requests answered 429 at the door.")
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
DOOR_METRICS = (QUEUE_LEN, IN_FLIGHT, REJECTED, RESUMED, SUBMISSIONS)
"""What the router reports of its queue."""

METRICS = (*ROUND_METRICS, *STATE_METRICS, *LATENCY_METRICS, *DOOR_METRICS)
"""Every metric, for whoever declares them."""


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
    rows = Counter(zip(record.row_steps, record.row_correct_drafts, strict=True))
    for position in range(1, max(record.row_steps, default=0) + 1):
        label = {"position": str(position)}
        drafted = {row: n for row, n in rows.items() if row[0] >= position}
        reached = sum(n for (_, correct), n in drafted.items() if correct >= position - 1)
        accepted = sum(n for (_, correct), n in drafted.items() if correct >= position)
        yield Reading(POSITION_DRAFTED, sum(drafted.values()), label)
        if reached:
            yield Reading(POSITION_REACHED, reached, label)
        if accepted:
            yield Reading(POSITION_ACCEPTED, accepted, label)


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
