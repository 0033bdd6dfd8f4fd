"""Rank 0's end: starts the worker ranks, broadcasts to them, and notices the loss of one."""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, cast

import torch
from torch._C._distributed_c10d import TCPStore

import serve_spec
from serve_spec.log import get_logger
from serve_spec.parallel.channel import (
    LOOPBACK,
    STOP,
    Address,
    Channel,
    accept,
    listen,
    wait_for_end,
)
from serve_spec.parallel.device_group import DeviceGroup, join, store_server
from serve_spec.parallel.group import TensorParallel
from serve_spec.parallel.store_tunnel import Forwarder, open_gate

logger = get_logger(__name__)


class Process(Protocol):
    """The process of a worker rank."""

    def exit_reason(self, within_s: float = 0.0) -> str | None:
        """Return how it ended, in a few words; None if it still runs after that many seconds."""

    def kill(self) -> None:
        """End it if it runs; return when it has ended."""


Processes = Mapping[int, Process]
"""Processes of worker ranks, by rank."""

_START_S = 300.0
"""Seconds that worker ranks get to start: a cold file system reads libraries slowly."""
_POLL_S = 0.1
"""Seconds between checks of the ranks that have not connected yet."""
_REPORT_S = 0.5
"""Seconds from the loss of a rank to its report, because reports of others may explain it."""
_NOTICE_S = 5.0
"""Seconds within which rank 0 notices the end of a rank."""
_GRACE_S = 10.0
"""Seconds that worker ranks get to end by themselves."""
_SHUT_DOWN = "the ranks have been shut down"


class RankLost(RuntimeError):
    """A rank is gone, or out of step with the others, so that no step can be computed any more."""


class WorkerRanks:
    """All ranks but 0, on any host. They connect to `address` (see `RankChannel`).

    host: the address of this machine that they reach.
    """

    def __init__(self, size: int, host: str = LOOPBACK) -> None:
        self.size = size
        self._listener = listen(host)
        self._listener.settimeout(_POLL_S)
        self._store: TCPStore | None = store_server()
        self._gate: Forwarder | None = None
        secret, store_port = os.urandom(32), self._store.port
        if host != LOOPBACK:
            self._gate = open_gate(host, store_port, secret)
            store_port = self._gate.port
        self.address = Address(host, self._listener.getsockname()[1], store_port, secret)
        self._channels: dict[int, Channel] = {}
        self._processes: Processes = {}
        self._watcher = threading.Thread(target=self._watch, name="worker ranks", daemon=True)
        self._joiner: threading.Thread | None = None
        self._group: TensorParallel | None = None
        self._loss: str | None = None
        self._has_lost = threading.Event()
        self._end: str | None = None
        self._is_stopped = False
        atexit.register(self.stop)

    def accept(self, processes: Processes) -> None:
        """Wait until all have connected; raise RankLost if one cannot start, ends or is late."""
        self._processes = processes
        deadline = time.monotonic() + _START_S
        while missing := [rank for rank in range(1, self.size) if rank not in self._channels]:
            self._check_start(missing, deadline)
            with suppress(TimeoutError):
                channel = accept(self._listener, self.address.secret)
                if channel is not None:
                    self._register(channel)
        self._watcher.start()

    def join(self, device: torch.device) -> TensorParallel:
        """Return the group of all ranks, which is closed if one is lost.

        Raises RankLost: one was lost before it joined.
        """
        joined: Future[DeviceGroup] = Future()

        def enter() -> None:
            try:
                joined.set_result(join(0, self.size, device, self.address, self.address.host))
            except BaseException as error:
                joined.set_exception(error)

        # In a thread, because it waits for ranks that may never come. `stop` ends it.
        self._joiner = threading.Thread(target=enter, name="join", daemon=True)
        self._joiner.start()
        while not wait([joined], _POLL_S).done:
            self.check()
        self._group = joined.result()
        return self._group

    def broadcast(self, message: object) -> None:
        """Send a message to all; raise RankLost if one is gone."""
        self.check()
        pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self.in_step():
            for channel in self._channels.values():
                channel.send_bytes(pickled)

    def check(self) -> None:
        """Raise RankLost if a rank is gone or out of step."""
        reason = self._loss or self._end
        if reason is not None:
            raise RankLost(reason)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Wrap what all ranks do at the same time; an error in it ends them all.

        Raises RankLost: another rank was lost, which explains the error here.
        """
        try:
            yield
        except BaseException as error:
            # A loss shows as an error of a computation or a channel; the watcher finds the reason.
            if isinstance(error, RuntimeError | OSError) and self._end is None:
                self._has_lost.wait(_NOTICE_S)
            self._disconnect(f"rank 0 of {self.size} failed while the others went on: {error!r}")
            if self._has_lost.is_set() and isinstance(error, Exception):
                raise RankLost(self._loss) from error
            raise
        self.check()

    def give_up(self, reason: str) -> None:
        """End all of them because one does not answer; calls of rank 0 that wait for them fail."""
        if self._end is None:
            self._loss = self._end = reason
            self._has_lost.set()
            # First of all: the group of this rank cannot close while it waits for them.
            for process in self._processes.values():
                process.kill()
            self._disconnect(reason)

    def stop(self) -> None:
        """End all of them. Safe to call again."""
        if self._is_stopped:
            return
        self._is_stopped = True
        atexit.unregister(self.stop)
        self._end = self._end or _SHUT_DOWN
        for channel in self._channels.values():
            with suppress(OSError):
                channel.send(STOP)
        self._listener.close()
        if self._gate is not None:
            self._gate.close()
        self._end_processes()
        self._disconnect(_SHUT_DOWN)
        self._end_joining()
        if self._watcher.is_alive():
            self._watcher.join()
        for channel in self._channels.values():
            channel.close()

    def _check_start(self, missing: list[int], deadline: float) -> None:
        for rank in missing:
            process = self._processes.get(rank)
            if process is not None and (end := process.exit_reason()) is not None:
                raise RankLost(f"rank {rank} of {self.size} {end} while it started; see its output")
        if time.monotonic() > deadline:
            raise RankLost(f"ranks {missing} of {self.size} did not start in {_START_S:.0f} s")

    def _register(self, channel: Channel) -> None:
        rank, problem = _report(channel)
        if problem is not None:
            channel.close()
            raise RankLost(f"rank {rank} of {self.size} cannot start: {problem}")
        self._channels[rank] = channel

    def _watch(self) -> None:
        """Wait until a rank is gone, find the reason, and end what waits for it."""
        wait_for_end(list(self._channels.values()))
        if self._end is not None:  # rank 0 ended it
            return
        time.sleep(_REPORT_S)
        lost = [rank for rank, channel in self._channels.items() if channel.is_broken()]
        self._loss = "; ".join(f"rank {rank} of {self.size} {self._end_of(rank)}" for rank in lost)
        self._has_lost.set()
        logger.error("%s", self._loss)
        self._disconnect(self._loss)

    def _end_of(self, rank: int) -> str:
        channel, process = self._channels[rank], self._processes.get(rank)
        with suppress(EOFError):
            if channel.has_message():
                return f"failed: {_report(channel)[1]}"
        end = None if process is None else process.exit_reason(_REPORT_S)
        return end or "disconnected"

    def _disconnect(self, reason: str) -> None:
        """Close the group and all channels; worker ranks end then."""
        self._end = self._end or reason
        for channel in self._channels.values():
            channel.disconnect()
        if self._group is not None:
            self._group.close()

    def _end_joining(self) -> None:
        """Stop accepting ranks; without a store, a thread that waits for them gets an error."""
        if self._joiner is not None and self._joiner.is_alive():
            self._store = None
            self._joiner.join(_GRACE_S)

    def _end_processes(self) -> None:
        # A rank that waits for the others to join reads no message.
        grace_s = _GRACE_S if self._group is not None else 0.0
        deadline = time.monotonic() + grace_s
        for process in self._processes.values():
            if process.exit_reason(max(0.0, deadline - time.monotonic())) is None:
                process.kill()


def _report(channel: Channel) -> tuple[int, str | None]:
    """Return a worker rank's number and the error that ended it, if any."""
    return cast(tuple[int, str | None], channel.receive())


class Launcher(Protocol):
    """Starts worker ranks."""

    @property
    def host(self) -> str:
        """Return the address of this machine that they reach."""

    def start(
        self, module: str, settings: object, rank: int, size: int, address: Address
    ) -> Process:
        """Start `module.follow(settings, rank, size, address)` without waiting for its end."""


class ProcessLauncher:
    """Starts child processes, each `python -m module`.

    They read (settings, rank, size, address), pickled, from standard input.
    """

    host = LOOPBACK

    def start(
        self, module: str, settings: object, rank: int, size: int, address: Address
    ) -> ChildProcess:
        """See `Launcher`."""
        package = str(Path(serve_spec.__file__).parents[1])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            # -P: no module of the current folder replaces one of a library.
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            # Only rank 0 shows progress.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TQDM_DISABLE": "1"},
            start_new_session=True,  # only rank 0 handles an interrupt at the terminal
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(pickle.dumps((settings, rank, size, address)))
        return ChildProcess(process)


class ChildProcess:
    """A worker rank in a child process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process

    def exit_reason(self, within_s: float = 0.0) -> str | None:
        """See `Process`."""
        with suppress(subprocess.TimeoutExpired):
            return f"ended with exit code {self._process.wait(within_s)}"
        return None

    def kill(self) -> None:
        """See `Process`."""
        self._process.kill()
        self._process.wait()


def launch(
    module: str, size: int, settings: object, launcher: Launcher | None = None
) -> WorkerRanks:
    """Start ranks 1 .. size - 1; return when all have connected, or raise RankLost.

    module: has `follow(settings, rank, size, address)`. launcher: None: processes of this host.
    """
    launcher = launcher or ProcessLauncher()
    ranks = WorkerRanks(size, launcher.host)
    try:
        start, address = launcher.start, ranks.address
        ranks.accept({r: start(module, settings, r, size, address) for r in range(1, size)})
    except BaseException:
        ranks.stop()
        raise
    return ranks
