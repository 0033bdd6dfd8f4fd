"""Metrics of replicas and routers, and the warm start of a replica from the fleet's acceptance.

The router measures the latency seen by clients, the replica that of its engine. The difference is
the framework's share: HTTP, queueing, routing and messages. Clocks of different processes are never
compared.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Literal

from serve_spec.adaptive import PolicySettings
from serve_spec.config import ServeSpecConfig
from serve_spec.core.request import TokenDelta
from serve_spec.log import get_logger
from serve_spec.metrics import (
    FIRST_TOKEN_WAIT_MS,
    FIRST_TOKENS,
    IN_FLIGHT,
    LATENCY_METRICS,
    LATER_TOKENS,
    LATER_TOKENS_WAIT_MS,
    QUEUE_LEN,
    REJECTED,
    REQUESTS,
    RESUMED,
    ROUND_METRICS,
    ROUTER_METRICS,
    STATE_METRICS,
    SUBMISSIONS,
    TPOT_MS,
    TTFT_MS,
    Reading,
)
from serve_spec.serving.messages import Failed, Refused, ReplicaItem
from serve_spec.serving.ray_metrics import RayMetrics, RoundSink, StateReadings
from serve_spec.serving.reports import Snapshot, number, section
from serve_spec.serving.stats_actor import StatsClient

OLD_ROUTER_LABEL = "door"
"""Former value of `measured_at` for "router"; it is exported as well until 0.3."""

ARRIVED: ContextVar[float | None] = ContextVar("arrived", default=None)
"""`perf_counter` at the arrival of the current request."""


class RequestTimer:
    """Measures the latency of one request and passes it to `record`.

    started: the `perf_counter` to measure from.
    """

    def __init__(
        self,
        record: Callable[[Reading], None],
        measured_at: Literal["router", "engine"],
        started: float,
    ) -> None:
        self._record = record
        self._labels: dict[str, str] = {"measured_at": measured_at}
        self._started = started
        self._first = self._last = 0.0
        self._num_later = 0
        self._outcome = "left"

    def observe(self, item: ReplicaItem) -> None:
        """Process an item of the replica as it arrives."""
        if isinstance(item, Refused | Failed):
            self._outcome = "refused" if isinstance(item, Refused) else "failed"
        elif isinstance(item, TokenDelta):
            if item.token_ids:
                self._observe_tokens(len(item.token_ids), time.perf_counter())
            if item.finish_reason is not None:
                self._outcome = "done"

    def fail(self) -> None:
        """Record that the request failed without a `Failed` item."""
        self._outcome = "failed"

    def end(self) -> None:
        """Record the outcome and the time per output token."""
        self._record(Reading(REQUESTS, 1, {**self._labels, "outcome": self._outcome}))
        if self._num_later:
            wait_ms = (self._last - self._first) * 1e3
            self._record(Reading(TPOT_MS, wait_ms / self._num_later, self._labels))
            self._record(Reading(LATER_TOKENS, self._num_later, self._labels))
            if wait_ms > 0:
                self._record(Reading(LATER_TOKENS_WAIT_MS, wait_ms, self._labels))

    def _observe_tokens(self, count: int, now: float) -> None:
        self._last = now
        if self._first:
            self._num_later += count
            return
        self._first = now
        wait_ms = (now - self._started) * 1e3
        self._record(Reading(TTFT_MS, wait_ms, self._labels))
        self._record(Reading(FIRST_TOKENS, 1, self._labels))
        if wait_ms > 0:
            self._record(Reading(FIRST_TOKEN_WAIT_MS, wait_ms, self._labels))


def router_timer(record: Callable[[Reading], None]) -> RequestTimer:
    """Return a timer that measures from the arrival of the current request."""

    def record_twice(reading: Reading) -> None:
        record(reading)
        labels = {**reading.labels, "measured_at": OLD_ROUTER_LABEL}
        record(replace(reading, labels=labels))

    return RequestTimer(record_twice, "router", ARRIVED.get() or time.perf_counter())


logger = get_logger(__name__)

_EXPORT_INTERVAL_S = 0.5


def serve_labels(context: Any) -> dict[str, str]:
    """Return the values of `ray_metrics.LABELS` for a Serve replica's context."""
    return {
        "application": context.app_name,
        "deployment": context.deployment,
        "replica": str(context.rank.rank) if context.rank else "-",
    }


def pair_name(config: ServeSpecConfig) -> str:
    """Return the key under which replicas share acceptance rates: target and draft model.

    Synthetic acceptance is part of the key, so that load tests do not affect other replicas.
    """
    speculative = config.speculative
    draft = speculative.speculative_draft_model_path or speculative.speculative_algorithm
    forced = speculative.synthetic_acceptance
    label = "" if forced is None else f", acceptance forced to {forced}"
    return f"{config.model.path}+{draft}{label}"


class ReplicaTelemetry:
    """Ray metrics of one replica; created on its event loop.

    The engine's thread only appends rounds. Exporting them takes milliseconds per second and runs
    in another thread.
    """

    def __init__(self, context: Any, engine: Any) -> None:
        labels = serve_labels(context)
        self._metrics = RayMetrics((*ROUND_METRICS, *STATE_METRICS, *LATENCY_METRICS), labels)
        self._rounds = RoundSink(self._metrics)
        self._state = StateReadings()
        engine.report_to(self._rounds)
        self._exporter = asyncio.get_running_loop().create_task(
            _export_forever(lambda: asyncio.to_thread(self._rounds.flush))
        )

    def timer(self) -> RequestTimer:
        """Return a started timer for a request to the engine."""
        return RequestTimer(self._metrics.record, "engine", time.perf_counter())

    def show(self, snapshot: Snapshot) -> None:
        """Export the metrics of an engine snapshot."""
        for reading in self._state.of(snapshot):
            self._metrics.record(reading)

    def close(self) -> None:
        """Stop exporting."""
        self._exporter.cancel()


class RouterTelemetry:
    """Ray metrics of one router; created on its event loop.

    show: returns the `router` section of `/server_info`.
    """

    def __init__(self, context: Any, show: Callable[[], Snapshot]) -> None:
        self._metrics = RayMetrics((*ROUTER_METRICS, *LATENCY_METRICS), serve_labels(context))
        self.record = self._metrics.record
        self._show = show
        self._counted: Counter[str] = Counter()
        self._exporter = asyncio.get_running_loop().create_task(_export_forever(self.export))

    async def export(self) -> None:
        """Export the router's queue and counters."""
        for reading in self._readings(self._show()):
            self._metrics.record(reading)

    def _readings(self, router: Snapshot) -> Iterator[Reading]:
        yield Reading(QUEUE_LEN, number(router, "queue_len"))
        yield Reading(IN_FLIGHT, number(router, "in_flight"))
        if rejected := self._new("rejected", number(router, "num_rejected")):
            yield Reading(REJECTED, rejected)
        if resumed := self._new("resumed", number(router, "num_resumed")):
            yield Reading(RESUMED, resumed)
        sizes = section(router, "submission_size_histogram")
        for size in sizes:
            if submissions := self._new(f"size {size}", number(sizes, size)):
                yield Reading(SUBMISSIONS, submissions, {"size": size})

    def _new(self, name: str, total: float) -> int:
        """Return the growth of a counter since the last call."""
        growth = int(total) - self._counted[name]
        self._counted[name] = int(total)
        return growth


async def _export_forever(export: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(_EXPORT_INTERVAL_S)
        try:
            await export()
        except Exception as error:  # only metrics are lost
            logger.warning("metrics not exported: %r", error)


def start_warm(config: ServeSpecConfig, engine: Any, stats: StatsClient) -> None:
    """Initialize an engine's acceptance rates from the fleet's, if there are any.

    Blocks for up to two seconds, before the first request.
    """
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
