"""Choose the replica for requests, from the load that a router knows."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from serve_spec.serving.connections import ReplicaConnection
from serve_spec.serving.messages import GenerateRequest


def requests_to_move(
    not_started: Mapping[str, Sequence[str]],
    stats: Mapping[str, Mapping[str, Any]],
    num_slots: int,
) -> list[str]:
    """Return waiting requests to withdraw, so that they are sent to replicas with free slots.

    Args:
        not_started: by replica, requests without a token yet, oldest first.
        stats: by replica, `EngineReplica.record_routing_stats`.
        num_slots: maximum number of running requests of a replica.
    """
    num_free = sum(_free_slots(state, num_slots) for state in stats.values())
    moving: list[str] = []
    for replica, request_ids in not_started.items():
        state = stats.get(replica, {})
        num_waiting = state.get("num_waiting") or 0
        # The engine starts requests in order of arrival, so the oldest may be in prefill.
        num_started = max(len(request_ids) - num_waiting, _num_in_prefill(state))
        taken = request_ids[num_started:][:num_free]
        num_free -= len(taken)
        moving += taken
    return moving


def _num_in_prefill(state: Mapping[str, Any]) -> int:
    return max(0, (state.get("num_running") or 0) - (state.get("batch_size") or 0))


def _free_slots(state: Mapping[str, Any], num_slots: int) -> int:
    if not state.get("is_healthy", True) or is_short_of_pages(state):
        return 0
    taken = (state.get("num_running") or 0) + (state.get("num_waiting") or 0)
    return max(0, num_slots - taken)


Policy: TypeAlias = Literal["goodput", "balanced", "prefix"]

# Costs within this factor of the lowest count as equal, because tables of equal machines differ by
# it; among these, the replica with the fewest requests is the fastest.
_NOISE = 1.25
_SHORT_SHARE = 0.1
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
    without free slots for all of the requests.

    load_factor: under `prefix`, the maximum requests of a replica relative to the mean.
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
    return bool(pages["free_pages"] < _SHORT_SHARE * pages["total_pages"])


def _between(known: Sequence[tuple[int, float]], count: int) -> float:
    """Return the ms at `count` by linear interpolation; beyond the table, proportional to it.

    With a step function, the replica with a slightly lower step would get all requests up to its
    end.
    """
    above = bisect_right(known, count, key=lambda entry: entry[0])
    if above == 0:
        return known[0][1]
    size, ms = known[above - 1]
    if above == len(known):
        return ms * max(1.0, count / (2 * size)) if size else ms
    next_size, next_ms = known[above]
    return ms + (next_ms - ms) * (count - size) / (next_size - size)


class SentPrefixes:
    """The prompt prefixes sent to each replica, the newest `max_blocks` blocks.

    This estimates the content of a replica's prefix cache; evictions there are not known.
    """

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
    """Return a hash of the prefix up to the end of each whole block of the prompt."""
    size = _CHARS_PER_BLOCK if isinstance(prompt, str) else _TOKENS_PER_BLOCK
    found: list[int] = []
    before = 0
    for start in range(0, min(len(prompt), size * _MAX_BLOCKS) - size + 1, size):
        part = prompt[start : start + size]
        before = hash((before, part if isinstance(part, str) else tuple(part)))
        found.append(before)
    return found


def first_block(request: GenerateRequest) -> int | None:
    """Return the hash of the first whole block, by which `prefix` groups requests, or None."""
    return next(iter(blocks(request.prompt)), None)


class ReplicaChooser:
    """Chooses replicas for the requests of one router.

    num_open: returns the number of this router's open requests at a replica.
    num_slots, max_requests: see `ReplicaLoad`.
    """

    def __init__(
        self,
        policy: Policy,
        router: str,
        num_open: Callable[[str], int],
        *,
        num_slots: int,
        max_requests: int,
        load_factor: float,
    ) -> None:
        self._policy = policy
        self._router = router
        self._num_open = num_open
        self._num_slots = num_slots
        self._max_requests = max_requests
        self._load_factor = load_factor
        self._prefixes = SentPrefixes()

    def choose(
        self, requests: Sequence[GenerateRequest], connections: Mapping[str, ReplicaConnection]
    ) -> str:
        """Return the replica for a batch of at least one request."""
        by_prefix = self._policy == "prefix"
        prompts = [blocks(request.prompt) for request in requests if by_prefix]
        loads = [self._load(name, connection, prompts) for name, connection in connections.items()]
        name, *_ = ranked(
            self._policy,
            loads,
            len(requests),
            load_factor=self._load_factor,
            avoid=requests[0].avoid,
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
        """Return the load of a replica from its last messages.

        `connection.load` is up to a second old, `connection.num_requests` milliseconds while the
        replica runs requests of this router.
        """
        load, by_router = connection.load, connection.num_requests
        costs: Mapping[str, float] | None = load.get("marginal_ms_by_batch_size")
        return ReplicaLoad(
            name,
            own_requests=self._num_open(name),
            other_requests=sum(n for sender, n in by_router.items() if sender != self._router),
            num_slots=self._num_slots,
            max_requests=self._max_requests,
            is_short_of_pages=is_short_of_pages(load),
            is_healthy=load.get("is_healthy", True),
            marginal_ms_by_batch_size={int(n): ms for n, ms in costs.items()} if costs else None,
            matched_blocks=sum(self._prefixes.matched(name, prompt) for prompt in prompts),
        )
