"""A stand-in for `EngineLoop`: deterministic texts, and a prompt's first word commands faults.

"a b c"      echoes the words of the prompt for ever, two tokens per round
"hold ..."   one round, then silence until the request is cancelled
"break ..."  one round, then the engine fails
"fail ..."   fails before it accepts
"full ..."   refuses because its queue is full
"die ..."    one round, then the process ends
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from typing import Any

from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import EngineOverloaded, InvalidRequest
from serve_spec.core.request import FinishReason, SamplingParams, SpeculationStats, TokenDelta

MAX_MODEL_LEN = 64


class FakeStream:
    """The deltas of one request."""

    def __init__(self, request_id: str, words: list[str], params: SamplingParams) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = len(words)
        self.cancelled = asyncio.Event()
        self._words = words
        self._params = params
        self._stats = SpeculationStats()

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        total, sent = self._params.max_tokens, 0
        while sent < total:
            count = min(2, total - sent)
            yield self._delta(sent, count, last=sent + count == total)
            sent += count
            command = self._words[0]
            if command == "hold":
                await self.cancelled.wait()
                yield TokenDelta(self.request_id, (), "", FinishReason.ABORT, self._stats)
                return
            if command == "break":
                raise RuntimeError("the engine thread died: boom")
            if command == "die":
                os._exit(1)
            await asyncio.sleep(0)

    def _delta(self, start: int, count: int, *, last: bool) -> TokenDelta:
        self._stats.observe(num_steps=3, num_correct_drafts=count - 1)
        ids = tuple(range(start, start + count))
        text = "".join(f"{self._words[i % len(self._words)]} " for i in ids)
        reason = FinishReason.LENGTH if last else None
        return TokenDelta(self.request_id, ids, text, reason, self._stats if last else None)


class FakeLoop:
    """The protocol of `EngineLoop` without an engine."""

    def __init__(self, config: ServeSpecConfig | None = None) -> None:
        self.knobs: dict[str, Any] = {}
        self.streams: dict[str, FakeStream] = {}
        self.num_cancelled = 0
        self.tokens = 0

    async def submit(
        self, prompt: str | list[int], params: SamplingParams, request_id: str
    ) -> FakeStream:
        words = prompt.split() if isinstance(prompt, str) else [f"<{token}>" for token in prompt]
        if not words:
            raise InvalidRequest("prompt", prompt, "give at least one token of text")
        if len(words) >= MAX_MODEL_LEN:
            fix = f"shorten it to at most {MAX_MODEL_LEN - 1} tokens"
            raise InvalidRequest("prompt", f"<{len(words)} tokens>", fix, too_long=True)
        if words[0] == "fail":
            raise RuntimeError("the engine thread died: boom")
        if words[0] == "full":
            raise EngineOverloaded("max_waiting_seqs=0 requests wait")
        stream = FakeStream(request_id, words, params)
        self.streams[request_id] = stream
        self.tokens += params.max_tokens
        return stream

    def cancel(self, request_id: str) -> None:
        stream = self.streams.pop(request_id, None)
        if stream is not None:
            self.num_cancelled += 1
            stream.cancelled.set()

    def check_health(self) -> None:
        if self.knobs.get("sick"):
            raise RuntimeError("told to be sick")

    def reconfigure(self, settings: Mapping[str, object]) -> None:
        self.knobs = dict(settings)

    def snapshot(self) -> dict[str, object]:
        return {
            "speculative_num_steps": 3,
            "avg_spec_accept_length": 2.0,
            "batch_size": len(self.streams),
            "num_running": len(self.streams),
            "num_waiting": 0,
            "kv": {"free_pages": 100 - len(self.streams), "total_pages": 100},
            "counters": {"decode_rows": self.tokens // 2, "decode_tokens": self.tokens},
            "slots": {},
            "reason": "fake",
            "knobs": self.knobs,
        }

    def shutdown(self) -> None:
        self.streams.clear()
