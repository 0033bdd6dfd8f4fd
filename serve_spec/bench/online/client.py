"""Clients of the OpenAI completions and chat APIs that record when bytes arrive.

Streams are parsed after a run, so that parsing one does not delay the clock of another. Clients may
run in worker processes, because one core reads a few thousand chunks a second.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from typing import Any, TypeAlias

import aiohttp

from serve_spec.bench.online.load import CompletionRequest, Load, LoadRun, Requests, Sample, Served

_DONE = "[DONE]"
_KEEPALIVE_S = 2.0
"""Shorter than the idle limit of servers, which would close a connection as it is used again."""
_INFO_TIMEOUT_S = 5.0
_SAME_WITHIN_S = 0.05
"""The same report, read twice, differs by the time the answers took."""
_MEET_WITHIN_S = 60.0
_SHOW_S = 0.2
"""Time between looks at how many requests have ended."""


def events(arrivals: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, str]]:
    """Yield the data of every complete server-sent event, and when its last byte came.

    Lines end in LF or CR LF; comments and fields other than `data` are skipped.
    """
    rest, data = b"", []
    for time_s, received in arrivals:
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            name, _, value = line.removesuffix(b"\r").partition(b":")
            if name == b"data":
                data.append(value.removeprefix(b" "))
            elif line in (b"", b"\r") and data:
                yield time_s, b"\n".join(data).decode()
                data = []


def read_stream(arrivals: Iterable[tuple[float, bytes]]) -> Served:
    """Return the completion in a stream; it is due, sent and ended at 0.

    arrivals: (time in s, bytes) of each read. Tokens are those of `usage`, else the number of token
    ids. Chunks are not counted, because a chunk holds the tokens of a round.
    """
    chunk_s, text, num_ids = [], "", 0
    usage: Mapping[str, Any] = {}
    error: str | None = "broken off"
    try:
        for time_s, event in events(arrivals):
            if event == _DONE:
                error = None
                break
            payload = json.loads(event)
            if "error" in payload:
                error = "error frame"
                break
            usage = payload.get("usage") or usage
            for choice in payload["choices"]:
                token_ids, new = choice.get("token_ids") or (), _text(choice)
                text += new
                num_ids += len(token_ids)
                if new or token_ids or choice.get("finish_reason"):
                    chunk_s.append(time_s)
    except (ValueError, KeyError, TypeError, AttributeError):
        error = "bad frame"
    num_tokens = int(usage.get("completion_tokens", num_ids))
    if error is None and not (chunk_s and num_tokens):
        error = "no token count" if chunk_s else "no tokens"
    return Served(
        due_s=0.0,
        sent_s=0.0,
        ended_s=0.0,
        chunk_s=tuple(chunk_s),
        text=text,
        num_tokens=num_tokens,
        num_prompt_tokens=int(usage.get("prompt_tokens", 0)),
        speculation=usage.get("speculation", {}),
        error=error,
    )


def _text(choice: Mapping[str, Any]) -> str:
    """Return the new text of a choice; of a chat also its reasoning."""
    if "text" in choice:
        return str(choice["text"])
    delta = choice["delta"]
    return f"{delta.get('reasoning_content') or ''}{delta.get('content') or ''}"


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
        return replace(
            answer,
            due_s=sent_s if due_s is None else due_s,
            sent_s=sent_s,
            ended_s=self.ended_s - started_s,
            error=self.error or answer.error,
        )


@dataclass(frozen=True)
class Target:
    """The server of a load."""

    url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0


class Client:
    """Sends requests to one server; every open request has a connection."""

    def __init__(self, target: Target) -> None:
        self._target = target

    async def __aenter__(self) -> Client:
        key = self._target.api_key
        self._http = aiohttp.ClientSession(
            headers={
                "Accept-Encoding": "identity",
                **({} if key is None else {"Authorization": f"Bearer {key}"}),
            },
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def complete(self, request: CompletionRequest) -> Exchange:
        """Stream a completion; failures are in the result."""
        arrivals: list[tuple[float, bytes]] = []
        error, target = None, self._target
        sent_s = time.perf_counter()
        try:
            async with (
                asyncio.timeout(target.timeout_s),
                self._http.post(
                    f"{target.url}{_path(request)}", json=_body(request, target)
                ) as answer,
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
                self._http.get(f"{self._target.url}/server_info") as answer,
            ):
                info = await answer.json() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
        return info if isinstance(info, dict) else None


def _path(request: CompletionRequest) -> str:
    return "/v1/chat/completions" if request.messages else "/v1/completions"


def _body(request: CompletionRequest, target: Target) -> dict[str, Any]:
    params = request.params
    return {
        **({} if target.model is None else {"model": target.model}),
        **({"messages": request.messages} if request.messages else {"prompt": request.prompt}),
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        "ignore_eos": params.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _watch(
    client: Client, started_s: float, every_s: float | None, samples: list[Sample]
) -> None:
    """Add new samples every `every_s` seconds; None: never."""
    while every_s is not None:
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
class ClientLoad:
    """The part of a load that one client sends: requests, on a schedule or over streams."""

    requests: Requests
    num_streams: int
    due_s: Sequence[float] | None
    """Due time of each request of an open loop; None: a closed loop."""


def deal(load: Load, requests: Requests, seed: int, num_clients: int) -> list[ClientLoad]:
    """Divide a load among clients: streams to clients in turn, requests to streams in turn.

    seed: of the schedule of an open loop, in which every request is its own stream.
    """
    num_streams, due_s = load.num_streams or len(requests), load.arrivals(len(requests), seed)
    numbers: list[list[int]] = [[] for _ in range(num_clients)]
    for number in range(len(requests)):
        numbers[owner(number, num_streams, num_clients)].append(number)
    return [
        ClientLoad(
            [requests[number] for number in mine],
            len(range(client, num_streams, num_clients)),
            None if due_s is None else [due_s[number] for number in mine],
        )
        for client, mine in enumerate(numbers)
    ]


def owner(number: int, num_streams: int, num_clients: int) -> int:
    """Return the client that sends request `number`."""
    return number % num_streams % num_clients


OnEnd: TypeAlias = Callable[[int], object]
"""Called with the number of requests that have ended since the last call."""


async def run_client(
    client: Client, load: ClientLoad, poll_s: float | None, on_end: OnEnd = int
) -> LoadRun:
    """Send every request of a load; read `/server_info` every `poll_s` seconds, if given."""
    started_s, cpu_s = time.perf_counter(), time.process_time()
    samples: list[Sample] = []
    watching = asyncio.create_task(_watch(client, started_s, poll_s, samples))
    exchanges = await _send(client, load, started_s, on_end)
    watching.cancel()
    cpu_fraction = (time.process_time() - cpu_s) / (time.perf_counter() - started_s)
    due_s: Sequence[float | None] = load.due_s or [None] * len(exchanges)
    served = [
        exchange.served(started_s, due) for exchange, due in zip(exchanges, due_s, strict=True)
    ]
    return LoadRun(served, samples, cpu_fraction)


async def _send(
    client: Client, load: ClientLoad, started_s: float, on_end: OnEnd
) -> list[Exchange]:
    """Send requests when they are due; in a closed loop, when a stream has ended the one before."""
    exchanges: dict[int, Exchange] = {}
    waiting = iter(enumerate(load.requests))

    async def complete(number: int, request: CompletionRequest) -> None:
        exchanges[number] = await client.complete(request)
        on_end(1)

    async def stream() -> None:
        for number, request in waiting:  # shared by all streams
            await complete(number, request)

    if load.due_s is None:
        await asyncio.gather(*(stream() for _ in range(load.num_streams)))
    else:
        sent = []
        for (number, request), due in zip(waiting, load.due_s, strict=True):
            await asyncio.sleep(started_s + due - time.perf_counter())
            sent.append(asyncio.create_task(complete(number, request)))
        await asyncio.gather(*sent)
    return [exchanges[number] for number in range(len(load.requests))]


class Clients:
    """`count` clients of one server; a single client runs in this process."""

    def __init__(self, target: Target, count: int = 1) -> None:
        self._target = target
        self._count = count
        self._pool: ProcessPoolExecutor | None = None
        if count > 1:
            context = multiprocessing.get_context("spawn")
            self._num_ended = context.Value("q")
            shared = context.Barrier(count), self._num_ended
            self._pool = ProcessPoolExecutor(count, context, _initialize, shared)

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(
        self,
        load: Load,
        requests: Requests,
        *,
        seed: int = 0,
        poll_s: float | None = 0.5,
        on_end: OnEnd = int,
    ) -> LoadRun:
        """Run the requests once. `seed` is that of the schedule of an open loop.

        poll_s: seconds between reads of `/server_info`, by one of the clients; None: never.
        """
        loads = deal(load, requests, seed, self._count)
        if self._pool is None:
            return _run(self._target, loads[0], poll_s, on_end)
        polls = [poll_s, *[None] * (self._count - 1)]
        runs = [
            self._pool.submit(_run_together, self._target, each, poll)
            for each, poll in zip(loads, polls, strict=True)
        ]
        num_known, is_running = self._num_ended.value, True
        while is_running:
            is_running = bool(wait(runs, _SHOW_S).not_done)
            num_ended = self._num_ended.value
            on_end(num_ended - num_known)
            num_known = num_ended
        return merged(load, [run.result() for run in runs])


def merged(load: Load, runs: Sequence[LoadRun]) -> LoadRun:
    """Return the runs of all clients as one, with the CPU fraction of the busiest client."""
    num_requests = sum(len(run.served) for run in runs)
    num_streams = load.num_streams or num_requests
    each = [iter(run.served) for run in runs]
    return LoadRun(
        [next(each[owner(number, num_streams, len(runs))]) for number in range(num_requests)],
        runs[0].samples,
        max((run.client_cpu_fraction or 0.0 for run in runs if run.served), default=0.0),
    )


_barrier: Barrier
_num_ended: Synchronized[int]


def _initialize(barrier: Barrier, num_ended: Synchronized[int]) -> None:
    """Initialize a worker process with the barrier from which all start and the common count."""
    global _barrier, _num_ended
    _barrier, _num_ended = barrier, num_ended


def _count(ended: int) -> None:
    with _num_ended.get_lock():
        _num_ended.value += ended


def _run_together(target: Target, load: ClientLoad, poll_s: float | None) -> LoadRun:
    _barrier.wait(_MEET_WITHIN_S)
    return _run(target, load, poll_s, _count)


def _run(target: Target, load: ClientLoad, poll_s: float | None, on_end: OnEnd) -> LoadRun:
    async def run() -> LoadRun:
        async with Client(target) as client:
            return await run_client(client, load, poll_s, on_end)

    return asyncio.run(run())
