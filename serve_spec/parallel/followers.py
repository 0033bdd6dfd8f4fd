"""Rank 0's end: the ranks that follow it, from their start to their end."""

from __future__ import annotations

import atexit
import os
import pickle
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Protocol, cast

import torch
from torch._C._distributed_c10d import TCPStore

from serve_spec.log import get_logger
from serve_spec.parallel.group import DeviceGroup, TensorParallel, join, store_server
from serve_spec.parallel.line import LOOPBACK, Address, Line, answer, listen, wait_for_end
from serve_spec.parallel.orders import STOP

logger = get_logger(__name__)


class Process(Protocol):
    """What a follower runs in."""

    def how_it_ended(self, within_s: float = 0.0) -> str | None:
        """A few words on its end; None: it runs, also after that many seconds."""

    def kill(self) -> None:
        """End it if it runs; return when it has ended."""


Processes = Mapping[int, Process]
"""What followers run in, by rank."""

_START_S = 300.0
"""Seconds that followers get to start: a cold file system reads libraries slowly."""
_LOOK_S = 0.1
"""Seconds between looks at who has not called yet."""
_NEWS_S = 0.5
"""Seconds from the first rank's end to the report of it: what others say may explain it."""
_NOTICE_S = 5.0
"""Seconds within which the end of a rank is noticed by all who watch."""
_GRACE_S = 10.0
"""Seconds that followers get to end by themselves."""
_SHUT_DOWN = "the ranks have been shut down"


class RankLost(RuntimeError):
    """A rank is gone, or out of step with the others: nothing can be computed together any more."""


class Followers:
    """All ranks but 0, wherever they run. They call at `address` (see `Orders`).

    host: the address of this machine that they reach.
    """

    def __init__(self, size: int, host: str = LOOPBACK) -> None:
        self.size = size
        self._listener = listen(host)
        self._listener.settimeout(_LOOK_S)
        self._store: TCPStore | None = store_server(host)
        port = self._listener.getsockname()[1]
        self.address = Address(host, port, self._store.port, os.urandom(32))
        self._lines: dict[int, Line] = {}
        self._processes: Processes = {}
        self._watcher = threading.Thread(target=self._watch, name="followers", daemon=True)
        self._joiner: threading.Thread | None = None
        self._group: TensorParallel | None = None
        self._loss: str | None = None
        self._has_lost = threading.Event()
        self._end: str | None = None
        self._is_stopped = False
        atexit.register(self.stop)

    def accept(self, processes: Processes) -> None:
        """Wait until all have called.

        Raises:
            RankLost: one cannot start, or ended, or does not call.
        """
        self._processes = processes
        deadline = time.monotonic() + _START_S
        while missing := [rank for rank in range(1, self.size) if rank not in self._lines]:
            self._check_start(missing, deadline)
            with suppress(TimeoutError):
                line = answer(self._listener, self.address.secret)
                if line is not None:
                    self._greet(line)
        self._watcher.start()

    def join(self, device: torch.device) -> TensorParallel:
        """The group of all ranks, closed when one is lost.

        Raises:
            RankLost: one was lost before it joined.
        """
        joined: Future[DeviceGroup] = Future()

        def enter() -> None:
            try:
                joined.set_result(join(0, self.size, device, self.address, self.address.host))
            except BaseException as error:
                joined.set_exception(error)

        # In a thread of its own: a rank that does not come is waited for inside. `stop` ends it.
        self._joiner = threading.Thread(target=enter, name="join", daemon=True)
        self._joiner.start()
        while not wait([joined], _LOOK_S).done:
            self.check()
        self._group = joined.result()
        return self._group

    def tell(self, order: object) -> None:
        """Send `order` to all.

        Raises:
            RankLost: one is gone.
        """
        self.check()
        message = pickle.dumps(order, pickle.HIGHEST_PROTOCOL)
        with self.in_step():
            for line in self._lines.values():
                line.send_pickled(message)

    def check(self) -> None:
        """Raise RankLost when a rank is gone or out of step."""
        reason = self._loss or self._end
        if reason is not None:
            raise RankLost(reason)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around what rank 0 does while the others do the same; an error in it ends them all.

        Raises:
            RankLost: another rank was lost, which says more than what that led to here.
        """
        try:
            yield
        except BaseException as error:
            # A loss shows as an error of a computation or a line; the watcher learns why.
            if isinstance(error, RuntimeError | OSError) and self._end is None:
                self._has_lost.wait(_NOTICE_S)
            self._let_go(f"rank 0 of {self.size} failed while the others went on: {error!r}")
            if self._has_lost.is_set() and isinstance(error, Exception):
                raise RankLost(self._loss) from error
            raise
        self.check()

    def give_up(self, reason: str) -> None:
        """End all of them because one does not answer; what rank 0 waits for in them fails."""
        if self._end is None:
            self._loss = self._end = reason
            self._has_lost.set()
            # First of all: the group of this rank cannot close while it waits for them.
            for process in self._processes.values():
                process.kill()
            self._let_go(reason)

    def stop(self) -> None:
        """End all of them. Safe to call again."""
        if self._is_stopped:
            return
        self._is_stopped = True
        atexit.unregister(self.stop)
        self._end = self._end or _SHUT_DOWN
        for line in self._lines.values():
            with suppress(OSError):
                line.send(STOP)
        self._listener.close()
        self._end_processes()
        self._let_go(_SHUT_DOWN)
        self._end_joining()
        if self._watcher.is_alive():
            self._watcher.join()
        for line in self._lines.values():
            line.close()

    def _check_start(self, missing: list[int], deadline: float) -> None:
        for rank in missing:
            process = self._processes.get(rank)
            if process is not None and (end := process.how_it_ended()) is not None:
                raise RankLost(
                    f"rank {rank} of {self.size} {end} while it started; what it wrote says why"
                )
        if time.monotonic() > deadline:
            raise RankLost(f"ranks {missing} of {self.size} did not start in {_START_S:.0f} s")

    def _greet(self, line: Line) -> None:
        rank, problem = _words(line)
        if problem is not None:
            line.close()
            raise RankLost(f"rank {rank} of {self.size} cannot start: {problem}")
        self._lines[rank] = line

    def _watch(self) -> None:
        """Wait until one is gone, find out why, and release what waits for it."""
        wait_for_end(list(self._lines.values()))
        if self._end is not None:  # rank 0's own doing
            return
        time.sleep(_NEWS_S)
        lost = [rank for rank, line in self._lines.items() if line.is_broken()]
        self._loss = "; ".join(f"rank {rank} of {self.size} {self._end_of(rank)}" for rank in lost)
        self._has_lost.set()
        logger.error("%s", self._loss)
        self._let_go(self._loss)

    def _end_of(self, rank: int) -> str:
        """How it ended."""
        line, process = self._lines[rank], self._processes.get(rank)
        with suppress(EOFError):
            if line.has_message():
                return f"failed: {_words(line)[1]}"
        end = None if process is None else process.how_it_ended(_NEWS_S)
        return end or "hung up"

    def _let_go(self, reason: str) -> None:
        """End what ranks wait for in each other; followers that hear nothing more end."""
        self._end = self._end or reason
        for line in self._lines.values():
            line.hang_up()
        if self._group is not None:
            self._group.close()

    def _end_joining(self) -> None:
        """Stop accepting ranks; without a store, what waits for them gets an error."""
        if self._joiner is not None and self._joiner.is_alive():
            self._store = None
            self._joiner.join(_GRACE_S)

    def _end_processes(self) -> None:
        # One that waits for the others to join hears no order.
        grace_s = _GRACE_S if self._group is not None else 0.0
        deadline = time.monotonic() + grace_s
        for process in self._processes.values():
            if process.how_it_ended(max(0.0, deadline - time.monotonic())) is None:
                process.kill()


def _words(line: Line) -> tuple[int, str | None]:
    """A follower's rank and what ended it, if anything did."""
    return cast(tuple[int, str | None], line.receive())
