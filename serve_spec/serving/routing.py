"""Choose the replica for requests: arithmetic on what a router knows of the replicas."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from serve_spec.serving.messages import GenerateRequest
from serve_spec.serving.replica_connections import ReplicaConnection


def requests_to_move(
    not_begun: Mapping[str, Sequence[str]],
    stats: Mapping[str, Mapping[str, Any]],
    num_places: int,
) -> list[str]:
    """Return the requests to withdraw, so that they are routed anew.

    Args:
        not_begun: by replica, requests without a token yet, oldest first.
        stats: by replica, `EngineReplica.record_routing_stats`.
        num_places: requests that a replica runs at once.
    """
    num_free = sum(_free_places(state, num_places) for state in stats.values())
    moving: list[str] = []
    for replica, request_ids in not_begun.items():
        state = stats.get(replica, {})
        num_waiting = state.get("num_waiting") or 0
        # The engine starts requests in order of arrival: the oldest may be computing their prompts.
        num_started = max(len(request_ids) - num_waiting, _num_in_prefill(state))
        taken = request_ids[num_started:][:num_free]
        num_free -= len(taken)
        moving += taken
    return moving


def _num_in_prefill(state: Mapping[str, Any]) -> int:
    return max(0, (state.get("num_running") or 0) - (state.get("batch_size") or 0))


def _free_places(state: Mapping[str, Any], num_places: int) -> int:
    if not state.get("is_healthy", True) or is_short_of_pages(state):
        return 0
    taken = (state.get("num_running") or 0) + (state.get("num_waiting") or 0)
    return max(0, num_places - taken)


Policy: TypeAlias = Literal["goodput", "balanced", "prefix"]

# Costs that are as close to the least as this are equal: tables of like machines differ so much,
# and between equals the one with fewer requests is the quicker.
_NOISE = 1.25
_SHORT_SHARE = 0.1
# Prefixes are compared in blocks of so many characters of text, or tokens.
_CHARS_PER_BLOCK = 64
_TOKENS_PER_BLOCK = 16
_MAX_BLOCKS = 64
_MAX_KNOWN_BLOCKS = 200_000


@dataclass(frozen=True)
class ReplicaLoad:
    """One replica as a router sees it."""

    name: str
    own_rows: int = 0
    """Requests that this router has sent it and that have not ended, as of now."""
    other_rows: int = 0
    """Requests of other routers, as of the last that is heard of it."""
    num_places: float = math.inf
    """Rows it runs at once: more wait until others have ended, whatever they cost then."""
    max_rows: float = math.inf
    """With more it is full."""
    is_short_of_pages: bool = False
    """Requests wait there for KV pages: a newcomer would stand behind them."""
    is_healthy: bool = True
    marginal_ms_by_rows: Mapping[int, float] | None = None
    """ms per token of one more request by rows, see `adaptive.marginal`; None: no cost table."""
    matched_blocks: int = 0
    """Blocks of the submission's prompts that it was sent before."""

    @classmethod
    def of(
        cls, name: str, load: Mapping[str, Any], rows: Mapping[str, int], router: str
    ) -> ReplicaLoad:
        """Return what is known of a replica from what it said.

        load: `EngineReplica.record_routing_stats`, a second old as a rule. rows: requests there by
        router, milliseconds old while it has requests of this router.
        """
        by_rows: Mapping[str, float] | None = load.get("marginal_ms_by_rows")
        return cls(
            name,
            other_rows=sum(n for sender, n in rows.items() if sender != router),
            is_short_of_pages=is_short_of_pages(load),
            is_healthy=load.get("is_healthy", True),
            marginal_ms_by_rows={int(k): ms for k, ms in by_rows.items()} if by_rows else None,
        )

    @property
    def rows(self) -> int:
        """Requests it has."""
        return self.own_rows + self.other_rows

    def marginal_ms(self, num_requests: int) -> float:
        """Mean ms per token of each of `num_requests` more."""
        assert self.marginal_ms_by_rows, "balanced is the policy without costs"
        known = sorted(self.marginal_ms_by_rows.items())
        rows = range(self.rows, self.rows + num_requests)
        return sum(_between(known, row) for row in rows) / num_requests


def ranked(
    policy: Policy,
    loads: Sequence[ReplicaLoad],
    num_requests: int,
    *,
    load_factor: float,
    avoid: frozenset[str] = frozenset(),
) -> list[str]:
    """Names of all replicas, the best for `num_requests` more first.

    Whatever the policy, sick replicas come last, then those to be avoided, full ones, and those
    that have no place for all of the newcomers.

    load_factor: under `prefix`, the most rows a replica may have, relative to the mean.
    """
    order = _order(policy, loads, num_requests, load_factor)

    def key(load: ReplicaLoad) -> tuple[Any, ...]:
        is_full = load.is_short_of_pages or load.rows + num_requests > load.max_rows
        has_to_wait = load.rows + num_requests > load.num_places
        return (not load.is_healthy, load.name in avoid, is_full, has_to_wait, *order(load))

    return [load.name for load in sorted(loads, key=key)]


def _order(
    policy: Policy, loads: Sequence[ReplicaLoad], num_requests: int, load_factor: float
) -> Callable[[ReplicaLoad], tuple[float, ...]]:
    if policy == "goodput" and all(load.marginal_ms_by_rows for load in loads):
        ms = {load.name: load.marginal_ms(num_requests) for load in loads}
        equal = _NOISE * min(ms.values())
        return lambda load: (max(equal, ms[load.name]), load.rows)
    if policy == "prefix":
        total = sum(load.rows for load in loads) + num_requests
        bound = math.ceil(load_factor * total / max(1, len(loads)))
        return lambda load: (
            load.rows + num_requests > max(bound, num_requests),
            -load.matched_blocks,
            load.rows,
        )
    return lambda load: (load.rows,)


def is_short_of_pages(stats: Mapping[str, Any]) -> bool:
    """Return whether a queue is there to stay: for a moment, every request that arrives waits."""
    pages = stats.get("kv")
    if not pages or not stats.get("num_waiting"):
        return False
    return bool(pages["free_pages"] < _SHORT_SHARE * pages["total_pages"])


def _between(known: Sequence[tuple[int, float]], rows: int) -> float:
    """ms at `rows`, between the entries around it; from the last one on, in proportion to rows.

    Not in stairs: a replica whose stair is a little lower would get all requests up to its end.
    """
    above = bisect_right(known, rows, key=lambda entry: entry[0])
    if above == 0:
        return known[0][1]
    size, ms = known[above - 1]
    if above == len(known):
        return ms * max(1.0, rows / (2 * size)) if size else ms
    next_size, next_ms = known[above]
    return ms + (next_ms - ms) * (rows - size) / (next_size - size)


class SentPrefixes:
    """Which replica was sent which beginnings of prompts, the newest `max_blocks` of them.

    An estimate of what a replica's cache holds: made of what was sent, not of what is kept.
    """

    def __init__(self, max_blocks: int = _MAX_KNOWN_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._sent: OrderedDict[tuple[str, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sent)

    def matched(self, replica: str, prefixes: Sequence[int]) -> int:
        """Leading blocks of one prompt (`blocks`) that the replica was sent before."""
        for count, block in enumerate(prefixes):
            if (replica, block) not in self._sent:
                return count
        return len(prefixes)

    def note(self, replica: str, prefixes: Sequence[int]) -> None:
        """The replica is sent a prompt."""
        for block in prefixes:
            self._sent[replica, block] = None
            self._sent.move_to_end((replica, block))
        while len(self._sent) > self._max_blocks:
            self._sent.popitem(last=False)

    def forget(self, replica: str) -> None:
        """The replica is gone, and its cache with it."""
        for key in [key for key in self._sent if key[0] == replica]:
            del self._sent[key]


def blocks(prompt: str | list[int]) -> list[int]:
    """One number per whole block of the prompt, each standing for everything up to its end."""
    size = _CHARS_PER_BLOCK if isinstance(prompt, str) else _TOKENS_PER_BLOCK
    found: list[int] = []
    before = 0
    for start in range(0, min(len(prompt), size * _MAX_BLOCKS) - size + 1, size):
        part = prompt[start : start + size]
        before = hash((before, part if isinstance(part, str) else tuple(part)))
        found.append(before)
    return found


def first_block(request: GenerateRequest) -> int | None:
    """What requests share that travel together under `prefix`; None: less than a block."""
    return next(iter(blocks(request.prompt)), None)


class ReplicaChooser:
    """Chooses for one router.

    num_open: how many requests of this router a replica has, as of now.
    num_places: requests that a replica runs at once. max_rows: with more it is full.
    """

    def __init__(
        self,
        policy: Policy,
        router: str,
        num_open: Callable[[str], int],
        *,
        num_places: int,
        max_rows: int,
        load_factor: float,
    ) -> None:
        self._policy = policy
        self._router = router
        self._num_open = num_open
        self._num_places = num_places
        self._max_rows = max_rows
        self._load_factor = load_factor
        self._prefixes = SentPrefixes()

    def choose(
        self, requests: Sequence[GenerateRequest], connections: Mapping[str, ReplicaConnection]
    ) -> str:
        """Return the replica that requests, at least one, are to be sent to together."""
        by_prefix = self._policy == "prefix"
        prompts = [blocks(request.prompt) for request in requests if by_prefix]
        loads = [
            replace(
                ReplicaLoad.of(name, link.load, link.rows, self._router),
                own_rows=self._num_open(name),
                num_places=self._num_places,
                max_rows=self._max_rows,
                matched_blocks=sum(self._prefixes.matched(name, prompt) for prompt in prompts),
            )
            for name, link in connections.items()
        ]
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
        """Note that a replica is gone, and its cache with it."""
        self._prefixes.forget(replica)
