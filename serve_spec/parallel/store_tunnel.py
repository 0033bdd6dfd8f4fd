"""The store in which ranks of several hosts find each other, by authenticated connections.

torch's TCPStore has no secret: everything that connects to it can read, change and list its keys.
So it listens on rank 0's host only, and connections of other hosts go through two forwarders.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from serve_spec.parallel.channel import LOOPBACK, Address, Channel, authenticated, listen

_GATE, _CALLER = b"store of rank 0", b"caller of the store"
_CHUNK_BYTES = 65536

_Ends = tuple[Channel, socket.socket]
"""The authenticated end of a forwarded connection, and the end on this host."""


class Forwarder:
    """Listens at `host` and forwards every connection.

    open_ends: returns both ends for an accepted connection; raises OSError to refuse it.
    """

    def __init__(self, host: str, open_ends: Callable[[socket.socket], _Ends]) -> None:
        self._open_ends = open_ends
        self._listener = listen(host)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="store tunnel", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                accepted, _ = self._listener.accept()
                # In a thread of its own: a stranger's proof may take its whole time.
                threading.Thread(target=self._forward, args=(accepted,), daemon=True).start()

    def _forward(self, accepted: socket.socket) -> None:
        try:
            channel, end = self._open_ends(accepted)
        except OSError:
            accepted.close()
            return
        sender = threading.Thread(target=_send, args=(channel, end), daemon=True)
        sender.start()
        with suppress(EOFError, OSError):
            while True:
                end.sendall(channel.receive_bytes())
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        sender.join()
        channel.close()
        end.close()


def open_gate(host: str, store_port: int, secret: bytes) -> Forwarder:
    """Let ranks that know the secret reach this host's store at `host`."""

    def open_ends(accepted: socket.socket) -> _Ends:
        channel = authenticated(Channel(accepted), secret, _GATE, _CALLER)
        if channel is None:
            raise ConnectionRefusedError("the caller does not know the secret")
        return channel, socket.create_connection((LOOPBACK, store_port))

    return Forwarder(host, open_ends)


def open_tunnel(address: Address) -> Forwarder:
    """Return what forwards connections of this host to rank 0's store."""

    def open_ends(accepted: socket.socket) -> _Ends:
        gate = socket.create_connection((address.host, address.store_port))
        channel = authenticated(Channel(gate), address.secret, _CALLER, _GATE)
        if channel is None:
            raise ConnectionRefusedError("not the store of rank 0")
        return channel, accepted

    return Forwarder(LOOPBACK, open_ends)


def _send(channel: Channel, end: socket.socket) -> None:
    with suppress(OSError):
        while data := end.recv(_CHUNK_BYTES):
            channel.send_bytes(data)
    channel.disconnect()
