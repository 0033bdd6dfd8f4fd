"""Attack a server of the shipped pair, and report what honest clients notice: `make attack`.

PYTHONPATH=. python benchmarks/attack.py [--requests 5000] [--json FILE]

Eight honest streams run without a break while the phases come one after the other: hostile requests
of many kinds, storms of short connections, clients that do not read, idle connections, deadlines,
HTTP/2 and reset connections, control characters. A row per phase tells the answers, deaths of
processes, the longest gap in an honest stream, and when nothing of the phase was left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx

from benchmarks.faults import processes, server
from serve_spec.bench.report import append_record, environment, print_record
from tests.e2e.attacks import Flood, Watch, client_at, head

COMPLETIONS = "/v1/completions"
NUM_HONEST = 8
FREE_WITHIN_S = 60.0
STORM_CLIENT, DEADLINE_CLIENT = "127.0.0.6", "127.0.0.7"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
_RESET_FRAME = bytes.fromhex("00000403000000000100000008")


def address(url: str) -> tuple[str, int]:
    """Return host and port of a URL."""
    parts = httpx.URL(url)
    assert parts.port is not None, "servers here have explicit ports"
    return parts.host, parts.port


def connect(url: str, host: str = STORM_CLIENT) -> socket.socket:
    """Return a connection from a loopback address of its own."""
    return socket.create_connection(address(url), 5, source_address=(host, 0))


def post(body: dict[str, Any]) -> bytes:
    """Return a request for a completion as bytes."""
    content = json.dumps(body).encode()
    return head(COMPLETIONS, len(content)) + content


def reset(sock: socket.socket) -> None:
    """Close a connection with RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def storm(url: str, num_storms: int, most_choices: int) -> Counter[str]:
    """Send storms of 100 requests of up to 800 tokens that leave after 0.15 s."""
    for _ in range(num_storms):
        sockets = []
        for i in range(100):
            body = {"prompt": f"def f{i}(", "max_tokens": 800, "ignore_eos": True}
            body |= {"stream": i % 2 == 0, "n": 1 + i % most_choices}
            sockets.append(sock := connect(url))
            sock.sendall(post(body))
        time.sleep(0.15)
        for i, sock in enumerate(sockets):
            reset(sock) if i % 2 else sock.close()
    return Counter({"left": 100 * num_storms})


def idle(url: str) -> Counter[str]:
    """Hold 2,000 connections for 5 s, then send half a request on half of them."""
    sockets = [connect(url) for _ in range(2000)]
    time.sleep(5)
    for sock in sockets[:1000]:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n")
    time.sleep(1)
    for sock in sockets:
        sock.close()
    return Counter({"idle": len(sockets)})


def slow_readers(url: str) -> Counter[str]:
    """Let 64 streams with long chunks run without reading them, for 8 s."""
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "logprobs": 20, "stream": True}
    sockets = []
    for _ in range(64):
        sockets.append(sock := connect(url))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(post(body))
    time.sleep(8)
    for sock in sockets:
        sock.close()
    return Counter({"unread": len(sockets)})


def odd_protocols(url: str) -> Counter[str]:
    """Speak HTTP/2 with stream resets, upgrade to WebSockets, and reset connections midway."""
    upgrade = (
        b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\nsec-websocket-version: 13\r\n\r\n"
    )
    starts = [
        _PREFACE + _RESET_FRAME * 200,
        upgrade,
        post({"prompt": "a"})[:-5],
        b"\x16\x03\x01\x02",
    ]
    for i in range(400):
        sock = connect(url)
        sock.sendall(starts[i % len(starts)])
        time.sleep(0.005)
        reset(sock)
    return Counter({"reset": 400})


def hostile(url: str, num_requests: int) -> tuple[Counter[str], list[str]]:
    """Send hostile requests, eight at a time; return their statuses and bad answers."""
    flood = Flood(num_requests, seed=num_requests)
    asyncio.run(flood.send(url))
    statuses = Counter({str(status): n for status, n in flood.statuses.items()})
    return statuses, flood.bad


def deadlines(url: str) -> Counter[str]:
    """Let 200 clients give up after 3 s, twice."""
    return asyncio.run(_deadlines(url))


async def _deadlines(url: str) -> Counter[str]:
    body = {"max_tokens": 900, "ignore_eos": True}

    async def ask(client: httpx.AsyncClient, i: int) -> str:
        try:
            answer = await client.post(COMPLETIONS, json={**body, "prompt": f"a{i}"})
        except httpx.TimeoutException:
            return "gave up"
        return str(answer.status_code)

    outcomes: Counter[str] = Counter()
    async with client_at(url, DEADLINE_CLIENT, timeout_s=3) as client:
        for _ in range(2):
            outcomes += Counter(await asyncio.gather(*(ask(client, i) for i in range(200))))
    return outcomes


def control_characters(url: str) -> Counter[str]:
    """Send ids, names and users with control characters, in headers and fields."""
    statuses: Counter[str] = Counter()
    rng = random.Random(5)
    with httpx.Client(base_url=url, timeout=120) as client:
        for _ in range(200):
            odd = "".join(chr(rng.choice([0, 7, 9, 27, 127, 0x85, 0x2028])) for _ in range(9))
            field = rng.choice(["model", "user", "request_id", "cache_salt"])
            body = {"prompt": "a", "max_tokens": 1, field: odd}
            name = f"a\tb{rng.choice(['', chr(0x85), chr(0xFF)])}"
            headers = {"x-request-id": name.encode("latin-1")}
            answer = client.post(COMPLETIONS, json=body, headers=headers)
            statuses[str(answer.status_code)] += 1
    return statuses


def memory_mb() -> dict[str, float]:
    """Return the resident memory of all processes of each kind."""
    pages = {
        kind: sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
        for kind, pids in processes().items()
    }
    return {kind: round(count * 4096 / 2**20, 1) for kind, count in pages.items()}


async def seconds_until_free(client: httpx.AsyncClient) -> float | None:
    """Return the seconds until only honest requests are left; None: not within a minute.

    Engines report every two seconds, so that much of it may be the report's age.
    """
    started = time.monotonic()
    while (waited := time.monotonic() - started) < FREE_WITHIN_S:
        state = (await client.get("/server_info")).raise_for_status().json()
        engines = state["internal_states"]
        router = state["router"]["in_flight"] + state["router"]["queue_len"]
        engine = sum(each["num_running"] + each["num_waiting"] for each in engines)
        if max(router, engine) <= NUM_HONEST:
            return round(waited, 1)
        await asyncio.sleep(0.1)
    return None


class Attack:
    """The honest streams, and a row for each phase beside them, which has a process of its own."""

    def __init__(self, url: str, path: Path | None) -> None:
        self._url = url
        self._path = path
        self._watch = Watch()
        self._process = ProcessPoolExecutor(1, get_context("spawn"))

    async def phase(self, name: str, work: Callable[..., Any], *args: int) -> None:
        """Run `work(url, *args)` and print the row of this phase."""
        before, memory = processes(), memory_mb()
        num_before, started = len(self._watch.streams), time.monotonic()
        loop = asyncio.get_running_loop()
        outcome = await loop.run_in_executor(self._process, work, self._url, *args)
        seconds = time.monotonic() - started
        statuses, bad = outcome if isinstance(outcome, tuple) else (outcome, [])
        async with client_at(self._url, DEADLINE_CLIENT) as client:
            free_s = await seconds_until_free(client)
        grown = {kind: round(mb - memory[kind], 1) for kind, mb in memory_mb().items()}
        streams = self._watch.streams[max(0, num_before - NUM_HONEST) :]
        gap_s = max(stream.longest_gap_s for stream in streams)
        print_record(
            self._path,
            section="phase",
            phase=name,
            seconds=round(seconds, 1),
            outcomes=dict(statuses),
            bad=bad[:5],
            deaths=sum(len(pids - processes()[kind]) for kind, pids in before.items()),
            honest_errors=self._watch.errors[:3],
            honest_texts=len(self._watch.texts),
            longest_honest_gap_s=round(gap_s, 2),
            free_after_s=free_s,
            grown_mb={kind: mb for kind, mb in grown.items() if abs(mb) >= 1},
        )

    async def run(self, num_requests: int) -> None:
        """Run all phases beside the honest streams."""
        url = self._url
        async with client_at(url, "127.0.0.2") as client:
            honest = [
                asyncio.create_task(self._watch.stream_for_ever(client)) for _ in range(NUM_HONEST)
            ]
            while not self._watch.texts:
                await asyncio.sleep(0.05)
            first = num_requests // 5
            await self.phase("hostile, first fifth", hostile, first)
            await self.phase("hostile", hostile, num_requests - first)
            for most in (1, 3, 8):
                await self.phase(f"15 storms, n up to {most}", storm, 15, most)
            for work in (slow_readers, idle, odd_protocols, deadlines, control_characters):
                await self.phase(work.__name__.replace("_", " "), work)
            for task in honest:
                task.cancel()
            await asyncio.gather(*honest, return_exceptions=True)


def main() -> None:
    """Print a row for every phase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000, help="hostile requests")
    parser.add_argument("--routers", type=int, default=1, help="routers")
    parser.add_argument("--port", type=int, default=8000, help="HTTP port")
    parser.add_argument("--json", type=Path, help="file to append records to")
    args = parser.parse_args()
    append_record(args.json, {"section": "run", "bench": "attack", "environment": environment()})
    with server(args.routers, args.port) as url:
        asyncio.run(Attack(url, args.json).run(args.requests))


if __name__ == "__main__":
    sys.exit(main())
