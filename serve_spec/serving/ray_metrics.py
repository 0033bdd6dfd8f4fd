"""Export of metrics through Ray, to its dashboard and every node's Prometheus endpoint.

Ray adds the prefix `ray_` and, for counters, the suffix `_total` (`exported_names`). It keeps a
series per set of labels for the life of the process, so the label of a replica is its rank, which
its replacement inherits, not its id.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import ray
from ray.util import metrics as ray_metrics

from serve_spec.core.record import StepRecord
from serve_spec.log import get_logger
from serve_spec.metrics import (
    FORCED_ACCEPTANCE,
    LAST_REASON,
    PREDICTED_GOODPUT,
    SLOT,
    Metric,
    Reading,
)
from serve_spec.metrics import readings as round_readings
from serve_spec.serving.reports import Snapshot, number, section

logger = get_logger(__name__)

_PREFIX = "ray_serve_spec_"
_ANSWER_WITHIN_S = 2.0


async def fleet_metrics() -> str:
    """Return serve_spec's metrics of all live nodes; nodes that do not respond are left out."""
    nodes = await asyncio.to_thread(ray.nodes)
    urls = [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in nodes
        if node["Alive"]
    ]
    return ours(await asyncio.gather(*(asyncio.to_thread(_read, url) for url in urls)))


def ours(expositions: Iterable[str]) -> str:
    """Merge serve_spec's metrics of several expositions, grouped by metric."""
    comments: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in expositions:
        name = ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                name = line.split(" ", 3)[2]
                known = comments.setdefault(name, [])
                if line[:7] not in {comment[:7] for comment in known}:
                    known.append(line)
            else:
                samples.setdefault(name, []).append(line)
    return "".join(
        f"{line}\n"
        for name, lines in samples.items()
        if name.startswith(_PREFIX)
        for line in (*comments[name], *lines)
    )


def _read(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_WITHIN_S) as answer:
            text: str = answer.read().decode()
    except OSError as error:
        logger.warning("no metrics from %s: %r", url, error)
        return ""
    return text


LABELS = ("application", "deployment", "replica")
"""Labels of every series, in addition to the metric's own."""

# Rounds to keep between flushes; a few seconds of a fast engine.
_MOST_WAITING = 8192

_Key: TypeAlias = tuple[Metric, tuple[tuple[str, str], ...]]


def exported_names(metric: Metric) -> tuple[str, ...]:
    """Return the names of a metric in Prometheus."""
    name = f"ray_{metric.name}"
    if metric.kind == "counter":
        return (f"{name}_total",)
    if metric.kind == "histogram":
        return (f"{name}_bucket", f"{name}_count", f"{name}_sum")
    return (name,)


class RayMetrics:
    """Metrics of this process. Thread-safe."""

    def __init__(self, metrics: Iterable[Metric], labels: Mapping[str, str]) -> None:
        """Declare `metrics`. labels: a value for each of `LABELS`."""
        self._counters: dict[Metric, ray_metrics.Counter] = {}
        self._gauges: dict[Metric, ray_metrics.Gauge] = {}
        self._histograms: dict[Metric, ray_metrics.Histogram] = {}
        for metric in metrics:
            self._declare(metric, dict(labels))

    def record(self, reading: Reading) -> None:
        """Record one reading; takes a few microseconds."""
        metric = reading.metric
        if metric.kind == "counter":
            self._counters[metric].inc(reading.value, dict(reading.labels))
        elif metric.kind == "gauge":
            self._gauges[metric].set(reading.value, dict(reading.labels))
        else:
            self._histograms[metric].observe(reading.value, dict(reading.labels))

    def _declare(self, metric: Metric, labels: dict[str, str]) -> None:
        tags = (*LABELS, *metric.labels)
        if metric.kind == "counter":
            self._counters[metric] = ray_metrics.Counter(metric.name, metric.help, tags)
            self._counters[metric].set_default_tags(labels)
        elif metric.kind == "gauge":
            self._gauges[metric] = ray_metrics.Gauge(metric.name, metric.help, tags)
            self._gauges[metric].set_default_tags(labels)
        else:
            self._histograms[metric] = ray_metrics.Histogram(
                metric.name, metric.help, list(metric.buckets), tags
            )
            self._histograms[metric].set_default_tags(labels)


class RoundSink:
    """Buffers rounds of the engine's thread, which only pays for an append, until `flush`."""

    def __init__(self, metrics: RayMetrics) -> None:
        self._metrics = metrics
        self._waiting: deque[StepRecord] = deque(maxlen=_MOST_WAITING)

    def observe(self, record: StepRecord) -> None:
        """Buffer a round; the oldest are dropped when the buffer is full."""
        self._waiting.append(record)

    def flush(self) -> None:
        """Record the buffered rounds: the sum for counters, the newest value for gauges."""
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        for reading in merged(reading for record in waiting for reading in round_readings(record)):
            self._metrics.record(reading)


def merged(readings: Iterable[Reading]) -> list[Reading]:
    """Merge readings with equal metric and labels, as the exporter's cost is per reading."""
    values: dict[_Key, float] = {}
    observed: list[Reading] = []
    for reading in readings:
        metric = reading.metric
        key = metric, tuple(reading.labels.items())
        if metric.kind == "counter":
            values[key] = values.get(key, 0.0) + reading.value
        elif metric.kind == "gauge":
            values[key] = reading.value
        else:
            observed.append(reading)
    return [Reading(m, value, dict(labels)) for (m, labels), value in values.items()] + observed


class StateReadings:
    """Converts engine snapshots to readings. It remembers labels to reset old ones to 0."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()

    def of(self, snapshot: Snapshot) -> list[Reading]:
        """Return the readings of one snapshot."""
        predicted = section(snapshot, "break_even", "tokens_per_ms")
        found = [
            Reading(PREDICTED_GOODPUT, number(predicted, steps), {"num_steps": steps})
            for steps in predicted
        ]
        slot, last_reason = snapshot.get("slot"), snapshot.get("last_reason")
        if isinstance(slot, str) and slot.isdecimal():
            found.append(Reading(SLOT, int(slot)))
        if "synthetic_acceptance" in snapshot:
            is_forced = snapshot["synthetic_acceptance"] is not None
            found.append(Reading(FORCED_ACCEPTANCE, float(is_forced)))
        if isinstance(last_reason, str):
            self._reasons.add(last_reason)
            found += [
                Reading(LAST_REASON, float(reason == last_reason), {"reason": reason})
                for reason in sorted(self._reasons)
            ]
        return found
