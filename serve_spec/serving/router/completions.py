"""Run requests in the router: admit each choice, send it to a replica, collect its tokens.

Each choice of a request is a separate engine request. Plain asyncio.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from serve_spec import metrics
from serve_spec.core.request import (
    FinishReason,
    SamplingParams,
    TokenDelta,
    choice_seed,
)
from serve_spec.core.stats import SpeculationStats
from serve_spec.metrics import Reading
from serve_spec.serving import messages
from serve_spec.serving.errors import (
    engine_failed,
    queue_full,
    refused,
    timed_out,
)
from serve_spec.serving.router.admission import Admission
from serve_spec.serving.router.resume import FleetSpeculation, resumed
from serve_spec.serving.statistics.request_timer import router_timer

if TYPE_CHECKING:
    from serve_spec.serving.router.fleet import RayFleet

Item = TypeVar("Item")


class Deadline:
    """A time limit, in the event loop's clock, for one task's reads from a generator."""

    def __init__(self, at: float) -> None:
        self.at = at
        self._has_passed = False
        self._waiting: asyncio.Task[object] | None = None
        self._timer = asyncio.get_running_loop().call_at(at, self._pass)

    async def next(self, items: AsyncGenerator[Item, None]) -> Item:
        """Return the next item; raise StopAsyncIteration, or TimeoutError after the deadline."""
        if self._is_late():
            raise TimeoutError
        task = self._waiting = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
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


def choices_of(
    answer_id: str,
    trace_id: str,
    prompts: Sequence[messages.Prompt],
    params: SamplingParams,
    num_choices: int,
) -> list[messages.GenerateRequest]:
    """Return `num_choices` requests per prompt, in the order of `index`.

    A choice's seed depends on its place among those of its prompt. Without one, each draws its own.
    """
    seeds = [
        None if params.seed is None else choice_seed(params.seed, place)
        for place in range(num_choices)
    ]
    drawn = [(prompt, replace(params, seed=seed)) for prompt in prompts for seed in seeds]
    return [
        messages.GenerateRequest(f"{answer_id}-{index}", trace_id, prompt, seeded)
        for index, (prompt, seeded) in enumerate(drawn)
    ]


def by_prompt(choices: Sequence[messages.GenerateRequest]) -> list[list[int]]:
    """Return the indices of the choices, grouped by equal prompts."""
    groups: dict[str | tuple[int, ...], list[int]] = {}
    for place, choice in enumerate(choices):
        prompt = choice.prompt if isinstance(choice.prompt, str) else tuple(choice.prompt)
        groups.setdefault(prompt, []).append(place)
    return list(groups.values())


async def spread(
    items: AsyncGenerator[tuple[int, Item], None], groups: Sequence[Sequence[int]]
) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield every item of stream i once for each place in group i."""
    async with aclosing(items):
        async for index, item in items:
            for place in groups[index]:
                yield place, item


def interleaved(
    streams: Sequence[AsyncGenerator[tuple[int, Item], None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield the items of all streams as they arrive; the first exception ends all of them."""
    return streams[0] if len(streams) == 1 else _together(streams)


async def _together(
    streams: Sequence[AsyncGenerator[tuple[int, Item], None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    # Bounded: unread items wait in the streams, which merge them.
    events: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(len(streams))
    readers = [asyncio.create_task(_read(stream, events)) for stream in streams]
    try:
        num_open = len(streams)
        while num_open:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                num_open -= 1
            else:
                yield event
    finally:
        for listener in readers:
            listener.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    stream: AsyncGenerator[tuple[int, Item], None],
    events: asyncio.Queue[tuple[int, Item] | Exception | None],
) -> None:
    """Put every item of a stream, then None, or the exception it raised."""
    try:
        async with aclosing(stream):
            async for item in stream:
                await events.put(item)
        await events.put(None)
    except Exception as error:  # raised again by the reader
        await events.put(error)


class TokenCounts(NamedTuple):
    """Token counts of one request, in the order of the arguments of `answers.usage`.

    num_cached_tokens: tokens of prompts that every choice found in its replica's prefix cache.
    """

    num_prompt_tokens: int
    num_tokens: int
    speculation: SpeculationStats
    num_cached_tokens: int


@dataclass(eq=False)
class RunningAnswer:
    """The running choices of one request.

    items: items of replicas with the index of their choice. Choices of a prompt are adjacent.
    is_prompt_only: drop generated tokens and keep only the prompt's log-probabilities.
    """

    items: AsyncGenerator[tuple[int, messages.ReplicaItem], None]
    num_choices: int
    num_prompts: int
    is_prompt_only: bool
    deadline: Deadline
    timeout_s: float
    _num_tokens: dict[int, int] = field(default_factory=dict)
    _num_prompt_tokens: dict[int, int] = field(default_factory=dict)
    _num_cached_tokens: dict[int, int] = field(default_factory=dict)
    _speculation: dict[int, SpeculationStats] = field(default_factory=dict)
    _num_ended: int = 0
    _first: list[tuple[int, TokenDelta]] = field(default_factory=list)

    async def start(self) -> None:
        """Wait for the first tokens; an ApiError before them sets the HTTP status.

        Return when every choice has tokens or one has ended, as others may wait for its slot.
        """
        waiting = set(range(self.num_choices))
        while waiting and not self._num_ended:
            index, delta = await self._next_delta()
            self._first.append((index, delta))
            waiting.discard(index)

    async def deltas(self) -> AsyncIterator[tuple[int, TokenDelta]]:
        """Yield (choice, delta) as they arrive, up to finish reasons; ApiError: one fails."""
        for index, delta in self._first:
            yield index, delta
        while self._num_ended < self.num_choices:
            yield await self._next_delta()

    @property
    def counts(self) -> TokenCounts:
        """Token counts over all choices; final once they have ended."""
        per_prompt = self.num_choices // self.num_prompts
        prompts = {index // per_prompt: num for index, num in self._num_prompt_tokens.items()}
        cached: dict[int, int] = {}
        for index, num in self._num_cached_tokens.items():
            cached[index // per_prompt] = min(num, cached.get(index // per_prompt, num))
        total = FleetSpeculation()
        for counts in self._speculation.values():
            total.add(counts)
        return TokenCounts(sum(prompts.values()), self.num_tokens, total, sum(cached.values()))

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all choices so far."""
        return sum(self._num_tokens.values())

    def sizes(self, max_tokens: int) -> Iterator[Reading]:
        """Yield the sizes of choices and prompts, if all choices have ended."""
        if self._num_ended < self.num_choices:
            return
        per_prompt = self.num_choices // self.num_prompts
        tokens = [self._num_tokens[index] for index in range(self.num_choices)]
        for index, num_tokens in enumerate(tokens):
            yield Reading(metrics.PROMPT_TOKENS, self._num_prompt_tokens[index])
            yield Reading(metrics.GENERATION_TOKENS, num_tokens)
        yield Reading(metrics.PARAMS_MAX_TOKENS, max_tokens, count=self.num_choices)
        for first in range(0, self.num_choices, per_prompt):
            most = max(tokens[first : first + per_prompt])
            yield Reading(metrics.MAX_GENERATION_TOKENS, most)
        yield Reading(metrics.PARAMS_N, per_prompt, count=self.num_prompts)

    async def _next_delta(self) -> tuple[int, TokenDelta]:
        while True:
            index, item = await self._next_item()
            if isinstance(item, TokenDelta):
                delta = _without_tokens(item) if self.is_prompt_only else item
                self._count(index, delta)
                return index, delta
            self._num_prompt_tokens[index] = item.num_prompt_tokens

    def _count(self, index: int, delta: TokenDelta) -> None:
        known = self._num_tokens.get(index, 0)
        self._num_tokens[index] = known + len(delta.token_ids)
        self._num_cached_tokens.setdefault(index, delta.num_cached_tokens)
        if delta.speculation is not None:
            self._speculation[index] = delta.speculation
        self._num_ended += delta.finish_reason is not None

    async def _next_item(self) -> tuple[int, messages.Accepted | TokenDelta]:
        try:
            index, item = await self.deadline.next(self.items)
        except TimeoutError:
            raise timed_out(self.timeout_s) from None
        except StopAsyncIteration:
            raise engine_failed("the replica ended the stream without a finish reason") from None
        if isinstance(item, TokenDelta):
            return index, item
        if isinstance(item, messages.Refused):
            raise refused(item.error)
        if isinstance(item, messages.Failed):
            raise queue_full(item.message, 1) if item.overloaded else engine_failed(item.message)
        assert not isinstance(item, messages.Withdrawn), "`resumed` does not yield it"
        return index, item


@dataclass(frozen=True)
class CompletionRunner:
    """Runs the choices of requests within a deadline.

    resume_timeout_s: how long a choice that has lost its replica waits for another one.
    record: receives the latency and outcome of choices.
    """

    fleet: RayFleet
    admission: Admission
    timeout_s: float
    resume_timeout_s: float
    record: Callable[[Reading], None] = lambda reading: None

    @property
    def max_choices(self) -> int:
        """Maximum number of choices of one client that can run or wait at once."""
        return self.admission.max_in_flight + self.admission.max_client_queued

    @asynccontextmanager
    async def run(
        self,
        choices: Sequence[messages.GenerateRequest],
        num_prompts: int = 1,
        *,
        client: str = "",
        is_prompt_only: bool = False,
        end_finder: Callable[[], Callable[[str], bool] | None] = lambda: None,
    ) -> AsyncIterator[RunningAnswer]:
        """Run choices during the `async with` block; release their slots and replicas at its end.

        num_prompts: number of prompts; each has the same number of choices.
        client: the client's identity for `Admission`. is_prompt_only: see `RunningAnswer`.
        end_finder: returns a function that says of each new text whether the choice ends with it.
        """
        end = asyncio.get_running_loop().time() + self.timeout_s
        # Without generated tokens, equal prompts are computed once.
        groups = by_prompt(choices) if is_prompt_only else [[i] for i in range(len(choices))]
        await self.fleet.refuse_if_closing()
        self.admission.refuse_if_full(client, len(groups))
        events = interleaved(
            [
                self._one(i, choices[group[0]], client, end, end_finder())
                for i, group in enumerate(groups)
            ]
        )
        if len(groups) < len(choices):
            events = spread(events, groups)
        deadline = Deadline(end)
        try:
            async with aclosing(events) as items:
                answer = RunningAnswer(
                    items, len(choices), num_prompts, is_prompt_only, deadline, self.timeout_s
                )
                await answer.start()
                yield answer
                for reading in answer.sizes(choices[0].params.max_tokens):
                    self.record(reading)
        finally:
            deadline.close()

    async def _one(
        self,
        index: int,
        request: messages.GenerateRequest,
        client: str,
        deadline: float,
        has_ended: Callable[[str], bool] | None = None,
    ) -> AsyncGenerator[tuple[int, messages.ReplicaItem], None]:
        """Yield (index, item) of one choice, which holds a slot meanwhile."""
        async with AsyncExitStack() as held:
            try:
                waiting = self.admission.slot(deadline, client, request.params.priority)
                slot = await held.enter_async_context(waiting)
            except TimeoutError:
                raise timed_out(self.timeout_s) from None
            timer = router_timer(self.record)
            held.callback(timer.end)
            items = resumed(self.fleet, request, self.resume_timeout_s, slot)
            await held.enter_async_context(aclosing(items))
            try:
                async for item in items:
                    if has_ended and isinstance(item, TokenDelta) and has_ended(item.text):
                        # Leaving the loop cancels the choice at its replica.
                        item = item._replace(finish_reason=FinishReason.STOP)
                    timer.observe(item)
                    yield index, item
                    if messages.is_last(item):
                        return
            except Exception:
                timer.fail()
                raise


def _without_tokens(delta: TokenDelta) -> TokenDelta:
    """Return a delta without its tokens; the finish reason becomes "length"."""
    ended = delta.finish_reason is not None
    return delta._replace(
        token_ids=(), text="", logprobs=None, finish_reason=FinishReason.LENGTH if ended else None
    )
