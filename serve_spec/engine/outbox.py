"""Queue of an engine's messages. Those of several steps merge until the channel takes them."""

from __future__ import annotations

import threading

from serve_spec.core.request import TokenDelta
from serve_spec.engine.messages import EngineMessage

_MOST_RECORDS = 8192
"""Most step records that wait: some seconds of the fastest engine."""


class EngineOutbox:
    """Merges messages that wait to be sent. One thread puts, another one takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: EngineMessage | None = None
        self._is_closed = False

    def put(self, message: EngineMessage) -> None:
        """Add a message to those that wait. Never waits for the channel."""
        with self._changed:
            if self._waiting is None:
                self._waiting = message
            else:
                _merge(self._waiting, message)
            self._changed.notify()

    def take(self) -> EngineMessage | None:
        """Return all that waits; wait for it. None: nothing will come any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
            message, self._waiting = self._waiting, None
            return message

    def close(self) -> None:
        """Let `take` return None once nothing waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()


def _merge(waiting: EngineMessage, message: EngineMessage) -> None:
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
    )
