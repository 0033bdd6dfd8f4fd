"""A follower's end: what rank 0 orders, and what it is told at last."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

from serve_spec.log import get_logger
from serve_spec.parallel import line

logger = get_logger(__name__)

STOP = None
"""The order to end."""
_GRACE_S = 10.0
"""Seconds that a computation gets to end once rank 0 is gone."""
_BREAK_S = 1.0
"""Seconds within which an end of rank 0 explains an error here."""


class Orders:
    """Iterates over rank 0's orders until there are no more.

    As a context, it tells rank 0 what ended it. Once rank 0 is gone, the process ends, be it in the
    middle of a computation that waits for rank 0 and never ends.

    address: where rank 0 listens.
    """

    def __init__(self, address: line.Address, rank: int) -> None:
        self._rank = rank
        self._line = line.call(address)
        self._has_ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="rank 0", daemon=True)
        self._watcher.start()

    @property
    def host(self) -> str:
        """The address at which other ranks reach this one."""
        return self._line.host

    def ready(self) -> None:
        """Tell rank 0 that this one is about to join."""
        self._line.send((self._rank, None))

    def __iter__(self) -> Iterator[object]:
        with suppress(EOFError):
            while (order := self._line.receive()) is not STOP:
                yield order

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Without rank 0, whatever fails fails for want of it: then there is nothing to raise."""
        is_alone = isinstance(error, RuntimeError) and self._line.is_broken(_BREAK_S)
        if error is not None and not is_alone:
            with suppress(OSError):
                self._line.send((self._rank, f"{type(error).__name__}: {error}"))
        self._has_ended.set()
        self._line.hang_up()
        self._watcher.join()
        self._line.close()
        return is_alone

    def _watch(self) -> None:
        line.wait_for_end([self._line])
        if not self._has_ended.wait(_GRACE_S):
            logger.error("rank %d ends in the middle of its work: rank 0 is gone", self._rank)
            os._exit(1)
