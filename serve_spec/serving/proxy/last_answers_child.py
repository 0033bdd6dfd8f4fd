"""The child process that ends the answers of a killed HTTP server. It imports nothing but Python's.

`last_answers.py` starts it: `python last_answers_child.py CHANNEL MEMORY CHECK_EVERY_S`, with two
file descriptors. CHANNEL is a socket that keeps messages apart. The first two messages are what to
send on a connection in state 0 and 1. Later ones hold a slot (4 bytes, little-endian), with a
connection's descriptor or, to give that connection back, without. MEMORY holds the state of each
slot, a byte, and a last byte that the server changes as long as its event loop runs. A server that
does not change it for `_MAX_QUIET_CHECKS` checks hangs and is killed.
"""

from __future__ import annotations

import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress

_MAX_MESSAGE_BYTES = 4096
_LINGER_S = 2.0
_MAX_QUIET_CHECKS = 10

Connections = dict[int, tuple[socket.socket, int]]
"""Sockets and their slots by file descriptor."""


class Watch:
    """Kills the parent when it hangs.

    Checks are counted instead of seconds, because none happen while this process is stalled.
    """

    def __init__(self, states: mmap.mmap, check_every_s: float) -> None:
        self._states = states
        self._check_every_s = check_every_s
        self._parent = os.getppid()
        self._last = states[-1]
        self._num_quiet_checks = 0
        self._check_at = time.monotonic() + check_every_s

    def wait_s(self) -> float:
        """Return the seconds until the next check."""
        return max(0.0, self._check_at - time.monotonic())

    def check(self) -> None:
        """Look whether the parent's event loop runs, if a check is due."""
        if self.wait_s() > 0:
            return
        self._check_at = time.monotonic() + self._check_every_s
        is_quiet = self._states[-1] == self._last
        self._num_quiet_checks = self._num_quiet_checks + 1 if is_quiet else 0
        self._last = self._states[-1]
        if self._num_quiet_checks >= _MAX_QUIET_CHECKS and os.getppid() == self._parent:
            print(f"process {self._parent} hangs; killing it", file=sys.stderr, flush=True)
            os.kill(self._parent, signal.SIGKILL)


def run(channel: socket.socket, states: mmap.mmap, watch: Watch) -> None:
    """Hold connections until the parent is gone, then end their answers."""
    answers = channel.recv(_MAX_MESSAGE_BYTES), channel.recv(_MAX_MESSAGE_BYTES)
    held: Connections = {}
    poll = select.epoll()
    poll.register(channel, select.EPOLLIN)
    while True:
        watch.check()
        for fd, _ in poll.poll(watch.wait_s()):
            if fd in held:  # both ends have closed the connection
                _drop(fd, poll, held)
            elif fd != channel.fileno():  # given back by a message of the same round
                continue
            elif not _receive(channel, poll, held):
                _answer(held, answers, states)
                poll.unregister(channel)
                _linger(poll, held)
                return


def _receive(channel: socket.socket, poll: select.epoll, held: Connections) -> bool:
    """Take a connection or give one back; return False if the parent is gone."""
    try:
        message, fds, _, _ = socket.recv_fds(channel, _MAX_MESSAGE_BYTES, 1)
    except ConnectionError:
        return False
    slot = int.from_bytes(message, "little")
    for fd in fds:
        held[fd] = socket.socket(fileno=fd), slot
        poll.register(fd, 0)  # no event but that the connection is closed
    if message and not fds:
        for fd in [fd for fd, (_, own_slot) in held.items() if own_slot == slot]:
            _drop(fd, poll, held)
    return bool(message)


def _drop(fd: int, poll: select.epoll, held: Connections) -> None:
    """Close a connection's socket here; closing alone would leave it in `poll` for the parent's."""
    poll.unregister(fd)
    held.pop(fd)[0].close()


def _answer(held: Connections, answers: tuple[bytes, ...], states: mmap.mmap) -> None:
    """Send each connection the answer of its state, if there is one, and end it."""
    for sock, slot in held.values():
        with suppress(OSError):
            if states[slot] < len(answers):
                sock.send(answers[states[slot]])
            sock.shutdown(socket.SHUT_WR)


def _linger(poll: select.epoll, held: Connections) -> None:
    """Read until the peers close: closing before would reset connections with unread requests."""
    for fd in held:
        poll.modify(fd, select.EPOLLIN)
    deadline = time.monotonic() + _LINGER_S
    while held and (left_s := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(left_s):
            try:
                is_open = bool(held[fd][0].recv(2**16))
            except BlockingIOError:
                continue
            except OSError:
                is_open = False
            if not is_open:
                _drop(fd, poll, held)


if __name__ == "__main__":
    channel_fd, memory_fd = map(int, sys.argv[1:3])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor for each connection
    memory = mmap.mmap(memory_fd, 0, access=mmap.ACCESS_READ)
    run(socket.socket(fileno=channel_fd), memory, Watch(memory, float(sys.argv[3])))
