"""Recent requests of one router, for the status page: latency, and how they ended."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence

from serve_spec import metrics
from serve_spec.metrics import Metric, Reading

_RECENT_REQUESTS = 512
_LATENCIES: dict[Metric, str] = {metrics.TTFT_MS: "ttft_ms", metrics.TPOT_MS: "token_gap_ms"}


class RecentRequests:
    """Passes readings on to `record` and keeps the latencies of the last requests."""

    def __init__(self, record: Callable[[Reading], None]) -> None:
        self._record = record
        self._latencies: dict[str, deque[float]] = {
            name: deque(maxlen=_RECENT_REQUESTS) for name in _LATENCIES.values()
        }
        self._outcomes: Counter[str] = Counter()

    def record(self, reading: Reading) -> None:
        """Pass a reading on; keep it if it is of a request as this router sees it."""
        self._record(reading)
        if reading.labels.get("measured_at") != "router":
            return
        if reading.metric in _LATENCIES:
            self._latencies[_LATENCIES[reading.metric]].append(reading.value)
        elif reading.metric is metrics.REQUESTS:
            self._outcomes[reading.labels["outcome"]] += 1

    def snapshot(self) -> dict[str, object]:
        """Return percentiles over the last requests, and requests by outcome since the start.

        `token_gap_ms`: the mean time between two tokens of a request.
        """
        latencies = {name: _percentiles(list(each)) for name, each in self._latencies.items()}
        return {**latencies, "requests": dict(self._outcomes)}


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if len(values) < 2:
        return {"p50": values[0], "p99": values[0]} if values else None
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": round(cuts[49], 3), "p99": round(cuts[98], 3)}
