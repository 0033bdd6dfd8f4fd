"""An engine that computes nothing and emits recorded numbers of tokens at a fixed rate.

`PacedLoop` replaces `start_engine` (`engine_loop` of the application), so the path between an
engine and its HTTP clients can be measured without a GPU. SERVE_SPEC_PACED_ROUNDS sets the rounds
per second. The snapshot has `late_ms`, from the due time of a round to its begin, and `host_ms`,
from there to the next call of `step`: the cost of everything else in the process.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

from serve_spec.config import ServeSpecConfig
from serve_spec.core.request import FinishReason, SpeculationStats, TokenDelta
from serve_spec.core.sequence import Sequence
from serve_spec.engine.client import EngineClient
from serve_spec.engine.inputs import EngineLimits
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.parallel.worker_ranks import Launcher
from serve_spec.serving.deployment.engine_actor import start_engine

ROUNDS_PER_SECOND = float(os.environ.get("SERVE_SPEC_PACED_ROUNDS", "60"))
ACCEPT_LENGTHS = (3, 1, 4, 2, 1, 4, 3, 1, 2, 4)
"""Tokens of the rounds of a request, repeated: 2.5 on average."""
TEXT = "the quick brown fox jumps over the lazy dog and runs away from all the other animals "


def _spread(values: Any) -> dict[str, float]:
    p99 = quantiles(values, n=100)[-1]
    return {"p50": round(median(values), 3), "p99": round(p99, 3), "max": round(max(values), 3)}


class PacedEngine:
    """An engine that extends every request by a fixed text once per round."""

    def __init__(self, config: ServeSpecConfig) -> None:
        tokenizer = Tokenizer(config.model.tokenizer_folder)
        size = tokenizer.vocab_size
        self.limits = EngineLimits(size, size, (), max_model_len=2**16)
        self.controller = SimpleNamespace(start_from=lambda rates: None)
        self.metrics: Any = None
        self._tokens = tokenizer.encode(TEXT)
        self._open: dict[str, tuple[Sequence, int]] = {}
        self._due = 0.0
        self._num_rounds = 0
        self._late_ms: deque[float] = deque([0.0] * 2, maxlen=256)
        self._host_ms: deque[float] = deque([0.0] * 2, maxlen=256)

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def step(self) -> list[TokenDelta]:
        """Wait for the next round; return its tokens."""
        now = time.monotonic()
        if now - self._due < 1.0 / ROUNDS_PER_SECOND:
            self._host_ms.append((now - self._due) * 1e3)
        self._due = max(self._due + 1.0 / ROUNDS_PER_SECOND, now)
        time.sleep(self._due - now)
        self._late_ms.append((time.monotonic() - self._due) * 1e3)
        self._num_rounds += 1
        deltas = []
        for request_id, (request, started) in list(self._open.items()):
            at = self._num_rounds - started
            size = ACCEPT_LENGTHS[at % len(ACCEPT_LENGTHS)]
            new = [self._tokens[(3 * at + i) % len(self._tokens)] for i in range(size)]
            count, reason = request.cut(new)
            del new[count:]
            request.token_ids += new
            stats = SpeculationStats() if reason else None
            deltas.append(TokenDelta(request_id, tuple(new), "", reason, stats))
            if reason:
                del self._open[request_id]
        return deltas

    def add(self, request: Sequence) -> None:
        self._open[request.request_id] = request, self._num_rounds

    def abort(self, request_id: str) -> TokenDelta | None:
        if self._open.pop(request_id, None) is None:
            return None
        return TokenDelta(request_id, (), "", FinishReason.ABORT, SpeculationStats())

    def idle_wait_s(self) -> float:
        return math.inf

    def use_idle_time(self) -> None: ...

    def check_health(self) -> None: ...

    def give_up(self, reason: str) -> None: ...

    def reconfigure(self, settings: Mapping[str, object]) -> None: ...

    def shutdown(self) -> None: ...

    def snapshot(self) -> dict[str, object]:
        return {
            "speculative_num_steps": 3,
            "avg_spec_accept_length": sum(ACCEPT_LENGTHS) / len(ACCEPT_LENGTHS),
            "batch_size": len(self._open),
            "num_running": len(self._open),
            "num_waiting": 0,
            "kv": {"free_pages": 1, "total_pages": 1},
            "slots": {},
            "late_ms": _spread(self._late_ms),
            "host_ms": _spread(self._host_ms),
        }


def build(config: ServeSpecConfig, launcher: Launcher | None) -> PacedEngine:
    """Return the engine, see `build_engine`."""
    return PacedEngine(config)


def start(config: ServeSpecConfig) -> EngineClient:
    """Start the engine in a process of its own."""
    return start_engine(config, "benchmarks.paced_engine:build")


PacedLoop = start
"""Entry point for `serving_path`."""
