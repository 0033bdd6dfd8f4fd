"""Resume requests on another replica when theirs is lost.

A sampled token depends only on the text before it, the seed and its position, so a replica that
receives prompt, generated tokens and seed continues with exactly the same text. With rejection
sampling the text also depends on the drafts; the continuation then differs but follows the same
distribution.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from serve_spec.core.request import FinishReason, TokenDelta
from serve_spec.core.stats import SpeculationStats
from serve_spec.log import get_logger
from serve_spec.serving import errors, messages
from serve_spec.serving.router.admission import AdmissionSlot

if TYPE_CHECKING:
    from serve_spec.serving.router.batching import Batcher

logger = get_logger(__name__)

# A request that has lost this many replicas may be the cause.
_MAX_LOSSES = 2
# Pause between attempts while no replica takes the request.
_PAUSE_S = 0.25


@dataclass
class FleetSpeculation(SpeculationStats):
    """Speculation counts of one request, or of several, summed over their replicas."""

    num_resumes: int = 0
    """How often the request was resumed after a failure."""

    def add(self, counts: SpeculationStats) -> None:
        """Add the counts of one replica or request."""
        self.num_rounds += counts.num_rounds
        self.num_draft_tokens += counts.num_draft_tokens
        self.num_correct_drafts += counts.num_correct_drafts
        self.num_grammar_tokens += counts.num_grammar_tokens
        for num_steps, rounds in counts.rounds_by_correct.items():
            sums = self.rounds_by_correct.setdefault(num_steps, {})
            for num_correct, num_rounds in rounds.items():
                sums[num_correct] = sums.get(num_correct, 0) + num_rounds
        if counts.rounds is not None:
            self.rounds = [*(self.rounds or ()), *counts.rounds]
        self.synthetic_acceptance |= counts.synthetic_acceptance
        if isinstance(counts, FleetSpeculation):
            self.num_resumes += counts.num_resumes

    def as_dict(self) -> dict[str, object]:
        """Return `usage.speculation` of the HTTP API."""
        return {**super().as_dict(), "num_resumes": self.num_resumes}


class _Attempts:
    def __init__(self, request: messages.GenerateRequest, resume_timeout_s: float) -> None:
        params = request.params
        if params.seed is None:  # every attempt must sample the same tokens
            params = replace(params, seed=secrets.randbits(63))
        self._request = replace(request, params=params)
        self._resume_timeout_s = resume_timeout_s
        self._emitted: list[int] = []
        # The latest speculation counts of each attempt.
        self._counts: dict[int, SpeculationStats] = {}
        self._num_resumes = 0
        self._avoid: set[str] = set()
        self._num_attempts = 0
        self._num_losses = 0
        self._is_resumption = False
        self._may_wait = False
        """Whether it has started somewhere, so that it waits when a new request is rejected."""
        self._replica: str | None = None
        self._was_accepted = False
        self._give_up_at = float("inf")

    def next_request(self) -> messages.GenerateRequest:
        """Return the request of the next attempt, with an id of its own."""
        self._num_attempts += 1
        self._replica = None
        return replace(
            self._request,
            request_id=f"{self._request.request_id}-{self._num_attempts}",
            emitted=tuple(self._emitted),
            avoid=frozenset(self._avoid),
            is_resumption=self._is_resumption,
        )

    def take(self, item: messages.ReplicaItem) -> messages.ReplicaItem | None:
        """Record an item; return it if the caller should receive it.

        Raises:
            ReplicaLost: the item is a failure, and another replica may succeed.
            ApiError: the replica is full; a request that has started before may wait.
        """
        if isinstance(item, messages.Failed) and not item.is_final:
            if not item.overloaded:
                raise errors.ReplicaLost(errors.engine_failed(item.message), replica=item.replica)
            if self._may_wait:
                raise errors.queue_full(item.message, 1)
        if isinstance(item, messages.Accepted):
            is_first, self._was_accepted = not self._was_accepted, True
            self._replica, self._give_up_at = item.replica, float("inf")
            self._num_resumes += self._is_resumption
            self._is_resumption = False
            return item if is_first else None
        if isinstance(item, TokenDelta):
            return self._take_delta(item)
        return item

    def _take_delta(self, delta: TokenDelta) -> TokenDelta:
        if delta.speculation is not None:
            self._counts[self._num_attempts] = delta.speculation
        if delta.finish_reason is FinishReason.ABORT:  # by the engine, at its shutdown
            why = "the replica that had this request is shutting down"
            raise errors.ReplicaLost(errors.no_replica(why), is_orderly=True)
        self._emitted += delta.token_ids
        if delta.finish_reason is None:
            return delta
        total = FleetSpeculation(num_resumes=self._num_resumes)
        for counts in self._counts.values():
            total.add(counts)
        return delta._replace(speculation=total)

    async def after(self, error: errors.ApiError) -> None:
        """Wait until the next attempt after an error; raise it if there will be none."""
        if isinstance(error, errors.ClientTooSlow):
            raise error
        if self._replica is not None or (
            isinstance(error, errors.ReplicaLost) and not self._was_accepted
        ):
            self._lose(error)
        elif not self._may_wait or _now() >= self._give_up_at:
            raise error
        else:
            await asyncio.sleep(_PAUSE_S)

    def _lose(self, error: errors.ApiError) -> None:
        lost = error if isinstance(error, errors.ReplicaLost) else errors.ReplicaLost(error)
        self._num_losses += not lost.is_orderly
        names = {name for name in (self._replica, lost.replica) if name}
        self._avoid |= names
        if self._num_losses >= _MAX_LOSSES:
            raise errors.replicas_lost(self._num_losses, error) from error
        self._is_resumption |= bool(names)
        self.wait_from_now()
        logger.warning(
            "request %s (%s) continues on another replica after %d tokens: %s",
            self._request.request_id,
            self._request.trace_id,
            len(self._emitted),
            error.message,
        )

    def wait_from_now(self) -> None:
        """Let the next attempt wait for a replica, after a loss or a withdrawal."""
        self._may_wait = True
        self._give_up_at = _now() + self._resume_timeout_s


def _now() -> float:
    return asyncio.get_running_loop().time()


async def resumed(
    fleet: Batcher,
    request: messages.GenerateRequest,
    resume_timeout_s: float,
    slot: AdmissionSlot | None = None,
) -> AsyncGenerator[messages.ReplicaItem, None]:
    """Yield the items of `fleet.generate(request)`, resuming it when its replica is lost.

    `Accepted` is yielded once, and no token is lost or repeated. The last delta's counts
    (`FleetSpeculation`) are summed over replicas; a lost one may have done more.

    slot: the request's slot at the replicas, which it may have to release for a while.

    Raises:
        ApiError: no replica takes the request, none took it for `resume_timeout_s` after a loss,
            or it lost its replica twice.
    """
    attempts = _Attempts(request, resume_timeout_s)
    while True:
        if slot is not None:
            await slot.ensure_slot()
        attempt = attempts.next_request()
        if slot is not None:
            slot.withdraw = partial(fleet.withdraw, attempt.request_id)
        try:
            async with aclosing(fleet.generate(attempt)) as items:
                async for item in items:
                    if isinstance(item, messages.Withdrawn):
                        break
                    if slot is not None and isinstance(item, TokenDelta):
                        slot.has_tokens = True
                    if (visible := attempts.take(item)) is not None:
                        yield visible
                    if messages.is_last(item):
                        return
                else:
                    raise errors.engine_failed(
                        "the replica ended the stream without a finish reason"
                    )
            attempts.wait_from_now()
        except errors.ApiError as error:
            await attempts.after(error)
