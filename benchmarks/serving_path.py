"""What the path from an engine to its HTTP clients costs: CPU time per chunk, by process.

PYTHONPATH=. python benchmarks/serving_path.py [--routers 1 2 4] [--streams 64] [--rounds 20]
    [--output-tokens 192] [--repetitions 2] [--checkouts . ../before] [--json FILE]

With several checkouts, their servers take turns. Ray Serve's settings are those of the environment,
and those that `serve-spec serve` of the checkout adds.

The engine is `paced_engine`: it emits all streams' tokens so many times a second, and says how late
its rounds begin. Chunks that come together count as they were sent, so merging them lowers their
number: CPU time per emitted token is given, too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import chdir
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import yaml

from benchmarks.paced_engine import ACCEPT_LENGTHS
from serve_spec.bench.online.clients import Clients, Target
from serve_spec.bench.online.load import ClosedLoop
from serve_spec.bench.online.record import LoadRun, TextRequest, text_requests
from serve_spec.bench.online.server import own_server, serve_command
from serve_spec.bench.report import append_row, environment

DEPLOYMENT = Path("deploy/tiny.yaml")
REPORT_S = 3.0
"""Seconds within which the engine's newest state reaches the router."""
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def deployment(num_routers: int, num_streams: int) -> dict[str, Any]:
    """Return the shipped deployment with the stand-in engine and so many routers."""
    file: dict[str, Any] = yaml.safe_load(DEPLOYMENT.read_text())
    app = file["applications"][0]
    app["args"] |= {
        "engine_loop": "benchmarks.paced_engine:PacedLoop",
        "max_num_seqs": num_streams,
        "num_cpus": 0.1,
        "speculative_algorithm": "NGRAM",
        "speculative_draft_model_path": None,
    }
    app["deployments"] = [{"name": "Router", "num_replicas": num_routers}]
    return file


def cpu_seconds() -> dict[int, tuple[str, float]]:
    """Return what each process of this session's children is, and the CPU seconds it has had."""
    parents, found = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            stat = (folder / "stat").read_text()
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        fields = stat[stat.rindex(")") + 2 :].split()
        pid = int(folder.name)
        parents[pid] = int(fields[1])
        found[pid] = kind_of(title), (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND
    return {pid: each for pid, each in found.items() if _is_below(pid, os.getpid(), parents)}


def _is_below(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != ancestor:
        pid = parents[pid]
    return pid == ancestor


def kind_of(title: str) -> str:
    """Return the role of a process by its title."""
    named = re.match(r"ray::(?:ServeReplica:\w+:)?(\w+)", title)
    if named:
        return named[1]
    others = ("raylet", "gcs_server", "serving_path", "haproxy")
    return next((kind for kind in others if kind in title), "other")


def figures(run: LoadRun, spent: dict[str, float], offered: float) -> dict[str, Any]:
    """Return rates, gaps between chunks, and CPU time per chunk and per token by process.

    offered: tokens per second that the engine emits while all streams are open.
    """
    errors = sum(served.error is not None for served in run.served)
    chunks = sum(len(served.chunk_s) for served in run.served)
    tokens = sum(served.num_tokens for served in run.served)
    gaps = [1e3 * (b - a) for s in run.served for a, b in pairwise(s.chunk_s)]
    first = [1e3 * (s.chunk_s[0] - s.sent_s) for s in run.served if s.chunk_s]
    server = {kind: s for kind, s in spent.items() if kind != "serving_path"}
    return {
        "errors": errors,
        "chunks_per_second": round(chunks / run.seconds, 1),
        "tokens_per_second": round(tokens / run.seconds, 1),
        "offered_per_second": round(offered, 1),
        "gap_p50_ms": round(median(gaps), 2),
        "gap_p99_ms": round(quantiles(gaps, n=100)[-1], 2),
        "first_token_p50_ms": round(median(first), 2),
        "cpu_us_per_chunk": round(1e6 * sum(server.values()) / chunks, 1),
        "cpu_us_per_token": round(1e6 * sum(server.values()) / tokens, 1),
        "by_process": {kind: round(1e6 * s / chunks, 1) for kind, s in sorted(spent.items())},
    }


def round_times(url: str) -> dict[str, Any]:
    """Return how late the newest rounds were, and the host's time of a round."""
    time.sleep(REPORT_S)
    (state,) = httpx.get(f"{url}/server_info").raise_for_status().json()["internal_states"]
    return {name: state[name] for name in ("late_ms", "host_ms") if name in state}


def main() -> None:
    """Print a line for every number of routers and repetition."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=float, default=20.0, help="of the engine, per second")
    parser.add_argument("--output-tokens", type=int, default=192)
    parser.add_argument("--requests-per-stream", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--checkouts", type=absolute, nargs="+", default=[absolute(".")])
    parser.add_argument("--json", type=absolute)
    args = parser.parse_args()
    os.environ["SERVE_SPEC_PACED_ROUNDS"] = str(args.rounds)
    append_row(args.json, {"section": "run", "environment": environment(None)})
    count = args.streams * args.requests_per_stream
    requests = text_requests(
        count, prompt_chars=400, output_tokens=args.output_tokens, temperature=0.0
    )
    for num_routers in args.routers:
        for checkout in args.checkouts:
            file = yaml.safe_dump(deployment(num_routers, args.streams))
            for row in loads(checkout, file, requests, args):
                shown = {"routers": num_routers, "commit": commit_of(checkout), **row}
                print(json.dumps(shown), flush=True)
                append_row(args.json, {"section": "load", **shown})


def loads(
    checkout: Path, deployment: str, requests: list[TextRequest], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the figures of every repetition on the server of a checkout."""
    offered = args.rounds * args.streams * sum(ACCEPT_LENGTHS) / len(ACCEPT_LENGTHS)
    os.environ["PYTHONPATH"] = str(checkout)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(deployment)
        file.flush()
        command = serve_command(file.name, args.port)
        with chdir(checkout), own_server(command) as url, Clients(Target(url)) as clients:
            clients.run(ClosedLoop(args.streams), requests[: args.streams])
            for repetition in range(args.repetitions):
                before = cpu_seconds()
                run = clients.run(ClosedLoop(args.streams), requests)
                spent: dict[str, float] = defaultdict(float)
                for pid, (kind, seconds) in cpu_seconds().items():
                    spent[kind] += seconds - before.get(pid, (kind, 0.0))[1]
                row = {"repetition": repetition, **figures(run, spent, offered)}
                yield {**row, **round_times(url)}


def absolute(path: str) -> Path:
    """Return a path that stays right in another directory."""
    return Path(path).absolute()


def commit_of(checkout: Path) -> str:
    """Return the short name of the commit that is checked out."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
