"""Several choices per request: each choice is a separate engine request."""

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
    """Return the seed of choice `index`; choice 0 has the request's seed, as with n=1.

    The others have the first 63 bits of BLAKE2b-64 over "SEED INDEX" in decimal, which does not
    depend on `n`.
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
    """Return `num_choices` requests per prompt, prompt by prompt, in the order of `index`.

    The seed of a choice depends on its place among the choices of its prompt, not on the other
    prompts. Without a seed, each choice draws its own.
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
    """Yield the items of all streams as they arrive.

    All streams start at once. The first exception, or closing the generator, ends all of them.
    """
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
