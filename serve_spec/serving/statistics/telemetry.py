"""Metrics of replicas and routers, and the warm start of a replica from the fleet's acceptance.

They are exported through Ray, to its dashboard and every node's Prometheus endpoint. Ray adds the
prefix `ray_` and, for counters, the suffix `_total` (`exported_names`). It keeps a series per set
of labels for the life of the process, so the label of a replica is its rank, which its replacement
inherits, not its id.
"""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.request
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any, Protocol, TypeAlias

import ray
from ray.util import metrics as ray_metrics

from serve_spec import metrics
from serve_spec.adaptive import PolicySettings
from serve_spec.config import ServeSpecConfig
from serve_spec.core.record import StepRecord
from serve_spec.log import get_logger
from serve_spec.metrics import Metric, Reading
from serve_spec.serving.statistics.request_timer import RequestTimer
from serve_spec.serving.statistics.snapshot import Snapshot, number, section

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

_EXPORT_INTERVAL_S = 0.5

_Record: TypeAlias = Callable[[float, dict[str, str]], None]
_Key: TypeAlias = tuple[Metric, tuple[tuple[str, str], ...]]


def exported_names(metric: Metric) -> tuple[str, ...]:
    """Return the names of a metric in Prometheus."""
    name = f"ray_{metric.name}"
    if metric.kind == "counter":
        return (f"{name}_total",)
    if metric.kind == "histogram":
        return (f"{name}_bucket", f"{name}_count", f"{name}_sum")
    if metric.kind == "distribution":
        return (f"{name}_bucket_total", f"{name}_sum_total")
    return (name,)


class RayMetrics:
    """Metrics of this process, with the values `labels` of `LABELS`, and a buffer of rounds."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._record = {
            metric: [_declare(part, name, dict(labels)) for part, name in _declared(metric)]
            for metric in metrics.METRICS
        }
        self._rounds: deque[StepRecord] = deque(maxlen=_MOST_WAITING)
        self._distributions = Distributions()

    def record(self, reading: Reading) -> None:
        """Record one reading, a distribution's at the next flush; takes a few microseconds."""
        if reading.metric.kind == "distribution":
            self._distributions.observe(reading)
            return
        for record in self._record[reading.metric]:
            record(reading.value, dict(reading.labels))

    def observe(self, record: StepRecord) -> None:
        """Buffer a round, for an append's time; a full buffer drops the oldest."""
        self._rounds.append(record)

    def flush(self) -> None:
        """Record distributions and rounds: the sum for counters, the newest value for gauges."""
        for metric, labels, counts, total in self._distributions.take():
            record_bucket, record_sum = self._record[metric]
            for bound, count in zip(bounds(metric), accumulate(counts), strict=True):
                if count:  # Ray refuses zeros
                    record_bucket(count, {**labels, "le": bound})
            if total > 0:
                record_sum(total, labels)
        waiting = [self._rounds.popleft() for _ in range(len(self._rounds))]
        for reading in merged(chain.from_iterable(map(metrics.readings, waiting))):
            self.record(reading)


class Distributions:
    """Counts what distributions observe, in any thread, until it is taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[_Key, list[int]] = {}
        self._sums: defaultdict[_Key, float] = defaultdict(float)

    def observe(self, reading: Reading) -> None:
        """Count a reading."""
        metric, count = reading.metric, reading.count
        key = metric, tuple(reading.labels.items())
        with self._lock:
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = [0] * (len(metric.buckets) + 1)
            counts[bisect_left(metric.buckets, reading.value)] += count
            self._sums[key] += reading.value * count

    def take(self) -> list[tuple[Metric, dict[str, str], list[int], float]]:
        """Return metric, labels, counts by bucket and sum of what is new since the last call."""
        with self._lock:
            counts, self._counts = self._counts, {}
            sums, self._sums = self._sums, defaultdict(float)
        return [(key[0], dict(key[1]), found, sums[key]) for key, found in counts.items()]


def bounds(metric: Metric) -> list[str]:
    """Return the values of the label `le`, as Prometheus writes them."""
    return [*(str(float(bound)) for bound in metric.buckets), "+Inf"]


def _declared(metric: Metric) -> list[tuple[Metric, str]]:
    """Return the metrics to declare in Ray for one, with their names."""
    if metric.kind != "distribution":
        return [(metric, name) for name in names(metric)]
    labels = metric.labels
    buckets = replace(metric, kind="counter", labels=(*labels, "le"))
    return [
        (buckets, f"{metric.name}_bucket"),
        (replace(metric, kind="counter"), f"{metric.name}_sum"),
    ]


def names(metric: Metric) -> list[str]:
    """Return the name of a metric, and its former name if it has one."""
    return list(filter(None, (metric.name, metrics.OLD_NAMES.get(metric))))


def _declare(metric: Metric, name: str, labels: dict[str, str]) -> _Record:
    """Declare a metric in Ray; return the function that records a value with its labels."""
    tags = (*LABELS, *metric.labels)
    declared: Any
    record: _Record
    if metric.kind == "histogram":
        declared = ray_metrics.Histogram(name, metric.help, list(metric.buckets), tags)
        record = declared.observe
    elif metric.kind == "gauge":
        declared = ray_metrics.Gauge(name, metric.help, tags)
        record = declared.set
    else:
        declared = ray_metrics.Counter(name, metric.help, tags)
        record = declared.inc
    declared.set_default_tags(labels)
    return record


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


def state_readings(snapshot: Snapshot, reasons: set[str]) -> Iterator[Reading]:
    """Yield the readings of an engine's snapshot; add its reason to `reasons`, reset the others."""
    predicted = section(snapshot, "break_even", "tokens_per_ms")
    for steps in predicted:
        yield Reading(metrics.PREDICTED_GOODPUT, number(predicted, steps), {"num_steps": steps})
    slot, last_reason = snapshot.get("slot"), snapshot.get("last_reason")
    if isinstance(slot, str) and slot.isdecimal():
        yield Reading(metrics.SLOT, int(slot))
    if "synthetic_acceptance" in snapshot:
        yield Reading(
            metrics.FORCED_ACCEPTANCE, float(snapshot["synthetic_acceptance"] is not None)
        )
    state = section(snapshot, "costs").get("state")
    if isinstance(state, str):
        yield Reading(metrics.COSTS_MISSING, float(state == "missing"))
    if isinstance(last_reason, str):
        reasons.add(last_reason)
        for reason in sorted(reasons):
            yield Reading(metrics.LAST_REASON, float(reason == last_reason), {"reason": reason})


def fleet_readings(fleet: Snapshot) -> Iterator[Reading]:
    """Yield the readings of `fleet` in `/server_info`; what is not measured yet has none."""
    for state, key in (("fresh", "num_replicas"), ("stale", "num_stale")):
        yield Reading(metrics.FLEET_REPLICAS, number(fleet, key), {"state": state})
    yield Reading(metrics.FLEET_ACCEPT_LENGTH, number(fleet, "avg_spec_accept_length"))
    if speedup := number(fleet, "effective_speedup"):
        yield Reading(metrics.FLEET_SPEEDUP, speedup)
    known = fleet.get("acceptance")
    for pair in known if isinstance(known, list) else ():
        shared = {"pair": pair["pair"], "max_steps": str(pair["max_steps"])}
        for row in pair["positions"]:
            if row["accept_rate"] is not None:
                labels = {**shared, "position": str(row["position"])}
                yield Reading(metrics.FLEET_ACCEPT_RATE, row["accept_rate"], labels)


def serve_labels(context: Any) -> dict[str, str]:
    """Return the values of `LABELS` for a Serve replica's context."""
    return {
        "application": context.app_name,
        "deployment": context.deployment,
        "replica": str(context.rank.rank) if context.rank else "-",
    }


def pair_name(config: ServeSpecConfig) -> str:
    """Return the key of shared acceptance rates: target, draft model and forced acceptance."""
    speculative = config.speculative
    draft = speculative.speculative_draft_model_path or speculative.speculative_algorithm
    forced = speculative.synthetic_acceptance
    label = "" if forced is None else f", acceptance forced to {forced}"
    return f"{config.model.source}+{draft}{label}"


class Growth:
    """Turns totals into what counters grow by."""

    def __init__(self) -> None:
        self._counted: defaultdict[object, float] = defaultdict(float)

    def of(
        self, metric: Metric, total: float, labels: Mapping[str, str] | None = None
    ) -> Iterator[Reading]:
        """Yield the growth of a total since the last call, if there is any."""
        values = dict(labels or {})
        key = (metric, *values.values())
        if growth := total - self._counted[key]:
            yield Reading(metric, growth, values)
        self._counted[key] = total


class ReplicaTelemetry:
    """Ray metrics of one replica; created on its event loop, exported in another thread."""

    def __init__(self, context: Any, engine: Any) -> None:
        self._metrics = RayMetrics(serve_labels(context))
        self._reasons: set[str] = set()
        self._growth = Growth()
        engine.report_to(self._metrics)
        self._exporter = asyncio.get_running_loop().create_task(
            _export_forever(lambda: asyncio.to_thread(self._metrics.flush))
        )

    def timer(self) -> RequestTimer:
        """Return a started timer for a request to the engine."""
        return RequestTimer(self._metrics.record, "engine", started=time.perf_counter())

    def show(self, snapshot: Snapshot) -> None:
        """Export the metrics of an engine snapshot."""
        preemptions = number(snapshot, "num_preemptions")
        for reading in (
            *state_readings(snapshot, self._reasons),
            *self._growth.of(metrics.PREEMPTIONS, preemptions),
        ):
            self._metrics.record(reading)

    def close(self) -> None:
        """Stop exporting."""
        self._exporter.cancel()


class RouterTelemetry:
    """Ray metrics of one router; created on its event loop. show: its part of `/server_info`."""

    def __init__(self, context: Any, show: Callable[[], Snapshot]) -> None:
        self._metrics = RayMetrics(serve_labels(context))
        self.record = self._metrics.record
        self._show = show
        self._growth = Growth()
        self._exporter = asyncio.get_running_loop().create_task(_export_forever(self.export))

    async def export(self) -> None:
        """Export the router's queue and counters."""
        for reading in self._readings(self._show()):
            self._metrics.record(reading)
        self._metrics.flush()

    def _readings(self, router: Snapshot) -> Iterator[Reading]:
        yield Reading(metrics.QUEUE_LEN, number(router, "queue_len"))
        yield Reading(metrics.IN_FLIGHT, number(router, "in_flight"))
        totals: list[tuple[Metric, dict[str, str], float]] = [
            (metrics.REJECTED, {}, number(router, "num_rejected")),
            (metrics.RESUMED, {}, number(router, "num_resumed")),
        ]
        sizes = section(router, "submission_size_histogram")
        totals += [(metrics.SUBMISSIONS, {"size": size}, number(sizes, size)) for size in sizes]
        for metric, labels, total in totals:
            yield from self._growth.of(metric, total, labels)


async def _export_forever(export: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(_EXPORT_INTERVAL_S)
        try:
            await export()
        except Exception as error:  # only metrics are lost
            logger.warning("metrics not exported: %r", error)


class PriorSource(Protocol):
    """Knows the acceptance of the fleet: `StatsClient`."""

    def prior(self, pair: str, max_steps: int) -> list[float] | None:
        """Return accept rates by position, or None."""


def start_warm(config: ServeSpecConfig, engine: Any, stats: PriorSource) -> None:
    """Give an engine the fleet's acceptance rates, if there are any; blocks for up to 2 s."""
    max_steps = PolicySettings.of(config.speculative).max_depth
    prior = stats.prior(pair_name(config), max_steps) if max_steps else None
    if prior is None:
        logger.info("cold start: the fleet has no acceptance rates for this pair of models")
        return
    try:
        engine.start_from(prior)
    except ValueError as error:
        logger.warning("the fleet's acceptance rates cannot be used: %s", error)
    else:
        logger.info("warm start with the fleet's acceptance rates: %s", prior)
