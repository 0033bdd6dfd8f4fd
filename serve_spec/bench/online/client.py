"""A client of the OpenAI completions API that notes when bytes come and does nothing else.

Streams are parsed after a run, so that reading one does not delay the clock of another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp

from serve_spec.bench.online.record import Served, TextRequest
from serve_spec.bench.online.stream import StreamedCompletion, read_stream

# Below the idle limits of usual servers, which would close a connection just as it is used again.
_KEEPALIVE_S = 2.0
_INFO_WITHIN_S = 5.0


@dataclass(frozen=True)
class Exchange:
    """One request on the wire; times are those of `time.perf_counter`."""

    sent_s: float
    ended_s: float
    arrivals: tuple[tuple[float, bytes], ...]
    error: str | None

    def served(self, started_s: float, due_s: float | None) -> Served:
        """What became of it, in seconds since `started_s`; due when it was sent, if None."""
        answer = read_stream((at - started_s, data) for at, data in self.arrivals)
        sent_s = self.sent_s - started_s
        return Served(
            due_s=sent_s if due_s is None else due_s,
            sent_s=sent_s,
            ended_s=self.ended_s - started_s,
            chunk_s=tuple(answer.chunk_s),
            text=answer.text,
            num_tokens=answer.num_tokens,
            num_prompt_tokens=int(answer.usage.get("prompt_tokens", 0)),
            speculation=answer.usage.get("speculation", {}),
            error=self.error or answer.error or _without_tokens(answer),
        )


def _without_tokens(answer: StreamedCompletion) -> str | None:
    if not answer.chunk_s:
        return "no tokens"
    return None if answer.num_tokens else "no token count"


class Client:
    """Asks one server; connections are as many as requests are open."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._url = url
        self._model = {} if model is None else {"model": model}
        self._key = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Client:
        self._http = aiohttp.ClientSession(
            headers={"Accept-Encoding": "identity", **self._key},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.close()

    async def complete(self, request: TextRequest) -> Exchange:
        """Streams one completion; whatever goes wrong is in the answer."""
        arrivals: list[tuple[float, bytes]] = []
        error = None
        sent_s = time.perf_counter()
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._http.post(f"{self._url}/v1/completions", json=self._body(request)) as answer,
            ):
                if answer.status != 200:
                    error = str(answer.status)
                    await answer.read()
                else:
                    async for data in answer.content.iter_any():
                        arrivals.append((time.perf_counter(), data))
        except TimeoutError:
            error = "timeout"
        except aiohttp.ClientConnectorError:
            error = "no connection"
        except aiohttp.ClientError:
            error = "disconnected"
        return Exchange(sent_s, time.perf_counter(), tuple(arrivals), error)

    async def server_info(self) -> Mapping[str, Any] | None:
        """What the server says of itself; None where it does not, or not now."""
        try:
            async with (
                asyncio.timeout(_INFO_WITHIN_S),
                self._http.get(f"{self._url}/server_info") as answer,
            ):
                info = await answer.json() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None
        return info if isinstance(info, dict) else None

    def _body(self, request: TextRequest) -> dict[str, Any]:
        params = request.params
        return {
            **self._model,
            "prompt": request.prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "ignore_eos": params.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
