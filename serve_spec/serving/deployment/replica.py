"""`EngineReplica`: the Ray Serve deployment that runs one engine."""

from __future__ import annotations

import asyncio
import pkgutil
from collections.abc import Awaitable, Mapping
from typing import Any

from ray import serve

from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import EngineOverloaded, InvalidRequest, RequestFailed
from serve_spec.log import TRACE_ID, get_logger
from serve_spec.serving.autoscaling import NUM_REQUESTS
from serve_spec.serving.deployment.engine_actor import end_process
from serve_spec.serving.messages import Accepted, Failed, GenerateRequest, Refused, ReplicaItem
from serve_spec.serving.router.connections import ResponseQueue, RouterAddress, RouterConnections
from serve_spec.serving.statistics.stats_actor import StatsClient, StatsUnavailable
from serve_spec.serving.statistics.telemetry import ReplicaTelemetry, pair_name, start_warm

logger = get_logger(__name__)

# Time to send the last items before the process exits.
_LAST_ITEMS_S = 1.0


class EngineReplica:
    """Runs the requests of routers on one engine. On shutdown it waits for running requests.

    Ray Serve calls `check_health`, `record_routing_stats`, `record_autoscaling_stats`,
    `reconfigure` and `__del__`. engine_loop: import path of `start_engine` or a replacement.
    """

    def __init__(self, config: ServeSpecConfig, engine_loop: str) -> None:
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        self._identity = {
            "replica_rank": context.rank.rank if context.rank else None,
            "pair": pair_name(config),
        }
        self._interval_s = config.stats.push_interval_s
        self._stats = StatsClient(config, context.app_name)
        self._loop = pkgutil.resolve_name(engine_loop)(config)
        self._routers = RouterConnections(
            self._name,
            self._answer,
            self.record_routing_stats,
            self._loop.flush_cache,
        )
        self._has_started = False
        self._refused_user_config: str | None = None
        self._telemetry = ReplicaTelemetry(context, self._loop)
        start_warm(config, self._loop, self._stats)
        tasks = asyncio.get_running_loop()
        self._reporter = tasks.create_task(self._report_forever())
        self._report_load_every_s = min(
            config.router.routing_stats_period_s, config.replica.stall_timeout_s / 5
        )
        self._watch = tasks.create_task(self._watch_forever())

    async def connect(self, router: RouterAddress) -> None:
        """See `RouterConnections.connect`; called by routers through Serve."""
        await self._routers.connect(router)

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine is dead or stuck; Serve then replaces this replica."""
        self._loop.check_health()
        self._has_started = True  # Serve's first check comes at the end of the start

    async def snapshot(self) -> dict[str, object]:
        """Return the engine's state, the replica's identity and why a `user_config` was refused."""
        return {
            **self._loop.snapshot(),
            **self._identity,
            "refused_user_config": self._refused_user_config,
            "replica": self._name,
        }

    def record_routing_stats(self) -> dict[str, object]:
        """Return the load for `routing_policy`; sent to routers every `routing_stats_period_s`."""
        state: Mapping[str, Any] = self._loop.snapshot()
        wanted = (
            "batch_size",
            "num_running",
            "num_waiting",
            "kv",
            "speculative_num_steps",
            "avg_spec_accept_length",
            "marginal_ms_by_batch_size",
        )
        return {
            **{name: state.get(name) for name in wanted},
            "replica": self._name,
            "is_healthy": self._is_healthy(),
            "num_requests": self._routers.num_requests(),
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics for `autoscaling`, which Serve collects if autoscaling is enabled."""
        return {NUM_REQUESTS: float(sum(self._routers.num_requests().values()))}

    async def reconfigure(self, user_config: Mapping[str, object]) -> None:
        """Change policy settings of the running engine (`user_config` of the deployment).

        Invalid ones are reported and ignored once the replica has started: an exception would make
        Serve end its streams. At the start they are a ValueError.
        """
        try:
            await asyncio.to_thread(self._loop.reconfigure, user_config)
        except ValueError as error:
            if not self._has_started:
                raise
            why = "; ".join(str(error).splitlines())
            self._refused_user_config = why
            logger.error("user_config rejected, the previous one stays active: %s", why)
        else:
            self._refused_user_config = None

    def __del__(self) -> Awaitable[None] | None:
        """Return the shutdown coroutine, which Serve awaits before it ends this process."""
        has_ended = not hasattr(self, "_reporter") or self._reporter.done()
        return None if has_ended else self._end()

    async def _end(self) -> None:
        await self._routers.drain()
        self._reporter.cancel()
        self._watch.cancel()
        self._telemetry.close()
        self._stats.forget(self._name)
        self._loop.shutdown()

    async def _answer(self, request: GenerateRequest, queue: ResponseQueue) -> None:
        """Put all items of a request into the queue; see `RouterConnections.answer`."""

        def emit(item: ReplicaItem) -> None:
            timer.observe(item)
            queue.put(request.request_id, item)

        TRACE_ID.set(request.trace_id)
        timer = self._telemetry.timer()
        try:
            stream = await self._loop.submit(
                request.prompt, request.params, request.request_id, request.emitted
            )
            emit(Accepted(stream.num_prompt_tokens, self._name))
            await stream.each(emit)
        except InvalidRequest as error:
            emit(Refused(error))
        except Exception as error:  # the router must receive every failure
            overloaded = isinstance(error, EngineOverloaded)
            if not overloaded:
                logger.error("request %s (%s): %r", request.request_id, request.trace_id, error)
            is_final = isinstance(error, RequestFailed)
            emit(Failed(str(error), overloaded, self._name, is_final))
        finally:
            self._loop.cancel(request.request_id)
            timer.end()

    async def _watch_forever(self) -> None:
        """Report the load to routers; end this process, and its streams, if the engine fails."""
        while True:
            await asyncio.sleep(self._report_load_every_s)
            try:
                self._loop.check_health()
            except RuntimeError as error:
                logger.error(
                    "engine failed, exiting; requests continue on other replicas: %s", error
                )
                break
            self._routers.report_load()
        self._routers.close()
        await asyncio.sleep(_LAST_ITEMS_S)
        end_process()

    def _is_healthy(self) -> bool:
        """Return whether the engine is healthy, without waiting for Serve's health check."""
        try:
            self._loop.check_health()
        except RuntimeError:
            return False
        return True

    async def _report_forever(self) -> None:
        """Send snapshots to the stats actor; its failures are only logged."""
        while True:
            pace_s = 0.0
            try:
                snapshot = await self.snapshot()
                self._telemetry.show(snapshot)
                pace_s = await self._stats.report(self._name, snapshot)
            except StatsUnavailable as error:
                logger.info("report not delivered: %s", error)
            except Exception as error:
                logger.warning("snapshot not reported: %r", error)
            await asyncio.sleep(max(self._interval_s, pace_s))
