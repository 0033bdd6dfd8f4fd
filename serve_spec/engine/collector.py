"""Speculation metrics for operators, over a sliding window and since start.

The window is in engine time, the sum of round times, so an idle engine forgets nothing.

Speeds are compared per request, over rounds without prefill, in one range of batch sizes (a power
of two up to the next). Drafting rounds verified drafts; plain rounds had depth 0. A round of a
larger depth in which no request could draft is neither.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from serve_spec import metrics
from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.metrics import RequestCounts

WINDOW_ROUNDS = 1024
WINDOW_S = 60.0
SPEED_ROUNDS = 128
"""Rounds a speed is averaged over. An occasional plain round keeps the comparison alive."""


class RoundSums:
    """Sums over rounds that decode. Times except `busy_ms` are of rounds without prefill."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._counts: Counter[tuple[int, int, int]] = Counter()

    def add(self, record: StepRecord, counts: RequestCounts) -> None:
        """Add one round and its requests by their drafts."""
        self._counts.update(counts)
        for name, value in _addends(record):
            self._sums[name] = self._sums.get(name, 0) + value

    def snapshot(self) -> dict[str, object]:
        """Return rates and fractions; None for a division by zero."""
        sums = self._sums.copy()

        def of(name: str) -> float:
            return sums.get(name, 0)

        def ratio(part: str, whole: str) -> float | None:
            return _ratio(of(part), of(whole))

        host_ms = max(0.0, of("step_ms") - of("draft_ms") - of("verify_ms"))
        return {
            "rounds": of("rounds"),
            "busy_s": round(of("busy_ms") / 1e3, 3),
            "accept_rate": ratio("correct_drafts", "draft_tokens"),
            "tokens_per_step": ratio("output_tokens", "requests"),
            "probe_share": ratio("probe_rounds", "rounds"),
            "budget_share": ratio("budget_rounds", "rounds"),
            "mean_budget": ratio("budgets", "budget_rounds"),
            "unverified_drafts": of("unverified_drafts"),
            "expected_correct_drafts": _rounded(of("expected_drafts")),
            "observed_correct_drafts": of("observed_drafts"),
            "observed_to_expected_drafts": ratio("observed_drafts", "expected_drafts"),
            "measured_to_predicted_ms": ratio("measured_ms", "predicted_ms"),
            "positions": [
                {
                    "position": position,
                    **counts._asdict(),
                    "accept_rate": _ratio(counts.accepted, counts.reached),
                }
                for position, counts in enumerate(
                    metrics.position_counts(self._counts.copy()), start=1
                )
            ],
            "overhead_ratio": ratio("draft_ms", "verify_ms"),
            # Host and device may overlap.
            "host_share": _ratio(host_ms, of("step_ms")),
            "idle_share": ratio("idle_ms", "step_ms"),
        }


def _addends(record: StepRecord) -> Iterator[tuple[str, float]]:
    """Yield what a round adds; `observed` and `measured` where there was a prediction."""
    yield "rounds", 1
    yield "requests", record.batch_size
    yield "output_tokens", record.num_output_tokens
    yield "draft_tokens", record.num_draft_tokens
    yield "correct_drafts", record.num_correct_drafts
    yield "probe_rounds", record.notes.is_probe
    yield "busy_ms", record.step_ms
    if record.budget is not None:
        yield "budget_rounds", 1
        yield "budgets", record.budget
        yield "unverified_drafts", metrics.unverified_drafts(record)
    if (expected := metrics.expected_drafts(record)) is not None:
        yield "expected_drafts", expected
        yield "observed_drafts", record.num_correct_drafts
    if record.decodes_only:
        yield "draft_ms", record.draft_ms
        yield "verify_ms", record.verify_ms
        yield "idle_ms", record.idle_ms
        yield "step_ms", record.step_ms
        if record.notes.predicted_ms is not None:
            yield "predicted_ms", record.notes.predicted_ms
            yield "measured_ms", record.step_ms


class RecentSpeed:
    """Speed of the last rounds of one kind, without prefill."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, float, float]] = deque(maxlen=SPEED_ROUNDS)
        self._tokens, self._ms, self._request_ms = 0, 0.0, 0.0

    def add(self, record: StepRecord) -> None:
        """Add one round and drop the oldest."""
        if len(self._rounds) == SPEED_ROUNDS:
            self._sum(*self._rounds[0], sign=-1)
        speed = record.num_output_tokens, record.step_ms, record.step_ms * record.batch_size
        self._rounds.append(speed)
        self._sum(*speed, sign=1)

    def _sum(self, tokens: int, ms: float, request_ms: float, *, sign: int) -> None:
        self._tokens += sign * tokens
        self._ms += sign * ms
        self._request_ms += sign * request_ms

    @property
    def tokens_per_ms(self) -> float | None:
        """Speed of the whole batch; None before the first round."""
        return self._tokens / self._ms if self._ms > 0 else None

    @property
    def tokens_per_request_ms(self) -> float | None:
        """Speed per request, which compares between batch sizes; None before the first round."""
        return self._tokens / self._request_ms if self._request_ms > 0 else None


class BucketSpeed:
    """Speeds of one range of batch sizes: by draft shape, and of all drafting rounds."""

    def __init__(self) -> None:
        self.by_shape: dict[DraftShape, RecentSpeed] = {}
        self.drafting = RecentSpeed()

    def add(self, record: StepRecord) -> None:
        """Add one round without prefill."""
        if record.num_draft_tokens:
            self.drafting.add(record)
        elif record.shape.depth:
            return
        self.by_shape.setdefault(record.shape, RecentSpeed()).add(record)

    @property
    def plain_tokens_per_request_ms(self) -> float | None:
        """Measured speed per request without drafts; None before the first such round."""
        plain = self.by_shape.get(PLAIN)
        return None if plain is None else plain.tokens_per_request_ms

    @property
    def speedup(self) -> float | None:
        """Measured speed of drafting over plain rounds; None until both were measured."""
        drafting, plain = self.drafting.tokens_per_request_ms, self.plain_tokens_per_request_ms
        return None if drafting is None or plain is None else drafting / plain

    def snapshot(self) -> dict[str, object]:
        """Return the speedup, and the batch's tokens per ms by draft shape."""
        speeds = self.by_shape.copy()
        return {
            "effective_speedup": _rounded(self.speedup),
            "tokens_per_ms": {
                str(shape): _rounded(speeds[shape].tokens_per_ms) for shape in sorted(speeds)
            },
        }


class MetricsCollector:
    """A `MetricsSink` that summarizes the recent rounds and all rounds.

    A round costs a few additions; `snapshot` sorts. One thread observes; any may read.
    window_rounds, window_s: the window ends at the first limit reached; seconds of engine time.
    """

    def __init__(self, window_rounds: int = WINDOW_ROUNDS, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self._clock_ms = 0.0
        self._window: deque[tuple[float, StepRecord, RequestCounts]] = deque(maxlen=window_rounds)
        self._since_start = RoundSums()
        self._budget: int | None = None
        self._buckets: dict[int, BucketSpeed] = {}

    def observe(self, record: StepRecord) -> None:
        """Record a round. One without decoding only advances the clock."""
        self._clock_ms += record.step_ms
        # Before the window, so that a reader that sees the round there finds its bucket.
        if record.decodes_only:
            bucket = metrics.batch_size_bucket(record.batch_size)
            self._buckets.setdefault(bucket, BucketSpeed()).add(record)
        if record.batch_size:
            counts = metrics.request_counts(record)
            self._window.append((self._clock_ms, record, counts))
            self._since_start.add(record, counts)
            self._budget = record.budget
        while self._window and self._window[0][0] < self._clock_ms - self.window_s * 1e3:
            self._window.popleft()

    def speedup(self, batch_size: int) -> float | None:
        """Return the measured speed of drafting over plain rounds near a batch size, if known."""
        bucket = self._buckets.get(metrics.batch_size_bucket(batch_size)) if batch_size else None
        return None if bucket is None else bucket.speedup

    def snapshot(self) -> dict[str, object]:
        """Return all metrics, JSON-able; unknown ones are None.

            accept_rate        drafts accepted and emitted per draft verified, 0..1
            tokens_per_step    tokens a request emits in a round: correct drafts and bonus token
            overhead_ratio     drafting / verification, in time
            host_share         fraction of round time in which neither model ran
            idle_share         time the device waited for the host before rounds, over round time
            effective_speedup  time plain rounds would have taken for the tokens of the window's
                               drafting rounds, over the time those took; both sides measured
            estimated_speedup  the same by the throughput equation, without plain rounds: tokens of
                               a request in a drafting round / (1 + overhead_ratio), as if a plain
                               round took what verification takes

            draft_budget       most drafts that the last round verified; None: all of them
            budget_share       fraction of rounds whose budget left drafts unverified; mean_budget
                               is of these
            observed_to_expected_drafts, measured_to_predicted_ms
                               1 if predictions are right; each over the rounds that have one
            positions          drafts made, verified, reached (all before were accepted), accepted;
                               accept_rate is of those reached

        Means weigh every draft (request, millisecond) alike; a p50 is over rounds.
        """
        # One call in C each, so the engine's thread cannot change them meanwhile.
        window = tuple(self._window)
        rounds = [record for _, record, _ in window]
        buckets = self._buckets.copy()
        return {
            "effective_speedup": _rounded(_speedup(rounds, buckets)),
            "estimated_speedup": _rounded(_estimated_speedup(rounds)),
            "draft_budget": self._budget,
            "window": _window_snapshot(window),
            "since_start": self._since_start.snapshot(),
            "by_batch_size": {str(size): b.snapshot() for size, b in sorted(buckets.items())},
        }


def _window_snapshot(
    window: Sequence[tuple[float, StepRecord, RequestCounts]],
) -> dict[str, object]:
    sums = RoundSums()
    for _, record, counts in window:
        sums.add(record, counts)
    rounds = [record for _, record, _ in window]
    pure = [record for record in rounds if record.decodes_only]
    shapes = sorted({record.shape for record in pure})
    return {
        **sums.snapshot(),
        "accept_rate_p50": _median(
            s.num_correct_drafts / s.num_draft_tokens for s in rounds if s.num_draft_tokens
        ),
        "tokens_per_step_p50": _median(s.num_output_tokens / s.batch_size for s in rounds),
        "by_num_steps": {
            str(shape): _shape_times([s for s in pure if s.shape == shape]) for shape in shapes
        },
    }


def _shape_times(rounds: list[StepRecord]) -> dict[str, object]:
    times = {
        "draft_ms": [s.draft_ms for s in rounds],
        "verify_ms": [s.verify_ms for s in rounds],
        "step_ms": [s.step_ms for s in rounds],
    }
    summary = {
        name: {"mean": _rounded(statistics.fmean(values)), "p50": _median(values)}
        for name, values in times.items()
    }
    return {"rounds": len(rounds), **summary}


def _speedup(rounds: list[StepRecord], buckets: dict[int, BucketSpeed]) -> float | None:
    drafting_ms = plain_ms = 0.0
    for record in rounds:
        if not (record.decodes_only and record.num_draft_tokens):
            continue
        plain = buckets[metrics.batch_size_bucket(record.batch_size)].plain_tokens_per_request_ms
        if plain:
            drafting_ms += record.step_ms
            plain_ms += record.num_output_tokens / (plain * record.batch_size)
    return plain_ms / drafting_ms if drafting_ms else None


def _estimated_speedup(rounds: list[StepRecord]) -> float | None:
    """Return the throughput equation's speedup of drafting rounds (arXiv 2211.17192)."""
    drafting = [s for s in rounds if s.decodes_only and s.num_draft_tokens and s.verify_ms]
    verify_ms = sum(s.verify_ms for s in drafting)
    if not verify_ms:
        return None
    tokens = sum(s.num_output_tokens / s.batch_size * s.verify_ms for s in drafting)
    return tokens / (verify_ms + sum(s.draft_ms for s in drafting))


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return _rounded(statistics.median(known)) if known else None


def _ratio(part: float, whole: float) -> float | None:
    return _rounded(part / whole) if whole else None


def _rounded(value: float | None) -> float | None:
    """Return value to five significant digits, because a speed may be far below one."""
    return None if value is None else float(f"{value:.5g}")
