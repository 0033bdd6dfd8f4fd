"""One client's share of a load, run against a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from serve_spec.bench.online.client import Client, Exchange
from serve_spec.bench.online.load import ClosedLoop, Load
from serve_spec.bench.online.record import LoadRun, TextRequest
from serve_spec.bench.online.watch import watched


@dataclass(frozen=True)
class Share:
    """Requests of one client: on schedule, or over streams that wait for their answers."""

    requests: Sequence[TextRequest]
    num_streams: int
    due_s: Sequence[float] | None
    """Of each request, in an open loop."""


def deal(load: Load, requests: Sequence[TextRequest], seed: int, num_clients: int) -> list[Share]:
    """Streams go to the clients in turn, requests to the streams in turn; see `owner`.

    seed: of an open loop's schedule, in which every request is a stream of its own.
    """
    if isinstance(load, ClosedLoop):
        num_streams, due_s = load.num_streams, None
    else:
        num_streams, due_s = len(requests), load.arrivals(len(requests), seed)
    numbers: list[list[int]] = [[] for _ in range(num_clients)]
    for number in range(len(requests)):
        numbers[owner(number, num_streams, num_clients)].append(number)
    return [
        Share(
            [requests[number] for number in mine],
            len(range(client, num_streams, num_clients)),
            None if due_s is None else [due_s[number] for number in mine],
        )
        for client, mine in enumerate(numbers)
    ]


def owner(number: int, num_streams: int, num_clients: int) -> int:
    """The client that sends request `number`."""
    return number % num_streams % num_clients


async def run_share(client: Client, share: Share, poll_s: float | None) -> LoadRun:
    """Sends every request of `share`; asks the server about itself every `poll_s`, if given."""
    started_s, cpu_s = time.perf_counter(), time.process_time()
    async with watched(client, started_s, poll_s) as samples:
        exchanges = await (
            _closed(client, share)
            if share.due_s is None
            else _open(client, share.requests, share.due_s, started_s)
        )
    cpu_share = (time.process_time() - cpu_s) / (time.perf_counter() - started_s)
    due_s: Sequence[float | None] = share.due_s or [None] * len(exchanges)
    served = [
        exchange.served(started_s, due) for exchange, due in zip(exchanges, due_s, strict=True)
    ]
    return LoadRun(served, samples, cpu_share)


async def _closed(client: Client, share: Share) -> list[Exchange]:
    exchanges: dict[int, Exchange] = {}
    waiting = iter(enumerate(share.requests))

    async def one_stream() -> None:
        for number, request in waiting:  # shared by all streams
            exchanges[number] = await client.complete(request)

    await asyncio.gather(*(one_stream() for _ in range(share.num_streams)))
    return [exchanges[number] for number in range(len(share.requests))]


async def _open(
    client: Client, requests: Sequence[TextRequest], due_s: Sequence[float], started_s: float
) -> list[Exchange]:
    sent = []
    for due, request in zip(due_s, requests, strict=True):
        await asyncio.sleep(started_s + due - time.perf_counter())
        sent.append(asyncio.create_task(client.complete(request)))
    return await asyncio.gather(*sent)
