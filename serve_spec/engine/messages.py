"""Messages between an engine's process and its client, encoded as MessagePack.

The engine sends one `EngineMessage` for every step. The client sends lists of commands.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from select import POLLOUT, poll
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from serve_spec.core.errors import InvalidRequest, RequestFailed
from serve_spec.core.record import StepRecord
from serve_spec.core.request import TokenDelta
from serve_spec.core.sequence import Sequence
from serve_spec.engine.inputs import EngineLimits
from serve_spec.log import get_logger

_MOST_RECORDS = 8192
"""Most step records that wait: some seconds of the fastest engine."""


class Add(msgspec.Struct, array_like=True, tag=True):
    """Queue a request. It is decoded separately, so that an invalid one does not affect others."""

    request_id: str
    request: msgspec.Raw
    """A `Sequence`."""

    @classmethod
    def of(cls, seq: Sequence) -> Add:
        """Return the command; texts stay with the client, and the seed is that of the sequence."""
        params = replace(seq.params, seed=None, stop=(), stop_token_ids=())
        return cls(seq.request_id, msgspec.Raw(encode(replace(seq, params=params))))


class Abort(msgspec.Struct, array_like=True, tag=True):
    """End a request."""

    request_id: str


class Call(msgspec.Struct, array_like=True, tag=True):
    """Call a method of the engine between steps; the answer is a `Reply`."""

    number: int
    method: str
    """`reconfigure` or `start_from`."""
    argument: Any


class FlushCache(msgspec.Struct, array_like=True, tag=True):
    """Drop the cached prefixes that no request uses."""


class Stop(msgspec.Struct, array_like=True, tag=True):
    """End the engine after the current step."""


Command: TypeAlias = Add | Abort | Call | FlushCache | Stop


class Reply(msgspec.Struct, array_like=True):
    """The outcome of a call. error: why its argument was refused; None: no error."""

    number: int
    error: str | None


class Failure(msgspec.Struct, array_like=True):
    """Why a request ends without an answer. field, value: what is wrong with it, if anything."""

    why: str
    field: str = ""
    value: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return an error as a message."""
        if isinstance(error, InvalidRequest):
            return cls(error.fix, error.field, str(error.value))
        return cls(str(error))

    def error(self) -> Exception:
        """Return the error of a message."""
        if self.field:
            return InvalidRequest(self.field, self.value, self.why)
        return RequestFailed(self.why)


class EngineMessage(msgspec.Struct, array_like=True, omit_defaults=True):
    """Everything that an engine reports since its last message."""

    deltas: list[TokenDelta] = []
    """New tokens, without texts. Those of one request are in order."""
    records: list[StepRecord] = []
    snapshot: dict[str, Any] | None = None
    """The state for operators, if it is sent this time."""
    failed: dict[str, Failure] = {}
    """Requests that end without an answer."""
    replies: list[Reply] = []
    limits: EngineLimits | None = None
    """Sent once, when the engine is ready."""
    death: str | None = None
    """Why the engine has died; its last message."""


def for_metrics(record: StepRecord) -> StepRecord:
    """Return the record without the columns that only the policy reads."""
    return replace(record, request_ids=(), draft_logprobs=None, is_sampled=(), is_ngram=())


def merge(waiting: EngineMessage, message: EngineMessage) -> None:
    """Add a message to one that waits. Of the tokens of one request one delta is made."""
    deltas = waiting.deltas
    last = {delta.request_id: place for place, delta in enumerate(deltas)}
    for delta in message.deltas:
        place = last.get(delta.request_id)
        # Statistics belong to the tokens they come with: the text may end among these.
        if place is not None and deltas[place].speculation is None:
            deltas[place] = _joined(deltas[place], delta)
        else:
            deltas.append(delta)
    waiting.records = (waiting.records + message.records)[-_MOST_RECORDS:]
    waiting.snapshot = message.snapshot or waiting.snapshot
    waiting.failed |= message.failed
    waiting.replies += message.replies
    waiting.death = message.death or waiting.death


def _joined(first: TokenDelta, then: TokenDelta) -> TokenDelta:
    logprobs = then.logprobs
    if first.logprobs is not None:
        logprobs = first.logprobs + (then.logprobs or ())
    return then._replace(
        token_ids=first.token_ids + then.token_ids,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or then.prompt_logprobs,
        num_cached_tokens=first.num_cached_tokens + then.num_cached_tokens,
        prefill_s=first.prefill_s + then.prefill_s,
    )


def hang_up(connection: Connection) -> None:
    """Break a connection, so that threads at both ends stop waiting for messages."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


encode = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_request = msgspec.msgpack.Decoder(Sequence).decode
decode_message = msgspec.msgpack.Decoder(EngineMessage).decode


T = TypeVar("T")

# About a millisecond of work.
_SHORT_CHARS = 4096
# One thread, so that many long texts do not take the cores from the engine.
_long_texts = ThreadPoolExecutor(1, thread_name_prefix="encode")


async def encode_async(num_chars: int, encode: Callable[[], T]) -> T:
    """Return `encode()`, computed in a thread if `num_chars` characters take long."""
    if num_chars <= _SHORT_CHARS:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(_long_texts, encode)


logger = get_logger(__name__)


_MOST_BYTES = 32 * 2**10
"""Longest message for which a socket that polls as writable surely has room."""


class Sender(Generic[T]):
    """The sending half of one end of a connection; its reader notices when the other end is gone.

    merge: adds a message to one that waits.
    """

    def __init__(
        self, connection: Connection, encode: Callable[[T], bytes], merge: Callable[[T, T], None]
    ) -> None:
        self._connection = connection
        self._encode = encode
        self._merge = merge
        self._poll = poll()
        self._poll.register(connection.fileno(), POLLOUT)
        self._changed = threading.Condition()
        self._waiting: T | None = None
        self._is_sending = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._send_waiting, name="send", daemon=True)
        self._thread.start()

    def put(self, message: T) -> None:
        """Send a message at once if there is room for it, else leave it to a thread. Never waits.

        The thread would take a while to wake up, above all while the caller is busy.
        """
        with self._changed:
            if self._waiting is not None:
                self._merge(self._waiting, message)
            elif self._is_sending or not self._send_at_once(message):
                self._waiting = message
                self._changed.notify()

    def close(self) -> None:
        """Send everything that is queued, unless the peer is gone, and return."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _send_at_once(self, message: T) -> bool:
        """Send a message unless that might take a while."""
        if not self._poll.poll(0):
            return False
        data = self._encode(message)
        if len(data) > _MOST_BYTES:
            return False
        with suppress(OSError):
            self._connection.send_bytes(data)
        return True

    def _send_waiting(self) -> None:
        try:
            while (message := self._take()) is not None:
                self._connection.send_bytes(self._encode(message))
        except OSError:
            logger.info("the other end no longer reads")
        except Exception:
            logger.exception("a message cannot be sent")
            hang_up(self._connection)

    def _take(self) -> T | None:
        """Wait for messages and return all that are queued; None: the channel is closed."""
        with self._changed:
            self._is_sending = False
            self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
            message, self._waiting = self._waiting, None
            self._is_sending = message is not None
            return message
