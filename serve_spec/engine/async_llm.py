"""`AsyncLLM`: texts as async iterators, from an engine in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from secrets import token_hex
from types import TracebackType
from typing import Any, Self

from serve_spec.config.root import Source
from serve_spec.core.request import RequestOutput, RequestOutputKind, SamplingParams, TokenDelta
from serve_spec.engine.answers import Answer
from serve_spec.engine.arguments import PromptForm, Seeds, load_arguments, read_prompt
from serve_spec.engine.client import TokenStream
from serve_spec.engine.inputs import sampling_defaults
from serve_spec.engine.process import start_engine
from serve_spec.engine.tokenizer import Tokenizer


class AsyncLLM:
    """An engine in a process of its own, for asyncio.

    Takes the arguments of `LLM` and raises what `LLM` raises; the call returns when the engine is
    ready. Used by one event loop at a time. `async with AsyncLLM(...)` shuts it down at the end.
    """

    def __init__(
        self, model: Source | None = None, *, seed: int | None = None, **arguments: Any
    ) -> None:
        self.config = load_arguments(model, arguments)
        self._seeds = Seeds(seed)
        self.engine = start_engine(self.config)
        self._running: dict[str, list[str]] = {}
        """Ids of the engine's requests, by those of the callers."""

    async def generate(
        self,
        prompt: PromptForm,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs as tokens come, as `output_kind` says; the last one is `finished`.

        Leaving the iterator aborts the request. Raises InvalidRequest, EngineOverloaded,
        RequestFailed, or RuntimeError if the engine's process has died.
        """
        params = sampling_params or self.get_default_sampling_params()
        request_id = request_id or token_hex(8)
        read = read_prompt(prompt)
        token_ids = await self.engine.token_ids(read, params)
        answer = Answer(request_id, read, token_ids, params.n, self.engine.tokenizer)
        arrived: asyncio.Queue[tuple[int, TokenDelta | Exception]] = asyncio.Queue()
        names: list[str] = []
        readers = []
        try:
            for index, each in enumerate(params.each()):
                seeded = replace(self._seeds.with_seed(each), truncate_prompt_tokens=None)
                name = request_id if index == 0 else f"{request_id}-{index}"
                stream = await self.engine.submit(token_ids, seeded, name)
                names.append(name)
                self._running[request_id] = names
                readers.append(asyncio.create_task(_read(index, stream, arrived)))
            while not answer.finished:
                _add(answer, *await arrived.get())
                while not arrived.empty():  # one output for what came meanwhile
                    _add(answer, *arrived.get_nowait())
                if params.output_kind is RequestOutputKind.DELTA:
                    yield answer.take()
                elif params.output_kind is RequestOutputKind.CUMULATIVE or answer.finished:
                    yield answer.output()
        finally:
            self._forget(request_id, names)
            for reader in readers:
                reader.cancel()

    async def abort(self, request_id: str) -> None:
        """End a request, which yields a last output with `finish_reason` abort; else no-op."""
        for name in self._running.get(request_id, ()):
            self.engine.cancel(name)

    def get_default_sampling_params(self) -> SamplingParams:
        """See `LLM`."""
        return SamplingParams(**sampling_defaults(self.config.model))

    def get_tokenizer(self) -> Tokenizer:
        """See `LLM`."""
        return self.engine.tokenizer

    async def reset_prefix_cache(self) -> bool:
        """Drop the cached prefixes that no request uses, before the next step; return True."""
        self.engine.flush_cache()
        return True

    async def check_health(self) -> None:
        """Raise RuntimeError if the engine has died or hangs in a step."""
        self.engine.check_health()

    def shutdown(self) -> None:
        """End the engine's process; unfinished requests end, and new ones are refused."""
        self.engine.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    def _forget(self, request_id: str, names: list[str]) -> None:
        for name in names:
            self.engine.cancel(name)
        if self._running.get(request_id) is names:
            del self._running[request_id]


async def _read(
    index: int, stream: TokenStream, arrived: asyncio.Queue[tuple[int, TokenDelta | Exception]]
) -> None:
    """Put everything that comes of a stream into a queue, errors as well."""
    try:
        await stream.each(lambda delta: arrived.put_nowait((index, delta)))
    except Exception as error:
        arrived.put_nowait((index, error))


def _add(answer: Answer, index: int, item: TokenDelta | Exception) -> None:
    if isinstance(item, Exception):
        raise item
    answer.add(index, item)
