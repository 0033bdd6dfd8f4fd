"""A stream outlives its replica: what one replica began, another continues.

A token is a function of the text before it, the seed and its position alone (the sampling law), so
prompt, tokens so far and seed are all that another replica needs to say exactly what the first one
would have said. (Not where drafts are judged by rejection: a text then depends on them, too, and
the second half is another one, of the same distribution.)
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from serve_spec.core.request import FinishReason, SpeculationStats, TokenDelta
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


@dataclass
class FleetSpeculation(SpeculationStats):
    """What speculation did for one request, added up over the replicas that had it."""

    num_resumes: int = 0
    """How often a replica took the request over from one that had failed it."""

    def add(self, counts: SpeculationStats) -> None:
        """Adds what one replica counted."""
        self.num_rounds += counts.num_rounds
        self.num_draft_tokens += counts.num_draft_tokens
        self.num_correct_drafts += counts.num_correct_drafts
        for num_steps, num_rounds in counts.rounds_by_num_steps.items():
            known = self.rounds_by_num_steps.get(num_steps, 0)
            self.rounds_by_num_steps[num_steps] = known + num_rounds
        self.synthetic_acceptance |= counts.synthetic_acceptance

    def as_dict(self) -> dict[str, object]:
        """The JSON form: `usage.speculation` of the HTTP API."""
        return {**super().as_dict(), "num_resumes": self.num_resumes}


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
        # By attempt: the newest that its replica said of speculation, which counts from its start.
        self._counts: dict[int, SpeculationStats] = {}
        self._num_resumes = 0
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

    def take(self, item: ReplicaItem) -> ReplicaItem | None:
        """Notes an item; what the caller is to hear of it, if anything.

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
            self._num_resumes += bool(self._avoid)
            return item if is_first else None
        if isinstance(item, TokenDelta):
            return self._take_delta(item)
        return item

    def _take_delta(self, delta: TokenDelta) -> TokenDelta:
        if delta.speculation is not None:
            self._counts[self._num_attempts] = delta.speculation
        if delta.finish_reason is FinishReason.ABORT:  # not ours: the engine is shutting down
            raise ReplicaLost(no_replica("the replica that had this request is shutting down"))
        self._emitted += delta.token_ids
        if delta.finish_reason is None:
            return delta
        total = FleetSpeculation(num_resumes=self._num_resumes)
        for counts in self._counts.values():
            total.add(counts)
        return delta._replace(speculation=total)

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

    The last delta's counts (`FleetSpeculation`) are the sum of the newest that each of the replicas
    has said of itself; nobody knows what one that died has counted since.

    Raises:
        ApiError: nobody takes the request; after a loss, nobody took it for `resume_timeout_s`,
            or it lost its replica three times.
    """
    attempts = _Attempts(request, resume_timeout_s)
    while True:
        try:
            async with aclosing(fleet.generate(attempts.next_request())) as items:
                async for item in items:
                    if (heard := attempts.take(item)) is not None:
                        yield heard
                    if is_last(item):
                        return
            raise engine_failed("the replica ended the completion early")
        except ApiError as error:
            await attempts.after(error)
