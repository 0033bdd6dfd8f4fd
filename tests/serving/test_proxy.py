"""Connections that send too slowly end; others do not notice. The last tests run a real Serve."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_spec.config import ConfigError
from serve_spec.serving import proxy
from tests.serving.cluster import eventually, local_serve
from tests.serving.texts import word_tokenizer, write_text_files

LIMIT_S = 1.0
# Far above what a limit of a second takes on a busy machine, far below any other limit.
SOON_S = 20.0
BODY = json.dumps({"prompt": "a b", "max_tokens": 4}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n"
)
LENGTH = (b"content-length", b"6")
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"


async def exchange(port: int, *parts: bytes, gap_s: float = 0.3) -> bytes:
    """Send the parts one by one, and return what comes back until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def send() -> None:
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


def trickle(data: bytes) -> list[bytes]:
    """Return the bytes one by one: many seconds' worth at a gap of 0.3 s."""
    assert len(data) * 0.3 > SOON_S / 2
    return [data[i : i + 1] for i in range(len(data))]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Read the body, think for longer than the limit on headers, answer."""
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(1.5 * LIMIT_S)
    await send({"type": "http.response.start", "status": 200, "headers": [LENGTH]})
    await send({"type": "http.response.body", "body": b"answer"})


@contextmanager
def uvicorn_with(protocol: Any) -> Iterator[int]:
    """Run `app` behind the limited protocol, and yield its port."""
    limited = proxy.limited(protocol, LIMIT_S)
    config = uvicorn.Config(app, http=limited, timeout_keep_alive=3, log_level="critical")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        eventually(lambda: server.started, bool)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module", params=[HttpToolsProtocol, H11Protocol])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with uvicorn_with(request.param) as port:
        yield port


@pytest.mark.parametrize(
    "parts",
    [[], [b"G"], [GET], trickle(GET * 9)],
    ids=["nothing", "one byte", "most of it", "byte by byte"],
)
def test_a_connection_without_whole_headers_is_closed(port: int, parts: list[bytes]) -> None:
    assert asyncio.run(exchange(port, *parts)) == b""


async def test_the_headers_of_a_second_request_are_limited_from_their_first_byte(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(GET + b"\r\n")
    first = await reader.readuntil(b"answer")
    await asyncio.sleep(1.5 * LIMIT_S)  # idle between two requests, within the keep-alive limit
    writer.write(GET)
    async with asyncio.timeout(SOON_S):
        rest = await reader.read()
    writer.close()
    first, rest = first, rest
    assert first.startswith(b"HTTP/1.1 200")
    assert rest == b""


def test_a_request_with_whole_headers_takes_as_long_as_it_takes(port: int) -> None:
    """Its body and its answer both take longer than its headers may."""
    body = [b"x"] * 5
    head = HEAD % len(body) + b"connection: close\r\n\r\n"
    assert asyncio.run(exchange(port, head, *body)).endswith(b"answer")


def test_the_limit_comes_from_the_environment_of_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy.header_timeout_s() == 30
    monkeypatch.setenv(proxy.HEADER_TIMEOUT_VARIABLE, "2.5")
    assert proxy.header_timeout_s() == 2.5
    for wrong in ("0", "soon"):
        monkeypatch.setenv(proxy.HEADER_TIMEOUT_VARIABLE, wrong)
        with pytest.raises(ConfigError, match=f"{proxy.HEADER_TIMEOUT_VARIABLE}="):
            proxy.header_timeout_s()


def test_the_proxy_imports_no_torch() -> None:
    program = "import sys, serve_spec.serving.proxy; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.fixture(scope="module")
def serve_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    model = tmp_path_factory.mktemp("models") / "fake"
    write_text_files(model, tokenizer=word_tokenizer())
    limits = {
        proxy.HEADER_TIMEOUT_VARIABLE: str(LIMIT_S),
        "SERVE_SPEC_ROUTER__BODY_TIMEOUT_S": str(LIMIT_S),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setenv(name, value)
        with local_serve(num_cpus=4) as url:
            from ray import serve

            from serve_spec.serving import build_app

            args = {
                "config": {"model": {"path": str(model)}},
                "engine_loop": "tests.serving.fake_engine:FakeLoop",
                "num_cpus": 0.1,
                "graceful_shutdown_timeout_s": 0.0,
            }
            serve.run(build_app(args), name="fake", route_prefix="/")
            yield int(url.rpartition(":")[2])


async def test_serve_ends_slow_connections_and_answers_the_others(serve_port: int) -> None:
    slow_headers = [exchange(serve_port, *trickle(GET * 9)) for _ in range(50)]
    slow_body = [HEAD % 500 + b"\r\n", *trickle(b"x" * 400)]
    slow_bodies = [exchange(serve_port, *slow_body) for _ in range(50)]
    slow = asyncio.gather(asyncio.gather(*slow_headers), asyncio.gather(*slow_bodies))
    await asyncio.sleep(LIMIT_S / 4)
    async with httpx.AsyncClient(timeout=SOON_S) as client:
        url = f"http://127.0.0.1:{serve_port}/v1/completions"
        headers = {"content-type": "application/json"}
        answer = await client.post(url, content=BODY, headers=headers)
    headers_heard, bodies_heard = await slow
    headers_heard, bodies_heard, answer = headers_heard, bodies_heard, answer
    assert answer.status_code == 200
    assert headers_heard == [b""] * 50
    for heard in bodies_heard:
        head, _, body = heard.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408")
        assert json.loads(body)["error"]["code"] == "body_timeout"


def test_a_request_id_that_is_not_utf8_is_answered(serve_port: int) -> None:
    head = HEAD % len(BODY) + b"x-request-id: caf\xe9\r\nconnection: close\r\n\r\n"
    heard = asyncio.run(exchange(serve_port, head + BODY))
    assert heard.startswith(b"HTTP/1.1 200")
    assert "x-request-id: café\r\n".encode() in heard


def test_a_cluster_without_the_callback_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from serve_spec.serving.ingress import Router

    monkeypatch.delenv(proxy.CALLBACK_VARIABLE, raising=False)
    monkeypatch.setattr(logging.getLogger("serve_spec"), "propagate", True)
    with pytest.raises(Exception, match=r"(?i)replica"):  # there is no Serve around it
        Router(None, None)
    assert proxy.CALLBACK in caplog.text
