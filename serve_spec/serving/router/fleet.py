"""The engine replicas behind a Ray Serve handle, and the choice of one for each request."""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from serve_spec.config import ServeSpecConfig
from serve_spec.log import get_logger
from serve_spec.serving.errors import ApiError, no_replica, starting
from serve_spec.serving.messages import GenerateRequest, encode_router_message
from serve_spec.serving.router.batching import Batcher
from serve_spec.serving.router.connections import ReplicaConnection, ReplicaConnections
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


Policy: TypeAlias = Literal["goodput", "balanced", "prefix"]

# Costs within this factor of the lowest count as equal, because tables of equal machines differ by
# it; among these, the replica with the fewest requests is the fastest.
_NOISE = 1.25
_SHORT_FRACTION = 0.1
"""A replica with a smaller fraction of free KV pages is short of them."""
# Size of the blocks in which prefixes are compared.
_CHARS_PER_BLOCK = 64
_TOKENS_PER_BLOCK = 16
_MAX_BLOCKS = 64
_MAX_KNOWN_BLOCKS = 200_000


@dataclass(frozen=True)
class ReplicaLoad:
    """The load of one replica as known to a router."""

    name: str
    own_requests: int = 0
    """Open requests of this router."""
    other_requests: int = 0
    """Requests of other routers, from the replica's last message."""
    num_slots: float = math.inf
    """Maximum number of running requests; more would wait."""
    max_requests: float = math.inf
    """Maximum number of requests, running and waiting."""
    is_short_of_pages: bool = False
    """Whether requests wait for KV pages; a new one would queue behind them."""
    is_healthy: bool = True
    marginal_ms_by_batch_size: Mapping[int, float] | None = None
    """ms/token of one more request, by number of requests (`adaptive.marginal`); None: no table."""
    matched_blocks: int = 0
    """Blocks of the batch's prompts that the replica was sent before."""

    @property
    def num_requests(self) -> int:
        """Requests of all routers."""
        return self.own_requests + self.other_requests

    def marginal_ms(self, num_requests: int) -> float:
        """Return the mean ms/token of `num_requests` additional requests."""
        assert self.marginal_ms_by_batch_size, "balanced is the policy without costs"
        known = sorted(self.marginal_ms_by_batch_size.items())
        counts = range(self.num_requests, self.num_requests + num_requests)
        return sum(_between(known, count) for count in counts) / num_requests


def ranked(
    policy: Policy,
    loads: Sequence[ReplicaLoad],
    num_requests: int,
    *,
    load_factor: float,
    avoid: frozenset[str] = frozenset(),
) -> list[str]:
    """Return the names of all replicas, the best for `num_requests` more first.

    Under every policy the worst are unhealthy replicas, then those to avoid, full ones, and those
    without free slots for all of them. load_factor: under `prefix`, the most requests of one
    replica relative to the mean.
    """
    order = _order(policy, loads, num_requests, load_factor)

    def key(load: ReplicaLoad) -> tuple[Any, ...]:
        is_full = load.is_short_of_pages or load.num_requests + num_requests > load.max_requests
        has_to_wait = load.num_requests + num_requests > load.num_slots
        return (not load.is_healthy, load.name in avoid, is_full, has_to_wait, *order(load))

    return [load.name for load in sorted(loads, key=key)]


def _order(
    policy: Policy, loads: Sequence[ReplicaLoad], num_requests: int, load_factor: float
) -> Callable[[ReplicaLoad], tuple[float, ...]]:
    if policy == "goodput" and all(load.marginal_ms_by_batch_size for load in loads):
        ms = {load.name: load.marginal_ms(num_requests) for load in loads}
        equal = _NOISE * min(ms.values())
        return lambda load: (max(equal, ms[load.name]), load.num_requests)
    if policy == "prefix":
        total = sum(load.num_requests for load in loads) + num_requests
        bound = math.ceil(load_factor * total / max(1, len(loads)))
        return lambda load: (
            load.num_requests + num_requests > max(bound, num_requests),
            -load.matched_blocks,
            load.num_requests,
        )
    return lambda load: (load.num_requests,)


def is_short_of_pages(stats: Mapping[str, Any]) -> bool:
    """Return whether requests wait for KV pages, not just for the next step."""
    pages = stats.get("kv")
    if not pages or not stats.get("num_waiting"):
        return False
    return bool(pages["free_pages"] < _SHORT_FRACTION * pages["total_pages"])


def _between(known: Sequence[tuple[int, float]], count: int) -> float:
    """Return the ms at `count` by linear interpolation; beyond the table, proportional to it."""
    above = bisect_right(known, count, key=lambda row: row[0])
    if above == 0:
        return known[0][1]
    size, ms = known[above - 1]
    if above == len(known):
        return ms * max(1.0, count / (2 * size)) if size else ms
    next_size, next_ms = known[above]
    return ms + (next_ms - ms) * (count - size) / (next_size - size)


class SentPrefixes:
    """The newest `max_blocks` blocks of prefixes sent to replicas: an estimate of their caches."""

    def __init__(self, max_blocks: int = _MAX_KNOWN_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._sent: OrderedDict[tuple[str, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sent)

    def matched(self, replica: str, prefixes: Sequence[int]) -> int:
        """Count the leading blocks of a prompt (`blocks`) that the replica was sent before."""
        for count, block in enumerate(prefixes):
            if (replica, block) not in self._sent:
                return count
        return len(prefixes)

    def note(self, replica: str, prefixes: Sequence[int]) -> None:
        """Record that a prompt is sent to the replica."""
        for block in prefixes:
            self._sent[replica, block] = None
            self._sent.move_to_end((replica, block))
        while len(self._sent) > self._max_blocks:
            self._sent.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Remove a replica, whose cache is gone."""
        for key in [key for key in self._sent if key[0] == replica]:
            del self._sent[key]


def blocks(prompt: str | list[int]) -> list[int]:
    """Return a hash of the prefix up to the end of each full block of the prompt."""
    size = _CHARS_PER_BLOCK if isinstance(prompt, str) else _TOKENS_PER_BLOCK
    found: list[int] = []
    before = 0
    for start in range(0, min(len(prompt), size * _MAX_BLOCKS) - size + 1, size):
        part = prompt[start : start + size]
        before = hash((before, part if isinstance(part, str) else tuple(part)))
        found.append(before)
    return found


def first_block(request: GenerateRequest) -> int | None:
    """Return the hash of the first full block, by which `prefix` groups requests, or None."""
    return next(iter(blocks(request.prompt)), None)


@dataclass(frozen=True)
class ReplicaChooser:
    """Chooses replicas for one router's requests.

    num_open: returns the number of its open requests at a replica.
    """

    policy: Policy
    router: str
    num_open: Callable[[str], int]
    num_slots: int
    max_requests: int
    load_factor: float
    _prefixes: SentPrefixes = field(default_factory=SentPrefixes)

    def choose(
        self, requests: Sequence[GenerateRequest], connections: Mapping[str, ReplicaConnection]
    ) -> str:
        """Return the replica for a batch of at least one request."""
        by_prefix = self.policy == "prefix"
        prompts = [blocks(request.prompt) for request in requests if by_prefix]
        loads = [self._load(name, connection, prompts) for name, connection in connections.items()]
        name, *_ = ranked(
            self.policy, loads, len(requests), load_factor=self.load_factor, avoid=requests[0].avoid
        )
        for prompt in prompts:
            self._prefixes.note(name, prompt)
        return name

    def forget(self, replica: str) -> None:
        """Remove a replica, whose cache is gone."""
        self._prefixes.forget(replica)

    def _load(
        self, name: str, connection: ReplicaConnection, prompts: Sequence[Sequence[int]]
    ) -> ReplicaLoad:
        """Return the load of a replica from its last messages, which are up to a second old."""
        load, by_router = connection.load, connection.num_requests
        costs: Mapping[str, float] | None = load.get("marginal_ms_by_batch_size")
        return ReplicaLoad(
            name,
            own_requests=self.num_open(name),
            other_requests=sum(n for sender, n in by_router.items() if sender != self.router),
            num_slots=self.num_slots,
            max_requests=self.max_requests,
            is_short_of_pages=is_short_of_pages(load),
            is_healthy=load.get("is_healthy", True),
            marginal_ms_by_batch_size={int(n): ms for n, ms in costs.items()} if costs else None,
            matched_blocks=sum(self._prefixes.matched(name, prompt) for prompt in prompts),
        )
