"""The choice of a replica for a batch of requests, from what the router knows of each."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from serve_spec.serving.messages import GenerateRequest
from serve_spec.serving.router.connections import ReplicaConnection

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


class MarginalCosts:
    """ms/token of one more request, by number of requests (`adaptive.marginal`)."""

    def __init__(self, ms_by_batch_size: Mapping[int, float]) -> None:
        self._sizes = sorted(ms_by_batch_size)
        self._ms = [ms_by_batch_size[size] for size in self._sizes]
        self._means: dict[tuple[int, int], float] = {}

    def mean(self, first: int, num: int) -> float:
        """Return the mean ms of `num` more requests after `first`."""
        mean = self._means.get((first, num))
        if mean is None:
            mean = self._means[first, num] = sum(map(self.at, range(first, first + num))) / num
        return mean

    def at(self, count: int) -> float:
        """Return the ms at `count` by linear interpolation; beyond the table, proportional."""
        above = bisect_right(self._sizes, count)
        if above == 0:
            return self._ms[0]
        size, ms = self._sizes[above - 1], self._ms[above - 1]
        if above == len(self._sizes):
            return ms * max(1.0, count / (2 * size)) if size else ms
        next_size, next_ms = self._sizes[above], self._ms[above]
        return ms + (next_ms - ms) * (count - size) / (next_size - size)


class ReplicaLoad(NamedTuple):
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
    marginal_costs: MarginalCosts | None = None
    """None: the replica has no table."""
    matched_blocks: int = 0
    """Blocks of the batch's prompts that the replica was sent before."""

    @property
    def num_requests(self) -> int:
        """Requests of all routers."""
        return self.own_requests + self.other_requests

    def marginal_ms(self, num_requests: int) -> float:
        """Return the mean ms/token of `num_requests` additional requests."""
        assert self.marginal_costs is not None, "balanced is the policy without costs"
        return self.marginal_costs.mean(self.num_requests, num_requests)


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
        num_then = load.num_requests + num_requests
        is_full = load.is_short_of_pages or num_then > load.max_requests
        has_to_wait = num_then > load.num_slots
        return (not load.is_healthy, load.name in avoid, is_full, has_to_wait, *order(load))

    return [load.name for load in sorted(loads, key=key)]


def _order(
    policy: Policy, loads: Sequence[ReplicaLoad], num_requests: int, load_factor: float
) -> Callable[[ReplicaLoad], tuple[float, ...]]:
    if policy == "goodput" and all(load.marginal_costs is not None for load in loads):
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
    _reports: dict[str, _LoadReport] = field(default_factory=dict)
    """By replica, its newest load report."""

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
        self._reports.pop(replica, None)

    def _load(
        self, name: str, connection: ReplicaConnection, prompts: Sequence[Sequence[int]]
    ) -> ReplicaLoad:
        """Return the load of a replica from its last messages, which are up to a second old."""
        report = self._reports.get(name)
        if report is None or report.load is not connection.load:
            report = self._reports[name] = _LoadReport.of(connection.load)
        by_router = connection.num_requests
        return ReplicaLoad(
            name,
            own_requests=self.num_open(name),
            other_requests=sum(by_router.values()) - by_router.get(self.router, 0),
            num_slots=self.num_slots,
            max_requests=self.max_requests,
            is_short_of_pages=report.is_short_of_pages,
            is_healthy=report.is_healthy,
            marginal_costs=report.marginal_costs,
            matched_blocks=sum([self._prefixes.matched(name, prompt) for prompt in prompts]),
        )


class _LoadReport(NamedTuple):
    """A load report, read once for all choices until the next one."""

    load: Mapping[str, Any]
    is_short_of_pages: bool
    is_healthy: bool
    marginal_costs: MarginalCosts | None

    @classmethod
    def of(cls, load: Mapping[str, Any]) -> _LoadReport:
        """Read a report."""
        by_name: Mapping[str, float] = load.get("marginal_ms_by_batch_size") or {}
        known = {int(size): ms for size, ms in by_name.items()}
        costs = MarginalCosts(known) if known else None
        return cls(load, is_short_of_pages(load), load.get("is_healthy", True), costs)
