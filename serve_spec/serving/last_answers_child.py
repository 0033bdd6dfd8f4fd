"""The child process that ends the answers of a killed HTTP server. It imports nothing but Python's.

`last_answers.py` starts it: `python last_answers_child.py CHANNEL MEMORY`, two file descriptors.
CHANNEL is a socket that keeps messages apart. The first two messages are what to send on a
connection in state 0 and 1. Later ones hold a slot (4 bytes, little-endian), with a connection's
descriptor or, to give that connection back, without. MEMORY holds the state of each slot, a byte.
"""

from __future__ import annotations

import mmap
import resource
import select
import socket
import sys
import time
from contextlib import suppress

_MAX_MESSAGE_BYTES = 4096
_LINGER_S = 2.0

Connections = dict[int, tuple[socket.socket, int]]
"""Sockets and their slots by file descriptor."""


def run(channel: socket.socket, states: mmap.mmap) -> None:
    """Hold connections until the parent is gone, then end their answers."""
    answers = channel.recv(_MAX_MESSAGE_BYTES), channel.recv(_MAX_MESSAGE_BYTES)
    held: Connections = {}
    poll = select.epoll()
    poll.register(channel, select.EPOLLIN)
    while True:
        for fd, _ in poll.poll():
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
    channel_fd, memory_fd = map(int, sys.argv[1:])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a descriptor for each connection
    run(socket.socket(fileno=channel_fd), mmap.mmap(memory_fd, 0, access=mmap.ACCESS_READ))
