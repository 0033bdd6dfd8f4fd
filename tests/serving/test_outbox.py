"""What several requests say becomes one stream, round by round."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.request import FinishReason, TokenDelta
from serve_spec.serving.messages import Items
from serve_spec.serving.outbox import Outbox


def say(outbox: Outbox, name: str, token: int, *, last: bool = False) -> None:
    outbox.put(name, TokenDelta(name, (token,), "", FinishReason.LENGTH if last else None))


async def test_what_one_round_brings_is_one_list_and_leaves_at_once() -> None:
    outbox = Outbox(2)
    lists = aiter(outbox)
    for last in (False, True):
        for name in ("a", "b"):
            say(outbox, name, 1, last=last)
        items = await anext(lists)
        assert [name for name, _ in items] == ["a", "b"]
    assert outbox.num_open == 0
    assert await anext(lists, None) is None


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.sampled_from("abc"), st.integers(1, 5), min_size=1), st.data())
def test_nothing_is_lost_or_out_of_order_however_slow_the_reader(
    lengths: dict[str, int], data: st.DataObject
) -> None:
    async def scenario() -> None:
        outbox = Outbox(len(lengths))
        heard: Items = []

        async def read() -> None:
            async for items in outbox:
                assert items
                heard.extend(items)

        reader = asyncio.create_task(read())
        said = dict.fromkeys(lengths, 0)
        while open_names := [name for name, n in lengths.items() if said[name] < n]:
            name = data.draw(st.sampled_from(open_names))
            said[name] += 1
            say(outbox, name, said[name], last=said[name] == lengths[name])
            if data.draw(st.booleans()):
                await asyncio.sleep(0)
        await reader
        for name, length in lengths.items():
            tokens = [d.token_ids[0] for n, d in heard if n == name and isinstance(d, TokenDelta)]
            assert tokens == list(range(1, length + 1))

    asyncio.run(scenario())


async def test_a_closed_one_ends_at_once_and_says_no_more() -> None:
    outbox = Outbox(1)
    lists = aiter(outbox)
    waiting = asyncio.ensure_future(anext(lists, None))
    await asyncio.sleep(0)
    say(outbox, "a", 1)
    outbox.close()
    assert await waiting is None
    assert outbox.num_open == 1
