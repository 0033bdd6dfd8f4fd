"""What crosses between router and replica. Plain data, picklable.

A router sends `Submission`s and `Cancellation`s, which are short calls. It reads all answers of a
replica from one stream, which an `Attachment` opens. The stream is made of `News`, one per engine
round: the items of all requests of that router. Each request has an `Accepted` item, then a
`TokenDelta` per engine round, the last one with its finish reason. Or it ends early with `Refused`
or `Failed`: values, not exceptions, because Ray prints a full traceback for each exception that
crosses a process.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import SamplingParams, TokenDelta
from serve_spec.log import get_logger

logger = get_logger(__name__)

_NOTHING_ELSE = TokenDelta("", (), "")[3:]


def encode(news: News) -> bytes:
    """Return the bytes that `decode` reads."""
    entries = [
        (request_id, item[1], item[2])
        if type(item) is TokenDelta and item[3:] == _NOTHING_ELSE
        else (request_id, pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
        for request_id, item in news.items
    ]
    message = (news.session, entries, news.rows, news.is_over)
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def decode(message: bytes) -> News:
    """Return the news in a message; an item that cannot be read becomes `Failed`."""
    session, entries, rows, is_over = pickle.loads(message)
    items: Items = [
        (entry[0], TokenDelta(*entry) if len(entry) == 3 else _decoded(*entry)) for entry in entries
    ]
    return News(session, items, rows, is_over)


def _decoded(request_id: str, data: bytes) -> ReplicaItem:
    try:
        item: ReplicaItem = pickle.loads(data)
    except Exception as error:
        logger.error("request %s: an item of its replica cannot be read: %r", request_id, error)
        return Failed(f"an item of the replica cannot be read ({type(error).__name__})")
    return item


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


class Submitted(NamedTuple):
    """The reply to a submission: where it is, and in which session of its sender there."""

    replica: str
    session: int


@dataclass(frozen=True)
class Cancellation:
    """Ends some requests of a router on the replica that has them."""

    replica: str
    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Attachment:
    """Opens the stream on which a replica answers a router."""

    replica: str
    sender: str


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
"""(request id, item), oldest first."""


class News(NamedTuple):
    """One message of a replica to a router: the items of a round.

    Without items it says that the replica is alive.
    """

    session: int
    """Grows when a replica has forgotten the requests of the router that it had before."""
    items: Items
    rows: ReplicaRows | None = None
    """How busy the replica is, unless the router was told a moment ago."""
    is_over: bool = False
    """Whether the replica ends the stream, for it has had nothing to say for a while."""


def is_last(item: ReplicaItem) -> bool:
    """Return whether no item of a request follows `item`."""
    if isinstance(item, TokenDelta):
        return item.finish_reason is not None
    return isinstance(item, Refused | Failed | Withdrawn)


def merged(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Return consecutive deltas of a request, at least one, as one."""
    first, last = deltas[0], deltas[-1]
    if len(deltas) == 1:
        return first
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return TokenDelta(
        first.request_id,
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join(delta.text for delta in deltas),
        last.finish_reason,
        last.speculation,
        tuple(entry for entries in logprobs for entry in entries) if logprobs else None,
        first.prompt_logprobs,
        first.num_cached_tokens,
    )


def merged_items(items: Iterable[tuple[str, ReplicaItem]]) -> Items:
    """Return the items with consecutive deltas of a request as one."""
    by_request: dict[str, list[ReplicaItem | list[TokenDelta]]] = {}
    for request_id, item in items:
        said = by_request.setdefault(request_id, [])
        if not isinstance(item, TokenDelta):
            said.append(item)
        elif said and isinstance(said[-1], list):
            said[-1].append(item)
        else:
            said.append([item])
    return [
        (request_id, merged(item) if isinstance(item, list) else item)
        for request_id, said in by_request.items()
        for item in said
    ]
