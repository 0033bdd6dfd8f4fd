"""A client that leaves is no error, whatever Ray makes of it."""

import asyncio
import json
import logging

import pytest
from ray.exceptions import ActorDiedError, TaskCancelledError

from serve_spec.serving.ingress import FailedReads
from tests.serving.asgi import COMPLETIONS, Server

BODY = json.dumps({"prompt": "hold on", "stream": True, "max_tokens": 9}).encode()


@pytest.mark.parametrize("error", [TaskCancelledError(), ActorDiedError()], ids=repr)
@pytest.mark.parametrize(
    ("message", "status"),
    [
        ({"type": "http.request", "body": BODY[:9], "more_body": True}, 499),
        ({"type": "http.request", "body": BODY}, 200),
    ],
    ids=["in its body", "in its stream"],
)
def test_a_read_that_ray_fails_is_a_client_that_left(
    config, caplog, monkeypatch, message, status, error
):
    monkeypatch.setattr(logging.getLogger("serve_spec"), "propagate", True)
    server = Server(config)
    app = FailedReads(server.app)
    inbox, sent = [message], []

    async def receive():
        if inbox:
            return inbox.pop()
        await asyncio.sleep(0.01)
        raise error

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    place = {"method": "POST", "path": COMPLETIONS, "query_string": b""}
    scope = {"type": "http", "headers": headers, **place}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == status
    assert not server.loop.streams
    assert caplog.text == ""
