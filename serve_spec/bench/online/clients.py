"""Clients in processes of their own: one core reads a few thousand chunks a second."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier

from serve_spec.bench.online.client import Client
from serve_spec.bench.online.load import ClosedLoop, Load
from serve_spec.bench.online.record import LoadRun, TextRequest
from serve_spec.bench.online.run import Share, deal, owner, run_share

_MEET_WITHIN_S = 60.0


@dataclass(frozen=True)
class Target:
    """Whom clients ask, and how long they wait for a whole answer."""

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0


class Clients:
    """`count` clients of one server; a single one runs in this process."""

    def __init__(self, target: Target, count: int = 1) -> None:
        self._target = target
        self._count = count
        self._pool: ProcessPoolExecutor | None = None
        if count > 1:
            context = multiprocessing.get_context("spawn")
            barrier = context.Barrier(count)
            self._pool = ProcessPoolExecutor(count, context, _meet_at, (barrier,))

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(
        self,
        load: Load,
        requests: Sequence[TextRequest],
        *,
        seed: int = 0,
        poll_s: float | None = 0.5,
    ) -> LoadRun:
        """Runs `requests` once as `load` says; an open loop's schedule comes from `seed`.

        The server is asked about itself every `poll_s`, by one of the clients; None: never.
        """
        shares = deal(load, requests, seed, self._count)
        if self._pool is None:
            return _run(self._target, shares[0], poll_s)
        polls = [poll_s, *[None] * (self._count - 1)]
        targets = [self._target] * self._count
        return merged(load, list(self._pool.map(_run_together, targets, shares, polls)))


def merged(load: Load, runs: Sequence[LoadRun]) -> LoadRun:
    """The runs of `deal`'s shares as one, requests in their order; the busiest client speaks."""
    num_requests = sum(len(run.served) for run in runs)
    num_streams = load.num_streams if isinstance(load, ClosedLoop) else num_requests
    each = [iter(run.served) for run in runs]
    return LoadRun(
        [next(each[owner(number, num_streams, len(runs))]) for number in range(num_requests)],
        runs[0].samples,
        max((run.client_cpu_share or 0.0 for run in runs if run.served), default=0.0),
    )


_barrier: Barrier


def _meet_at(barrier: Barrier) -> None:
    """What a process of the pool does first: keeps the barrier all of them start from."""
    global _barrier
    _barrier = barrier


def _run_together(target: Target, share: Share, poll_s: float | None) -> LoadRun:
    _barrier.wait(_MEET_WITHIN_S)
    return _run(target, share, poll_s)


def _run(target: Target, share: Share, poll_s: float | None) -> LoadRun:
    async def run() -> LoadRun:
        async with Client(
            target.url,
            model=target.model,
            api_key=target.api_key,
            timeout_s=target.timeout_s,
        ) as client:
            return await run_share(client, share, poll_s)

    return asyncio.run(run())
