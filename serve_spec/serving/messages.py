"""What crosses between router and replica. Plain data, picklable.

A replica answers one `GenerateRequest` with a stream: `Accepted`, then a `TokenDelta` per engine
round, the last one with its finish reason. Or it ends early with `Refused` or `Failed`: values, not
exceptions, because Ray prints a full traceback for each exception that crosses a process.
"""

from __future__ import annotations

from dataclasses import dataclass
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


ReplicaItem: TypeAlias = Accepted | Refused | Failed | TokenDelta


def is_last(item: ReplicaItem) -> bool:
    """Whether the replica has nothing to say after `item`."""
    if isinstance(item, TokenDelta):
        return item.finish_reason is not None
    return isinstance(item, Refused | Failed)
