"""Latency of a request, in the router or the replica.

The router measures the latency seen by clients, the replica that of its engine. The difference is
the framework's part: HTTP, queueing, routing and messages. Clocks of different processes are never
compared.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from contextvars import ContextVar

from serve_spec import metrics
from serve_spec.core.request import TokenDelta
from serve_spec.metrics import Metric, Reading
from serve_spec.serving.messages import Failed, Refused, ReplicaItem

ARRIVED: ContextVar[float | None] = ContextVar("arrived", default=None)
"""`perf_counter` at the arrival of the current request."""

_GAPS_AT_ONCE = 32

OLD_ROUTER_LABEL = "door"
"""Former value of `measured_at` for "router"; it is exported as well until 0.3."""


class RequestTimer:
    """Measures the latency of a request from `started`, by `perf_counter`, for `record`.

    The prefill is the engine's measurement. The time before it is the queue's: of the router and
    the engine, with the way between them.
    """

    def __init__(
        self, record: Callable[[Reading], None], *measured_at: str, started: float
    ) -> None:
        self._record = record
        self._measured_at = measured_at
        self._started = started
        self._first = self._last = 0.0
        self._prefill_s = 0.0
        self._num_later = 0
        self._num_gaps = 0
        self._gaps: dict[int, list[float]] = {}
        """Gaps between tokens since the last reading, by bucket."""
        self._outcome = "left"
        self._finish_reason: str | None = None

    def observe(self, item: ReplicaItem) -> None:
        """Process an item of the replica as it arrives."""
        if isinstance(item, Refused | Failed):
            self._outcome = "refused" if isinstance(item, Refused) else "failed"
        elif isinstance(item, TokenDelta):
            if item.token_ids:
                self._observe_tokens(item, time.perf_counter())
            if item.finish_reason is not None:
                self._outcome = "done"
                self._finish_reason = item.finish_reason.value

    def fail(self) -> None:
        """Record that the request failed without a `Failed` item."""
        self._outcome = "failed"

    def end(self) -> None:
        """Record the outcome, the time of the request and the time per output token."""
        self._add(metrics.REQUESTS, 1, outcome=self._outcome)
        if self._finish_reason is not None:
            request_ms = (time.perf_counter() - self._started) * 1e3
            self._add(metrics.FINISHED, 1, finish_reason=self._finish_reason)
            self._add(metrics.REQUEST_MS, request_ms)
            self._add(metrics.REQUEST_WAIT_MS, request_ms)
            if self._first:
                self._add_phases()
        self._add_gaps()
        if self._num_later:
            wait_ms = (self._last - self._first) * 1e3
            self._add(metrics.TPOT_MS, wait_ms / self._num_later)
            self._add(metrics.TPOT_WAIT_MS, wait_ms / self._num_later)
            self._add(metrics.LATER_TOKENS, self._num_later)
            self._add(metrics.LATER_TOKENS_WAIT_MS, wait_ms)

    def _observe_tokens(self, delta: TokenDelta, now: float) -> None:
        before, self._last = self._last, now
        if before:
            self._num_later += len(delta.token_ids)
            gap_s = now - before
            bucket = bisect_left(metrics.GAP_S.buckets, gap_s)
            self._gaps.setdefault(bucket, []).append(gap_s)
            self._num_gaps += 1
            if self._num_gaps >= _GAPS_AT_ONCE:
                self._add_gaps()
            return
        self._first = now
        self._prefill_s = min(delta.prefill_s, now - self._started)
        wait_ms = (now - self._started) * 1e3
        self._add(metrics.TTFT_MS, wait_ms)
        self._add(metrics.FIRST_TOKENS, 1)
        self._add(metrics.FIRST_TOKEN_WAIT_MS, wait_ms)

    def _add_phases(self) -> None:
        """Record the phases, which add up to the time until the last token."""
        decode_s = self._last - self._first
        self._add(metrics.QUEUE_S, self._first - self._started - self._prefill_s)
        self._add(metrics.PREFILL_S, self._prefill_s)
        self._add(metrics.DECODE_S, decode_s)
        self._add(metrics.INFERENCE_S, self._prefill_s + decode_s)

    def _add_gaps(self) -> None:
        """Record the gaps of each bucket in one reading, as a reading costs more than a gap."""
        for gaps in self._gaps.values():
            labels = {"measured_at": self._measured_at[0]}
            self._record(Reading(metrics.GAP_S, sum(gaps) / len(gaps), labels, len(gaps)))
        self._gaps.clear()
        self._num_gaps = 0

    def _add(self, metric: Metric, value: float, **labels: str) -> None:
        if value <= 0 and metric.kind == "counter":  # Ray refuses it
            return
        is_new = metric.kind == "distribution"  # it has no former label
        for place in self._measured_at[:1] if is_new else self._measured_at:
            self._record(Reading(metric, value, {"measured_at": place, **labels}))


def router_timer(record: Callable[[Reading], None]) -> RequestTimer:
    """Return a timer that measures from the arrival of the current request."""
    started = ARRIVED.get() or time.perf_counter()
    return RequestTimer(record, "router", OLD_ROUTER_LABEL, started=started)
