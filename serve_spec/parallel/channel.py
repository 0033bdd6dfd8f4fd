"""The RPC channel between rank 0 and a worker rank: messages over TCP, and notice of a lost end."""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Self

from serve_spec.core.handshake import NUM_BYTES, MessageTags, challenge, is_proof, proof
from serve_spec.log import get_logger

logger = get_logger(__name__)

LOOPBACK = "127.0.0.1"
"""Where ranks of one host meet. By number: a host's own name may resolve to anything."""
STOP = None
"""The message that ends a worker rank."""

_PROOF_S = 5
"""Seconds in which a caller must prove that it is a rank."""
_SILENCE_MS = 10_000
"""Milliseconds after which a host that does not answer counts as gone."""
_NO_TIMEOUT, _PROOF_TIMEOUT = struct.pack("ll", 0, 0), struct.pack("ll", _PROOF_S, 0)
_GRACE_S = 10.0
"""Seconds that a computation gets to end once rank 0 is gone."""
_BREAK_S = 1.0
"""Seconds within which the end of rank 0 explains an error of a worker rank."""


@dataclass(frozen=True)
class Address:
    """Where rank 0 is reached, and the secret of its ranks.

    port: where worker ranks connect. store_port: where ranks find each other before they compute:
    the store itself if host is `LOOPBACK`, else a gate to it (`store_tunnel.py`).
    """

    host: str
    port: int
    store_port: int
    secret: bytes = field(repr=False)


class Channel:
    """One end of a TCP connection. If a process ends, the other end notices immediately.

    It is authenticated before it sends or receives messages.
    """

    _sent: MessageTags
    _received: MessageTags

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._connection = Connection(os.dup(end.fileno()))
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that is switched off closes nothing.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)

    @property
    def host(self) -> str:
        """Return this end's address."""
        return str(self._end.getsockname()[0])

    def send(self, message: object) -> None:
        """Send a message. Raise OSError if the other end is gone."""
        self.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def send_bytes(self, message: bytes) -> None:
        """Send a message that is bytes already."""
        self._connection.send_bytes(self._sent.next(message) + message)

    def receive(self) -> object:
        """Wait for the next message. Raise EOFError if the other end has none left."""
        return pickle.loads(self.receive_bytes())

    def receive_bytes(self) -> bytes:
        """Wait for the next message of `send_bytes`; raise EOFError if there is none left."""
        try:
            return self._received.opened(self._connection.recv_bytes())
        except OSError as error:
            raise EOFError(str(error)) from error

    def has_message(self) -> bool:
        """Return whether `receive` would not wait."""
        with suppress(OSError):
            return self._connection.poll()
        return False

    def is_broken(self, within_s: float = 0.0) -> bool:
        """Return whether the other end is gone, or goes within that time."""
        return wait_for_end([self], within_s)

    def disconnect(self) -> None:
        """Break the channel; the other end can read what was sent before."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket. No thread may wait for its end then."""
        self._connection.close()
        self._end.close()

    def fileno(self) -> int:
        """Return the socket's number."""
        return self._end.fileno()

    def authenticate(self, secret: bytes, mine: bytes, theirs: bytes) -> None:
        """Prove that both ends know the secret, before anything is unpickled, or raise EOFError.

        Later messages have tags, which prove that the other end sent them in this order.
        mine, theirs: names of the two ends, so that a proof cannot be sent back as one's own.
        """
        self._end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _PROOF_TIMEOUT)
        asked = challenge()
        try:
            self._connection.send_bytes(asked)
            was_asked = self._connection.recv_bytes(NUM_BYTES)
            self._connection.send_bytes(proof(secret, mine, was_asked))
            answer = self._connection.recv_bytes(NUM_BYTES)
        except OSError as error:
            raise EOFError from error
        if not is_proof(answer, secret, theirs, asked):
            raise EOFError("the other end does not know the secret")
        self._sent = MessageTags(secret, mine, asked + was_asked)
        self._received = MessageTags(secret, theirs, was_asked + asked)
        self._end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _NO_TIMEOUT)


def wait_for_end(channels: Sequence[Channel], within_s: float | None = None) -> bool:
    """Wait until one of them is broken, at either end. Return whether one was within that time."""
    poll = select.poll()
    for channel in channels:
        # Ends and errors only: messages wait for `receive`.
        poll.register(channel.fileno(), select.POLLRDHUP)
    return bool(poll.poll(None if within_s is None else within_s * 1e3))


def listen(host: str) -> socket.socket:
    """Return a listener at a free port of an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=64)


def accept(listener: socket.socket, secret: bytes) -> Channel | None:
    """Return a channel to the next process that connects, None if it is not a rank.

    Raises TimeoutError if none comes.
    """
    end, _ = listener.accept()
    end.setblocking(True)
    return authenticated(Channel(end), secret, b"rank 0", b"worker rank")


def connect(address: Address) -> Channel:
    """Return a channel to rank 0; raise OSError if nothing, or another process, listens there."""
    channel = Channel(socket.create_connection((address.host, address.port)))
    if authenticated(channel, address.secret, b"worker rank", b"rank 0") is None:
        raise ConnectionRefusedError(f"{address.host}:{address.port} is not rank 0's")
    return channel


def authenticated(channel: Channel, secret: bytes, mine: bytes, theirs: bytes) -> Channel | None:
    """Return the channel if its other end knows the secret, or close it and return None.

    mine, theirs: see `Channel.authenticate`.
    """
    try:
        channel.authenticate(secret, mine, theirs)
    except EOFError:
        channel.close()
        return None
    return channel


class RankChannel:
    """A worker rank's end: iterates over the messages of rank 0, which listens at `address`.

    As a context, it reports to rank 0 the error that ended it. Once rank 0 is gone, the process
    ends, even in the middle of a computation that waits for rank 0.
    """

    def __init__(self, address: Address, rank: int) -> None:
        self._rank = rank
        self._channel = connect(address)
        self._has_ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="rank 0", daemon=True)
        self._watcher.start()

    @property
    def host(self) -> str:
        """Return the address at which other ranks reach this one."""
        return self._channel.host

    def ready(self) -> None:
        """Report to rank 0 that this rank is about to join."""
        self._channel.send((self._rank, None))

    def __iter__(self) -> Iterator[object]:
        with suppress(EOFError):
            while (message := self._channel.receive()) is not STOP:
                yield message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Report an error, and swallow it if the loss of rank 0 explains it."""
        is_alone = isinstance(error, RuntimeError) and self._channel.is_broken(_BREAK_S)
        if error is not None and not is_alone:
            with suppress(OSError):
                self._channel.send((self._rank, f"{type(error).__name__}: {error}"))
        self._has_ended.set()
        self._channel.disconnect()
        self._watcher.join()
        self._channel.close()
        return is_alone

    def _watch(self) -> None:
        wait_for_end([self._channel])
        if not self._has_ended.wait(_GRACE_S):
            logger.error("rank %d ends in the middle of its work: rank 0 is gone", self._rank)
            os._exit(1)
