"""Time to first token and per output token, where a request arrives and where it runs.

The router measures what a caller waits for, the replica what its engine took; the difference is the
framework's: HTTP, queue, routing, and the way between processes. Clocks never cross processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Literal

from serve_spec.core.request import TokenDelta
from serve_spec.metrics import (
    FIRST_TOKEN_WAIT_MS,
    FIRST_TOKENS,
    LATER_TOKENS,
    LATER_TOKENS_WAIT_MS,
    REQUESTS,
    TPOT_MS,
    TTFT_MS,
    Reading,
)
from serve_spec.serving.messages import Failed, Refused, ReplicaItem

ARRIVED: ContextVar[float | None] = ContextVar("arrived", default=None)
"""`perf_counter` of the arrival of the request that this task serves."""


class RequestTimer:
    """Times one request; `record` gets the readings, two at its first tokens, the rest at its end.

    started: `perf_counter` to count from.
    """

    def __init__(
        self,
        record: Callable[[Reading], None],
        measured_at: Literal["door", "engine"],
        started: float,
    ) -> None:
        self._record = record
        self._labels: dict[str, str] = {"measured_at": measured_at}
        self._started = started
        self._first = self._last = 0.0
        self._num_later = 0
        self._outcome = "left"

    def saw(self, item: ReplicaItem) -> None:
        """Take what the replica just answered."""
        if isinstance(item, Refused | Failed):
            self._outcome = "refused" if isinstance(item, Refused) else "failed"
        elif isinstance(item, TokenDelta):
            if item.token_ids:
                self._saw_tokens(len(item.token_ids), time.perf_counter())
            if item.finish_reason is not None:
                self._outcome = "done"

    def fail(self) -> None:
        """Note that the request broke off without an item that says so."""
        self._outcome = "failed"

    def end(self) -> None:
        """Record the request as a whole."""
        self._record(Reading(REQUESTS, 1, {**self._labels, "outcome": self._outcome}))
        if self._num_later:
            wait_ms = (self._last - self._first) * 1e3
            self._record(Reading(TPOT_MS, wait_ms / self._num_later, self._labels))
            self._record(Reading(LATER_TOKENS, self._num_later, self._labels))
            if wait_ms > 0:
                self._record(Reading(LATER_TOKENS_WAIT_MS, wait_ms, self._labels))

    def _saw_tokens(self, count: int, now: float) -> None:
        self._last = now
        if self._first:
            self._num_later += count
            return
        self._first = now
        wait_ms = (now - self._started) * 1e3
        self._record(Reading(TTFT_MS, wait_ms, self._labels))
        self._record(Reading(FIRST_TOKENS, 1, self._labels))
        if wait_ms > 0:
            self._record(Reading(FIRST_TOKEN_WAIT_MS, wait_ms, self._labels))


def door_timer(record: Callable[[Reading], None]) -> RequestTimer:
    """Return a timer that counts from the arrival of the request that this task serves."""
    return RequestTimer(record, "door", ARRIVED.get() or time.perf_counter())
