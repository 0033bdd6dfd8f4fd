"""What `SpecStats` costs when a large fleet reports: the real actor, replicas that only talk."""

from __future__ import annotations

import time
from typing import Any

import ray

from serve_spec.config import StatsConfig
from serve_spec.serving.stats_actor import SpecStats, actor_options, packed

_POSITIONS = 7
_TIERS = range(_POSITIONS + 1)
# Reports that may be under way at a time; a push waits for room, as a slow replica would.
_MOST_PENDING = 512


class _Measured(SpecStats):
    """The actor, and what its process has used."""

    def cpu_s(self) -> float:
        """CPU seconds of this process so far, all threads."""
        return time.process_time()


class _Pushers:
    """Some of the fleet: sends one report after the other at an even pace."""

    def push(self, actor: Any, names: list[str], per_s: float, seconds: float) -> int:
        """Reports in turn for every name; how many were sent."""
        pending: list[Any] = []
        snapshots = [packed(example_snapshot(tick)) for tick in range(256)]
        started = time.monotonic()
        sent = 0
        while (now := time.monotonic()) < started + seconds:
            if sent >= (now - started) * per_s:
                time.sleep(0.001)
                continue
            pending.append(
                actor.report.remote(names[sent % len(names)], snapshots[sent % len(snapshots)])
            )
            sent += 1
            if len(pending) >= _MOST_PENDING:
                _, pending = ray.wait(pending, num_returns=len(pending) // 2)
        ray.wait(pending, num_returns=len(pending))
        return sent


def measure(num_replicas: int, interval_s: float, seconds: float) -> dict[str, float]:
    """Runs a fleet of `num_replicas` that report every `interval_s`, on a Ray of its own.

    Returns:
        reports_per_s: really delivered.
        report_us: CPU time that the actor's process took for one of them, all threads, in
            microseconds.
        cores: what that makes at the fleet's rate, whether or not this machine could send at it.
        status_ms, view_ms: time until the answer for the page, and for everything, was here.
    """
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        config = StatsConfig()
        actor: Any = (
            ray.remote(_Measured)
            .options(**actor_options(config))
            .remote(config.stale_after_s, config.history_s)
        )
        pushers: Any = ray.remote(_Pushers).remote()
        names = [f"EngineReplica#{number:05}" for number in range(num_replicas)]
        per_s = num_replicas / interval_s
        # Every replica has been heard of before the clock starts.
        ray.get(pushers.push.remote(actor, names, per_s, interval_s * 1.2))
        cpu_before, started = ray.get(actor.cpu_s.remote()), time.monotonic()
        sent = ray.get(pushers.push.remote(actor, names, per_s, seconds))
        used, elapsed = ray.get(actor.cpu_s.remote()) - cpu_before, time.monotonic() - started
        return {
            "reports_per_s": sent / elapsed,
            "report_us": used / sent * 1e6,
            "cores": used / sent * per_s,
            "status_ms": _timed_ms(actor.status),
            "view_ms": _timed_ms(actor.view),
        }
    finally:
        ray.shutdown()


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
