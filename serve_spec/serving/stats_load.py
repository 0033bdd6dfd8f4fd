"""What `SpecStats` costs when a large fleet reports: the real actor, replicas that only talk."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import ray

from serve_spec.config import StatsConfig
from serve_spec.serving.reports import Report
from serve_spec.serving.stats_actor import SpecStats, actor_options

_POSITIONS = 7
_TIERS = range(_POSITIONS + 1)
# Reports that may be under way at a time; a push waits for room, as a slow replica would.
_MOST_PENDING = 512


class _Process:
    """What the process of an actor has used."""

    def cpu_s(self) -> float:
        """CPU seconds so far, all threads."""
        return time.process_time()

    def peak_mib(self) -> float:
        """The most memory that was resident, in MiB."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class _Measured(_Process, SpecStats):
    """The actor."""


class _Idle(_Process):
    """Takes the same reports and does nothing: what is left is Ray's price of a call."""

    def report(self, packed: bytes) -> float:
        """An answer of the same type."""
        return 0.0


class _Pushers:
    """Some of the fleet: sends one report after the other at an even pace."""

    def __init__(self, num_replicas: int) -> None:
        self._names = [f"EngineReplica#{number:05}" for number in range(num_replicas)]
        self._reports = [Report.of("", example_snapshot(tick)) for tick in range(256)]

    def push(self, actor: Any, per_s: float, seconds: float) -> int:
        """Reports in turn for every name; how many were sent."""
        pending: list[Any] = []
        started = time.monotonic()
        sent = 0
        while (now := time.monotonic()) < started + seconds:
            if sent >= (now - started) * per_s:
                time.sleep(0.001)
                continue
            pending.append(actor.report.remote(self._packed(sent)))
            sent += 1
            if len(pending) >= _MOST_PENDING:
                _, pending = ray.wait(pending, num_returns=len(pending) // 2)
        ray.wait(pending, num_returns=len(pending))
        return sent

    def _packed(self, number: int) -> bytes:
        report = self._reports[number % len(self._reports)]
        return report._replace(replica=self._names[number % len(self._names)]).packed()


def measure(
    num_replicas: int, interval_s: float, seconds: float, repetitions: int
) -> dict[str, Any]:
    """Runs a fleet of `num_replicas` that report every `interval_s`, on a Ray of its own.

    `repetitions` times `seconds`, in turn with an actor that does nothing at all: the machine may
    have others to serve. Times are CPU times, medians over the repetitions.

    Returns:
        reports_per_s: really delivered, in the slowest repetition.
        report_us: CPU time that the actor's process took for one of them, all threads, in
            microseconds; and in every repetition.
        ray_us: the same of the actor that does nothing.
        cores: what `report_us` makes at the fleet's rate, whether or not this machine could send
            at it.
        paced_interval_s, paced_cores: the interval that the actor asked for, where it is longer,
            and what that makes.
        status_ms, view_ms: time until the answer for the page, and for everything, was here.
        peak_mib: memory of the actor's process, before anybody asked.
    """
    per_s = num_replicas / interval_s
    one_more = Report.of("one more", {}).packed()
    with _fleet(num_replicas) as (actor, idle, pushers):
        # Every replica has been heard of before the clock starts.
        _pushed(pushers, actor, per_s, interval_s * 1.2)
        _pushed(pushers, idle, per_s, 1.0)
        rates, report_us, ray_us, paced_s = [], [], [], []
        for _ in range(repetitions):
            rate, used_s = _pushed(pushers, actor, per_s, seconds)
            rates.append(rate)
            report_us.append(used_s * 1e6)
            paced_s.append(max(interval_s, ray.get(actor.report.remote(one_more))))
            ray_us.append(_pushed(pushers, idle, per_s, seconds)[1] * 1e6)
        cores = [us / 1e6 * per_s for us in report_us]
        return {
            "reports_per_s": min(rates),
            "report_us": median(report_us),
            "report_us_each": [round(us, 1) for us in report_us],
            "ray_us": median(ray_us),
            "cores": median(cores),
            "paced_interval_s": median(paced_s),
            "paced_cores": median(
                used * interval_s / paced for used, paced in zip(cores, paced_s, strict=True)
            ),
            "peak_mib": ray.get(actor.peak_mib.remote()),
            "status_ms": _timed_ms(actor.status),
            "view_ms": _timed_ms(actor.view),
        }


@contextmanager
def _fleet(num_replicas: int) -> Iterator[tuple[Any, Any, Any]]:
    """The actor, the one that does nothing, and the replicas."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        config = StatsConfig()
        options = actor_options(config, "load")
        measured: Any = ray.remote(_Measured).options(**options)
        idle: Any = ray.remote(_Idle).options(**{**options, "name": "Idle"})
        pushers: Any = ray.remote(_Pushers)
        yield (
            measured.remote(config.stale_after_s, config.history_s),
            idle.remote(),
            pushers.remote(num_replicas),
        )
    finally:
        ray.shutdown()


def _pushed(pushers: Any, actor: Any, per_s: float, seconds: float) -> tuple[float, float]:
    """Reports per second, and CPU seconds of the actor's process for each."""
    cpu_before, started = ray.get(actor.cpu_s.remote()), time.monotonic()
    sent = ray.get(pushers.push.remote(actor, per_s, seconds))
    elapsed = time.monotonic() - started
    return sent / elapsed, (ray.get(actor.cpu_s.remote()) - cpu_before) / sent


def _timed_ms(method: Any) -> float:
    started = time.perf_counter()
    ray.get(method.remote())
    return (time.perf_counter() - started) * 1e3


def example_snapshot(tick: int) -> dict[str, object]:
    """A snapshot of the size and shape that a replica with strategy `goodput` sends."""
    rates = [0.8 - 0.05 * position for position in range(_POSITIONS)]
    positions = range(1, _POSITIONS + 1)
    by_tier = {str(k): 1.0 + 0.1 * k for k in _TIERS}
    times = {"mean": 5.1, "p50": 5.0}
    return {
        "pair": "target+draft",
        "replica_rank": tick % 100,
        "strategy": "goodput",
        "per_sequence": True,
        "slot": "16",
        "slots": {
            str(1 << i): {"candidate_steps": [*_TIERS], "speedup": 1.4, "num_closings": 0}
            for i in range(7)
        },
        "predicted_goodput": by_tier,
        "predicted_ms": 5.0,
        "acceptance": {
            "num_requests": 32,
            "positions": [
                {"position": p, "accept_rate": rates[p - 1], "trials": 400.0} for p in positions
            ],
        },
        "costs": {
            "drift": 1.0,
            "draft_factors": dict.fromkeys(map(str, range(7)), 1.0),
            "verify_factors": {str(1 << i): by_tier for i in range(7)},
        },
        "marginal_ms_by_rows": dict.fromkeys(map(str, range(16)), 0.1),
        "speculative_num_steps": tick % 5,
        "batch_size": tick % 64,
        "candidate_steps": [*_TIERS],
        "last_reason": "steady",
        "switches": {"gain": tick, "loss": tick, "range": 3},
        "rounds_by_num_steps": by_tier,
        "positions": [
            {"position": p, "drafted": tick, "reached": tick, "accepted": tick, "accept_rate": 0.7}
            for p in positions
        ],
        "avg_spec_accept_length": 2.7,
        "num_running": tick % 64,
        "num_waiting": 0,
        "num_preemptions": 0,
        "kv": {"free_pages": 1000, "total_pages": 4000},
        "counters": {"steps": tick, "decode_rows": 32 * tick, "decode_tokens": 80 * tick},
        "speculation": {
            "effective_speedup": 1.5,
            "window": {
                "rounds": 1024,
                "busy_s": 5.0,
                "tokens_per_step": 2.7,
                "by_num_steps": {
                    str(k): {"rounds": 9, "draft_ms": times, "verify_ms": times, "step_ms": times}
                    for k in _TIERS
                },
            },
            "by_batch_size": {
                str(1 << i): {"effective_speedup": 1.5, "tokens_per_ms": by_tier} for i in range(7)
            },
        },
    }
