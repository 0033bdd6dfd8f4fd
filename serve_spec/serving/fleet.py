"""The engine replicas behind a Serve handle: the `Fleet` that the router runs on."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Mapping
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
from serve_spec.serving.errors import (
    ApiError,
    ReplicaLost,
    engine_failed,
    no_replica,
    queue_full,
)
from serve_spec.serving.fleet_stats import FleetStats
from serve_spec.serving.links import Links, does_not_answer
from serve_spec.serving.messages import (
    Attachment,
    Cancellation,
    GenerateRequest,
    ReplicaItem,
    Submission,
    Submitted,
)
from serve_spec.serving.routing_policy import first_block, requests_to_move
from serve_spec.serving.snapshots import section
from serve_spec.serving.stats_actor import StatsClient, StatsUnavailable

logger = get_logger(__name__)

# A cancellation that no replica takes has nothing to end.
_CANCEL_WITHIN_S = 10.0
_STATUS_WITHIN_S = 5.0
_SNAPSHOT_WITHIN_S = 2.0
_WATCH_EVERY_S = 0.5
# A replica takes a submission within milliseconds; one that waits for longer looks at the fleet.
_LOOKS_AT_FLEET_EVERY = 2
# A request without a token for so long may be waiting while another replica is idle.
_WAITS_LONG_S = 1.0
# UPDATING: it is taking a new user_config, in place.
_SERVING = frozenset({"RUNNING", "UPDATING"})


class RayFleet:
    """Replicas of the deployment behind `handle`, in the Serve application `app_name`.

    sender: the name of this router, unlike that of any other.
    """

    def __init__(self, handle: Any, app_name: str, sender: str, config: ServeSpecConfig) -> None:
        self._handle = handle
        self._sender = sender
        self._attach = handle.options(stream=True, method_name="attach")
        self._submit = handle.options(method_name="submit")
        self._cancel = handle.options(method_name="cancel")
        self._app_name = app_name
        self._stats_config = config.stats
        self._stats = StatsClient(config, app_name)
        self._num_replicas = config.replica.num_replicas
        self._num_places = config.scheduler.max_num_seqs
        self._max_silent_looks = math.ceil(config.replica.stall_timeout_s / _WATCH_EVERY_S)
        router = config.router
        self._batcher = Batcher(
            self,
            sender,
            batch_wait_s=router.batch_wait_ms / 1000,
            max_batch_size=router.max_batch_size,
            num_shares=self._num_replicas,
            max_unread_bytes=router.max_unread_bytes,
            **({"group_of": first_block} if router.routing_policy == "prefix" else {}),
        )
        self._links = Links(self._messages, self._batcher, self._max_silent_looks)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to look after replicas that fall silent and requests that wait for nothing."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._watch_for_silence())]
        if self._num_replicas > 1:
            self._tasks.append(loop.create_task(self._share_out_forever()))

    def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplicaItem, None]:
        """See `Fleet.generate`."""
        return self._batcher.generate(request)

    def withdraw(self, request_id: str) -> None:
        """See `Fleet.withdraw`."""
        self._batcher.withdraw(request_id)

    def batching(self) -> dict[str, object]:
        """See `Fleet.batching`."""
        return self._batcher.snapshot()

    async def submit(self, submission: Submission) -> Submitted:
        """See `Transport.submit`."""
        submission.heard, submission.silent = self._links.rows, self._links.silent
        response = self._submit.remote(submission)
        try:
            taken = await self._reply(response, submission)
        except (RayError, RayServeException) as error:
            raise _as_api_error(error, submission.replica) from error
        self._links.open(taken.replica)
        return taken

    async def cancel(self, cancellation: Cancellation) -> None:
        """See `Transport.cancel`."""
        with suppress(RayError, RayServeException, TimeoutError):
            async with asyncio.timeout(_CANCEL_WITHIN_S):
                await self._cancel.remote(cancellation)

    async def _messages(self, replica: str) -> AsyncGenerator[bytes, None]:
        """Yield the messages of a replica; see `Links`."""
        responses = self._attach.remote(Attachment(replica, self._sender))
        has_ended = False
        try:
            async for message in responses:
                yield message
            has_ended = True
        except (RayError, RayServeException) as error:
            raise _as_api_error(error, replica) from error
        finally:
            if not has_ended:
                # A response that never reached a replica raises its error here once more.
                with suppress(RayError, RayServeException):
                    responses.cancel()

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

    async def costs(self) -> dict[str, int]:
        """See `Fleet.costs`; of the first replicas of a large fleet."""
        try:
            status: Mapping[str, Any] = await self._stats.status()
        except StatsUnavailable:
            return {}
        states = (section(replica, "costs").get("state") for replica in status["replicas"])
        return dict(Counter(state for state in states if isinstance(state, str)))

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

    async def _watch_for_silence(self) -> None:
        """Take requests from replicas that have been silent for too long."""
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            self._links.look()

    async def _share_out_forever(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            try:
                await self._share_out_waiting()
            except Exception as error:  # requests stay where they are
                logger.warning("waiting requests not shared out: %r", error)

    async def _share_out_waiting(self) -> None:
        """Withdraw requests that wait at a replica while another one has free places."""
        not_begun = self._batcher.not_begun(_WAITS_LONG_S)
        if not not_begun:
            return
        answers = await self._handle.broadcast("record_routing_stats").results_async(
            timeout_s=_SNAPSHOT_WITHIN_S, return_exceptions=True
        )
        stats = {str(a["replica"]): a for a in answers if isinstance(a, dict)}
        for request_id in requests_to_move(not_begun, stats, self._num_places):
            self._batcher.withdraw(request_id)

    async def _reply(self, response: Awaitable[Submitted], submission: Submission) -> Submitted:
        """Wait for the reply to a submission.

        Serve would wait for ever if no replica is left, or if the one that has it hangs.
        """
        reply = asyncio.ensure_future(_awaited(response))
        num_looks = 0
        try:
            while True:
                done, _ = await asyncio.wait({reply}, timeout=_WATCH_EVERY_S)
                if done:
                    return reply.result()
                num_looks += 1
                if submission.replica is None:
                    if num_looks % _LOOKS_AT_FLEET_EVERY == 0 and await self.num_healthy() == 0:
                        raise no_replica("none is running")
                elif num_looks >= self._max_silent_looks:
                    self._links.note_silence(submission.replica)
                    raise does_not_answer(submission.replica)
        finally:
            reply.cancel()
            # Serve makes an error of the cancellation, which asyncio would log unless it is read.
            reply.add_done_callback(lambda task: task.cancelled() or task.exception())

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


async def _awaited(response: Awaitable[Submitted]) -> Submitted:
    return await response


def _as_api_error(error: Exception, replica: str | None) -> ApiError:
    if isinstance(error, BackPressureError):
        return queue_full("the replicas' queue is full", 1)
    if isinstance(error, DeploymentUnavailableError | ReplicaUnavailableError):
        return no_replica(error.message)
    if isinstance(error, RayActorError):
        gone = no_replica("the replica that had this request is gone")
        return ReplicaLost(gone, replica=replica)
    return engine_failed(f"the replica failed ({type(error).__name__})")
