"""A stream outlives its replica: what one replica began, another continues.

A token is a function of the text before it, the seed and its position alone (the sampling law), so
prompt, tokens so far and seed are all that another replica needs to say exactly what the first one
would have said.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from serve_spec.core.request import FinishReason, TokenDelta
from serve_spec.log import get_logger
from serve_spec.serving.errors import ApiError, engine_failed, no_replica, queue_full
from serve_spec.serving.messages import Accepted, Failed, GenerateRequest, ReplicaItem, is_last

logger = get_logger(__name__)

# A request that has cost this many replicas may be what kills them.
_MAX_LOSSES = 3
# Between two attempts of a request that no replica takes.
_PAUSE_S = 0.25


class ReplicaLost(ApiError):
    """The replica died, or its engine did, while it had the request. Others may be well."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(
            error.status,
            error.message,
            kind=error.kind,
            code=error.code,
            retry_after_s=error.retry_after_s,
        )


class _Fleet(Protocol):
    def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplicaItem, None]: ...


class _Attempts:
    """One request, on one replica after the other."""

    def __init__(self, request: GenerateRequest, resume_timeout_s: float) -> None:
        params = request.params
        if params.seed is None:  # the next replica must draw as the first one did
            params = replace(params, seed=secrets.randbits(63))
        self._request = replace(request, params=params)
        self._resume_timeout_s = resume_timeout_s
        self._emitted: list[int] = []
        self._avoid: set[str] = set()
        self._num_attempts = 0
        self._num_losses = 0
        self._replica: str | None = None
        self._was_accepted = False
        self._give_up_at = float("inf")

    def next_request(self) -> GenerateRequest:
        """What to ask the next replica for. Engines know attempts apart by their ids."""
        self._num_attempts += 1
        self._replica = None
        return replace(
            self._request,
            request_id=f"{self._request.request_id}-{self._num_attempts}",
            emitted=tuple(self._emitted),
            avoid=frozenset(self._avoid),
        )

    def take(self, item: ReplicaItem) -> bool:
        """Notes an item; whether the caller has not heard it before.

        Raises:
            ReplicaLost: the item is a failure, and another replica may do better.
            ApiError: the replica is full; a request that was taken before may wait.
        """
        if isinstance(item, Failed) and not item.overloaded:
            self._avoid.add(item.replica)
            raise ReplicaLost(engine_failed(item.message))
        if isinstance(item, Failed) and self._num_losses:
            raise queue_full(item.message, 1)
        if isinstance(item, Accepted):
            is_first, self._was_accepted = not self._was_accepted, True
            self._replica, self._give_up_at = item.replica, float("inf")
            return is_first
        if isinstance(item, TokenDelta):
            if item.finish_reason is FinishReason.ABORT:  # not ours: the engine is shutting down
                raise ReplicaLost(no_replica("the replica that had this request is shutting down"))
            self._emitted += item.token_ids
        return True

    async def after(self, error: ApiError) -> None:
        """Returns when it is time for another attempt.

        Raises:
            ApiError: there will be none; the error that says why.
        """
        now = asyncio.get_running_loop().time()
        if self._replica is not None or (isinstance(error, ReplicaLost) and not self._was_accepted):
            self._lose(error, now)
        elif not self._num_losses or now >= self._give_up_at:
            raise error
        else:
            await asyncio.sleep(_PAUSE_S)

    def _lose(self, error: ApiError, now: float) -> None:
        self._num_losses += 1
        if self._replica is not None:
            self._avoid.add(self._replica)
        if self._num_losses >= _MAX_LOSSES:
            raise error
        self._give_up_at = now + self._resume_timeout_s
        logger.warning(
            "request %s (%s) goes on elsewhere after %d tokens: %s",
            self._request.request_id,
            self._request.trace_id,
            len(self._emitted),
            error.message,
        )


async def resumed(
    fleet: _Fleet, request: GenerateRequest, resume_timeout_s: float
) -> AsyncGenerator[ReplicaItem, None]:
    """`fleet.generate(request)` without breaks: `Accepted` once, no token lost or repeated.

    Counts of speculation in the last delta are those of the last replica.

    Raises:
        ApiError: nobody takes the request; after a loss, nobody took it for `resume_timeout_s`,
            or it lost its replica three times.
    """
    attempts = _Attempts(request, resume_timeout_s)
    while True:
        try:
            async with aclosing(fleet.generate(attempts.next_request())) as items:
                async for item in items:
                    if attempts.take(item):
                        yield item
                    if is_last(item):
                        return
            raise engine_failed("the replica ended the completion early")
        except ApiError as error:
            await attempts.after(error)
