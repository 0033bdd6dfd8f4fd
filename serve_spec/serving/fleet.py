"""The engine replicas behind a Serve handle: the `Fleet` that the router runs on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
)

from serve_spec.config import ServeSpecConfig
from serve_spec.log import get_logger
from serve_spec.serving.batching import Batcher
from serve_spec.serving.errors import ApiError, engine_failed, no_replica, queue_full
from serve_spec.serving.fleet_stats import FleetStats
from serve_spec.serving.messages import (
    Cancellation,
    GenerateRequest,
    Items,
    News,
    ReplicaItem,
    ReplicaRows,
    Submission,
)
from serve_spec.serving.resume import ReplicaLost
from serve_spec.serving.routing_policy import first_block
from serve_spec.serving.stats_actor import StatsClient, StatsUnavailable

logger = get_logger(__name__)

# A replica accepts within milliseconds; a request that waits this long gets a look at the fleet.
_LOOK_AFTER_S = 1.0
_STATUS_WITHIN_S = 5.0
_SNAPSHOT_WITHIN_S = 2.0
_MAX_HEARD = 256
# UPDATING: it is taking a new user_config, in place.
_SERVING = frozenset({"RUNNING", "UPDATING"})


class RayFleet:
    """Replicas of the deployment behind `handle`, in the Serve application `app_name`.

    sender: the name of this router, unlike that of any other.
    """

    def __init__(self, handle: Any, app_name: str, sender: str, config: ServeSpecConfig) -> None:
        self._handle = handle
        self._stream = handle.options(stream=True, method_name="generate")
        self._cancel = handle.options(method_name="cancel")
        self._app_name = app_name
        self._stats_config = config.stats
        self._stats = StatsClient(config.stats, app_name)
        self._heard: dict[str, ReplicaRows] = {}
        router = config.router
        self._batcher = Batcher(
            self,
            sender,
            batch_wait_s=router.batch_wait_ms / 1000,
            max_batch_size=router.max_batch_size,
            num_shares=config.replica.num_replicas,
            **({"group_of": first_block} if router.routing_policy == "prefix" else {}),
        )

    def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplicaItem, None]:
        """See `Fleet.generate`."""
        return self._batcher.generate(request)

    def batching(self) -> dict[str, object]:
        """See `Fleet.batching`."""
        return self._batcher.snapshot()

    async def send(self, submission: Submission) -> AsyncGenerator[Items, None]:
        """See `Transport.send`."""
        submission.heard = self._heard
        responses = self._stream.remote(submission)
        ended = False
        try:
            yield self._hear(await self._first(responses))
            async for news in responses:
                yield self._hear(news)
            ended = True
        except (RayError, RayServeException) as error:
            raise _as_api_error(error) from error
        finally:
            if not ended:
                # A response that never reached a replica raises its error here once more.
                with suppress(RayError, RayServeException):
                    responses.cancel()

    async def cancel(self, cancellation: Cancellation) -> None:
        """See `Transport.cancel`."""
        with suppress(RayError, RayServeException):
            await self._cancel.remote(cancellation)

    async def num_healthy(self) -> int | None:
        """See `Fleet.num_healthy`; asks Serve's controller."""
        try:
            async with asyncio.timeout(_STATUS_WITHIN_S):
                status = await asyncio.to_thread(serve.status)
        except (RayError, RayServeException, TimeoutError) as error:
            # The controller may be away for a moment; replicas serve on without it.
            logger.warning("replica count unknown: %r", error)
            return None
        app = status.applications.get(self._app_name)
        deployment = app.deployments.get(self._handle.deployment_name) if app else None
        if deployment is None:
            return 0
        return sum(n for state, n in deployment.replica_states.items() if state in _SERVING)

    async def stats(self) -> dict[str, object]:
        """See `Fleet.stats`; without the stats actor, the replicas themselves are asked."""
        try:
            return await self._stats.view()
        except StatsUnavailable as error:
            logger.warning("asking the replicas, for the stats actor does not answer: %s", error)
            return (await self._heard_from_replicas()).view(time.time())

    async def status(self) -> dict[str, object]:
        """See `Fleet.status`; without the stats actor, of this moment alone."""
        try:
            return await self._stats.status()
        except StatsUnavailable as error:
            logger.warning("asking the replicas, for the stats actor does not answer: %s", error)
            return (await self._heard_from_replicas()).status(time.time())

    def _hear(self, news: News) -> Items:
        """The items; how busy their replica is, is kept for whatever is routed next."""
        items, rows = news
        if rows is not None:
            self._heard[rows.replica] = rows
            if len(self._heard) > _MAX_HEARD:  # replicas come and go
                del self._heard[next(iter(self._heard))]
        return items

    async def _first(self, responses: AsyncIterator[News]) -> News:
        """The first news. Serve would wait for ever where no replica is left; this does not."""
        first = asyncio.ensure_future(anext(responses))
        try:
            while True:
                done, _ = await asyncio.wait({first}, timeout=_LOOK_AFTER_S)
                if done:
                    return first.result()
                if await self.num_healthy() == 0:
                    raise no_replica("none is running")
        finally:
            first.cancel()
            # Serve makes an error of the cancellation, which asyncio would log unless it is read.
            first.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _heard_from_replicas(self) -> FleetStats:
        config = self._stats_config
        fleet = FleetStats(stale_after_s=config.stale_after_s, history_s=config.history_s)
        try:
            states = await self._handle.broadcast("snapshot").results_async(
                timeout_s=_SNAPSHOT_WITHIN_S, return_exceptions=True
            )
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("the replicas do not answer either: %r", error)
            states = []
        for state in states:
            if isinstance(state, dict):
                fleet.report(str(state["replica"]), state, time.time())
        return fleet


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, BackPressureError):
        return queue_full("the replicas' queue is full", 1)
    if isinstance(error, DeploymentUnavailableError | ReplicaUnavailableError):
        return no_replica(error.message)
    if isinstance(error, RayActorError):
        return ReplicaLost(no_replica("the replica that had this request is gone"))
    return engine_failed(f"the replica failed ({type(error).__name__})")
