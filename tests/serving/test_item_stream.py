"""What waits for a reader is merged, in order, and bounded."""

import asyncio

import pytest

from serve_spec.core.request import FinishReason, TokenDelta, TokenLogprob
from serve_spec.serving.batching import ItemStream
from serve_spec.serving.errors import ApiError, ClientTooSlow, no_replica
from serve_spec.serving.messages import Accepted, Withdrawn, merge_deltas
from tests.serving.fakes import delta, settle

ACCEPTED = Accepted(1, "r1")


async def test_a_reader_that_waits_gets_every_item_as_it_comes():
    items = ItemStream(4096)
    reader = asyncio.create_task(items.get())
    await settle()
    items.put(ACCEPTED)
    items.put(delta("a", 1))
    assert await reader == ACCEPTED
    assert await items.get() == delta("a", 1)


async def test_deltas_that_wait_are_one_and_nothing_overtakes():
    items = ItemStream(4096)
    for item in (delta("a", 1), delta("b", 2, 3), Withdrawn(), delta("c", 4), no_replica("gone")):
        assert items.put(item)
    assert await items.get() == delta("ab", 1, 2, 3)
    assert await items.get() == Withdrawn()
    assert await items.get() == delta("c", 4)
    with pytest.raises(ApiError, match="gone"):
        await items.get()


@pytest.mark.parametrize("num_alternatives", [0, 20])
async def test_what_waits_is_bounded_and_past_it_there_is_an_error_alone(num_alternatives):
    entry = TokenLogprob(1, -1.0, 1, tuple((i, -1.0) for i in range(num_alternatives)))
    item = delta("a", 1)._replace(logprobs=(entry,))
    items = ItemStream(100_000)
    count = 0
    while items.put(item):
        count += 1
    assert 100_000 / 3000 < count < 100_000 / 200
    with pytest.raises(ClientTooSlow):
        await items.get()


async def test_a_reader_that_catches_up_has_the_whole_bound_again():
    items = ItemStream(4096)
    for _ in range(100):
        for _ in range(10):
            assert items.put(delta("a", 1))
        assert await items.get() == delta(10 * "a", *10 * [1])


def test_a_merged_delta_says_what_its_parts_say():
    entries = [TokenLogprob(i, -1.0, 1) for i in range(3)]
    last = delta("c", 2, finish=FinishReason.STOP)
    parts = [
        delta("a", 0)._replace(
            logprobs=(entries[0],), prompt_logprobs=(None,), num_cached_tokens=5
        ),
        delta("b", 1)._replace(logprobs=(entries[1],)),
        last._replace(logprobs=(entries[2],)),
    ]
    assert merge_deltas(parts) == TokenDelta(
        "cmpl-1",
        (0, 1, 2),
        "abc",
        FinishReason.STOP,
        last.speculation,
        tuple(entries),
        (None,),
        5,
    )
    assert merge_deltas([delta("a", 0), delta("b", 1)]).logprobs is None
