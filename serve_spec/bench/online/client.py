"""Clients of the OpenAI completions API that record when bytes arrive.

Streams are parsed after a run, so that parsing one does not delay the clock of another. Clients may
run in worker processes, because one core reads a few thousand chunks a second.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.synchronize import Barrier
from typing import Any

import aiohttp

from serve_spec.bench.online.load import (
    ClosedLoop,
    CompletionRequest,
    Load,
    LoadRun,
    Sample,
    Served,
)

_DONE = "[DONE]"
_KEEPALIVE_S = 2.0
"""Shorter than the idle limit of servers, which would close a connection as it is used again."""
_INFO_TIMEOUT_S = 5.0
_SAME_WITHIN_S = 0.05
"""The same report, read twice, differs by the time the answers took."""
_MEET_WITHIN_S = 60.0


class SseParser:
    """Splits a byte stream into the data of server-sent events.

    Lines end in LF or CR LF; comments and fields other than `data` are skipped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[str]:
        """Return the events that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [event for line in lines for event in self._take(line.removesuffix(b"\r"))]

    def _take(self, line: bytes) -> Iterable[str]:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif not line and self._data:
            yield b"\n".join(self._data).decode()
            self._data = []


@dataclass
class StreamedCompletion:
    """A completion, assembled from its events."""

    chunk_s: list[float] = field(default_factory=list)
    """Arrival of every event with text, token ids or a finish reason."""
    text: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    num_token_ids: int = 0
    error: str | None = None
    """Error frame, bad frame, or broken off before [DONE]."""

    @property
    def num_tokens(self) -> int:
        """Return the tokens of `usage`, else the number of token ids; 0 if the server sent neither.

        Chunks are not counted, because a chunk holds the tokens of a round.
        """
        return int(self.usage.get("completion_tokens", self.num_token_ids))


def read_stream(arrivals: Iterable[tuple[float, bytes]]) -> StreamedCompletion:
    """Return the completion in a stream. arrivals: (time in s, bytes) of each read."""
    answer, parser = StreamedCompletion(error="broken off"), SseParser()
    for time_s, data in arrivals:
        for event in parser.feed(data):
            if event == _DONE:
                answer.error = None
                return answer
            try:
                _add(answer, time_s, json.loads(event))
            except (ValueError, KeyError, TypeError, AttributeError):
                answer.error = "bad frame"
                return answer
            if answer.error == "error frame":
                return answer
    return answer


def _add(answer: StreamedCompletion, time_s: float, payload: Mapping[str, Any]) -> None:
    if "error" in payload:
        answer.error = "error frame"
        return
    answer.usage = payload.get("usage") or answer.usage
    for choice in payload["choices"]:
        token_ids = choice.get("token_ids") or ()
        answer.text += choice["text"]
        answer.num_token_ids += len(token_ids)
        if choice["text"] or token_ids or choice.get("finish_reason"):
            answer.chunk_s.append(time_s)


@dataclass(frozen=True)
class Exchange:
    """A request and the bytes of its answer; times are those of `time.perf_counter`."""

    sent_s: float
    ended_s: float
    arrivals: tuple[tuple[float, bytes], ...]
    error: str | None

    def served(self, started_s: float, due_s: float | None) -> Served:
        """Return the outcome in seconds since `started_s`; due_s None: due when it was sent."""
        answer = read_stream((at - started_s, data) for at, data in self.arrivals)
        sent_s = self.sent_s - started_s
        return Served(
            due_s=sent_s if due_s is None else due_s,
            sent_s=sent_s,
            ended_s=self.ended_s - started_s,
            chunk_s=tuple(answer.chunk_s),
            text=answer.text,
            num_tokens=answer.num_tokens,
            num_prompt_tokens=int(answer.usage.get("prompt_tokens", 0)),
            speculation=answer.usage.get("speculation", {}),
            error=self.error or answer.error or _without_tokens(answer),
        )


def _without_tokens(answer: StreamedCompletion) -> str | None:
    if not answer.chunk_s:
        return "no tokens"
    return None if answer.num_tokens else "no token count"


class Client:
    """Sends requests to one server; every open request has a connection."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._url = url
        self._model = {} if model is None else {"model": model}
        self._key = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Client:
        self._http = aiohttp.ClientSession(
            headers={"Accept-Encoding": "identity", **self._key},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def complete(self, request: CompletionRequest) -> Exchange:
        """Stream a completion; failures are in the result."""
        arrivals: list[tuple[float, bytes]] = []
        error = None
        sent_s = time.perf_counter()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._http.post(f"{self._url}/v1/completions", json=self._body(request)) as answer,
            ):
                if answer.status != 200:
                    error = str(answer.status)
                    await answer.read()
                else:
                    async for data in answer.content.iter_any():
                        arrivals.append((time.perf_counter(), data))
        except TimeoutError:
            error = "timeout"
        except aiohttp.ClientConnectorError:
            error = "no connection"
        except aiohttp.ClientError:
            error = "disconnected"
        return Exchange(sent_s, time.perf_counter(), tuple(arrivals), error)

    async def server_info(self) -> Mapping[str, Any] | None:
        """Return `/server_info`; None if the server does not answer."""
        try:
            async with (
                asyncio.timeout(_INFO_TIMEOUT_S),
                self._http.get(f"{self._url}/server_info") as answer,
            ):
                info = await answer.json() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
        return info if isinstance(info, dict) else None

    def _body(self, request: CompletionRequest) -> dict[str, Any]:
        params = request.params
        return {
            **self._model,
            "prompt": request.prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "ignore_eos": params.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@asynccontextmanager
async def watched(
    client: Client, started_s: float, every_s: float | None
) -> AsyncIterator[list[Sample]]:
    """Yield a list that receives new samples every `every_s` seconds; None: never."""
    samples: list[Sample] = []
    if every_s is None:
        yield samples
        return
    watching = asyncio.create_task(_watch(client, started_s, every_s, samples))
    try:
        yield samples
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _watch(client: Client, started_s: float, every_s: float, samples: list[Sample]) -> None:
    while True:
        info = await client.server_info()
        if info is not None:
            samples += new_samples(accounts(info, time.perf_counter() - started_s), samples)
        await asyncio.sleep(every_s)


def accounts(info: Mapping[str, Any], time_s: float) -> list[Sample]:
    """Return the samples of `/server_info` at `time_s`, each as old as its replica's report."""
    return [
        {
            "time_s": round(time_s - state.get("age_s", 0.0), 3),
            "replica": str(state.get("replica", place)),
            "batch_size": state.get("batch_size"),
            "num_waiting": state.get("num_waiting"),
            "num_steps": state.get("speculative_num_steps"),
        }
        for place, state in enumerate(info.get("internal_states", ()))
    ]


def new_samples(found: Iterable[Sample], known: Iterable[Sample]) -> list[Sample]:
    """Return the samples of this run that are newer than the known ones of their replicas."""
    latest = {sample["replica"]: sample["time_s"] + _SAME_WITHIN_S for sample in known}
    return [sample for sample in found if sample["time_s"] > latest.get(sample["replica"], 0.0)]


@dataclass(frozen=True)
class Share:
    """Requests of one client, on a schedule or over streams."""

    requests: Sequence[CompletionRequest]
    num_streams: int
    due_s: Sequence[float] | None
    """Due time of each request of an open loop; None: a closed loop."""


def deal(
    load: Load, requests: Sequence[CompletionRequest], seed: int, num_clients: int
) -> list[Share]:
    """Divide a load among clients: streams to clients in turn, requests to streams in turn.

    seed: of the schedule of an open loop, in which every request is its own stream.
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
    """Return the client that sends request `number`."""
    return number % num_streams % num_clients


async def run_share(client: Client, share: Share, poll_s: float | None) -> LoadRun:
    """Send every request of a share; read `/server_info` every `poll_s` seconds, if given."""
    started_s, cpu_s = time.perf_counter(), time.process_time()
    async with watched(client, started_s, poll_s) as samples:
        exchanges = await (
            _run_closed(client, share)
            if share.due_s is None
            else _open(client, share.requests, share.due_s, started_s)
        )
    cpu_share = (time.process_time() - cpu_s) / (time.perf_counter() - started_s)
    due_s: Sequence[float | None] = share.due_s or [None] * len(exchanges)
    served = [
        exchange.served(started_s, due) for exchange, due in zip(exchanges, due_s, strict=True)
    ]
    return LoadRun(served, samples, cpu_share)


async def _run_closed(client: Client, share: Share) -> list[Exchange]:
    exchanges: dict[int, Exchange] = {}
    waiting = iter(enumerate(share.requests))

    async def one_stream() -> None:
        for number, request in waiting:  # shared by all streams
            exchanges[number] = await client.complete(request)

    await asyncio.gather(*(one_stream() for _ in range(share.num_streams)))
    return [exchanges[number] for number in range(len(share.requests))]


async def _open(
    client: Client, requests: Sequence[CompletionRequest], due_s: Sequence[float], started_s: float
) -> list[Exchange]:
    sent = []
    for due, request in zip(due_s, requests, strict=True):
        await asyncio.sleep(started_s + due - time.perf_counter())
        sent.append(asyncio.create_task(client.complete(request)))
    return await asyncio.gather(*sent)


@dataclass(frozen=True)
class Target:
    """The server of a load."""

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0


class Clients:
    """`count` clients of one server; a single client runs in this process."""

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
        requests: Sequence[CompletionRequest],
        *,
        seed: int = 0,
        poll_s: float | None = 0.5,
    ) -> LoadRun:
        """Run the requests once. `seed` is that of the schedule of an open loop.

        poll_s: seconds between reads of `/server_info`, by one of the clients; None: never.
        """
        shares = deal(load, requests, seed, self._count)
        if self._pool is None:
            return _run(self._target, shares[0], poll_s)
        polls = [poll_s, *[None] * (self._count - 1)]
        targets = [self._target] * self._count
        return merged(load, list(self._pool.map(_run_together, targets, shares, polls)))


def merged(load: Load, runs: Sequence[LoadRun]) -> LoadRun:
    """Return the runs of all shares as one, with the CPU share of the busiest client."""
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
    """Initialize a worker process with the barrier from which all start."""
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
