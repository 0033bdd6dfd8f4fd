"""Speculation metrics for operators, over a sliding window and since start.

The window is in engine time, the sum of round times, so an idle engine forgets nothing.

Speeds are compared per request, over rounds without prefill, in one range of batch sizes (a power
of two up to the next). Drafting rounds verified drafts; plain rounds had depth 0. A round of a
larger depth in which no request could draft is neither.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.metrics import batch_size_bucket

WINDOW_ROUNDS = 1024
WINDOW_S = 60.0
SPEED_ROUNDS = 128
"""Rounds a speed is averaged over. An occasional plain round keeps the comparison alive."""


@dataclass
class RoundSums:
    """Sums over rounds that decode. Times except `busy_ms` are of rounds without prefill."""

    rounds: int = 0
    requests: int = 0
    output_tokens: int = 0
    draft_tokens: int = 0
    correct_drafts: int = 0
    probe_rounds: int = 0
    busy_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    step_ms: float = 0.0

    def add(self, record: StepRecord) -> None:
        """Add one round."""
        self.rounds += 1
        self.requests += record.batch_size
        self.output_tokens += record.num_output_tokens
        self.draft_tokens += record.num_draft_tokens
        self.correct_drafts += record.num_correct_drafts
        self.probe_rounds += record.notes.is_probe
        self.busy_ms += record.step_ms
        if record.decodes_only:
            self.draft_ms += record.draft_ms
            self.verify_ms += record.verify_ms
            self.step_ms += record.step_ms

    def snapshot(self) -> dict[str, object]:
        """Return rates and shares; None for a division by zero."""
        models_ms = self.draft_ms + self.verify_ms
        return {
            "rounds": self.rounds,
            "busy_s": round(self.busy_ms / 1e3, 3),
            "accept_rate": _ratio(self.correct_drafts, self.draft_tokens),
            "tokens_per_step": _ratio(self.output_tokens, self.requests),
            "probe_share": _ratio(self.probe_rounds, self.rounds),
            "overhead_ratio": _ratio(self.draft_ms, self.verify_ms),
            # Host and device may overlap.
            "host_share": _ratio(max(0.0, self.step_ms - models_ms), self.step_ms),
        }


class RecentSpeed:
    """Speed of the last rounds of one kind, without prefill."""

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, float, float]] = deque(maxlen=SPEED_ROUNDS)
        self._tokens, self._ms, self._request_ms = 0, 0.0, 0.0

    def add(self, record: StepRecord) -> None:
        """Add one round and drop the oldest."""
        if len(self._rounds) == SPEED_ROUNDS:
            self._sum(*self._rounds[0], sign=-1)
        entry = record.num_output_tokens, record.step_ms, record.step_ms * record.batch_size
        self._rounds.append(entry)
        self._sum(*entry, sign=1)

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

    A round costs a few additions; `snapshot` sorts. Memory: the records of `window_rounds` rounds
    and, per range of batch sizes and draft shape, three numbers for each of `SPEED_ROUNDS`. One
    thread observes; any may read.

    window_rounds, window_s: the window ends at the first limit reached; seconds of engine time.
    """

    def __init__(self, window_rounds: int = WINDOW_ROUNDS, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self._clock_ms = 0.0
        self._window: deque[tuple[float, StepRecord]] = deque(maxlen=window_rounds)
        self._since_start = RoundSums()
        self._buckets: dict[int, BucketSpeed] = {}

    def observe(self, record: StepRecord) -> None:
        """Record a round. One without decoding only advances the clock."""
        self._clock_ms += record.step_ms
        # Before the window, so that a reader that sees the round there finds its bucket.
        if record.decodes_only:
            bucket = batch_size_bucket(record.batch_size)
            self._buckets.setdefault(bucket, BucketSpeed()).add(record)
        if record.batch_size:
            self._window.append((self._clock_ms, record))
            self._since_start.add(record)
        while self._window and self._window[0][0] < self._clock_ms - self.window_s * 1e3:
            self._window.popleft()

    def speedup(self, batch_size: int) -> float | None:
        """Return the measured speed of drafting over plain rounds near a batch size, if known."""
        bucket = self._buckets.get(batch_size_bucket(batch_size)) if batch_size else None
        return None if bucket is None else bucket.speedup

    def snapshot(self) -> dict[str, object]:
        """Return all metrics, JSON-able; unknown ones are None.

            accept_rate        drafts accepted and emitted per draft verified, 0..1
            tokens_per_step    tokens a request emits in a round: correct drafts and bonus token
            overhead_ratio     drafting / verification, in time
            host_share         share of round time in which neither model ran
            effective_speedup  time plain rounds would have taken for the tokens of the window's
                               drafting rounds, over the time those took; both sides measured
            estimated_speedup  the same by the throughput equation, without plain rounds: tokens of
                               a request in a drafting round / (1 + overhead_ratio), as if a plain
                               round took what verification takes

        Means weigh every draft (request, millisecond) alike; a p50 is over rounds.
        """
        # One call in C each, so the engine's thread cannot change them meanwhile.
        rounds = [record for _, record in tuple(self._window)]
        buckets = self._buckets.copy()
        return {
            "effective_speedup": _rounded(_speedup(rounds, buckets)),
            "estimated_speedup": _rounded(_estimated_speedup(rounds)),
            "window": _window_snapshot(rounds),
            "since_start": self._since_start.snapshot(),
            "by_batch_size": {str(size): b.snapshot() for size, b in sorted(buckets.items())},
        }


def _window_snapshot(rounds: list[StepRecord]) -> dict[str, object]:
    sums = RoundSums()
    for record in rounds:
        sums.add(record)
    pure = [record for record in rounds if record.decodes_only]
    shapes = sorted({record.shape for record in pure})
    return {
        **sums.snapshot(),
        "accept_rate_p50": _median(
            s.num_correct_drafts / s.num_draft_tokens for s in rounds if s.num_draft_tokens
        ),
        "tokens_per_step_p50": _median(s.num_output_tokens / s.batch_size for s in rounds),
        "measured_to_predicted_ms": _measured_to_predicted(pure),
        "by_num_steps": {
            str(shape): _shape_times([s for s in pure if s.shape == shape]) for shape in shapes
        },
    }


def _shape_times(rounds: list[StepRecord]) -> dict[str, object]:
    """Return the milliseconds of one shape's rounds without prefill."""
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


def _measured_to_predicted(pure: list[StepRecord]) -> float | None:
    known = [(s.step_ms, s.notes.predicted_ms) for s in pure if s.notes.predicted_ms is not None]
    return _ratio(sum(ms for ms, _ in known), sum(predicted for _, predicted in known))


def _speedup(rounds: list[StepRecord], buckets: dict[int, BucketSpeed]) -> float | None:
    drafting_ms = plain_ms = 0.0
    for record in rounds:
        if not (record.decodes_only and record.num_draft_tokens):
            continue
        plain = buckets[batch_size_bucket(record.batch_size)].plain_tokens_per_request_ms
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
