"""Requests to an app in this process, with or without a server."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from serve_spec.config import ServeSpecConfig
from serve_spec.serving.admission import Admission
from serve_spec.serving.api import create_api
from tests.serving.cluster import eventually
from tests.serving.fake_engine import FakeLoop
from tests.serving.fakes import LoopFleet

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def send(
    app: FastAPI, method: str, path: str, *, root_path: str = "", **options: Any
) -> httpx.Response:
    """Return the answer; what the app raises is its own answer of 500."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(ask())


def chunks_of(answer: httpx.Response) -> list[Any]:
    """Return the chunks of a stream, which is complete."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last = [line for line in answer.text.split("\n\n") if line]
    assert last == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


class Server:
    """The app in this process, a fake engine behind it where there is no other fleet."""

    def __init__(
        self, config: ServeSpecConfig, fleet: Any = None, *, max_in_flight: int = 8, **door: Any
    ) -> None:
        self.loop = FakeLoop(config)
        self.fleet = fleet or LoopFleet(self.loop)
        self.door = Admission(max_in_flight=max_in_flight, **{"max_queued": 1, **door})
        self._config = config

    @cached_property
    def app(self) -> FastAPI:
        return create_api(self._config, self.fleet, self.door)

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        return send(self.app, method, path, **options)

    def complete(self, prompt: Any = "a b c", **body: Any) -> httpx.Response:
        return self.ask("POST", COMPLETIONS, json={"prompt": prompt, **body})

    def chat(self, content: Any = "a b c", **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return self.ask("POST", CHAT, json={"messages": messages, **body})


@contextmanager
def listening(app: Any, **options: Any) -> Iterator[int]:
    """Run `app` behind a real HTTP server, and yield its port."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", **options))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        eventually(lambda: server.started, bool)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
