"""Measure what a router and the central actor cost as the fleet grows, without a GPU.

PYTHONPATH=. python benchmarks/scale.py [--replicas 8 64] [--choices 8 64 1000] [--json FILE]

router: a `RayFleet` in this process, without Ray and HTTP. A child process has the other ends of
the connections: paced replicas that send one message per round and router. CPU is of this process.
choice: the time in which the router chooses a replica, with connections that send nothing.
actor: a `SpecStats` actor in a Ray of its own; one process reports an engine's snapshot for all
replicas, evenly over the interval that the actor asks for.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import os
import pickle
import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]
import ray

from benchmarks.paced_engine import ACCEPT_LENGTHS
from serve_spec import LLM
from serve_spec.bench.report import append_record, environment, print_record
from serve_spec.config import ServeSpecConfig
from serve_spec.core.request import FinishReason, SamplingParams, SpeculationStats, TokenDelta
from serve_spec.serving.messages import Accepted, GenerateRequest, is_last
from serve_spec.serving.router.choice import ReplicaChooser
from serve_spec.serving.router.connections import ResponseQueue, RouterConnections
from serve_spec.serving.router.fleet import RayFleet
from serve_spec.serving.statistics.stats_actor import SpecStats

PUSH_INTERVAL_S = 2.0
ROUNDS, ROUNDS_PER_SECOND = 40, 20
COSTS = {str(rows): 3.0 + rows / 8 for rows in (0, 1, 2, 4, 8, 16, 32, 64)}
LOAD: dict[str, Any] = {
    "batch_size": 8,
    "num_running": 8,
    "num_waiting": 0,
    "kv": {"free_pages": 900, "total_pages": 1000},
    "speculative_num_steps": 3,
    "avg_spec_accept_length": 2.5,
    "marginal_ms_by_batch_size": COSTS,
    "is_healthy": True,
}


class PacedReplica(RouterConnections):
    """A replica's end of its connections; all its requests get tokens in the same rounds."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self._paced, lambda: LOAD, lambda: None)

    async def _paced(self, request: GenerateRequest, queue: ResponseQueue) -> None:
        name = request.request_id
        queue.put(name, Accepted(8, self.name))
        for number in range(ROUNDS):
            await asyncio.sleep(1 / ROUNDS_PER_SECOND - time.time() % (1 / ROUNDS_PER_SECOND))
            tokens = (7,) * ACCEPT_LENGTHS[number % len(ACCEPT_LENGTHS)]
            is_end = number == ROUNDS - 1
            stats = SpeculationStats() if is_end else None
            reason = FinishReason.LENGTH if is_end else None
            queue.put(name, TokenDelta(name, tokens, " word" * len(tokens), reason, stats))


def run_replicas(pipe: Connection, num: int) -> None:
    """Connect replicas to the router whose address comes, and report their load every second."""

    async def serve() -> None:
        address = pipe.recv()
        replicas = [PacedReplica(f"replica-{number}") for number in range(num)]
        for replica in replicas:
            await replica.connect(address)
        while not pipe.poll():
            for replica in replicas:
                replica.report_load()
                await asyncio.sleep(1 / num)

    asyncio.run(serve())


def silent_handle() -> Any:
    """Return a handle of a deployment whose replicas are told addresses by other means."""

    async def results_async(**options: object) -> list[object]:
        return []

    return SimpleNamespace(
        deployment_name="EngineReplica",
        broadcast=lambda *args: SimpleNamespace(results_async=results_async),
    )


async def measure_router(num: int, num_requests: int) -> dict[str, object]:
    """Send requests evenly over twice their life, so half are open; return CPU a request."""
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=run_replicas, args=(there, num))
    child.start()
    config = ServeSpecConfig.load("asset:tiny")
    fleet = RayFleet(silent_handle(), "app", "router", "127.0.0.1", config)
    fleet.start(lambda count: None)
    here.send(fleet._connections.address)
    while fleet.num_parts < num:
        await asyncio.sleep(0.1)

    async def ask(number: int) -> None:
        params = SamplingParams(max_tokens=1000)
        async for item in fleet.generate(GenerateRequest(f"r{number}", "", "a b c " * 40, params)):
            assert is_last(item) or isinstance(item, Accepted | TokenDelta), item

    used_s, began_s = -time.process_time(), time.monotonic()
    tasks = []
    for number in range(num_requests):
        tasks.append(asyncio.create_task(ask(number)))
        await asyncio.sleep(ROUNDS / ROUNDS_PER_SECOND / num_requests * 2)
    await asyncio.gather(*tasks)
    used_s += time.process_time()
    wall_s = time.monotonic() - began_s
    here.send(None)
    child.join()
    for task in fleet._tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    return {
        "replicas": num,
        "requests": num_requests,
        "cpu_ms_per_request": round(used_s / num_requests * 1e3, 3),
        "core": round(used_s / wall_s, 3),
        "connections": num,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def measure_choice(num: int, policy: Any) -> dict[str, object]:
    """Return the time of one choice among idle connections."""
    connections: Mapping[str, Any] = {
        f"replica-{number}": SimpleNamespace(num_requests={"other": number % 8}, load=LOAD)
        for number in range(num)
    }
    chooser = ReplicaChooser(policy, "me", lambda name: 3, 64, 256, 1.25)
    request = GenerateRequest("r", "", "a b c " * 40, SamplingParams())
    times = []
    for _ in range(50):
        began_s = time.perf_counter()
        chooser.choose([request], connections)
        times.append(time.perf_counter() - began_s)
    return {"replicas": num, "policy": policy, "choice_ms": round(median(times) * 1e3, 3)}


def measure_actor(num: int, snapshot: Mapping[str, object]) -> dict[str, object]:
    """Return what one report costs the actor, and with its interval the share of a core."""
    options = {"num_cpus": 0, "enable_task_events": False}
    actor: Any = ray.remote(SpecStats).options(**options).remote(15.0, 600.0)
    pid = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
    process = psutil.Process(pid)
    before = process.memory_info().rss

    encoded = pickle.dumps(snapshot, pickle.HIGHEST_PROTOCOL)

    def send(interval_s: float) -> float:
        """Report for each replica, evenly over the interval; return the one asked for."""
        began_s, answers = time.monotonic(), []
        for number in range(num):
            time.sleep(max(0.0, began_s + number * interval_s / num - time.monotonic()))
            answers.append(actor.report.remote(f"replica-{number}", encoded))
        return max(PUSH_INTERVAL_S, float(ray.get(answers)[-1]))

    interval_s = send(0.0)
    used_s = -sum(process.cpu_times()[:2])
    num_rounds = math.ceil(20 / interval_s)
    for _ in range(num_rounds):
        send(interval_s)
    used_s += sum(process.cpu_times()[:2])
    report_ms = used_s / num_rounds / num * 1e3
    view_bytes = len(ray.get(actor.view.remote()))
    row = {
        "replicas": num,
        "report_ms": round(report_ms, 3),
        "interval_s": round(interval_s, 2),
        "core": round(num / interval_s * report_ms / 1e3, 3),
        "grown_mib": round((process.memory_info().rss - before) / 2**20, 1),
        "rss_mib": process.memory_info().rss >> 20,
        "view_kib": view_bytes >> 10,
    }
    ray.kill(actor)
    return row


def main() -> None:
    """Measure and print all rows."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--replicas", type=int, nargs="*", default=[8, 64])
    parser.add_argument("--requests", type=int, default=512, help="of all replicas")
    parser.add_argument("--runs", type=int, default=3, help="of a router")
    parser.add_argument("--choices", type=int, nargs="*", default=[8, 64, 1000])
    parser.add_argument("--actor", type=int, nargs="*", default=[8, 64, 1000])
    parser.add_argument("--json", type=Path, help="file to append records to")
    args = parser.parse_args()
    append_record(args.json, {"section": "run", "bench": "scale", "environment": environment()})
    for _ in range(args.runs):  # by turns
        for num in args.replicas:
            row = asyncio.run(measure_router(num, args.requests))
            print_record(args.json, section="router", **row)
    for num in args.choices:
        for policy in ("goodput", "balanced", "prefix"):
            print_record(args.json, section="choice", **measure_choice(num, policy))
    if args.actor:
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        snapshot = LLM(ServeSpecConfig.load("asset:tiny")).engine.snapshot()
        for num in args.actor:
            print_record(args.json, section="actor", **measure_actor(num, snapshot))


if __name__ == "__main__":
    main()
