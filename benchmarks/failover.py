"""Kill ranks of replicas under load: what streams get, and how long a replica is away.

PYTHONPATH=. python benchmarks/failover.py MODEL --set tensor_parallel_size=2 num_replicas=2

Two loads run undisturbed. In each of the next, a process of a kind is killed after a delay. Texts
are compared with those of the first load; in 16 bits they also differ with the batch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.serving_path import cpu_seconds
from serve_spec.bench.online.client import Clients, Target
from serve_spec.bench.online.load import ClosedLoop, LoadRun, text_requests
from serve_spec.bench.online.server import own_server, serve_command
from serve_spec.bench.report import append_record, environment, print_record
from serve_spec.config import ServeSpecConfig

RANKS = ("_Follower", "Engine")
"""Processes of ranks other than 0, and of rank 0."""
LONGEST_S = 300.0
POLL_S = 0.1


def pids_of(kind: str) -> set[int]:
    """Return the processes of a kind below this one."""
    return {pid for pid, (found, _) in cpu_seconds().items() if found == kind}


def kill_after(kind: str, delay_s: float) -> threading.Timer:
    """Kill one process of a kind after a delay."""

    def kill() -> None:
        os.kill(min(pids_of(kind)), signal.SIGKILL)

    timer = threading.Timer(delay_s, kill)
    timer.start()
    return timer


def seconds_until_healthy(url: str, kind: str, before: set[int], num_replicas: int) -> float:
    """Wait until another process has replaced a killed one and all replicas are healthy.

    Raises:
        TimeoutError: that took longer than `LONGEST_S`.
    """
    started = time.perf_counter()
    while (waited := time.perf_counter() - started) < LONGEST_S:
        now = pids_of(kind)
        if now != before and len(now) == len(before):
            health = httpx.get(f"{url}/health").json()
            if health["healthy_replicas"] == num_replicas:
                return waited
        time.sleep(POLL_S)
    raise TimeoutError(f"a replica was not back after {LONGEST_S:.0f} s")


def outcome(run: LoadRun, undisturbed: LoadRun) -> dict[str, Any]:
    """Return how the requests of a run ended, and its longest gap within a stream."""
    pairs = list(zip(run.served, undisturbed.served, strict=True))
    complete = [served for served in run.served if served.error is None]
    return {
        "requests": len(pairs),
        "same_texts": sum(a.error is None and a.text == b.text for a, b in pairs),
        "other_texts": sum(a.error is None and a.text != b.text for a, b in pairs),
        "errors": len(pairs) - len(complete),
        "tokens_per_second": round(sum(s.num_tokens for s in complete) / run.seconds, 1),
        "longest_gap_ms": round(1e3 * max(max(s.chunk_gaps_s, default=0.0) for s in complete), 1),
    }


def main() -> None:
    """Print a row for the start and for every load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="model, configuration or Serve file")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="override of its engine"
    )
    parser.add_argument("--streams", type=int, default=64, help="open requests")
    parser.add_argument("--requests-per-stream", type=int, default=4, help="requests per stream")
    parser.add_argument("--output-tokens", type=int, default=192, help="tokens per request")
    parser.add_argument("--prompt-chars", type=int, default=700, help="characters per prompt")
    parser.add_argument("--kill-after-s", type=float, default=1.0, help="delay of a kill, seconds")
    parser.add_argument("--port", type=int, default=8123, help="HTTP port of the server")
    parser.add_argument("--json", type=Path, help="file to append every row to (JSON lines)")
    args = parser.parse_args()
    keys = {key: yaml.safe_load(value) for key, value in (s.split("=", 1) for s in args.set)}
    config = ServeSpecConfig.load(args.model, **keys)
    append_record(args.json, {"section": "run", "environment": environment(config)})
    requests = text_requests(
        args.streams * args.requests_per_stream,
        prompt_chars=args.prompt_chars,
        output_tokens=args.output_tokens,
        temperature=0.0,
    )
    load, num_replicas = ClosedLoop(args.streams), config.replica.num_replicas
    started = time.perf_counter()
    with own_server(serve_command(args.model, args.port, keys)) as url:
        print_record(args.json, section="start", seconds=round(time.perf_counter() - started, 1))
        with Clients(Target(url), 1) as clients:
            clients.run(load, requests[: args.streams])
            first = clients.run(load, requests, poll_s=None)
            again = clients.run(load, requests, poll_s=None)
            print_record(args.json, section="load", killed=None, **outcome(again, first))
            for kind in RANKS:
                before = pids_of(kind)
                timer = kill_after(kind, args.kill_after_s)
                run = clients.run(load, requests, poll_s=None)
                timer.join()
                away_s = seconds_until_healthy(url, kind, before, num_replicas)
                since_kill_s = run.seconds - args.kill_after_s + away_s
                row = {"killed": kind, "healthy_after_s": round(since_kill_s, 1)}
                print_record(args.json, section="load", **row, **outcome(run, first))


if __name__ == "__main__":
    sys.exit(main())
