"""Servers in a thread of the test: any ASGI app, and one whose prompts name the answer.

"4 chunks of 3"  that many chunks, each of so many tokens, and usage
"429"            refuses with that status
"uncounted"      neither usage nor token ids
"empty"          [DONE], and nothing else
"error"          one chunk, then an error frame
"cut"            one chunk, then the connection breaks
"silent"         one chunk, then nothing
"""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

import uvicorn


@contextmanager
def serving(app):
    """Yield the base URL of `app`, over real sockets."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


class ScriptedApp:
    """An app that waits `delay_s` before each chunk.

    No chunk is sent before `hold_until` requests have been open at once.
    """

    def __init__(self, delay_s=0.0, *, hold_until=0):
        self.delay_s = delay_s
        self.hold_until = hold_until
        self.bodies = []
        self.headers = []
        self.num_open = 0
        self.most_open = 0

    async def __call__(self, scope, receive, send):
        if scope["path"] != "/v1/completions":
            await _answer(send, 404, {})
            return
        body = json.loads((await receive())["body"])
        self.bodies.append(body)
        self.headers.append(dict(scope["headers"]))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await self._complete(str(body["prompt"]), send)
        finally:
            self.num_open -= 1

    async def _complete(self, prompt, send):
        if prompt.isdigit():
            await _answer(send, int(prompt), {"error": {"message": "refused"}})
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for payload in _chunks(prompt):
            await self._event(send, payload)
        if prompt == "cut":
            raise ConnectionAbortedError("cut")
        if prompt == "silent":
            await asyncio.Event().wait()
        is_error = prompt == "error"
        last = event({"error": {}}) if is_error else _usage(prompt) + b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": last})

    async def _event(self, send, payload):
        while self.most_open < self.hold_until:
            await asyncio.sleep(0.001)
        await asyncio.sleep(self.delay_s)
        await send({"type": "http.response.body", "body": event(payload), "more_body": True})


def event(payload):
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def chunk(text, **choice):
    return {"choices": [{"index": 0, "text": text, "finish_reason": None, **choice}]}


def _chunks(prompt):
    if "chunks of" in prompt:
        return [chunk(f"{number} ") for number in range(int(prompt.split()[0]))]
    return [] if prompt == "empty" else [chunk("x")]


def _usage(prompt):
    if "chunks of" not in prompt:
        return b""
    count, tokens = int(prompt.split()[0]), int(prompt.split()[3])
    usage = {"prompt_tokens": 4, "completion_tokens": count * tokens}
    return event({"choices": [], "usage": usage})


async def _answer(send, status, payload):
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(payload).encode()})
