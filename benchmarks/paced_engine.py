"""An engine that computes nothing: it emits recorded numbers of tokens at a given rate.

`PacedLoop` takes the place of `EngineLoop` (`engine_loop` of the application), so that everything
between an engine and its HTTP clients can be measured without a GPU. SERVE_SPEC_PACED_ROUNDS sets
the rounds a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from serve_spec.engine.loop import EngineLoop

from serve_spec.config import ServeSpecConfig
from serve_spec.core.request import FinishReason, SamplingParams, SpeculationStats, TokenDelta
from serve_spec.core.sequence import Sequence as Request
from serve_spec.engine.output import OutputText
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.parallel.launch import Launcher

ROUNDS_PER_SECOND = float(os.environ.get("SERVE_SPEC_PACED_ROUNDS", "60"))
ACCEPT_LENGTHS = (3, 1, 4, 2, 1, 4, 3, 1, 2, 4)
"""Tokens of a request's rounds, again and again: 2.5 in the mean."""
TEXT = "the quick brown fox jumps over the lazy dog and runs away from all the other animals "


class PacedEngine:
    """Requests that grow by a text, all of them once a round."""

    def __init__(self, config: ServeSpecConfig) -> None:
        self.tokenizer = Tokenizer(Path(config.model.path))
        self.controller = SimpleNamespace(start_from=lambda rates: None)
        self.metrics: Any = None
        self._tokens = self.tokenizer.encode(TEXT)
        self._open: dict[str, tuple[Request, OutputText, int]] = {}
        self._due = 0.0
        self._num_rounds = 0

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def step(self) -> list[TokenDelta]:
        """Wait for the next round; return what it adds to every request."""
        now = time.monotonic()
        self._due = max(self._due + 1.0 / ROUNDS_PER_SECOND, now)
        time.sleep(self._due - now)
        self._num_rounds += 1
        deltas = []
        for request_id, (request, text, started) in list(self._open.items()):
            at = self._num_rounds - started
            size = ACCEPT_LENGTHS[at % len(ACCEPT_LENGTHS)]
            new = [self._tokens[(3 * at + i) % len(self._tokens)] for i in range(size)]
            del new[text.push(new) :]
            request.token_ids += new
            reason = text.finish_reason
            stats = SpeculationStats() if reason else None
            deltas.append(TokenDelta(request_id, tuple(new), text.take(), reason, stats))
            if reason:
                del self._open[request_id]
        return deltas

    def encode(self, prompt: str) -> list[int]:
        return self.tokenizer.encode(prompt)

    def new_sequence(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        emitted: Sequence[int] = (),
    ) -> Request:
        return Request(request_id, params, [*prompt, *emitted], len(prompt), params.seed or 0)

    def add(self, request: Request) -> None:
        text = OutputText(self.tokenizer, request, ())
        self._open[request.request_id] = request, text, self._num_rounds

    def abort(self, request_id: str) -> TokenDelta | None:
        if self._open.pop(request_id, None) is None:
            return None
        return TokenDelta(request_id, (), "", FinishReason.ABORT, SpeculationStats())

    def idle_wait_s(self) -> float | None:
        return None

    def use_idle_time(self) -> None: ...

    def check_health(self) -> None: ...

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
        }


class PacedLoop(EngineLoop):
    """An `EngineLoop` around a `PacedEngine`."""

    def _build(self, config: ServeSpecConfig, launcher: Launcher | None) -> Any:
        return PacedEngine(config)
