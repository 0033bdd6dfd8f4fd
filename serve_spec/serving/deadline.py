"""A time limit on many short waits. `asyncio.timeout` costs more than most of the waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

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
