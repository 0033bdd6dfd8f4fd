"""Kill and stop every process of a server under load: what clients get, and when it is restored.

PYTHONPATH=. python benchmarks/faults.py [--routers 1 2] [--only Engine Router] [--json FILE]

For each fault, eight streams with known texts run while the process is killed (SIGKILL) or stopped
(SIGSTOP), and a short request is sent every 0.2 s. A row tells how the streams ended, how the short
requests were answered, and the seconds until the server is restored: as many processes as before,
all replicas healthy, requests answered; null: not within 100 s. A server that ends itself is
started anew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.serving_path import cpu_seconds, with_routers
from serve_spec.bench.online.server import own_server, serve_command
from serve_spec.bench.report import append_record, environment, print_record

DEPLOYMENT = Path("deploy/tiny.yaml")
KINDS = ("Engine", "EngineReplica", "Router", "haproxy", "ServeController", "SpecStats", "raylet")
"""Victims. The last one ends the server."""
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
NUM_STREAMS = 8
MAX_TOKENS = 600
UNTIL_FAULT_S = 0.5
PROBE_EVERY_S = 0.2
PROBE_TIMEOUT_S = 120.0
WHOLE_WITHIN_S = 100.0


def processes() -> dict[str, set[int]]:
    """Return the processes of the server by kind."""
    found: dict[str, set[int]] = {}
    for pid, (kind, _) in cpu_seconds().items():
        if pid != os.getpid():  # whose arguments may name kinds
            found.setdefault(kind, set()).add(pid)
    return {kind: found.get(kind, set()) for kind in KINDS}


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


async def stream(client: httpx.AsyncClient, index: int) -> tuple[str, str]:
    """Return how stream `index` ended (`done`, `error object` or `broken`), and its text."""
    body = {
        "prompt": f"def f{index}(x):",
        "max_tokens": MAX_TOKENS,
        "temperature": 0.8,
        "seed": index,
        "ignore_eos": True,
        "stream": True,
    }
    text, end = "", "broken"
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                return ("error object" if "error" in _parsed(await answer.aread()) else end), text
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    end = "done"
                elif data:
                    chunk = json.loads(data)
                    end = "error object" if "error" in chunk else end
                    text += "".join(choice["text"] for choice in chunk.get("choices", ()))
    except (httpx.HTTPError, ValueError):
        return "broken", text
    return end, text


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


async def probe(client: httpx.AsyncClient) -> str:
    """Return the status of a request for one token: `200`, `503`, or what broke it."""
    body = {"prompt": "a", "max_tokens": 1}
    try:
        answer = await client.post("/v1/completions", json=body, timeout=PROBE_TIMEOUT_S)
    except httpx.TimeoutException:
        return "timeout"
    except httpx.HTTPError:
        return "refused or broken"
    is_plain = answer.is_error and "error" not in _parsed(answer.content)
    return f"{answer.status_code}{' without an error object' if is_plain else ''}"


class Probes:
    """Requests for one token, sent every `PROBE_EVERY_S` whether or not the last is answered."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.statuses: Counter[str] = Counter()
        self.longest_s = 0.0
        self.last_failed_s = 0.0
        """Time since the start at which the newest failed request was sent."""
        self._client = client
        self._started = time.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Send requests until cancelled."""
        while True:
            self._tasks.add(task := asyncio.create_task(self._send()))
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(PROBE_EVERY_S)

    async def _send(self) -> None:
        sent = time.monotonic()
        status = await probe(self._client)
        self.statuses[status] += 1
        self.longest_s = max(self.longest_s, time.monotonic() - sent)
        if status != "200":
            self.last_failed_s = max(self.last_failed_s, sent - self._started)

    async def drained(self) -> None:
        """Wait for the requests that are open."""
        while self._tasks:
            await asyncio.wait(self._tasks)


async def is_restored(client: httpx.AsyncClient, before: dict[str, set[int]]) -> bool:
    """Return whether all kinds of processes are as many as before, and all replicas healthy."""
    now = processes()
    # HAProxy is two processes for a while after each change of its configuration.
    wanted = {kind: len(pids) for kind, pids in before.items()} | {"haproxy": 1}
    if any(len([*filter(is_running, now[kind])]) < wanted[kind] for kind in KINDS):
        return False
    with suppress(httpx.HTTPError, ValueError, KeyError):
        health = (await client.get("/health", timeout=5.0)).json()
        return bool(health["healthy_replicas"] == len(before["EngineReplica"]))
    return False


async def fault(url: str, kind: str, name: str, texts: list[str]) -> dict[str, Any]:
    """Kill or stop one process of a kind, and return what happened."""
    before = processes()
    victim = min(before[kind])
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=PROBE_TIMEOUT_S, limits=limits) as client:
        streams = [asyncio.create_task(stream(client, i)) for i in range(NUM_STREAMS)]
        await asyncio.sleep(UNTIL_FAULT_S)
        os.kill(victim, SIGNALS[name])
        at = time.monotonic()
        probes = Probes(client)
        sending = asyncio.create_task(probes.run())
        ends = await asyncio.gather(*streams)
        streams_s = time.monotonic() - at
        whole_s = await _seconds_until_restored(client, before, victim, at)
        sending.cancel()
        await probes.drained()
    outcomes = Counter(
        end if end != "done" else "right text" if text == expected else "wrong text"
        for (end, text), expected in zip(ends, texts, strict=True)
    )
    is_replaced = not is_running(victim)
    if not is_replaced:
        os.kill(victim, signal.SIGCONT)
    return {
        "kind": kind,
        "fault": name,
        "streams": dict(outcomes),
        "streams_ended_s": round(streams_s, 1),
        "requests": dict(probes.statuses),
        "longest_request_s": round(probes.longest_s, 1),
        "last_failed_s": round(probes.last_failed_s, 1),
        "whole_s": whole_s,
        "is_replaced": is_replaced,
        "server_ended": not processes()["raylet"],
    }


async def _seconds_until_restored(
    client: httpx.AsyncClient, before: dict[str, set[int]], victim: int, at: float
) -> float | None:
    while (waited := time.monotonic() - at) < WHOLE_WITHIN_S:
        if not processes()["raylet"]:
            return None
        is_stopped = is_running(victim) and _state(victim) == "T"
        if not is_stopped and await is_restored(client, before) and await probe(client) == "200":
            return round(waited, 1)
        await asyncio.sleep(PROBE_EVERY_S)
    return None


def _state(pid: int) -> str:
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat[stat.rindex(")") + 2]
    return "X"


@contextmanager
def server(num_routers: int, port: int) -> Iterator[str]:
    """Serve the shipped pair with two replicas and `num_routers` routers; yield the URL."""
    file: dict[str, Any] = yaml.safe_load(DEPLOYMENT.read_text())
    file["applications"][0].setdefault("args", {}).update(num_replicas=2, num_cpus=0.4)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "deploy.yaml"
        path.write_text(yaml.safe_dump(with_routers(file, num_routers), sort_keys=False))
        with own_server(serve_command(str(path), port)) as url:
            yield url


async def undisturbed(url: str) -> list[str]:
    """Return the texts of all streams."""
    async with httpx.AsyncClient(base_url=url, timeout=PROBE_TIMEOUT_S) as client:
        ends = await asyncio.gather(*(stream(client, i) for i in range(NUM_STREAMS)))
    if any(end != "done" for end, _ in ends):
        raise RuntimeError(f"a stream failed without a fault: {ends}")
    return [text for _, text in ends]


def run(num_routers: int, cases: list[tuple[str, str]], port: int, path: Path | None) -> None:
    """Run cases, each on the server of the last one unless that has ended."""
    cases = cases.copy()
    while cases:
        with server(num_routers, port) as url:
            texts = asyncio.run(undisturbed(url))
            while cases:
                kind, name = cases.pop(0)
                row = asyncio.run(fault(url, kind, name, texts))
                print_record(path, section="fault", routers=num_routers, **row)
                if row["server_ended"]:
                    break


def main() -> None:
    """Print a row for every fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 2], help="router counts")
    parser.add_argument("--only", nargs="+", default=KINDS, choices=KINDS, help="victims")
    parser.add_argument("--port", type=int, default=8000, help="HTTP port")
    parser.add_argument("--json", type=Path, help="file to append records to")
    args = parser.parse_args()
    append_record(args.json, {"section": "run", "bench": "faults", "environment": environment()})
    for count in args.routers:
        # With more routers, only faults of theirs differ.
        kinds = args.only if count == args.routers[0] else [k for k in args.only if k == "Router"]
        run(count, [(kind, name) for kind in kinds for name in SIGNALS], args.port, args.json)


if __name__ == "__main__":
    sys.exit(main())
