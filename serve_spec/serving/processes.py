"""Nothing outlives `serve-spec serve`, whatever signal ends it.

The command forks before it imports anything large. The parent stays where a shell or a service
manager started it: it passes signals on and waits. The child is the server, in a session of its
own, so that a signal for the process group of the command does not end Ray's processes under the
running requests. Each of the two ends everything if the other is killed: orphans of the server
become children of the parent (a "subreaper"), and the server notices the end of a pipe.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

_PR_SET_CHILD_SUBREAPER = 36
# HAProxy's sockets lie there, whose paths have at most 97 bytes: not below a long $TMPDIR.
_FOLDERS, _PREFIX = Path("/tmp"), "serve-spec."
_KILL_WITHIN_S = 10.0
_IMPATIENT_S = 10
"""Seconds from a second signal to the end of a server that does not react."""
_SAME_SIGNAL_S = 1.0
"""A service manager signals every process; what the parent passes on arrives as a second signal."""


@cache
def private_folder() -> Path:
    """Return a folder that only this user can enter, until this process ends.

    Folders of servers that were killed are removed: nothing locks them any more.
    """
    for old in _FOLDERS.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # of another user, or locked
            _lock(old)
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_FOLDERS))
    _lock(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _lock(folder: Path) -> None:
    """Lock a folder until this process and its forks have ended; raise OSError if it is locked."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise


def supervise(work: Callable[[], int]) -> int:
    """Run `work` in a child process, end all that it leaves, and return its exit status."""
    if sys.platform != "linux":
        return work()
    private_folder()  # before the fork: it is of both
    _adopt_orphans()
    lifeline, held = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(held)
        _adopt_orphans()
        threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
        return work()
    os.close(lifeline)
    with suppress(ProcessLookupError):
        _pass_signals_to(child)
    try:
        return _status_of(child)
    finally:
        end_descendants()


def _pass_signals_to(child: int) -> None:
    signals: list[int] = []

    def forward(number: int, _frame: object) -> None:
        signals.append(number)
        with suppress(ProcessLookupError):
            # The server knows no hang-up.
            os.kill(child, signal.SIGTERM if number == signal.SIGHUP else number)
            if len(signals) > 1:
                signal.alarm(_IMPATIENT_S)

    def kill(*_: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, forward)
    signal.signal(signal.SIGALRM, kill)


def _status_of(child: int) -> int:
    """Wait for a child, and for orphans meanwhile; return its status, as shells do for signals."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _end_with_parent(lifeline: int) -> None:
    """Wait until the parent is gone, then end everything below this process, and itself."""
    os.read(lifeline, 1)
    exit_now(1, "the command was killed")


_exiting = threading.Lock()


def exit_now(status: int, why: str) -> NoReturn:
    """End everything below this process, and itself, although other threads may hang."""
    _exiting.acquire()  # for ever: one thread does it
    with suppress(OSError, ValueError):  # no one may read it any more
        print(why, file=sys.stderr, flush=True)
    end_descendants()
    shutil.rmtree(private_folder(), ignore_errors=True)
    os._exit(status)


def end_descendants() -> None:
    """Kill all processes below this one, those that start meanwhile as well."""
    _adopt_orphans()
    deadline = time.monotonic() + _KILL_WITHIN_S
    while pids := [pid for pid in _descendants() if not _is_zombie(pid)]:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        if time.monotonic() > deadline:
            print(f"processes that cannot be ended: {sorted(pids)}", file=sys.stderr)
            return
        time.sleep(0.02)


def _adopt_orphans() -> None:
    """Become the parent of descendants whose parents end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _descendants() -> set[int]:
    parents = {pid: int(fields[1]) for pid, fields in _processes()}
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def _is_zombie(pid: int) -> bool:
    return _stat_fields(pid)[0] in ("Z", "X")


def _processes() -> Iterator[tuple[int, list[str]]]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            yield int(path.name), _stat_fields(int(path.name))


def _stat_fields(pid: int) -> list[str]:
    """Return state, parent and more of a process; state X if it is gone."""
    try:
        # The second field, the name in parentheses, may hold spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C and SIGTERM set while the body runs."""
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    stop = threading.Event()
    take_signals(stop)
    try:
        yield stop
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def take_signals(stop: threading.Event) -> None:
    """Set `stop` at the first of these signals, and raise KeyboardInterrupt at the next."""
    began_s = math.inf

    def handle(*_: object) -> None:
        nonlocal began_s
        if not stop.is_set():
            began_s = time.monotonic()
            stop.set()
        elif time.monotonic() - began_s > _SAME_SIGNAL_S:
            raise KeyboardInterrupt  # a second signal: do not wait for running requests

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, handle)


def holder_of_port(port: int) -> str:
    """Return process id and command of the process that listens on a TCP port, if one is seen."""
    inodes = {
        f"socket:[{fields[9]}]"
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for fields in _lines_of(table)
        if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port
    }
    for pid, _ in _processes():
        if inodes & _open_files(pid):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
            return f"process {pid} ({command.decode(errors='replace').strip():.120})"
    return ""


def _open_files(pid: int) -> set[str]:
    links = set()
    with suppress(OSError):  # of another user, or gone
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                links.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return links


def _lines_of(table: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(table).read_text().splitlines()[1:]]
    except OSError:
        return []


def reserve_ports(first: int, last: int, size: int) -> tuple[range, socket.socket]:
    """Return a range of ports that no other server reserves, as long as the socket is open."""
    for start in range(first, last - size + 2, size):
        mark = socket.socket()
        try:
            mark.bind(("", start))
        except OSError:
            mark.close()
            continue
        return range(start + 1, start + size), mark
    raise OSError(f"no {size} free ports between {first} and {last}")
