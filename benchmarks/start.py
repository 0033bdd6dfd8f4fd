"""Measure how long a server takes from the command to its first answer.

PYTHONPATH=. python benchmarks/start.py [MODEL ...] [--starts 5] [--cold 2] [--json FILE]

A row is one start: seconds until the router answers, until the command says that it is ready, and
until the first completion. A cold start has no cost table, nothing that the policy has learned,
and no compiled Python of this package. It leaves them behind for the warm ones.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import IO, Any

import httpx

import serve_spec
from serve_spec.bench.online.server import announced_url, serve_command
from serve_spec.bench.report import append_record, environment, print_record

POLL_S = 0.02
WITHIN_S = 300.0
STOP_WITHIN_S = 60.0
NUM_TOKENS = 8
FIGURES = ("router_s", "ready_s", "answer_s")


class Output(threading.Thread):
    """Reads what the command prints, and notes when it is ready."""

    def __init__(self, lines: IO[str]) -> None:
        super().__init__(daemon=True)
        self._lines = lines
        self.text = ""
        self.is_ready = threading.Event()
        self.ready_at = 0.0
        self.start()

    def run(self) -> None:
        """Read until the end."""
        for line in self._lines:
            self.text += line
            if announced_url(line):
                self.ready_at = time.monotonic()
                self.is_ready.set()


def first_answers(client: httpx.Client, process: subprocess.Popen[str]) -> tuple[float, float]:
    """Return when the router and when a completion was first answered; RuntimeError if neither."""
    router_at, model = None, None
    deadline = time.monotonic() + WITHIN_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if model is None:
                listed = client.get("/v1/models").raise_for_status().json()
                router_at, model = time.monotonic(), listed["data"][0]["id"]
            body = {"model": model, "prompt": "def f(", "max_tokens": NUM_TOKENS}
            client.post("/v1/completions", json=body).raise_for_status()
            assert router_at is not None, "it has listed the model"
            return router_at, time.monotonic()
        except httpx.HTTPError:
            time.sleep(POLL_S)
    raise RuntimeError(f"no answer within {WITHIN_S:.0f} s")


def start(command: list[str], url: str, cache: Path) -> dict[str, float]:
    """Start a server, stop it after its first answer, and return the seconds; RuntimeError."""
    kept = os.environ.keys() - {"PYTHONDONTWRITEBYTECODE"}
    environment_variables = {name: os.environ[name] for name in kept}
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**environment_variables, "SERVE_SPEC_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None, "stdout is a pipe"
    output = Output(process.stdout)
    try:
        with httpx.Client(base_url=url, timeout=WITHIN_S) as client:
            router_at, answer_at = first_answers(client, process)
        if not output.is_ready.wait(WITHIN_S):
            raise RuntimeError("it does not say that it is ready")
    except RuntimeError as error:
        raise RuntimeError(f"{' '.join(command)}: {error}\n{output.text}") from error
    finally:
        process.terminate()
        process.wait(STOP_WITHIN_S)
    times = zip(FIGURES, (router_at, output.ready_at, answer_at), strict=True)
    return {name: round(at - began, 2) for name, at in times}


def forget(cache: Path) -> None:
    """Remove what earlier starts have left behind."""
    shutil.rmtree(cache, ignore_errors=True)
    for folder in Path(serve_spec.__file__).parent.rglob("__pycache__"):
        shutil.rmtree(folder, ignore_errors=True)


def measure(model: str, args: argparse.Namespace) -> None:
    """Print a row for each start of a model, and the medians."""
    name, *flags = model.split()
    command = [*serve_command(name, args.port), *flags]
    url = f"http://127.0.0.1:{args.port}"
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        for kind, number in (("cold", args.cold), ("warm", args.starts)):
            rows = []
            for _ in range(number):
                if kind == "cold":
                    forget(cache)
                rows.append(start(command, url, cache))
                print_record(args.json, section="start", model=model, kind=kind, **rows[-1])
            print_record(args.json, section="median", model=model, kind=kind, **medians(rows))


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: round(median(row[name] for row in rows), 2) for name in FIGURES}


def main() -> None:
    """Print a row for every start."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models",
        nargs="*",
        default=["asset:tiny", "asset:smollm2"],
        help="model, and flags after it",
    )
    parser.add_argument("--starts", type=int, default=5, help="warm starts")
    parser.add_argument("--cold", type=int, default=2, help="cold starts, which come first")
    parser.add_argument("--port", type=int, default=8000, help="HTTP port")
    parser.add_argument("--json", type=Path, help="file to append records to")
    args = parser.parse_args()
    if min(args.starts, args.cold) < 1:
        parser.error(f"--starts={args.starts}, --cold={args.cold}: give 1 or more")
    append_record(args.json, {"section": "run", "bench": "start", "environment": environment()})
    for model in args.models:
        measure(model, args)


if __name__ == "__main__":
    main()
