"""The life of one answer in the router: for each choice a turn, a replica, the tokens.

Plain asyncio: the replicas are behind the `Fleet` protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Protocol, TypeVar

from serve_spec.core.request import FinishReason, SpeculationStats, TokenDelta
from serve_spec.log import get_logger
from serve_spec.metrics import Reading
from serve_spec.serving import sse
from serve_spec.serving.admission import Admission
from serve_spec.serving.answers import Answer, AnswerFormat, Usage, usage
from serve_spec.serving.choices import by_prompt, interleaved, spread
from serve_spec.serving.errors import (
    ApiError,
    defect,
    engine_failed,
    queue_full,
    refused,
    timed_out,
)
from serve_spec.serving.messages import (
    Accepted,
    Failed,
    GenerateRequest,
    Refused,
    ReplicaItem,
    Withdrawn,
)
from serve_spec.serving.resume import FleetSpeculation, resumed
from serve_spec.serving.telemetry import router_timer

Item = TypeVar("Item")


class Deadline:
    """Ends waits for the items of a generator at a time of the event loop's clock.

    It has one timer for all waits. One task at a time may wait.
    """

    def __init__(self, at: float) -> None:
        self.at = at
        self._has_passed = False
        self._waiting: asyncio.Task[object] | None = None
        self._timer = asyncio.get_running_loop().call_at(at, self._pass)

    async def next(self, items: AsyncGenerator[Item, None]) -> Item:
        """Return the next item.

        Raises:
            StopAsyncIteration: there is none.
            TimeoutError: the time has come.
        """
        if self._is_late():
            raise TimeoutError
        task = self._waiting = asyncio.current_task()
        assert task is not None, "it runs in one"
        num_cancels = task.cancelling()
        try:
            return await anext(items)
        except asyncio.CancelledError:
            if self._is_late() and task.uncancel() <= num_cancels:
                raise TimeoutError from None
            raise
        finally:
            self._waiting = None

    def close(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def _is_late(self) -> bool:
        return self._has_passed

    def _pass(self) -> None:
        self._has_passed = True
        if self._waiting is not None:
            self._waiting.cancel()


logger = get_logger(__name__)


class Fleet(Protocol):
    """The engine replicas as the router sees them."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplicaItem, None]:
        """What one replica answers; closing the generator cancels the request there.

        Raises:
            ApiError: no replica can take it, or the one that had it is gone.
        """
        ...

    def withdraw(self, request_id: str) -> None:
        """Take a request back from its replica; `generate` yields `Withdrawn` last."""
        ...

    def batching(self) -> dict[str, object]:
        """Batch sizes as the router knows them: its part of `router` in `/server_info`."""
        ...

    async def num_healthy(self) -> int | None:
        """Return the number of replicas that take requests; None if it is not known now."""
        ...

    async def costs(self) -> dict[str, int]:
        """Return replicas by the state of their costs ("missing", "measured", "loaded"); empty
        when not known. While they are missing, strategy ema decides in place of goodput.
        """
        ...

    async def stats(self) -> dict[str, object]:
        """`internal_states` (per replica) and `fleet` of `/server_info`."""
        ...

    async def status(self) -> dict[str, object]:
        """What the status page shows; see `FleetStats.status`."""
        ...


class RunningAnswer:
    """Choices that replicas work on, the first tokens of which are here.

    items: what replicas say, with the choice it belongs to. Choices of one prompt are neighbours.
    is_prompt_only: drop the tokens that choices bring; what is events of their prompts stays.
    """

    def __init__(
        self,
        items: AsyncGenerator[tuple[int, ReplicaItem], None],
        *,
        num_choices: int,
        num_prompts: int,
        is_prompt_only: bool,
        deadline: Deadline,
        timeout_s: float,
    ) -> None:
        self.num_choices = num_choices
        self.num_tokens = 0
        self._items = items
        self._choices_per_prompt = num_choices // num_prompts
        self._is_prompt_only = is_prompt_only
        self.deadline = deadline
        self._timeout_s = timeout_s
        self._num_prompt_tokens: dict[int, int] = {}
        self._num_cached_tokens: dict[int, int] = {}
        self._speculation: dict[int, SpeculationStats] = {}
        self._num_ended = 0
        self._first: list[tuple[int, TokenDelta]] = []

    async def start(self) -> None:
        """Wait for first tokens, so that whatever goes wrong before them gets its status.

        Those of every choice, unless one has ended: others may wait for its turn.

        Raises:
            ApiError: the request did not get so far.
        """
        silent = set(range(self.num_choices))
        while silent and not self._num_ended:
            index, delta = await self._next_delta()
            self._first.append((index, delta))
            silent.discard(index)

    async def deltas(self) -> AsyncIterator[tuple[int, TokenDelta]]:
        """Every delta with its choice, in order; a choice's last one carries the finish reason.

        Raises:
            ApiError: one of the choices broke off.
        """
        for index, delta in self._first:
            yield index, delta
        while self._num_ended < self.num_choices:
            yield await self._next_delta()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(
            num_tokens
            for index, num_tokens in self._num_prompt_tokens.items()
            if index % self._choices_per_prompt == 0
        )

    @property
    def usage(self) -> Usage:
        """Counts over all choices; complete once they have ended."""
        return usage(
            self.num_prompt_tokens,
            self.num_tokens,
            self._total_speculation(),
            self._total_cached_tokens(),
        )

    def _total_cached_tokens(self) -> int:
        """Of every prompt, what the choice that found the least of it found."""
        least: dict[int, int] = {}
        for index, num_tokens in self._num_cached_tokens.items():
            prompt = index // self._choices_per_prompt
            least[prompt] = min(num_tokens, least.get(prompt, num_tokens))
        return sum(least.values())

    def _total_speculation(self) -> SpeculationStats:
        total = FleetSpeculation()
        for counts in self._speculation.values():
            total.add(counts)
            if isinstance(counts, FleetSpeculation):
                total.num_resumes += counts.num_resumes
        return total

    async def _next_delta(self) -> tuple[int, TokenDelta]:
        while True:
            index, item = await self._next_item()
            if isinstance(item, TokenDelta):
                delta = _without_tokens(item) if self._is_prompt_only else item
                self._note(index, delta)
                return index, delta
            self._num_prompt_tokens[index] = item.num_prompt_tokens

    def _note(self, index: int, delta: TokenDelta) -> None:
        self.num_tokens += len(delta.token_ids)
        self._num_cached_tokens.setdefault(index, delta.num_cached_tokens)
        if delta.speculation is not None:
            self._speculation[index] = delta.speculation
        self._num_ended += delta.finish_reason is not None

    async def _next_item(self) -> tuple[int, Accepted | TokenDelta]:
        try:
            index, item = await self.deadline.next(self._items)
        except TimeoutError:
            raise timed_out(self._timeout_s) from None
        except StopAsyncIteration:
            raise engine_failed("the replica ended the completion early") from None
        if isinstance(item, TokenDelta):
            return index, item
        if isinstance(item, Refused):
            raise refused(item.error)
        if isinstance(item, Failed):
            raise queue_full(item.message, 1) if item.overloaded else engine_failed(item.message)
        assert not isinstance(item, Withdrawn), "`resumed` keeps it to itself"
        return index, item


class CompletionRunner:
    """Runs answers: for each choice one turn in the router and a replica, all within one deadline.

    resume_timeout_s: how long a choice that has lost its replica may wait for another one.
    record: gets how long choices took, and how they ended.
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

    @property
    def max_choices(self) -> int:
        """Most choices of one client that could ever run or wait together."""
        return self._admission.max_in_flight + self._admission.max_client_queued

    @asynccontextmanager
    async def run(
        self,
        choices: Sequence[GenerateRequest],
        num_prompts: int = 1,
        *,
        client: str = "",
        is_prompt_only: bool = False,
    ) -> AsyncIterator[RunningAnswer]:
        """Hold turns and replicas for the body of the `async with`, however it ends.

        num_prompts: how many prompts the choices are for, the same number for each.
        client: whose request it is, for `Admission`.
        is_prompt_only: see `RunningAnswer`.

        Raises:
            ApiError: the request did not get to its first tokens.
        """
        end = asyncio.get_running_loop().time() + self._timeout_s
        # Equal prompts are computed once if nothing follows them.
        groups = by_prompt(choices) if is_prompt_only else [[i] for i in range(len(choices))]
        self._admission.refuse_if_full(client, len(groups))
        events = interleaved(
            [self._one(i, choices[group[0]], client, end) for i, group in enumerate(groups)]
        )
        if len(groups) < len(choices):
            events = spread(events, groups)
        deadline = Deadline(end)
        try:
            async with aclosing(events) as items:
                answer = RunningAnswer(
                    items,
                    num_choices=len(choices),
                    num_prompts=num_prompts,
                    is_prompt_only=is_prompt_only,
                    deadline=deadline,
                    timeout_s=self._timeout_s,
                )
                await answer.start()
                yield answer
        finally:
            deadline.close()

    async def _one(
        self, index: int, request: GenerateRequest, client: str, deadline: float
    ) -> AsyncGenerator[tuple[int, ReplicaItem], None]:
        """Yield what a replica says of choice `index`, which holds a place meanwhile."""
        async with AsyncExitStack() as held:
            try:
                turn = await held.enter_async_context(self._admission.slot(deadline, client))
            except TimeoutError:
                raise timed_out(self._timeout_s) from None
            timer = router_timer(self._record)
            held.callback(timer.end)
            items = resumed(self._fleet, request, self._resume_timeout_s, turn)
            await held.enter_async_context(aclosing(items))
            try:
                async for item in items:
                    timer.saw(item)
                    yield index, item
            except Exception:
                timer.fail()
                raise


async def whole_answer(answer: RunningAnswer, form: AnswerFormat) -> Answer:
    """The answer of a request without `stream`.

    Raises:
        ApiError: one of the choices broke off.
    """
    choices: list[list[TokenDelta]] = [[] for _ in range(answer.num_choices)]
    async for index, delta in answer.deltas():
        choices[index].append(delta)
    # Log-probabilities of a long answer take a while to write down; streams go on meanwhile.
    return await asyncio.to_thread(form.whole, choices, answer.usage)


async def stream_frames(
    answer: RunningAnswer, form: AnswerFormat, trace_id: str
) -> AsyncIterator[bytes]:
    """The answer of a request with `stream`: a frame per choice and round that adds to it.

    A round that completes no text adds its tokens' log-probabilities, where they are asked for.

    The 200 is out by now, so a failure becomes a frame, and [DONE] does not follow it.
    """
    try:
        for index in range(answer.num_choices):
            if (opening := form.opening(index)) is not None:
                yield sse.frame(opening)
        async for index, delta in answer.deltas():
            if delta.text or delta.logprobs or delta.finish_reason is not None:
                yield form.frame(index, delta)
        if form.head.include_usage:
            yield sse.frame(form.usage_chunk(answer.usage))
        yield sse.DONE
    except ApiError as error:
        logger.warning("request %s (%s) broke off: %s", form.head.id, trace_id, error.message)
        yield sse.frame(error.body())
    except Exception as error:
        logger.exception("request %s (%s) broke off", form.head.id, trace_id)
        yield sse.frame(defect(error).body())


def _without_tokens(delta: TokenDelta) -> TokenDelta:
    """As if the engine had read the prompt and stopped: the length, 0 tokens, is reached."""
    ended = delta.finish_reason is not None
    return delta._replace(
        token_ids=(),
        text="",
        logprobs=None,
        finish_reason=FinishReason.LENGTH if ended else None,
    )
