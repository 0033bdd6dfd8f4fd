"""Kill ranks of replicas under load: what streams get, and how long a replica is away.

PYTHONPATH=. python benchmarks/failover.py MODEL --set tensor_parallel_size=2 num_replicas=2

Two loads run undisturbed. During each of the next, one rank is killed. Texts are compared with
those of the first load; in 16 bits they may also differ because batches do.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from typing import Any

import httpx

from benchmarks.serving_path import add_load_options, cpu_seconds, requests_of
from serve_spec.bench.online.client import Clients, Target
from serve_spec.bench.online.load import ClosedLoop, LoadRun
from serve_spec.bench.online.server import own_server, serve_command
from serve_spec.bench.report import append_record, environment, print_record
from serve_spec.config import ServeSpecConfig
from serve_spec.config.base import parse_yaml

RANKS = ("_Follower", "Engine")
"""Process of a rank other than 0, and of rank 0, by name."""
LONGEST_S = 300.0
POLL_S = 0.1


def pids_of(kind: str) -> set[int]:
    """Return the descendants of this process that are of a kind."""
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
    parser.add_argument("--streams", type=int, default=64, help="open requests")
    parser.add_argument("--kill-after-s", type=float, default=1.0, help="delay of a kill, seconds")
    add_load_options(parser)
    args = parser.parse_args()
    pairs = (setting.split("=", 1) for setting in args.set)
    keys = {key: parse_yaml(value, f"--set {key}") for key, value in pairs}
    config = ServeSpecConfig.load(args.model, **keys)
    append_record(args.json, {"section": "run", "environment": environment(config)})
    requests = requests_of(args.streams, args)
    load, num_replicas = ClosedLoop(args.streams), config.replica.num_replicas
    started = time.perf_counter()
    with own_server(serve_command(args.model, args.port, keys)) as url:
        print_record(args.json, section="start", seconds=round(time.perf_counter() - started, 1))
        with Clients(Target(url), args.clients) as clients:
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
