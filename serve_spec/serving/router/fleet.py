"""The engine replicas behind a Ray Serve handle."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from serve_spec.config import ServeSpecConfig
from serve_spec.log import get_logger
from serve_spec.serving.errors import ApiError, no_replica, starting
from serve_spec.serving.messages import GenerateRequest, encode_router_message
from serve_spec.serving.router.batching import Batcher
from serve_spec.serving.router.choice import ReplicaChooser, first_block, is_short_of_pages
from serve_spec.serving.router.connections import ReplicaConnections
from serve_spec.serving.statistics.fleet_stats import FleetStats
from serve_spec.serving.statistics.snapshot import section
from serve_spec.serving.statistics.stats_actor import StatsClient, StatsUnavailable

logger = get_logger(__name__)

_STATUS_WITHIN_S = 5.0
_SNAPSHOT_WITHIN_S = 2.0
_WATCH_EVERY_S = 0.5
# Period in which new replicas receive the address of this router.
_BROADCAST_EVERY_S = 1.0
# After this time without a token, a request may be moved to another replica.
_MAX_WAIT_S = 1.0
# UPDATING: the replica applies a new user_config while it serves.
_SERVING = frozenset({"RUNNING", "UPDATING"})


class RayFleet(Batcher):
    """The replicas of the deployment behind `handle`, in the Serve application `app_name`.

    sender: this router's unique name. host: the address at which replicas reach this process.
    """

    def __init__(
        self, handle: Any, app_name: str, sender: str, host: str, config: ServeSpecConfig
    ) -> None:
        self._handle = handle
        self._app_name = app_name
        self._stats_config = config.stats
        self._stats = StatsClient(config, app_name)
        self._num_slots = config.scheduler.max_num_seqs
        self._max_quiet_checks = math.ceil(config.replica.stall_timeout_s / _WATCH_EVERY_S)
        router = config.router
        super().__init__(
            batch_wait_s=router.batch_wait_ms / 1000,
            max_batch_size=router.max_batch_size,
            num_parts=1,
            max_unread_bytes=router.max_unread_bytes,
            **({"group_of": first_block} if router.routing_policy == "prefix" else {}),
        )
        self._chooser = ReplicaChooser(
            router.routing_policy,
            sender,
            self.num_open,
            num_slots=self._num_slots,
            max_requests=config.replica.max_ongoing_requests,
            load_factor=router.prefix_load_factor,
        )
        self._connections = ReplicaConnections(sender, host, self, self._max_quiet_checks)
        self._is_wanted = asyncio.Event()
        """Set when a request waits for a replica."""
        self._tasks: list[asyncio.Task[None]] = []
        self._has_served = False
        self._is_starting = False

    def start(self, resize: Callable[[int], None]) -> None:
        """Start the background tasks: accept replicas, check them and move waiting requests.

        resize: receives the number of replicas that take requests.
        """
        self._resize = resize
        work = (
            self._connections.serve(),
            self._broadcast_address_forever(),
            self._check_forever(),
            self._rebalance_forever(),
        )
        self._tasks = [asyncio.get_running_loop().create_task(each) for each in work]

    def batching(self) -> dict[str, object]:
        """See `Batcher`; `replica_batch_sizes` is of all connected replicas."""
        sizes = {name: self.num_open(name) for name in self._connections.usable()}
        return {**super().batching(), "replica_batch_sizes": sizes}

    async def ready(self) -> None:
        """See `Batcher.ready`."""
        num_checks = 0
        while not self._connections.reachable():
            self._is_wanted.set()
            await self._connections.changed(within_s=_WATCH_EVERY_S)
            num_checks += 1
            if num_checks >= self._max_quiet_checks:
                raise self.unavailable("none responds")
            if num_checks % 2 == 0 and await self.num_healthy() == 0:
                raise self.unavailable("none is running")
        self._has_served = True

    def unavailable(self, why: str) -> ApiError:
        """Return the error for "no replica": `starting` until the first one is ready."""
        return starting() if self._is_starting and not self._has_served else no_replica(why)

    async def refuse_if_closing(self) -> None:
        """See `Batcher.refuse_if_closing`."""
        while self._connections.reachable() and not self._connections.usable():
            # During an update, one that is about to connect replaces them.
            self._is_wanted.set()
            await self._connections.changed(within_s=_WATCH_EVERY_S)
            if not self._connections.usable() and await self.num_healthy() == 0:
                raise no_replica("all are shutting down")

    def send(self, requests: Sequence[GenerateRequest]) -> str:
        """See `Batcher.send`."""
        replica = self._chooser.choose(requests, self._connections.reachable())
        self._connections.send(replica, encode_router_message(requests))
        return replica

    def cancel(self, replica: str, request_ids: Sequence[str]) -> None:
        """See `Batcher.cancel`."""
        self._connections.send(replica, encode_router_message(cancelled=request_ids))

    def flush_cache(self) -> None:
        """Let every connected replica drop the cached prefixes that no request uses."""
        for replica in self._connections.usable():
            self._connections.send(replica, encode_router_message(flushes_cache=True))

    def fail_replica(self, replica: str, error: ApiError) -> None:
        """See `Batcher.fail_replica`."""
        self._chooser.forget(replica)
        super().fail_replica(replica, error)

    async def num_healthy(self) -> int | None:
        """Return the number of replicas that take requests; None if Serve does not answer."""
        try:
            async with asyncio.timeout(_STATUS_WITHIN_S):
                status = await asyncio.to_thread(serve.status)
        except (RayError, RayServeException, TimeoutError) as error:
            # Replicas serve without the controller.
            logger.warning("replica count unknown: %r", error)
            return None
        app = status.applications.get(self._app_name)
        deployment = app.deployments.get(self._handle.deployment_name) if app else None
        states = deployment.replica_states if deployment else {}
        # A controller that has just started knows no replicas yet, but those connected here serve.
        num_healthy = sum(n for state, n in states.items() if state in _SERVING) or len(
            self._connections.usable()
        )
        self._has_served |= num_healthy > 0
        self._is_starting = any(n for state, n in states.items() if state == "STARTING")
        return num_healthy

    async def costs(self) -> dict[str, int]:
        """Count replicas by the state of their cost table: "missing", "measured" or "loaded".

        Without one, a policy uses the strategy ema instead of goodput. Large fleets are sampled.
        """
        try:
            status: Mapping[str, Any] = await self._stats.status()
        except StatsUnavailable:
            return {}
        states = (section(replica, "costs").get("state") for replica in status["replicas"])
        return dict(Counter(state for state in states if isinstance(state, str)))

    async def stats(self) -> dict[str, object]:
        """Return `internal_states` (one per replica) and `fleet` of `/server_info`."""
        try:
            return await self._stats.view()
        except StatsUnavailable as error:
            return (await self._ask_replicas(error)).view(time.time())

    async def status(self) -> dict[str, object]:
        """Return the data of the status page; without the stats actor there is no history."""
        try:
            return await self._stats.status()
        except StatsUnavailable as error:
            return (await self._ask_replicas(error)).status(time.time())

    async def _broadcast_address_forever(self) -> None:
        """Send all replicas, including new ones, the address of this router."""
        while True:
            try:
                await self._handle.broadcast("connect", self._connections.address).results_async(
                    timeout_s=_BROADCAST_EVERY_S, return_exceptions=True
                )
            except Exception as error:  # the next broadcast may succeed
                logger.info("the router's address did not reach all replicas: %r", error)
            with suppress(TimeoutError):
                async with asyncio.timeout(_BROADCAST_EVERY_S):
                    await self._is_wanted.wait()
            self._is_wanted.clear()

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            self._connections.check()
            self._count_replicas()

    def _count_replicas(self) -> None:
        num_replicas = len(self._connections.usable())
        self.num_parts = max(1, num_replicas)
        self._resize(num_replicas)

    async def _rebalance_forever(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            try:
                await self._rebalance()
            except Exception as error:  # requests stay where they are
                logger.warning("waiting requests were not moved: %r", error)

    async def _rebalance(self) -> None:
        """Withdraw requests that wait at a replica while another one has free slots."""
        not_started = self.not_started(_MAX_WAIT_S)
        if not not_started or self.num_parts == 1:
            return
        answers = await self._handle.broadcast("record_routing_stats").results_async(
            timeout_s=_SNAPSHOT_WITHIN_S, return_exceptions=True
        )
        stats = {str(a["replica"]): a for a in answers if isinstance(a, dict)}
        for request_id in requests_to_move(not_started, stats, self._num_slots):
            self.withdraw(request_id)

    async def _ask_replicas(self, reason: StatsUnavailable) -> FleetStats:
        logger.warning("the stats actor does not respond, asking the replicas: %s", reason)
        config = self._stats_config
        fleet = FleetStats(stale_after_s=config.stale_after_s, history_s=config.history_s)
        try:
            states = await self._handle.broadcast("snapshot").results_async(
                timeout_s=_SNAPSHOT_WITHIN_S, return_exceptions=True
            )
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("the replicas do not respond either: %r", error)
            states = []
        for state in states:
            if isinstance(state, dict):
                fleet.report(str(state["replica"]), state, time.time())
        return fleet


def requests_to_move(
    not_started: Mapping[str, Sequence[str]], stats: Mapping[str, Mapping[str, Any]], num_slots: int
) -> list[str]:
    """Return waiting requests to withdraw, so that they are sent to replicas with free slots.

    not_started: by replica, requests without a token, oldest first. num_slots: of a replica.
    stats: by replica, `EngineReplica.record_routing_stats`.
    """
    num_free = sum(_free_slots(state, num_slots) for state in stats.values())
    moving: list[str] = []
    for replica, request_ids in not_started.items():
        state = stats.get(replica, {})
        num_waiting, num_running = state.get("num_waiting") or 0, state.get("num_running") or 0
        # The engine starts requests in order of arrival, so the oldest may be in prefill.
        num_in_prefill = num_running - (state.get("batch_size") or 0)
        num_started = max(len(request_ids) - num_waiting, num_in_prefill, 0)
        taken = request_ids[num_started:][:num_free]
        num_free -= len(taken)
        moving += taken
    return moving


def _free_slots(state: Mapping[str, Any], num_slots: int) -> int:
    if not state.get("is_healthy", True) or is_short_of_pages(state):
        return 0
    taken = (state.get("num_running") or 0) + (state.get("num_waiting") or 0)
    return max(0, num_slots - taken)
