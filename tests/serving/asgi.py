"""Requests to an app in this process, with or without a server."""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager
from functools import cached_property

import httpx
import openai
import uvicorn

from serve_spec.core.request import FinishReason, TokenLogprob
from serve_spec.serving.messages import Accepted
from serve_spec.serving.protocols.api import create_api
from serve_spec.serving.router.admission import Admission
from tests.serving.cluster import eventually
from tests.serving.fake_engine import FakeLoop
from tests.serving.fakes import LoopFleet, ScriptedFleet, delta

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def send(app, method, path, *, root_path="", **options):
    """Return the answer; what the app raises is its own answer of 500."""

    async def ask():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(ask())


def chunks_of(answer):
    """Return the chunks of a stream, which is complete."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, last = [line for line in answer.text.split("\n\n") if line]
    assert last == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


class Server:
    """The app in this process, a fake engine behind it where there is no other fleet."""

    def __init__(self, config, fleet=None, *, max_in_flight=8, **admission):
        self.loop = FakeLoop(config)
        self.fleet = fleet or LoopFleet(self.loop)
        self.admission = Admission(max_in_flight=max_in_flight, **{"max_queued": 1, **admission})
        self._config = config

    @cached_property
    def app(self):
        return create_api(self._config, self.fleet, self.admission)

    def ask(self, method, path, **options):
        return send(self.app, method, path, **options)

    def complete(self, prompt="a b c", **body):
        return self.ask("POST", COMPLETIONS, json={"prompt": prompt, **body})

    def chat(self, content="a b c", **body):
        messages = [{"role": "user", "content": content}]
        return self.ask("POST", CHAT, json={"messages": messages, **body})


def saying(config, text, *, finish=FinishReason.STOP, logprobs=False):
    """A server whose engine generates `text`, three characters and one token a round."""
    scores = (TokenLogprob(65, -1.0, 1),) if logprobs else None
    rounds = [
        delta(text[at : at + 3], 65)._replace(logprobs=scores) for at in range(0, len(text), 3)
    ]
    return Server(config, ScriptedFleet([Accepted(1, "r"), *rounds, delta("", finish=finish)]))


def client_of(server):
    """The official client of a server in this process."""
    transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
    return openai.AsyncOpenAI(
        base_url="http://test/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=transport),
    )


@contextmanager
def listening(app, **options):
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
