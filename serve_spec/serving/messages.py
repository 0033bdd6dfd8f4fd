"""Messages between routers and replicas: plain, picklable data.

Each replica has one connection to each router. The router sends `RouterMessage`s. The replica sends
one `ReplicaMessage` per engine step with the items of all requests of that router. A request gets
an `Accepted` item, then a `TokenDelta` per step, the last one with a finish reason. `Refused` and
`Failed` end it early; they are items because an error concerns only its request.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import SamplingParams, TokenDelta
from serve_spec.log import get_logger

logger = get_logger(__name__)

Prompt: TypeAlias = str | list[int]
"""A string, or token ids."""

_NOTHING_ELSE = TokenDelta("", (), "")[3:]


def encode_replica_message(message: ReplicaMessage) -> bytes:
    """Encode a message for `decode_replica_message`."""
    encoded = [
        (request_id, item[1], item[2])
        if type(item) is TokenDelta and item[3:] == _NOTHING_ELSE
        else (request_id, pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
        for request_id, item in message.items
    ]
    return pickle.dumps((encoded, *message[1:]), pickle.HIGHEST_PROTOCOL)


def decode_replica_message(message: bytes) -> ReplicaMessage:
    """Decode a message; an unreadable item becomes `Failed`."""
    encoded, *rest = pickle.loads(message)
    items: Items = [
        (each[0], TokenDelta(*each) if len(each) == 3 else _decoded(*each)) for each in encoded
    ]
    return ReplicaMessage(items, *rest)


def encode_router_message(
    requests: Iterable[GenerateRequest] = (),
    cancelled: Sequence[str] = (),
    *,
    flushes_cache: bool = False,
    known_ids: Sequence[str] | None = None,
) -> bytes:
    """Encode a message for `decode_router_message`."""
    encoded = [(r.request_id, pickle.dumps(r, pickle.HIGHEST_PROTOCOL)) for r in requests]
    return pickle.dumps((encoded, cancelled, flushes_cache, known_ids), pickle.HIGHEST_PROTOCOL)


def decode_router_message(message: bytes) -> RouterMessage:
    """Decode a message; an unreadable request becomes `Failed`."""
    encoded, *rest = pickle.loads(message)
    return RouterMessage([(name, _decoded(name, data)) for name, data in encoded], *rest)


def _decoded(request_id: str, data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        logger.error("request %s: unreadable message: %r", request_id, error)
        return Failed(f"unreadable message for this request ({type(error).__name__})")


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt to complete.

    `request_id` is unique in the fleet. `trace_id`, the client's x-request-id, is for logs only.
    """

    request_id: str
    trace_id: str
    prompt: Prompt
    params: SamplingParams
    emitted: tuple[int, ...] = ()
    """Tokens from another replica that the client already has; generation continues after them."""
    avoid: frozenset[str] = frozenset()
    """Replicas that have failed this request; others are preferred."""
    is_resumption: bool = False
    """Whether its last replica failed it."""


@dataclass(frozen=True)
class Accepted:
    """The engine accepted the request."""

    num_prompt_tokens: int
    replica: str


@dataclass(frozen=True)
class Refused:
    """The request is invalid."""

    error: InvalidRequest


@dataclass(frozen=True)
class Failed:
    """The engine failed the request. overloaded: because its queue is full.

    is_final: no other replica would do better.
    """

    message: str
    overloaded: bool = False
    replica: str = ""
    is_final: bool = False


@dataclass(frozen=True)
class Withdrawn:
    """The router took the request back from its replica, which has not failed."""


ReplicaItem: TypeAlias = Accepted | Refused | Failed | Withdrawn | TokenDelta
Items: TypeAlias = list[tuple[str, ReplicaItem]]
"""(request id, item), oldest first."""


class ReplicaMessage(NamedTuple):
    """Message of a replica to a router: the items of a round, if any, and the load."""

    items: Items
    num_requests: Mapping[str, int] = {}
    """Number of the replica's requests by router."""
    load: Mapping[str, Any] | None = None
    """`EngineReplica.record_routing_stats`, sent periodically."""
    is_closing: bool = False
    """Whether the replica is shutting down and takes no more requests."""


class RouterMessage(NamedTuple):
    """Message of a router to a replica."""

    requests: Sequence[tuple[str, GenerateRequest | Failed]]
    """Ids and requests to start."""
    cancelled: Sequence[str]
    """Ids of requests to cancel; no-op if they have ended."""
    flushes_cache: bool = False
    """Whether the replica drops the cached prefixes that no request uses."""
    known_ids: Sequence[str] | None = None
    """Ids of all requests that the router has at the replica, which cancels others; None: unsaid.

    A connection keeps order, so the replica has got these requests before.
    """


def is_last(item: ReplicaItem) -> bool:
    """Return whether `item` is the last of its request."""
    if isinstance(item, TokenDelta):
        return item.finish_reason is not None
    return isinstance(item, Refused | Failed | Withdrawn)


def merge_deltas(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Merge at least one consecutive delta of a request into one."""
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
        tuple(token for tokens in logprobs for token in tokens) if logprobs else None,
        first.prompt_logprobs,
        first.num_cached_tokens,
        first.prefill_s,
    )


def merge_items(items: Iterable[tuple[str, ReplicaItem]]) -> Items:
    """Merge consecutive deltas of each request."""
    by_request: dict[str, list[ReplicaItem | list[TokenDelta]]] = {}
    for request_id, item in items:
        parts = by_request.setdefault(request_id, [])
        if not isinstance(item, TokenDelta):
            parts.append(item)
        elif parts and isinstance(parts[-1], list):
            parts[-1].append(item)
        else:
            parts.append([item])
    return [
        (request_id, merge_deltas(item) if isinstance(item, list) else item)
        for request_id, parts in by_request.items()
        for item in parts
    ]
