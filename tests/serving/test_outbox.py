"""What several requests say becomes one stream, round by round."""

from __future__ import annotations

from serve_spec.core.request import FinishReason, TokenDelta
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
