"""The life of one completion at the door: a turn, a replica, the first token, then the rest.

Plain asyncio: the replicas are behind the `Fleet` protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Protocol

from serve_spec.core.request import FinishReason, SpeculationStats, TokenDelta
from serve_spec.log import get_logger
from serve_spec.metrics import Reading
from serve_spec.serving import sse
from serve_spec.serving.admission import Admission
from serve_spec.serving.answers import Completion, CompletionFormat, Usage, usage
from serve_spec.serving.errors import (
    ApiError,
    engine_failed,
    queue_full,
    refused,
    timed_out,
)
from serve_spec.serving.latency import timed
from serve_spec.serving.messages import (
    Accepted,
    Failed,
    GenerateRequest,
    Refused,
    ReplicaItem,
)
from serve_spec.serving.resume import resumed

logger = get_logger(__name__)


class Fleet(Protocol):
    """The engine replicas as the router sees them."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplicaItem, None]:
        """What one replica answers; closing the generator cancels the request there.

        Raises:
            ApiError: no replica can take it, or the one that had it is gone.
        """
        ...

    def batching(self) -> dict[str, object]:
        """Batch sizes as the router knows them: its part of `router` in `/server_info`."""
        ...

    async def num_healthy(self) -> int | None:
        """Replicas that take requests; None when nobody knows at the moment."""
        ...

    async def stats(self) -> dict[str, object]:
        """`internal_states` (per replica) and `fleet` of `/server_info`."""
        ...

    async def status(self) -> dict[str, object]:
        """What the status page shows; see `FleetStats.status`."""
        ...


class RunningCompletion:
    """A request that a replica works on and whose first tokens are here."""

    def __init__(
        self, items: AsyncGenerator[ReplicaItem, None], deadline: float, timeout_s: float
    ) -> None:
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.speculation = SpeculationStats()
        self._items = items
        self._deadline = deadline
        self._timeout_s = timeout_s
        self._first: TokenDelta | None = None

    async def start(self) -> None:
        """Waits for the first tokens, so that whatever goes wrong before them gets its status.

        Raises:
            ApiError: the request did not get so far.
        """
        accepted = await self._next_item()
        assert isinstance(accepted, Accepted), "a replica's first item is Accepted"
        self.num_prompt_tokens = accepted.num_prompt_tokens
        self._first = await self._next_delta()

    async def deltas(self) -> AsyncIterator[TokenDelta]:
        """Every delta in order; the last one carries the finish reason.

        Raises:
            ApiError: the completion broke off.
        """
        assert self._first is not None, "start() comes first"
        delta = self._first
        while True:
            self.num_tokens += len(delta.token_ids)
            if delta.speculation is not None:
                self.speculation = delta.speculation
            yield delta
            if delta.finish_reason is not None:
                return
            delta = await self._next_delta()

    async def _next_delta(self) -> TokenDelta:
        delta = await self._next_item()
        assert isinstance(delta, TokenDelta), "a replica's later items are deltas"
        return delta

    async def _next_item(self) -> Accepted | TokenDelta:
        try:
            async with asyncio.timeout_at(self._deadline):
                item = await anext(self._items, None)
        except TimeoutError:
            raise timed_out(self._timeout_s) from None
        if isinstance(item, Refused):
            raise refused(item.error)
        if isinstance(item, Failed):
            raise queue_full(item.message, 1) if item.overloaded else engine_failed(item.message)
        if item is None:
            raise engine_failed("the replica ended the completion early")
        return item


class CompletionRunner:
    """Runs completions: one turn at the door and a replica each, within the deadline.

    resume_timeout_s: how long a request that has lost its replica may wait for another one.
    record: gets how long requests took, and how they ended.
    """

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        *,
        timeout_s: float,
        resume_timeout_s: float,
        record: Callable[[Reading], None] = lambda reading: None,
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._timeout_s = timeout_s
        self._resume_timeout_s = resume_timeout_s
        self._record = record

    @asynccontextmanager
    async def run(self, request: GenerateRequest) -> AsyncIterator[RunningCompletion]:
        """Holds turn and replica for the body of the `async with`, however it ends.

        Raises:
            ApiError: the request did not get to its first token.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        async with AsyncExitStack() as held:
            try:
                await held.enter_async_context(self._admission.slot(deadline))
            except TimeoutError:
                raise timed_out(self._timeout_s) from None
            answer = timed(resumed(self._fleet, request, self._resume_timeout_s), self._record)
            items = await held.enter_async_context(aclosing(answer))
            completion = RunningCompletion(items, deadline, self._timeout_s)
            await completion.start()
            yield completion


async def whole_answer(completion: RunningCompletion, form: CompletionFormat) -> Completion:
    """The answer of a request without `stream`.

    Raises:
        ApiError: the completion broke off.
    """
    texts: list[str] = []
    finish_reason = FinishReason.ABORT
    async for delta in completion.deltas():
        texts.append(delta.text)
        finish_reason = delta.finish_reason or finish_reason
    return form.completion("".join(texts), finish_reason, _counts(completion))


async def stream_frames(
    completion: RunningCompletion, form: CompletionFormat, trace_id: str
) -> AsyncIterator[bytes]:
    """The answer of a request with `stream`: a frame per round that completes text.

    The 200 is out by now, so a failure becomes a frame, and [DONE] does not follow it.
    """
    try:
        async for delta in completion.deltas():
            if delta.text or delta.finish_reason is not None:
                yield sse.frame(form.chunk(delta.text, delta.finish_reason))
        if form.include_usage:
            yield sse.frame(form.usage_chunk(_counts(completion)))
        yield sse.DONE
    except ApiError as error:
        logger.warning("request %s (%s) broke off: %s", form.id, trace_id, error.message)
        yield sse.frame(error.body())


def _counts(completion: RunningCompletion) -> Usage:
    return usage(completion.num_prompt_tokens, completion.num_tokens, completion.speculation)
