"""Several answers to one request: every choice is an engine request of its own."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from serve_spec.core.request import SamplingParams
from serve_spec.serving.fields import Prompt
from serve_spec.serving.messages import GenerateRequest

Item = TypeVar("Item")


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: the request's own for choice 0, so that n=1 says what it says.

    For others the first 63 bits of BLAKE2b-64 over "SEED INDEX" in decimal: a function of the two
    alone, whatever `n` is.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def choices_of(
    answer_id: str,
    trace_id: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    num_choices: int,
) -> list[GenerateRequest]:
    """`num_choices` requests per prompt, prompt after prompt, as `index` counts them.

    A seeded choice depends on its prompt and its place among that prompt's choices, not on the
    other prompts. Without a seed each draws one of its own.
    """
    seeds = [
        None if params.seed is None else choice_seed(params.seed, place)
        for place in range(num_choices)
    ]
    drawn = [(prompt, replace(params, seed=seed)) for prompt in prompts for seed in seeds]
    return [
        GenerateRequest(f"{answer_id}-{index}", trace_id, prompt, seeded)
        for index, (prompt, seeded) in enumerate(drawn)
    ]


def by_prompt(choices: Sequence[GenerateRequest]) -> list[list[int]]:
    """Return the places of the choices, those of equal prompts together."""
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
    """Return the items of all streams as they come.

    All begin at once. The first that raises ends the others, and so does closing the generator.
    """
    return streams[0] if len(streams) == 1 else _together(streams)


async def _together(
    streams: Sequence[AsyncGenerator[tuple[int, Item], None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    # What the reader does not take waits in the streams, which merge it.
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
    """Put every item of a stream, then None, or the exception that came instead."""
    try:
        async with aclosing(stream):
            async for item in stream:
                await events.put(item)
        await events.put(None)
    except Exception as error:  # whatever it is, it is for the reader
        await events.put(error)
