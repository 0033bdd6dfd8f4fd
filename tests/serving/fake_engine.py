"""A stand-in for `EngineLoop`: deterministic texts, and a prompt's first word commands faults.

"a b c"      echoes the words of the prompt for ever, two tokens per round
"hold ..."   one round, then silence until the request is cancelled
"break ..."  one round, then the engine fails
"fail ..."   fails before it accepts
"full ..."   refuses because its queue is full
"die ..."    one round, then the process ends; where it is continued, it lives
"poison ..." one round, then the process ends, wherever it is continued

A word is a token. The next one is what followed the last one before, or the prompt's first.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.core.errors import EngineOverloaded, InvalidRequest
from serve_spec.core.request import FinishReason, SamplingParams, SpeculationStats, TokenDelta
from serve_spec.metrics import MetricsSink
from tests.serving.lawful_logprobs import entries_of, prompt_entries

MAX_MODEL_LEN = 64


class FakeTokenizer:
    """A word, with the space after it, is a token; ids that are no word's are shown as numbers."""

    def encode(self, text: str) -> list[int]:
        return [int.from_bytes(b"\x01" + word.encode(), "big") for word in text.split()]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(f"{self._word(token)} " for token in token_ids)

    def _word(self, token: int) -> str:
        spelled = token.to_bytes((token.bit_length() + 7) // 8, "big")
        return spelled[1:].decode() if spelled[:1] == b"\x01" and spelled[1:] else f"<{token}>"


class FakeStream:
    """The deltas of one request."""

    def __init__(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        dies: bool,
        emitted: tuple[int, ...],
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = len(token_ids)
        self.cancelled = asyncio.Event()
        self._token_ids = [*token_ids, *emitted]
        self._dies = dies
        self._command = FakeTokenizer().decode(token_ids[:1]).strip()
        self._params = params
        self._stats = SpeculationStats()

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        total = self._params.max_tokens
        sent = len(self._token_ids) - self.num_prompt_tokens
        while sent < total:
            count = min(2, total - sent)
            yield self._delta(count, last=sent + count == total)
            sent += count
            command = self._command
            if command == "hold":
                await self.cancelled.wait()
                yield TokenDelta(self.request_id, (), "", FinishReason.ABORT, self._stats)
                return
            if command == "break":
                raise RuntimeError("the engine thread died: boom")
            if self._dies:
                await asyncio.sleep(0.1)  # what it said is to leave the process
                os._exit(1)
            await asyncio.sleep(0)

    def _delta(self, count: int, *, last: bool) -> TokenDelta:
        self._stats.observe(num_steps=3, num_correct_drafts=count - 1)
        before = list(self._token_ids)
        new = [self._draw() for _ in range(count)]
        is_first = len(before) == self.num_prompt_tokens
        return TokenDelta(
            self.request_id,
            tuple(new),
            FakeTokenizer().decode(new),
            FinishReason.LENGTH if last else None,
            self._stats if last else None,
            entries_of(before, new, self._params.logprobs),
            prompt_entries(before, self._params.prompt_logprobs) if is_first else None,
        )

    def _draw(self) -> int:
        *before, last = self._token_ids
        self._token_ids.append(
            self._token_ids[1 + before.index(last)] if last in before else self._token_ids[0]
        )
        return self._token_ids[-1]


class FakeLoop:
    """The protocol of `EngineLoop` without an engine."""

    tokenizer = FakeTokenizer()

    def __init__(self, config: ServeSpecConfig | None = None) -> None:
        self.knobs: dict[str, Any] = {}
        self.streams: dict[str, FakeStream] = {}
        self.num_cancelled = 0
        self.tokens = 0
        self.accept_rates: list[float] | None = None

    async def encode(self, prompt: str) -> list[int]:
        return self.tokenizer.encode(prompt)

    async def submit(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str,
        emitted: tuple[int, ...] = (),
    ) -> FakeStream:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidRequest("prompt", prompt, "give at least one token of text")
        if len(ids) >= MAX_MODEL_LEN:
            fix = f"shorten it to at most {MAX_MODEL_LEN - 1} tokens"
            raise InvalidRequest("prompt", f"<{len(ids)} tokens>", fix, too_long=True)
        command = self.tokenizer.decode(ids[:1]).strip()
        if command == "fail":
            raise RuntimeError("the engine thread died: boom")
        if command == "full":
            raise EngineOverloaded("max_waiting_seqs=0 requests wait")
        dies = command == "poison" or (command == "die" and isinstance(prompt, str))
        stream = FakeStream(request_id, ids, params, dies, emitted)
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
        if "typo" in settings:
            raise ConfigError("typo: unknown key")
        self.knobs = dict(settings)

    def report_to(self, metrics: MetricsSink) -> None:
        self.metrics = metrics

    def start_from(self, accept_rates: Sequence[float]) -> None:
        self.accept_rates = list(accept_rates)

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
