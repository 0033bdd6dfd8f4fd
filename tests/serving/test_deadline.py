"""One timer ends whichever wait is under way."""

import asyncio

import pytest

from serve_spec.serving.completions import Deadline
from tests.serving.fakes import FAR_S, settle


async def items(*given):
    for item in given:
        yield item
    await asyncio.Event().wait()


def at(delay_s):
    return Deadline(asyncio.get_running_loop().time() + delay_s)


async def test_a_wait_that_is_too_long_ends_and_so_does_every_later_one():
    deadline = at(0.01)
    source = items(1)
    assert await deadline.next(source) == 1
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await deadline.next(source)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "the task goes on"


async def test_a_cancellation_of_the_task_is_no_timeout():
    deadline = at(FAR_S)
    waiting = asyncio.create_task(deadline.next(items()))  # type: ignore[arg-type]
    await settle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_closed_deadline_cancels_nothing():
    deadline = at(0.01)
    deadline.close()
    waiting = asyncio.create_task(deadline.next(items()))  # type: ignore[arg-type]
    await asyncio.sleep(0.03)
    assert not waiting.done()
    waiting.cancel()


async def test_the_end_of_the_items_is_the_end():
    async def none():
        return
        yield

    with pytest.raises(StopAsyncIteration):
        await at(FAR_S).next(none())
