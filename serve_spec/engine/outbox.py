"""What an engine has yet to send: the messages of steps merge until the channel takes them."""

from __future__ import annotations

import threading
from collections import deque

from serve_spec.core.record import StepRecord
from serve_spec.core.request import TokenDelta
from serve_spec.engine.messages import EngineMessage

_MOST_RECORDS = 8192
"""Records of steps that wait. Some seconds of the quickest engine."""


class EngineOutbox:
    """Merges messages that wait to be sent. One thread puts, another one takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_closed = False
        self._waiting: EngineMessage | None = None
        self._deltas: dict[str, list[TokenDelta]] = {}
        self._records: deque[StepRecord] = deque(maxlen=_MOST_RECORDS)

    def put(self, message: EngineMessage) -> None:
        """Add a message to those that wait. Never blocks for the channel."""
        with self._changed:
            for delta in message.deltas:
                self._add(delta)
            self._records += message.records
            waiting = self._waiting
            if waiting is None:
                self._waiting = message
            else:
                waiting.failed = waiting.failed | message.failed
                waiting.replies = waiting.replies + message.replies
                waiting.snapshot = message.snapshot or waiting.snapshot
                waiting.death = message.death or waiting.death
            self._changed.notify()

    def take(self) -> EngineMessage | None:
        """Return all that waits; wait for it. None: nothing will come any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
            message, self._waiting = self._waiting, None
            if message is not None:
                message.deltas = [delta for each in self._deltas.values() for delta in each]
                message.records = list(self._records)
                self._deltas = {}
                self._records.clear()
            return message

    def close(self) -> None:
        """Let `take` return None once nothing waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _add(self, delta: TokenDelta) -> None:
        of_request = self._deltas.setdefault(delta.request_id, [])
        # Statistics belong to the tokens they come with: the text may end among these.
        if of_request and of_request[-1].speculation is None:
            of_request[-1] = _joined(of_request[-1], delta)
        else:
            of_request.append(delta)


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
