"""Metrics of engines and routers: names, units and meaning, independent of the exporter.

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
    """Declaration of one metric, for every exporter."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "distribution"]
    """A distribution is a histogram that is counted here, so that its sum is exact."""
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def batch_size_bucket(batch_size: int) -> int:
    """Return the largest power of two ≤ `batch_size`; batch_size ≥ 1."""
    return 1 << (batch_size.bit_length() - 1)


class MetricsSink(Protocol):
    """Receives the records of rounds; must neither block nor raise."""

    def observe(self, record: StepRecord) -> None:
        """Record a round."""


class NullSink:
    """Drops all records; for offline engines and tests."""

    def observe(self, record: StepRecord) -> None:
        """Drop the round."""


_MS_BUCKETS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
_TTFT_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 6e4)
_TPOT_BUCKETS = (
    0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 200.0, 500.0, 1e3,
)  # fmt: skip

# vLLM's bounds, and below them finer ones for small models.
_PHASE_BUCKETS_S = (
    0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_GAP_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_TOKENS_BUCKETS = tuple(
    float(digit * 10**power) for power in range(6) for digit in (1, 2, 5)
)  # up to 500,000
_CHOICES_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)

_REQUEST_BUCKETS = (
    10.0, 20.0, 50.0, 100.0, 200.0, 300.0, 500.0, 800.0, 1e3, 1.5e3, 2e3, 2.5e3, 5e3, 1e4, 1.5e4,
    2e4, 3e4, 6e4, 1.2e5, 2.4e5, 4.8e5, 9.6e5,
)  # fmt: skip


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"serve_spec_{name}", "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"serve_spec_{name}", "gauge", text, labels)


def _ms(name: str, text: str, *labels: str, buckets: tuple[float, ...] = _MS_BUCKETS) -> Metric:
    return Metric(f"serve_spec_{name}", "histogram", text, labels, buckets)


def _distribution(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(f"serve_spec_{name}", "distribution", text, labels, buckets)


# Metrics of rounds.
NUM_STEPS = _gauge("num_steps", "Speculation depth of the last round: draft tokens per request.")
BATCH_SIZE = _gauge("batch_size", "Decoding requests in the last round.")
ROUNDS = _counter(
    "rounds",
    "Decode rounds by draft shape: depth of chains, or depth x size of trees.",
    "num_steps",
)
BATCH_SIZE_ROUNDS = _counter(
    "batch_size_rounds",
    "Decode rounds by batch size, rounded down to a power of two.",
    "batch_size",
)
SWITCHES = _counter("depth_switches", "Changes of speculation depth by reason.", "reason")
PROBE_ROUNDS = _counter("probe_rounds", "Rounds spent on exploration.")
DRAFT_TOKENS = _counter("draft_tokens", "Draft tokens verified by the target.")
CORRECT_DRAFTS = _counter("correct_drafts", "Draft tokens accepted by the target.")
GRAMMAR_DRAFTS = _counter(
    "grammar_draft_tokens",
    "Drafts of text that a grammar forces, verified by the target; draft_tokens leaves them out.",
)
GRAMMAR_TOKENS = _counter("grammar_tokens", "Of these, tokens accepted and emitted.")
POSITION_PROPOSED = _counter(
    "position_proposed_tokens",
    "Draft tokens proposed by position; those beyond the budget are not verified.",
    "position",
)
POSITION_DRAFTED = _counter(
    "position_drafted_tokens", "Draft tokens verified by position.", "position"
)
POSITION_REACHED = _counter(
    "position_reached_tokens",
    "Verified draft tokens whose predecessors were accepted, by position.",
    "position",
)
POSITION_ACCEPTED = _counter(
    "position_accepted_tokens", "Draft tokens accepted by position.", "position"
)
DRAFT_BUDGET = _gauge(
    "draft_budget_tokens", "Verification budget of the last round with one, in draft tokens."
)
BUDGET_ROUNDS = _counter(
    "budget_rounds", "Decode rounds in which the budget left draft tokens unverified."
)
UNVERIFIED_DRAFTS = _counter(
    "unverified_draft_tokens", "Draft tokens not verified because of the budget."
)
EXPECTED_DRAFTS = _counter(
    "expected_correct_drafts", "Draft tokens predicted to be accepted, in rounds with a prediction."
)
OBSERVED_DRAFTS = _counter(
    "observed_correct_drafts", "Draft tokens accepted in rounds with a prediction."
)
OUTPUT_TOKENS = _counter("output_tokens", "Tokens emitted by decoding requests.")
PREFILL_TOKENS = _counter("prefill_tokens", "Prompt tokens computed.")
PREFIX_QUERY_TOKENS = _counter("prefix_cache_query_tokens", "Prompt tokens of admitted requests.")
PREFIX_HIT_TOKENS = _counter(
    "prefix_cache_hit_tokens", "Prompt tokens of admitted requests found in the prefix cache."
)
ACCEPT_LENGTHS = _counter(
    "accept_length_requests",
    "Decoding requests by the tokens they emitted in a round: correct drafts and the bonus token.",
    "accept_length",
)
DRAFT_MS = _ms("draft_ms", "Draft time of a round, in ms.")
VERIFY_MS = _ms("verify_ms", "Target forward time of a round, in ms.")
IDLE_MS = _ms("device_idle_ms", "Time the device waited for the host before a round, in ms.")
BROKEN_DRAFTS = _counter(
    "broken_drafts", "Requests without further drafts, as the draft model produced NaN or no token."
)
STEP_MS = _ms("step_ms", "Total time of a round, in ms.")
PREDICTED_MS = _ms("predicted_step_ms", "Predicted time of a round without prompts, in ms.")
MEASURED_MS = _ms("measured_step_ms", "Measured time of rounds with a prediction, in ms.")
OVERHEAD = _gauge(
    "overhead_ratio", "Draft time divided by verification time, last round without prompts."
)
SPEEDUP = _gauge(
    "effective_speedup_ratio",
    "Measured speed with drafts over speed without, by batch size (powers of two).",
    "batch_size",
)
EMA_ACCEPT_LENGTH = _gauge(
    "ema_accept_length_tokens",
    "Moving average of accepted drafts per request, by batch-size slot.",
    "slot",
)
RUNNING_SEQS = _gauge("running_seqs", "Running requests.")
WAITING_SEQS = _gauge("waiting_seqs", "Requests that wait for KV pages or request slots.")
KV_USAGE = _gauge("kv_usage_ratio", "Fraction of KV pages in use, 0..1.")
KV_PAGES = _gauge("kv_pages", "KV pages by state: used or free.", "state")

# Metrics of an engine's snapshots.
PREDICTED_GOODPUT = _gauge(
    "predicted_goodput_tokens_per_ms",
    "Predicted tokens per ms of every draft shape for the current batch.",
    "num_steps",
)
LAST_REASON = _gauge(
    "last_reason",
    "1 for the reason of the policy's last decision, or idle without requests; 0 for earlier ones.",
    "reason",
)
SLOT = _gauge("slot", "Smallest batch size of the slot that made the last decision.")
PREEMPTIONS = _counter("preemptions", "Requests preempted because the KV pages ran out.")
FORCED_ACCEPTANCE = _gauge(
    "forced_acceptance",
    "1 while acceptance is synthetic, for load tests: texts are not the model's.",
)
COSTS_MISSING = _gauge(
    "costs_missing", "1 while the policy has no measured costs of steps, so `ema` decides."
)

# Metrics of requests, at the router and at the engine. Every latency has a histogram for its
# quantiles, and counters for its mean: exporters that rebuild a histogram from its buckets know the
# sum only to a bucket's width.
TTFT_MS = _ms(
    "time_to_first_token_ms",
    "Time from arrival, at the router or at the engine, to the first token, in ms.",
    "measured_at",
    buckets=_TTFT_BUCKETS,
)
TPOT_MS = _ms(
    "time_per_output_token_ms",
    "Mean time per output token after the first, by request, in ms.",
    "measured_at",
    buckets=_TPOT_BUCKETS,
)
FIRST_TOKEN_WAIT_MS = _counter(
    "first_token_wait_ms",
    "Sum of times to first token, in ms; router minus engine: serving overhead.",
    "measured_at",
)
FIRST_TOKENS = _counter("first_tokens", "Requests with a first token.", "measured_at")
LATER_TOKENS_WAIT_MS = _counter(
    "later_tokens_wait_ms",
    "Sum of times from first to last token of requests, in ms.",
    "measured_at",
)
LATER_TOKENS = _counter("later_tokens", "Output tokens after the first.", "measured_at")
REQUESTS = _counter(
    "requests",
    "Finished requests by outcome: done, refused, failed or left.",
    "measured_at",
    "outcome",
)
REQUEST_MS = _ms(
    "request_ms",
    "Time from arrival, at the router or at the engine, to the last token, in ms.",
    "measured_at",
    buckets=_REQUEST_BUCKETS,
)
REQUEST_WAIT_MS = _counter(
    "request_wait_ms", "Sum of the times of finished requests, in ms.", "measured_at"
)
TPOT_WAIT_MS = _counter(
    "time_per_output_token_wait_ms",
    "Sum of the requests' mean times per output token, in ms.",
    "measured_at",
)
GAP_S = _distribution(
    "inter_token_latency_seconds",
    "Time between two messages with tokens of a request, in s; a step that accepts drafts sends "
    "its tokens in one.",
    _GAP_BUCKETS_S,
    "measured_at",
)
QUEUE_S = _distribution(
    "request_queue_time_seconds",
    "Time of finished requests from arrival, at the router or at the engine, until their prompt "
    "is computed, in s.",
    _PHASE_BUCKETS_S,
    "measured_at",
)
PREFILL_S = _distribution(
    "request_prefill_time_seconds",
    "Time of finished requests from admission to the first token, in s.",
    _PHASE_BUCKETS_S,
    "measured_at",
)
DECODE_S = _distribution(
    "request_decode_time_seconds",
    "Time of finished requests from the first to the last token, in s.",
    _PHASE_BUCKETS_S,
    "measured_at",
)
INFERENCE_S = _distribution(
    "request_inference_time_seconds",
    "Time of finished requests from admission to the last token, in s.",
    _PHASE_BUCKETS_S,
    "measured_at",
)
PROMPT_TOKENS = _distribution(
    "request_prompt_tokens", "Prompt tokens of finished requests.", _TOKENS_BUCKETS
)
GENERATION_TOKENS = _distribution(
    "request_generation_tokens", "Tokens emitted of finished requests.", _TOKENS_BUCKETS
)
MAX_GENERATION_TOKENS = _distribution(
    "request_max_num_generation_tokens",
    "Most tokens emitted of the choices of a prompt.",
    _TOKENS_BUCKETS,
)
PARAMS_MAX_TOKENS = _distribution(
    "request_params_max_tokens", "Parameter max_tokens of finished requests.", _TOKENS_BUCKETS
)
PARAMS_N = _distribution("request_params_n", "Choices of a prompt.", _CHOICES_BUCKETS)
FINISHED = _counter(
    "finished_requests",
    "Requests that are done by finish reason: stop, length or abort.",
    "measured_at",
    "finish_reason",
)
IGNORED_FIELDS = _counter("ignored_fields", "Unknown fields of requests, which were ignored.")

# Metrics of a router's queue.
QUEUE_LEN = _gauge("queue_len", "Requests that wait in the router.")
IN_FLIGHT = _gauge("in_flight_requests", "Requests sent to replicas.")
REJECTED = _counter("rejected_requests", "Requests answered 429 by the router.")
RESUMED = _counter("resumed_requests", "Requests resumed on another replica after a failure.")
SUBMISSIONS = _counter(
    "submissions",
    "Messages to replicas by number of requests (upper bounds, powers of two).",
    "size",
)
SIZES = (
    PROMPT_TOKENS, GENERATION_TOKENS, MAX_GENERATION_TOKENS, PARAMS_MAX_TOKENS, PARAMS_N,
)  # fmt: skip
ROUTER_METRICS = (QUEUE_LEN, IN_FLIGHT, REJECTED, RESUMED, SUBMISSIONS, *SIZES)

# Metrics of all replicas together, from the central actor.
FLEET_REPLICAS = _gauge(
    "fleet_replicas", "Replicas by their reports to the central actor: fresh or stale.", "state"
)
FLEET_ACCEPT_LENGTH = _gauge(
    "fleet_accept_length_tokens",
    "Tokens of a decoding request and step over all replicas, since their start.",
)
FLEET_SPEEDUP = _gauge(
    "fleet_effective_speedup_ratio",
    "Measured speed with drafts over speed without, over all replicas, by their busy time.",
)
FLEET_ACCEPT_RATE = _gauge(
    "fleet_accept_rate_ratio",
    "Acceptance rate that new replicas of a pair of models start with, by position.",
    "pair",
    "max_steps",
    "position",
)
FLEET_METRICS = (FLEET_REPLICAS, FLEET_ACCEPT_LENGTH, FLEET_SPEEDUP, FLEET_ACCEPT_RATE)

OLD_NAMES = {SWITCHES: "serve_spec_tier_switches", ACCEPT_LENGTHS: "serve_spec_accept_length_rows"}
"""Former names of metrics, which are exported as well until 0.3."""

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""Every metric, for the exporters that declare them."""


@dataclass(frozen=True)
class Reading:
    """One value of a metric: added to a counter, set on a gauge, observed in a histogram.

    count: how often a distribution observes the value.
    """

    metric: Metric
    value: float
    labels: dict[str, str] = field(default_factory=dict)
    count: int = 1


def readings(record: StepRecord) -> Iterator[Reading]:
    """Yield the readings of a round, without zeros for counters, which several exporters refuse."""
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
        proposed or record.steps_per_req, record.steps_per_req, record.correct_per_req, strict=True
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
    yield Reading(GRAMMAR_DRAFTS, record.num_grammar_drafts)
    yield Reading(GRAMMAR_TOKENS, record.num_grammar_tokens)
    yield Reading(OUTPUT_TOKENS, record.num_output_tokens)
    for length, num_rows in Counter(record.accept_lengths).items():
        yield Reading(ACCEPT_LENGTHS, num_rows, {"accept_length": str(length)})


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
