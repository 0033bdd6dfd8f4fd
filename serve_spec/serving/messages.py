"""What crosses between router and replica. Plain data, picklable.

A replica answers a `Submission` with one stream of `News`: whatever its requests have to say since
the last one, as lists of (request id, item), as a rule once per engine round. Each request says
`Accepted`, then a `TokenDelta` per engine round, the last one with its finish reason. Or it ends
early with `Refused` or `Failed`: values, not exceptions, because Ray prints a full traceback for
each exception that crosses a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import SamplingParams, TokenDelta


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt to complete.

    `request_id` is the engine's key and unique in the fleet; `trace_id` is the caller's
    x-request-id, which two callers may well share, and appears in logs only.
    """

    request_id: str
    trace_id: str
    prompt: str | list[int]
    params: SamplingParams
    emitted: tuple[int, ...] = ()
    """Tokens that another replica generated and the caller has: the answer goes on after them."""
    avoid: frozenset[str] = frozenset()
    """Replicas that have failed this request; others come first."""
    is_resumption: bool = False
    """Whether the replica that had it last has failed it."""


@dataclass(frozen=True)
class ReplicaRows:
    """How many requests a replica has, by the router they came from.

    time_s: when, by the replica's own clock.
    """

    replica: str
    time_s: float
    by_sender: Mapping[str, int]


@dataclass(eq=False)
class Submission:
    """Requests that go to one replica together, at least one."""

    sender: str
    """Which router sends it."""
    requests: Sequence[GenerateRequest]
    num_open: int = field(init=False)
    """How many have not ended. The sender counts it down; the replica's copy stays as it was."""
    heard: Mapping[str, ReplicaRows] = field(default_factory=dict)
    """What replicas last said to the sender, by name. It does not travel."""
    silent: Set[str] = frozenset()
    """Replicas that do not answer the sender; others come first. It does not travel."""
    replica: str | None = None
    """Where it was routed to, for its sender to know. It does not travel."""

    def __post_init__(self) -> None:
        self.num_open = len(self.requests)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "heard": {}, "silent": frozenset()}


@dataclass(frozen=True)
class Cancellation:
    """Ends some requests of a submission on the replica that has them."""

    replica: str
    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Accepted:
    """The engine took the request."""

    num_prompt_tokens: int
    replica: str


@dataclass(frozen=True)
class Refused:
    """The request cannot run; the caller's fault."""

    error: InvalidRequest


@dataclass(frozen=True)
class Failed:
    """The engine could not finish; not the caller's fault. `overloaded`: its queue is full."""

    message: str
    overloaded: bool = False
    replica: str = ""


@dataclass(frozen=True)
class Withdrawn:
    """The router has taken the request back from its replica, which has not failed it."""


ReplicaItem: TypeAlias = Accepted | Refused | Failed | Withdrawn | TokenDelta
Items: TypeAlias = list[tuple[str, ReplicaItem]]
"""(request id, item): what a submission's requests have to say at one time."""


News: TypeAlias = tuple[Items, ReplicaRows | None]
"""One element of a replica's answer: what the requests say, and how busy it is, where that is news
to the router. Without items it says that the replica is alive. A plain tuple: one is pickled for
every submission and round."""


def is_last(item: ReplicaItem) -> bool:
    """Whether the replica has nothing to say of a request after `item`."""
    if isinstance(item, TokenDelta):
        return item.finish_reason is not None
    return isinstance(item, Refused | Failed | Withdrawn)
