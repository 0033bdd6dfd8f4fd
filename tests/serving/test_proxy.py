"""Connections that send too slowly end; others do not notice."""

import asyncio
import logging

import pytest
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_spec.config import ConfigError
from serve_spec.serving import proxy
from serve_spec.serving.errors import starting
from tests.serving.asgi import listening, send

LIMIT_S = 0.6
# Far above what such a limit takes on a busy machine, far below any other limit.
SOON_S = 20.0
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n"
)
LENGTH = (b"content-length", b"6")
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"


async def exchange(port, *parts, gap_s=0.3):
    """Send the parts one by one, and return what comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send():
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(gap_s)

    sending = asyncio.create_task(send())
    try:
        async with asyncio.timeout(SOON_S):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


def trickle(data):
    """Return the bytes one by one: many seconds' worth at a gap of 0.3 s."""
    assert len(data) * 0.3 > SOON_S / 2
    return [data[i : i + 1] for i in range(len(data))]


async def app(scope, receive, send):
    """Read the body, think for longer than the limit on headers, answer."""
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(1.5 * LIMIT_S)
    await send({"type": "http.response.start", "status": 200, "headers": [LENGTH]})
    await send({"type": "http.response.body", "body": b"answer"})


@pytest.fixture(scope="module", params=[HttpToolsProtocol, H11Protocol])
def port(request):
    limited = proxy.limited(request.param, LIMIT_S)
    with listening(app, http=limited, timeout_keep_alive=2) as port:
        yield port


async def test_a_connection_without_whole_headers_is_closed(port):
    """Nothing, one byte, most of it, and byte by byte."""
    incomplete = [[], [b"G"], [GET], trickle(GET * 9)]
    answers = await asyncio.gather(*(exchange(port, *parts) for parts in incomplete))
    assert answers == [b""] * 4


async def test_the_headers_of_a_second_request_are_limited_from_their_first_byte(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET + b"\r\n")
    first = await reader.readuntil(b"answer")
    await asyncio.sleep(1.5 * LIMIT_S)  # idle between two requests, within the keep-alive limit
    writer.write(GET)
    async with asyncio.timeout(SOON_S):
        rest = await reader.read()
    writer.close()
    assert first.startswith(b"HTTP/1.1 200")
    assert rest == b""


def test_a_request_with_whole_headers_takes_as_long_as_it_takes(port):
    """Its body and its answer both take longer than its headers may."""
    body = [b"x"] * 5
    head = HEAD % len(body) + b"connection: close\r\n\r\n"
    assert asyncio.run(exchange(port, head, *body)).endswith(b"answer")


def test_the_limit_comes_from_the_environment_of_the_proxy(monkeypatch):
    assert proxy.header_timeout_s() == 30
    monkeypatch.setenv(proxy.HEADER_TIMEOUT_VARIABLE, "2.5")
    assert proxy.header_timeout_s() == 2.5
    for wrong in ("0", "soon"):
        monkeypatch.setenv(proxy.HEADER_TIMEOUT_VARIABLE, wrong)
        with pytest.raises(ConfigError, match=f"{proxy.HEADER_TIMEOUT_VARIABLE}="):
            proxy.header_timeout_s()


def test_a_cluster_without_the_callback_is_warned_about(monkeypatch, caplog):
    from serve_spec.serving.app import Router

    monkeypatch.delenv(proxy.CALLBACK_VARIABLE, raising=False)
    monkeypatch.setattr(logging.getLogger("serve_spec"), "propagate", True)
    with pytest.raises(Exception, match=r"(?i)replica"):  # there is no Serve around it
        Router(None, None)
    assert proxy.CALLBACK in caplog.text


class ServeProxy:
    """Answers as Serve's proxy does: text for what it does not know, JSON of an application."""

    def __init__(self):
        self.routes = None

    async def __call__(self, scope, receive, send):
        path = scope["path"].removeprefix(scope["root_path"])
        if path in ("/-/routes", "/-/healthz"):
            answer = Response("Route table is not populated yet.", 503)
            if self.routes is not None:
                answer = JSONResponse(self.routes)
        elif self.routes and path.startswith(tuple(self.routes)):
            known = path.endswith("/health")
            answer = JSONResponse({}, 200 if known else 404)
        else:
            answer = Response(f"Path '{path}' not found.", 404)
        await answer(scope, receive, send)


@pytest.mark.parametrize("root_path", ["", "/root"])
@pytest.mark.parametrize("first", ["/app/health", "/app/unknown", "/unknown", "/-/healthz"])
def test_until_there_is_a_route_requests_are_told_that_the_model_starts(first, root_path):
    serve = ServeProxy()
    app = proxy.StartingAnswers(serve)

    def ask(path):
        return send(app, "GET", root_path + path, root_path=root_path)

    for path in ("/", "/app/health", "/unknown"):
        answer = ask(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json() == starting().body()
    assert ask("/-/healthz").text == "Route table is not populated yet."
    serve.routes = {"/app": "name"}
    statuses = {"/app/health": 200, "/app/unknown": 404, "/unknown": 404, "/-/healthz": 200}
    assert ask(first).status_code == statuses[first]
    assert {path: ask(path).status_code for path in statuses} == statuses
    assert ask("/unknown").text == "Path '/unknown' not found."
    serve.routes = {}
    assert ask("/app/health").status_code == 404, "the application was deleted"
