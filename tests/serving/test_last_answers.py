"""A server that is killed breaks no answer off without an error object."""

import asyncio
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_spec.serving.proxy import OTHER, UNANSWERED, Connection, LastAnswers, with_child
from tests.serving.cluster import ROOT, eventually

PROTOCOLS = {"uvloop": HttpToolsProtocol, "asyncio": H11Protocol}
WITHIN_S = 60
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
    code = f"from tests.serving.test_last_answers import serve; serve(*{[protocol] * 2})"
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


@with_both_protocols
def test_a_websocket_ends_as_it_would_without_the_child(server):
    key = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="
    upgrade = b"connection: upgrade", b"upgrade: websocket", b"sec-websocket-version: 13", key
    with server.connection(get("/", *upgrade)) as connection:
        read_until(connection, b"\r\n\r\n")
        connection.sendall(b"\x88\x80\0\0\0\0")  # the closing frame of a client
        rest(connection)


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
