"""Clients that mean no good, and one that watches how everybody else fares meanwhile.

Everything goes to loopback addresses, a client each, and ends by itself.
"""

import asyncio
import json
import random
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from serve_spec.serving.protocols.openai import ChatRequest, CompletionRequest
from tests.e2e.fleet import Stream
from tests.serving.asgi import CHAT, COMPLETIONS

STALL_TIMEOUT_S = 5.0
"""Seconds after which the router under attack takes a replica for stuck."""

WATCHER, HOG, BYSTANDER, ATTACKER = (f"127.0.0.{host}" for host in (2, 3, 4, 5))


def client_at(url, address, timeout_s=120):
    """A client with an address of its own, so that the router knows it from others."""
    limits = httpx.Limits(max_connections=None)
    transport = httpx.AsyncHTTPTransport(local_address=address, limits=limits)
    return httpx.AsyncClient(base_url=url, transport=transport, timeout=timeout_s)


@dataclass
class Watch:
    """What a client saw that streams all the time, and asks for `/health` once in a while."""

    streams: list[Stream] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)

    @property
    def stands_still(self):
        """Whether a stream had to wait as long as the router waits for a stuck replica."""
        return max(stream.longest_gap_s for stream in self.streams) >= STALL_TIMEOUT_S

    async def stream_for_ever(self, client):
        while True:
            self.streams.append(stream := Stream())
            await stream.listen(client, "def f(x):\n", max_tokens=100, temperature=0)
            self.texts.add(stream.text)
            if stream.error is not None:
                self.errors.append(str(stream.error))

    async def ask_for_health(self, client):
        while True:
            answer = await client.get("/health")
            if answer.status_code != 200:
                self.errors.append(f"health: {answer.text}")
            await asyncio.sleep(0.2)


@asynccontextmanager
async def watching(url):
    """Two streams and a probe, for as long as the body takes."""
    watch = Watch()
    async with client_at(url, WATCHER) as client:
        tasks = [
            asyncio.create_task(work)
            for work in (
                watch.stream_for_ever(client),
                watch.stream_for_ever(client),
                watch.ask_for_health(client),
            )
        ]
        try:
            while not watch.texts:
                await asyncio.sleep(0.01)
            yield watch
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if not isinstance(error, asyncio.CancelledError):
            watch.errors.append(repr(error))


async def statuses(client, path, bodies):
    """Statuses of requests that are all sent at once."""

    async def send(content):
        answer = await client.post(
            path, content=content, headers={"content-type": "application/json"}
        )
        return answer.status_code

    # Encoded before: one body of eight megabytes keeps this process from watching.
    contents = {id(body): json.dumps(body).encode() for body in bodies}
    return await asyncio.gather(*(send(contents[id(body)]) for body in bodies))


async def until_closed(url, start, drip, every_s, most_s):
    """What a connection receives that sends `start`, and then `drip` again and again; b"open" if it
    is never closed.
    """
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port, local_addr=(ATTACKER, 0)
    )
    heard = asyncio.create_task(reader.read())
    try:
        writer.write(start)
        for _ in range(int(most_s / every_s)):
            done, _ = await asyncio.wait({heard}, timeout=every_s)
            if done:
                return heard.result()
            writer.write(drip)
        return b"open"
    except OSError:
        return b"closed"
    finally:
        heard.cancel()
        writer.close()
        with suppress(OSError, asyncio.CancelledError):
            await writer.wait_closed()


def head(path, length):
    """The head of a POST with a body of so many bytes."""
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {length}\r\n\r\n"
    ).encode()


_WORDS = ["a", "def f(x):", "<eos>", "\u0000", "é", "\ud7ff", "\ud800", " " * 50, "x" * 5000, "🙂"]
_NUMBERS = [0, 1, -1, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, 1e-320]
_ODD = [None, True, "3", [], {}, [[]], [None], {"a": 1}, *_NUMBERS, *_WORDS]
_FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, "unknown"})


def _long(rng):
    return (rng.choice(_WORDS) * rng.choice([10, 2_000, 30_000]))[:300_000]


def _messages(rng):
    roles = ["user", "system", "assistant", "tool", 7]
    return [
        {"role": rng.choice(roles), "content": rng.choice(_ODD)} for _ in range(rng.randint(0, 4))
    ]


def _odd_fields(rng):
    return {name: rng.choice(_ODD) for name in rng.sample(_FIELDS, rng.randint(1, 4))}


_ELSEWHERE = {
    "text": "/generate",
    "input_ids": "/generate",
    "input": "/v1/responses",
    "tokens": "/detokenize",
}
_KINDS = [
    _odd_fields,
    lambda rng: {"prompt": [rng.choice([0, 5, 8191, 8192, 2**31])] * rng.choice([1, 900, 20_000])},
    lambda rng: {"prompt": _long(rng)},
    lambda rng: {"prompt": ["a"] * rng.choice([1, 8, 2000]), "n": rng.choice([1, 4, 10**9])},
    lambda rng: {"prompt": [5] * 200, "echo": True, "logprobs": 20, "n": rng.choice([1, 16])},
    lambda rng: {"stop": ["x" * rng.choice([10, 2000, 100_000])] * rng.choice([1, 16, 17])},
    lambda rng: {"stop_token_ids": [1] * rng.choice([1, 2000, 100_000])},
    lambda rng: {"guided_regex": rng.choice(["(a+)+b" * 20, "a{1,100000}", "(", "[", ".*" * 500])},
    lambda rng: {"bad_words": [rng.choice(_WORDS)] * rng.choice([1, 128, 129])},
    lambda rng: {"truncate_prompt_tokens": rng.choice(_NUMBERS), "prompt": _long(rng)},
    lambda rng: {"best_of": rng.choice([2, 128]), "n": 2, "cache_salt": rng.choice(_WORDS)},
    lambda rng: {"text": rng.choice(_ODD), "sampling_params": _odd_fields(rng)},
    lambda rng: {"input_ids": [rng.choice([0, 5, 8191, 2**31])] * 9, "return_logprob": True},
    lambda rng: {"input": rng.choice([*_ODD, _messages(rng)]), **_odd_fields(rng)},
    lambda rng: {"tokens": [rng.choice([0, 5, 8192, 2**31 - 1])] * rng.choice([1, 20_000])},
    lambda rng: {"messages": _messages(rng)},
    lambda rng: {"messages": [{"role": "user", "content": _long(rng)}]},
]


def hostile_request(rng):
    """A path, a body and headers; of a kind that `rng` draws."""
    body = {"prompt": rng.choice(_WORDS[1:]), "max_tokens": rng.choice([0, 1, 4])}
    body |= rng.choice(_KINDS)(rng)
    path = next((_ELSEWHERE[name] for name in body if name in _ELSEWHERE), COMPLETIONS)
    if "messages" in body and rng.random() < 0.9:
        path = CHAT
        del body["prompt"]
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    if rng.random() < 0.1:
        content = rng.choice(
            [b"", b"{", b"[" * 50_000, b"\xff\xfe", content[:-3], b"{}" * 9, b'{"a":1e999}', b"7"]
        )
        headers["content-type"] = rng.choice(["text/plain", "application/json", "x"])
    if rng.random() < 0.05:
        headers["x-request-id"] = rng.choice(["", "x" * 5000, "a b\tc"])
    return path, content, headers


class Flood:
    """Hostile requests, made before they are sent, and how they were answered."""

    def __init__(self, num_requests, seed):
        self._rng = random.Random(seed)
        self._requests = [hostile_request(self._rng) for _ in range(num_requests)]
        self.statuses = Counter()
        self.bad = []
        """Answers of 500 and more, and what they answer."""

    async def send(self, url, num_at_once=8):
        async with client_at(url, ATTACKER) as client:

            async def work():
                while self._requests:
                    path, content, headers = self._requests.pop()
                    leaves = self._rng.random() < 0.1
                    timeout_s = self._rng.choice([0.01, 0.1]) if leaves else 120
                    try:
                        answer = await client.post(
                            path, content=content, headers=headers, timeout=timeout_s
                        )
                    except httpx.TimeoutException:
                        self.statuses[0 if leaves else 599] += 1
                        continue
                    self.statuses[answer.status_code] += 1
                    if answer.status_code >= 500:
                        self.bad.append(f"{content[:200]!r}: {answer.text[:300]}")

            await asyncio.gather(*(work() for _ in range(num_at_once)))
