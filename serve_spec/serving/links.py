"""One stream from each replica that has requests of this router.

Plain asyncio. A stream is opened with the first request, and its replica ends it when it has had
no request for a while. A stream that breaks, or is silent for too long, loses its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import Context
from typing import Protocol

from serve_spec.log import get_logger
from serve_spec.serving.errors import ApiError, ReplicaLost, engine_failed, no_replica
from serve_spec.serving.messages import News, ReplicaRows, decode

logger = get_logger(__name__)

_MAX_KNOWN_ROWS = 256


class Listener(Protocol):
    """What takes the news."""

    def hear(self, replica: str, news: News) -> None:
        """Take one message of a replica."""
        ...

    def lose(self, replica: str, error: ApiError) -> None:
        """Take note that the requests of a replica are lost."""
        ...

    def num_open(self, replica: str) -> int:
        """Return how many requests have not ended there."""
        ...


class _Link:
    """One stream."""

    def __init__(self) -> None:
        self.num_silent_looks = 0
        self.is_silent = False
        self.task: asyncio.Task[None] | None = None


class Links:
    """The streams of all replicas.

    attach: yields the messages of a replica; raises ApiError if it is gone.
    max_silent_looks: looks (`look`) without a message after which a replica is silent.
    """

    def __init__(
        self,
        attach: Callable[[str], AsyncGenerator[bytes, None]],
        listener: Listener,
        max_silent_looks: int,
    ) -> None:
        self._attach = attach
        self._listener = listener
        self._max_silent_looks = max_silent_looks
        self._links: dict[str, _Link] = {}
        self.rows: dict[str, ReplicaRows] = {}
        """How busy replicas were when they last said so."""
        self.silent: set[str] = set()
        """Replicas that do not answer."""

    def open(self, replica: str) -> None:
        """Make sure that there is a stream from a replica."""
        if replica not in self._links:
            link = self._links[replica] = _Link()
            # Serve and Ray end what was started in the context of a request when its client leaves.
            link.task = asyncio.create_task(self._read(replica, link), context=Context())

    def look(self) -> None:
        """Take the requests from replicas that have been silent for too long.

        It counts looks, not seconds: while this process itself is held up there are none.
        """
        for replica, link in self._links.items():
            if not self._listener.num_open(replica):
                link.num_silent_looks = 0
                continue
            link.num_silent_looks += 1
            if link.num_silent_looks >= self._max_silent_looks and not link.is_silent:
                self.note_silence(replica)
                link.is_silent = True
                if link.task is not None:
                    link.task.cancel()

    def note_silence(self, replica: str) -> None:
        """Avoid a replica until it says something."""
        if replica not in self.silent:
            logger.error("replica %s is silent, its requests go on elsewhere", replica)
            self.silent.add(replica)

    async def _read(self, replica: str, link: _Link) -> None:
        end: ApiError | None = engine_failed("the replica ended its stream early")
        try:
            async with aclosing(self._attach(replica)) as messages:
                async for message in messages:
                    news = decode(message)
                    self._note(replica, link, news)
                    if news.is_over:
                        end = None
                    else:
                        self._listener.hear(replica, news)
        except ApiError as error:  # Serve makes an error of a cancellation
            end = does_not_answer(replica) if link.is_silent else error
        except asyncio.CancelledError:
            if not link.is_silent:
                raise
            end = does_not_answer(replica)
        except Exception as error:  # whatever broke, no request may wait for ever
            end = engine_failed(f"the stream from the replica broke ({error!r})")
        finally:
            del self._links[replica]
            if end is not None:
                self._listener.lose(replica, ReplicaLost(end, replica=replica))
            elif self._listener.num_open(replica):
                self.open(replica)

    def _note(self, replica: str, link: _Link, news: News) -> None:
        link.num_silent_looks = 0
        self.silent.discard(replica)
        if news.rows is not None:
            self.rows[replica] = news.rows
            if len(self.rows) > _MAX_KNOWN_ROWS:  # replicas come and go
                del self.rows[next(iter(self.rows))]


def does_not_answer(replica: str) -> ReplicaLost:
    """Return the error of requests whose replica is silent."""
    return ReplicaLost(no_replica(f"replica {replica} does not answer"), replica=replica)
