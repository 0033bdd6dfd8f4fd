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
_TTFT_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 6e4)
_TPOT_BUCKETS = (
    0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 200.0, 500.0, 1e3,
)  # fmt: skip


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"serve_spec_{name}", "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"serve_spec_{name}", "gauge", text, labels)


def _ms(name: str, text: str, *labels: str, buckets: tuple[float, ...] = _MS_BUCKETS) -> Metric:
    return Metric(f"serve_spec_{name}", "histogram", text, labels, buckets)


# Of rounds.
NUM_STEPS = _gauge("num_steps", "Tier of the last round: drafts per sequence.")
BATCH_SIZE = _gauge("batch_size", "Decoding sequences of the last round.")
ROUNDS = _counter(
    "rounds",
    "Decode rounds by draft shape: drafts per sequence, or levels x drafts of trees.",
    "num_steps",
)
BATCH_SIZE_ROUNDS = _counter(
    "batch_size_rounds", "Decode rounds by batch size (powers of two at or below it).", "batch_size"
)
SWITCHES = _counter("tier_switches", "Tier changes by reason.", "reason")
PROBE_ROUNDS = _counter("probe_rounds", "Rounds taken to learn something.")
DRAFT_TOKENS = _counter("draft_tokens", "Drafts the target verified.")
CORRECT_DRAFTS = _counter("correct_drafts", "Drafts the target kept.")
POSITION_PROPOSED = _counter(
    "position_proposed_tokens",
    "Drafts made, by position; those outside the budget are not verified.",
    "position",
)
POSITION_DRAFTED = _counter("position_drafted_tokens", "Drafts verified, by position.", "position")
POSITION_REACHED = _counter(
    "position_reached_tokens",
    "Drafts before which all were kept, by position; what kept drafts are to be divided by.",
    "position",
)
POSITION_ACCEPTED = _counter("position_accepted_tokens", "Drafts kept, by position.", "position")
DRAFT_BUDGET = _gauge(
    "draft_budget_tokens", "Most drafts that the last round with a budget verified."
)
BUDGET_ROUNDS = _counter("budget_rounds", "Decode rounds whose budget left drafts unverified.")
UNVERIFIED_DRAFTS = _counter(
    "unverified_draft_tokens", "Drafts made but not verified: outside budget."
)
EXPECTED_DRAFTS = _counter(
    "expected_correct_drafts",
    "Drafts expected to be accepted, in rounds for which the policy predicts it.",
)
OBSERVED_DRAFTS = _counter("observed_correct_drafts", "Drafts accepted in the same rounds.")
OUTPUT_TOKENS = _counter("output_tokens", "Tokens emitted by decoding requests.")
PREFILL_TOKENS = _counter("prefill_tokens", "Prompt tokens computed.")
PREFIX_QUERY_TOKENS = _counter(
    "prefix_cache_query_tokens", "Tokens that admitted requests came with."
)
PREFIX_HIT_TOKENS = _counter(
    "prefix_cache_hit_tokens",
    "Of those, the tokens whose pages others had left: they are not computed anew.",
)
ACCEPT_LENGTH_ROWS = _counter(
    "accept_length_rows",
    "Decoding requests by the tokens they emitted in a round: correct drafts and the bonus token.",
    "accept_length",
)
DRAFT_MS = _ms("draft_ms", "Drafting of one round, in ms.")
VERIFY_MS = _ms("verify_ms", "Target forward of one round, in ms.")
IDLE_MS = _ms("device_idle_ms", "What the device waited for the host before one round, in ms.")
BROKEN_DRAFTS = _counter(
    "broken_drafts", "Sequences that stopped drafting because their draft gave NaN or no token."
)
STEP_MS = _ms("step_ms", "One whole round, in ms.")
PREDICTED_MS = _ms("predicted_step_ms", "Predicted time of a round without prompts, in ms.")
MEASURED_MS = _ms(
    "measured_step_ms", "Measured time of the rounds whose time was predicted, in ms."
)
OVERHEAD = _gauge(
    "overhead_ratio", "Time of drafting over time of verification, last round without prompts."
)
SPEEDUP = _gauge(
    "effective_speedup_ratio",
    "Measured speed of drafting rounds over measured plain ones, by batch size (powers of two).",
    "batch_size",
)
EMA_ACCEPT_LENGTH = _gauge(
    "ema_accept_length_tokens",
    "Average of correct drafts per request that a batch-size slot decides by.",
    "slot",
)
RUNNING_SEQS = _gauge("running_seqs", "Sequences in the batch.")
WAITING_SEQS = _gauge("waiting_seqs", "Sequences that wait for pages or request slots.")
KV_USAGE = _gauge("kv_usage_ratio", "Share of KV pages in use, 0..1.")
KV_PAGES = _gauge("kv_pages", "KV pages by state: used or free.", "state")

# Of an engine's snapshots.
PREDICTED_GOODPUT = _gauge(
    "predicted_goodput_tokens_per_ms",
    "Predicted tokens per ms of every draft shape for the current batch.",
    "num_steps",
)
LAST_REASON = _gauge(
    "last_reason",
    "1 for the reason of the policy's last decision, 0 for those before it.",
    "reason",
)
SLOT = _gauge("slot", "Smallest batch size of the batch-size slot that decided last.")
FORCED_ACCEPTANCE = _gauge(
    "forced_acceptance",
    "1 while acceptance is forced for a load test: what is kept, and how fast, is of no real text.",
)

# Of requests, where they arrive and where they run. Every latency has a histogram for its
# quantiles, and counters for its mean: exporters that rebuild a histogram from its buckets know the
# sum only to a bucket's width.
TTFT_MS = _ms(
    "time_to_first_token_ms",
    "From arrival (at the router, or at the engine) to the first tokens, in ms.",
    "measured_at",
    buckets=_TTFT_BUCKETS,
)
TPOT_MS = _ms(
    "time_per_output_token_ms",
    "Mean time of a request's tokens after its first ones, in ms.",
    "measured_at",
    buckets=_TPOT_BUCKETS,
)
FIRST_TOKEN_WAIT_MS = _counter(
    "first_token_wait_ms",
    "Times to first token added up, in ms; at the router less at the engine is the framework's.",
    "measured_at",
)
FIRST_TOKENS = _counter("first_tokens", "Requests that got to a first token.", "measured_at")
LATER_TOKENS_WAIT_MS = _counter(
    "later_tokens_wait_ms",
    "Times from the first tokens of a request to its last, added up, in ms.",
    "measured_at",
)
LATER_TOKENS = _counter("later_tokens", "Tokens of requests after their first ones.", "measured_at")
REQUESTS = _counter(
    "requests",
    "Requests that ended, by how: done, refused, failed or left.",
    "measured_at",
    "outcome",
)

# Of a router's queue.
QUEUE_LEN = _gauge("queue_len", "Requests that wait in the router.")
IN_FLIGHT = _gauge("in_flight_requests", "Requests handed to replicas.")
REJECTED = _counter("rejected_requests", "Requests answered 429 by the router.")
RESUMED = _counter(
    "resumed_requests", "Requests that a replica took over from one that had failed them."
)
SUBMISSIONS = _counter(
    "submissions",
    "Hand-overs to replicas by how many requests went together (at most, powers of two).",
    "size",
)
ROUTER_METRICS = (QUEUE_LEN, IN_FLIGHT, REJECTED, RESUMED, SUBMISSIONS)

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""Every metric, for the exporters that declare them."""


@dataclass(frozen=True)
class Reading:
    """One value for one metric: added to a counter, set on a gauge, put in a histogram."""

    metric: Metric
    value: float
    labels: dict[str, str] = field(default_factory=dict)


def readings(record: StepRecord) -> Iterator[Reading]:
    """What one round adds. Counters get no zeros: several exporters refuse them."""
    found = [*_step_readings(record)]
    if record.batch_size:
        found += _decode_readings(record)
        found += _position_readings(record)
        found += _policy_readings(record)
    return (reading for reading in found if reading.value or reading.metric.kind != "counter")


def _step_readings(record: StepRecord) -> Iterator[Reading]:
    yield Reading(STEP_MS, record.step_ms)
    if record.idle_ms:
        yield Reading(IDLE_MS, record.idle_ms)
    yield Reading(BROKEN_DRAFTS, record.num_broken_drafts)
    yield Reading(RUNNING_SEQS, record.num_running_seqs)
    yield Reading(WAITING_SEQS, record.num_waiting_seqs)
    yield Reading(KV_USAGE, record.num_used_pages / record.num_pages)
    yield Reading(KV_PAGES, record.num_used_pages, {"state": "used"})
    yield Reading(KV_PAGES, record.num_pages - record.num_used_pages, {"state": "free"})
    yield Reading(PREFILL_TOKENS, record.num_prefill_tokens)
    yield Reading(PREFIX_QUERY_TOKENS, record.num_prefix_query_tokens)
    yield Reading(PREFIX_HIT_TOKENS, record.num_prefix_hit_tokens)


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
        yield Reading(DRAFT_MS, record.draft_ms)
    yield Reading(DRAFT_TOKENS, record.num_draft_tokens)
    yield Reading(CORRECT_DRAFTS, record.num_correct_drafts)
    yield Reading(OUTPUT_TOKENS, record.num_output_tokens)
    for length, num_rows in Counter(record.accept_lengths).items():
        yield Reading(ACCEPT_LENGTH_ROWS, num_rows, {"accept_length": str(length)})


def _position_readings(record: StepRecord) -> Iterator[Reading]:
    for position, counts in enumerate(position_counts(request_counts(record)), start=1):
        label = {"position": str(position)}
        for metric, count in zip(_POSITION_METRICS, counts, strict=True):
            yield Reading(metric, count, label)


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
    if record.budget is not None:
        yield Reading(DRAFT_BUDGET, record.budget)
        yield Reading(BUDGET_ROUNDS, 1)
        yield Reading(UNVERIFIED_DRAFTS, unverified_drafts(record))
    expected = expected_drafts(record)
    if expected is not None:
        yield Reading(EXPECTED_DRAFTS, expected)
        yield Reading(OBSERVED_DRAFTS, record.num_correct_drafts)
