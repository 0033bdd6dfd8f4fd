"""How followers come to run: as processes of this host, or wherever else a launcher puts them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import serve_spec
from serve_spec.parallel.followers import Followers, Process
from serve_spec.parallel.line import LOOPBACK, Address


class Launcher(Protocol):
    """Puts followers somewhere."""

    @property
    def host(self) -> str:
        """The address of this machine that they reach."""

    def start(
        self, module: str, settings: object, rank: int, size: int, address: Address
    ) -> Process:
        """Start `module.follow(settings, rank, size, address)`; does not wait for it."""


class ProcessLauncher:
    """Followers are processes of this one, each `python -m module`.

    They find (settings, rank, size, address), pickled, at their standard input.
    """

    host = LOOPBACK

    def start(
        self, module: str, settings: object, rank: int, size: int, address: Address
    ) -> ChildProcess:
        """See `Launcher`."""
        package = str(Path(serve_spec.__file__).parents[1])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            # -P: no module of the current folder takes the place of a library's.
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            # Progress is rank 0's to show.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TQDM_DISABLE": "1"},
            start_new_session=True,  # an interrupt at the terminal is rank 0's to answer
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(pickle.dumps((settings, rank, size, address)))
        return ChildProcess(process)


class ChildProcess:
    """A follower that is a process of this one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process

    def how_it_ended(self, within_s: float = 0.0) -> str | None:
        """See `Process`."""
        with suppress(subprocess.TimeoutExpired):
            return f"ended with exit code {self._process.wait(within_s)}"
        return None

    def kill(self) -> None:
        """See `Process`."""
        self._process.kill()
        self._process.wait()


def launch(module: str, size: int, settings: object, launcher: Launcher | None = None) -> Followers:
    """Start ranks 1 .. size - 1; return when all have called.

    module: import path of what has `follow(settings, rank, size, address)`. launcher: None for
    processes of this host.

    Raises:
        RankLost: one did not start.
    """
    launcher = launcher or ProcessLauncher()
    followers = Followers(size, launcher.host)
    try:
        followers.accept(
            {
                rank: launcher.start(module, settings, rank, size, followers.address)
                for rank in range(1, size)
            }
        )
    except BaseException:
        followers.stop()
        raise
    return followers
