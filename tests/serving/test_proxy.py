"""Slow connections end, and a killed server leaves no answer without an error object."""

import asyncio
import json
import logging
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_spec.config import ConfigError
from serve_spec.serving.errors import no_router, starting
from serve_spec.serving.proxy import callback, last_answers
from serve_spec.serving.proxy.last_answers import (
    OTHER,
    UNANSWERED,
    Connection,
    LastAnswers,
    with_child,
)
from serve_spec.serving.proxy.settings import CALLBACK, CALLBACK_VARIABLE, HEADER_TIMEOUT_VARIABLE
from tests.serving.asgi import listening, send
from tests.serving.cluster import ROOT, eventually

PROTOCOLS = {"uvloop": HttpToolsProtocol, "asyncio": H11Protocol}
WITHIN_S = 60
BEAT_EVERY_S = 0.25
# The server asks for the body when the app wants it: then the app has the request.
EXPECT = b"content-length: 1000000", b"expect: 100-continue"
CONTINUE = b"100 Continue\r\n\r\n"
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")


async def app(scope, receive, send):
    """Answer by path: begin a stream, begin a plain answer, answer whole, or only wait."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close"})
        return
    while (await receive()).get("more_body"):
        pass
    path = scope["path"]
    headers = {"/stream": [EVENTS], "/plain": [(b"content-length", b"9")]}
    await asyncio.sleep(3600 if path == "/wait" else 0)
    await send({"type": "http.response.start", "status": 200, "headers": headers.get(path, [])})
    is_whole = path == "/whole"
    await send({"type": "http.response.body", "body": b"data: 1\n", "more_body": True})
    await asyncio.sleep(0 if is_whole else 3600)
    await send({"type": "http.response.body"})


def serve(loop, protocol):
    """Serve `app` on a free port, which is printed, until this process is killed."""
    last_answers._BEAT_EVERY_S = BEAT_EVERY_S
    http = with_child(PROTOCOLS[protocol])
    config = uvicorn.Config(LastAnswers(app), log_level="critical", loop=loop, http=http)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(config).run(sockets=[listener])


@dataclass
class Server:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    port: int

    def children(self):
        """Return its child processes that run."""
        return [pid for pid in pids() if status(pid)[1] == str(self.process.pid)]

    def kill(self):
        self.process.kill()
        self.process.wait()

    @contextmanager
    def connection(self, *parts):
        """Open a connection and send `parts`."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=WITHIN_S) as connection:
            connection.sendall(b"".join(parts))
            yield connection


def pids():
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def status(pid):
    """Return a process's state, Z if it is gone, and its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "Z", ""
    return fields[0], fields[1]


with_both_protocols = pytest.mark.parametrize("server", PROTOCOLS, indirect=True)


@pytest.fixture
def server(request):
    protocol = getattr(request, "param", "uvloop")
    code = f"from tests.serving.test_proxy import serve; serve(*{[protocol] * 2})"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        server = Server(process, int(process.stdout.readline()))
        children = []
        try:
            with server.connection(get("/whole")) as connection:
                read_until(connection, b"0\r\n\r\n")
            children = server.children()
            yield server
        finally:
            server.kill()
    for pid in children:
        eventually(lambda pid=pid: status(pid)[0], lambda state: state == "Z")


def get(path, *headers):
    lines = [f"GET {path} HTTP/1.1".encode(), b"host: x", *headers, b"", b""]
    return b"\r\n".join(lines)


def read_until(connection, end):
    data = b""
    while end not in data:
        part = connection.recv(2**16)
        assert part, data
        data += part
    return data


def rest(connection):
    """Return what arrives until the other side ends the connection."""
    data = b""
    while part := connection.recv(2**16):
        data += part
    return data


def assert_is_error_answer(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    status_line, *lines = head.decode().lower().split("\r\n")
    headers = dict(line.split(": ") for line in lines)
    assert status_line == "http/1.1 503 service unavailable"
    assert headers["connection"] == "close"
    assert headers["content-type"] == "application/json"
    assert headers["retry-after"] == "1"
    assert int(headers["content-length"]) == len(body)
    assert json.loads(body)["error"]["code"] == "server_lost"


def assert_is_error_event(chunks):
    length, _, more = chunks.partition(b"\r\n")
    event, end = more[: int(length, 16)], more[int(length, 16) :]
    assert end == b"\r\n0\r\n\r\n"
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert error["code"] == "server_lost"
    assert set(error) == {"message", "type", "param", "code"}


def test_a_request_that_the_server_has_not_read_gets_an_error_object(server):
    with server.connection() as connection, server.connection(get("/stream")) as later:
        read_until(later, b"data: 1\n\r\n")
        os.kill(server.process.pid, signal.SIGSTOP)
        connection.sendall(get("/wait"))
        server.kill()
        assert_is_error_answer(rest(connection))


def test_a_request_whose_body_has_not_arrived_gets_one_too(server):
    with server.connection(get("/wait", *EXPECT)) as connection:
        read_until(connection, CONTINUE)
        os.kill(server.process.pid, signal.SIGSTOP)
        connection.sendall(b"x" * 10**5)
        server.kill()
        connection.sendall(b"x" * 10**5)
        assert_is_error_answer(rest(connection))


@with_both_protocols
def test_each_of_64_streams_and_16_other_requests_gets_its_own_error(server):
    with ExitStack() as opened:

        def asking(count, *parts):
            return [opened.enter_context(server.connection(get(*parts))) for _ in range(count)]

        begun, waiting = asking(64, "/stream"), asking(16, "/wait", *EXPECT)
        for connection in begun:
            read_until(connection, b"data: 1\n\r\n")
        for connection in waiting:
            read_until(connection, CONTINUE)
        server.kill()
        for connection in begun:
            assert_is_error_event(rest(connection))
        for connection in waiting:
            assert_is_error_answer(rest(connection))


def test_a_server_that_hangs_is_killed_and_its_answers_end_with_errors(server):
    with (
        server.connection(get("/stream")) as begun,
        server.connection(get("/wait", *EXPECT)) as waiting,
    ):
        read_until(begun, b"data: 1\n\r\n")
        read_until(waiting, CONTINUE)
        server.process.send_signal(signal.SIGSTOP)
        with server.connection(get("/whole")) as unread:
            assert_is_error_event(rest(begun))
            assert_is_error_answer(rest(waiting))
            assert server.process.wait(WITHIN_S) == -signal.SIGKILL
            with suppress(ConnectionError):
                assert rest(unread) == b"", "the kernel's queue has it; another server gets it"


def test_a_server_that_waits_for_requests_does_not_hang(server):
    with server.connection(get("/stream")) as connection:
        read_until(connection, b"data: 1\n\r\n")
        time.sleep(15 * BEAT_EVERY_S)
        assert server.process.poll() is None


def test_nothing_is_added_to_a_begun_answer_that_is_no_stream(server):
    with server.connection(get("/plain")) as connection:
        assert read_until(connection, b"data: 1\n").endswith(b"\r\n\r\ndata: 1\n")
        server.kill()
        assert rest(connection) == b""


@with_both_protocols
def test_a_whole_answer_does_not_change_what_the_next_request_gets(server):
    with server.connection(get("/whole")) as connection:
        read_until(connection, b"0\r\n\r\n")
        connection.sendall(get("/whole"))
        read_until(connection, b"0\r\n\r\n")
        connection.sendall(get("/stream"))
        read_until(connection, b"data: 1\n\r\n")
        server.kill()
        assert_is_error_event(rest(connection))


def test_a_server_that_ends_by_itself_sends_nothing_more(server):
    with server.connection(get("/whole")) as connection:
        read_until(connection, b"0\r\n\r\n")
        server.process.terminate()
        server.process.wait()
        assert rest(connection) == b""


def test_the_server_serves_on_when_its_child_dies_and_the_next_one_takes_its_connections(server):
    (child,) = server.children()
    with server.connection(get("/stream")) as old:
        read_until(old, b"data: 1\n\r\n")
        os.kill(child, signal.SIGKILL)
        eventually(lambda: status(child)[0], lambda state: state == "Z")
        with server.connection(get("/stream")) as new:
            read_until(new, b"data: 1\n\r\n")
            server.kill()
            assert_is_error_event(rest(new))
            assert_is_error_event(rest(old))


def test_connections_end_at_once_even_if_the_child_hangs(server):
    (child,) = server.children()
    os.kill(child, signal.SIGSTOP)
    try:
        with server.connection(get("/whole", b"connection: close")) as connection:
            assert rest(connection).endswith(b"0\r\n\r\n")
    finally:
        os.kill(child, signal.SIGCONT)


UPGRADE = (
    *(b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-version: 13"),
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
)


@with_both_protocols
def test_a_websocket_ends_as_it_would_without_the_child(server):
    with server.connection(get("/", *UPGRADE)) as connection:
        read_until(connection, b"\r\n\r\n")
        connection.sendall(b"\x88\x80\0\0\0\0")  # the closing frame of a client
        rest(connection)


def test_websockets_that_are_reset_while_they_are_given_back_do_not_end_the_child(server):
    (child,) = server.children()
    os.kill(child, signal.SIGSTOP)  # it reads both messages after the reset
    for _ in range(3):
        with server.connection(get("/", *UPGRADE)) as connection:
            read_until(connection, b"\r\n\r\n")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with server.connection(get("/stream")) as stream:
        read_until(stream, b"data: 1\n\r\n")
        os.kill(child, signal.SIGCONT)
        server.kill()
        assert_is_error_event(rest(stream))


def test_a_child_is_started_again_however_often_it_dies(server):
    for _ in range(7):
        (child,) = eventually(server.children, lambda pids: len(pids) == 1)
        os.kill(child, signal.SIGKILL)
        eventually(lambda pid=child: status(pid)[0], lambda state: state == "Z")

        def ask():
            with server.connection(get("/whole")) as connection:
                read_until(connection, b"0\r\n\r\n")
            return [pid for pid in server.children() if status(pid)[0] != "Z"]

        eventually(ask, lambda pids: len(pids) == 1)
    with server.connection(get("/stream")) as stream:
        read_until(stream, b"data: 1\n\r\n")
        server.kill()
        assert_is_error_event(rest(stream))


def test_the_child_holds_open_connections_and_nothing_else_of_the_server(server):
    (child,) = server.children()

    def num_sockets():
        num = 0
        for link in Path(f"/proc/{child}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                num += os.readlink(link).startswith("socket:")
        return num

    eventually(num_sockets, lambda num: num == 1)  # its channel
    with server.connection(get("/wait")), server.connection(get("/stream")):
        eventually(num_sockets, lambda num: num == 3)
    eventually(num_sockets, lambda num: num == 1)


def test_a_late_answer_of_a_closed_connection_does_not_touch_the_next_one():
    states = mmap.mmap(-1, 2**16)
    first = Connection(socket.socket(), states)
    slot = first.sock.fileno()
    first.close()
    with socket.socket() as sock:
        assert sock.fileno() == slot
        Connection(sock, states)
        first.note(OTHER)
        assert states[slot] == UNANSWERED


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


async def slow_app(scope, receive, send):
    """Read the body, think for longer than the limit on headers, answer."""
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(1.5 * LIMIT_S)
    await send({"type": "http.response.start", "status": 200, "headers": [LENGTH]})
    await send({"type": "http.response.body", "body": b"answer"})


@pytest.fixture(scope="module", params=[HttpToolsProtocol, H11Protocol])
def port(request):
    limited = callback.limited(request.param, LIMIT_S)
    with listening(slow_app, http=limited, timeout_keep_alive=2) as port:
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
    assert callback.header_timeout_s() == 30
    monkeypatch.setenv(HEADER_TIMEOUT_VARIABLE, "2.5")
    assert callback.header_timeout_s() == 2.5
    for wrong in ("0", "soon"):
        monkeypatch.setenv(HEADER_TIMEOUT_VARIABLE, wrong)
        with pytest.raises(ConfigError, match=f"{HEADER_TIMEOUT_VARIABLE}="):
            callback.header_timeout_s()


def test_a_cluster_without_the_callback_is_warned_about(monkeypatch, caplog):
    from serve_spec.serving.deployment.app import Router

    monkeypatch.delenv(CALLBACK_VARIABLE, raising=False)
    monkeypatch.setattr(logging.getLogger("serve_spec"), "propagate", True)
    with pytest.raises(Exception, match=r"(?i)replica"):  # there is no Serve around it
        Router(None, None)
    assert CALLBACK in caplog.text


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
def test_before_the_first_route_and_after_the_last_requests_are_told_to_come_back(first, root_path):
    serve = ServeProxy()
    app = callback.NoRouteAnswers(serve)

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
    for path in ("/app/health", "/unknown"):  # the application is being deleted
        answer = ask(path)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json() == no_router().body()
