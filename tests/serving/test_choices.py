"""Choices are requests of their own: prompt, seed and index alone decide what one says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.request import SamplingParams
from serve_spec.serving.choices import choice_seed, choices_of, interleaved

SEEDS = st.integers(-(2**63), 2**63 - 1)


@given(SEEDS, st.integers(1, 127))
def test_the_first_choice_has_the_requests_own_seed_and_the_others_have_others(
    seed: int, index: int
) -> None:
    assert choice_seed(seed, 0) == seed
    assert 0 <= choice_seed(seed, index) < 2**63
    assert len({choice_seed(seed, i) for i in range(index + 1)}) == index + 1


def test_derived_seeds_never_change() -> None:
    """Somebody has noted a seed and wants the text again."""
    assert choice_seed(7, 1) == 2114375518687650719


def test_choices_of_a_prompt_are_neighbours_and_the_same_as_if_it_came_alone() -> None:
    both = choices_of("cmpl-1", "t", ["a", [1, 2]], SamplingParams(seed=3, top_k=5), 2)
    assert [c.request_id for c in both] == [f"cmpl-1-{i}" for i in range(4)]
    assert [c.prompt for c in both] == ["a", "a", [1, 2], [1, 2]]
    alone = choices_of("cmpl-2", "t", [[1, 2]], SamplingParams(seed=3, top_k=5), 2)
    assert [c.params for c in both[2:]] == [c.params for c in alone]


def test_without_a_seed_nobody_fixes_one_here() -> None:
    made = choices_of("cmpl-1", "t", ["a"], SamplingParams(), 3)
    assert [c.params.seed for c in made] == [None] * 3


class Streams:
    """Streams of numbers that note who has begun and who has been closed."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.closed: list[int] = []

    async def make(
        self, name: int, length: int, pause: int = 0, error: Exception | None = None
    ) -> AsyncGenerator[int, None]:
        self.begun.append(name)
        try:
            for number in range(length):
                for _ in range(pause):
                    await asyncio.sleep(0)
                yield number
            if error is not None:
                raise error
        finally:
            self.closed.append(name)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=5))
def test_every_stream_is_heard_whole_and_in_order(shapes: list[tuple[int, int]]) -> None:
    async def scenario() -> None:
        streams = Streams()
        made = [streams.make(i, length, pause) for i, (length, pause) in enumerate(shapes)]
        heard: dict[int, list[int]] = {i: [] for i in range(len(shapes))}
        async with aclosing(interleaved(made)) as items:
            async for index, number in items:
                heard[index].append(number)
        assert heard == {i: list(range(length)) for i, (length, _) in enumerate(shapes)}
        assert sorted(streams.closed) == list(range(len(shapes)))

    asyncio.run(scenario())


async def test_all_streams_have_begun_before_the_first_item_is_heard() -> None:
    streams = Streams()
    async with aclosing(interleaved([streams.make(i, 3) for i in range(4)])) as items:
        await anext(items)
        assert streams.begun == [0, 1, 2, 3]


async def test_one_that_fails_ends_the_others() -> None:
    streams = Streams()
    made = [
        streams.make(0, 10**6, pause=1),
        streams.make(1, 2, error=ValueError("boom")),
    ]
    with pytest.raises(ValueError, match="boom"):
        async for _ in interleaved(made):
            pass
    assert sorted(streams.closed) == [0, 1]


@pytest.mark.parametrize("count", [1, 3])
async def test_who_stops_listening_closes_them_all(count: int) -> None:
    streams = Streams()
    made = [streams.make(i, 10**6, pause=1) for i in range(count)]
    async with aclosing(interleaved(made)) as items:
        await anext(items)
    assert sorted(streams.closed) == list(range(count))
