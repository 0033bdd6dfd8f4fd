"""`serve-spec serve` as a user starts it: a process of its own, the real engine, HTTP."""

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from serve_spec.serving.errors import starting
from serve_spec.serving.processes import holder_of_port
from tests.serving.cluster import (
    ROOT,
    command_of,
    eventually,
    free_port,
    isolated_environment,
    pids_with,
    short_tmp,
)

READY_WITHIN_S = 240


@dataclass
class Server:
    """A running `serve-spec serve`, what it has printed and what the port answered until then."""

    url: str
    output: str
    process: subprocess.Popen[str]
    answers: set[tuple[int, str, str | None]]
    tmp: str

    def pids(self, command=""):
        """Its processes, of all sessions and parents, whose command holds a text."""
        return {pid for pid in pids_with(f"RAY_TMPDIR={self.tmp}") if command in command_of(pid)}

    def private_folder(self):
        """The folder of HAProxy's files."""
        (pid,) = self.pids("raylet/raylet ")
        environment = Path(f"/proc/{pid}/environ").read_text()
        return Path(re.search(r"HAPROXY_CONFIG_FILE_LOC=(.+?)/haproxy\.cfg", environment).group(1))

    def haproxy_folder(self):
        """The folder of the configuration that HAProxy runs with."""
        (pid, *_) = self.pids("haproxy.cfg")
        folder = Path(re.search(r"(\S+)/haproxy\.cfg", command_of(pid)).group(1))
        assert folder.parent == self.private_folder()
        return folder

    def has_ended(self):
        """Whether nothing is left of it: no process, and no listener at its port."""
        return not self.pids() and not holder_of_port(urlsplit(self.url).port)


@contextmanager
def serving(until="curl"):
    """The command with the shipped deployment, after a line that begins with `until`.

    Nothing is left of it when the body has ended it.
    """
    with short_tmp() as tmp:
        port = free_port()
        command = [sys.executable, "-m", "serve_spec", "serve", str(ROOT / "deploy/tiny.yaml")]
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env=isolated_environment(tmp) | {"OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        # A hung start must fail this test with what was printed, not hang the run.
        alarm = threading.Timer(READY_WITHIN_S, process.kill)
        alarm.start()
        url, answers, is_ready = f"http://127.0.0.1:{port}", set(), threading.Event()
        asking = threading.Thread(target=_keep_asking, args=(url, answers, is_ready))
        asking.start()
        try:
            output = _until(until, process)
            is_ready.set()
            asking.join()
            alarm.cancel()
            server = Server(url, output, process, answers, tmp)
            folder = server.private_folder()
            yield server
        finally:
            alarm.cancel()
            is_ready.set()
            process.kill()
        eventually(server.has_ended, bool)
        assert not folder.exists()


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


def _until(start, process):
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(start):
            return "".join(lines)
    raise AssertionError("the server ended before it was ready:\n" + "".join(lines))


def _keep_asking(url, answers, is_ready):
    """Note the status, the text and the Retry-After of each answer."""
    while not is_ready.wait(0.05):
        try:
            answer = httpx.get(f"{url}/v1/models", timeout=60)
        except httpx.TransportError:
            continue
        what = "models" if answer.status_code == 200 else answer.text
        answers.add((answer.status_code, what, answer.headers.get("retry-after")))


def test_until_it_is_ready_the_port_tells_that_the_model_starts(server):
    (status, text, retry_after), *others = server.answers - {(200, "models", None)}
    assert (status, json.loads(text), retry_after, others) == (503, starting().body(), "5", [])


def test_the_printed_curl_line_works(server):
    line = next(text for text in server.output.splitlines() if text.startswith("curl"))
    answer = subprocess.run(shlex.split(line), capture_output=True, text=True, check=True)
    events = [event for event in answer.stdout.split("\n\n") if event]
    assert events[-1] == "data: [DONE]"
    last = json.loads(events[-2].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] in ("stop", "length")


def test_the_example_starts_a_server_asks_it_and_leaves_nothing(tmp_path):
    with short_tmp() as tmp:
        environment = isolated_environment(tmp) | {"OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        environment["PORT"] = str(free_port())
        script = ROOT / "examples" / "serve_and_curl.sh"
        done = subprocess.run(
            ["sh", str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr + (tmp_path / "serve.log").read_text()
        models, answer, *events = [line for line in done.stdout.splitlines() if line]
        assert json.loads(models)["data"][0]["id"] == "tiny"
        assert json.loads(answer)["usage"]["completion_tokens"] > 0
        assert events[-1] == "data: [DONE]"
        eventually(lambda: pids_with(f"RAY_TMPDIR={tmp}"), lambda pids: not pids)


def test_the_shipped_pair_serves_from_the_shipped_deployment(server):
    assert re.search(r"ready: tiny at http", server.output)
    body = {"model": "tiny", "prompt": "def fibonacci(n):", "max_tokens": 32, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
    assert answer["choices"][0]["text"].strip()
    # How deep it drafts depends on what this machine measured at start.
    assert answer["usage"]["speculation"]["accept_length"] > 1


def test_one_text_is_told_by_every_endpoint_until_its_prefix_is_flushed(server):
    prompt = "def fibonacci(n):\n    " + "x = 1\n    " * 40
    sampling = {"temperature": 0, "seed": 1, "bad_words": ["return"]}
    with httpx.Client(base_url=server.url, timeout=120) as client:

        def generate():
            body = {"text": prompt, "sampling_params": {**sampling, "max_new_tokens": 24}}
            return client.post("/generate", json=body).json()

        first, second = generate(), generate()
        body = {"prompt": prompt, **sampling, "max_tokens": 24, "speculative": {"enabled": False}}
        plain = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert first["text"] == second["text"] == plain
        assert "return" not in plain
        tokens = client.post("/tokenize", json={"prompt": prompt}).json()
        assert first["meta_info"]["prompt_tokens"] == tokens["count"]
        assert second["meta_info"]["cached_tokens"] > 0
        assert client.post("/flush_cache").status_code == 200
        assert generate()["meta_info"]["cached_tokens"] == 0


def test_only_this_user_reaches_haproxy_and_only_this_host_its_statistics(server):
    folder = server.haproxy_folder()
    for private in (folder, folder.parent):
        assert private.stat().st_mode & 0o777 == 0o700
    assert (folder / "admin").stat().st_mode & 0o777 == 0o600
    config = (folder / "haproxy.cfg").read_text()
    binds = re.findall(r"^ *bind (\S+):\d+$", config, re.MULTILINE)
    assert binds == ["127.0.0.1"] * 3


async def test_ctrl_c_lets_running_streams_and_waiting_requests_end(server):
    """Others are told to come back, by whatever answers them."""
    body = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=240, limits=limits) as client:

        async def router():
            return (await client.get("/server_info")).json()["router"]

        async def ask():
            return (await client.post("/v1/completions", json=body)).json()

        async def stream():
            return (await client.post("/v1/completions", json=body | {"stream": True})).text

        num_requests = (await router())["max_in_flight"] + 4
        streams = [asyncio.create_task(stream()) for _ in range(2)]
        answers = [asyncio.create_task(ask()) for _ in range(num_requests)]
        while (await router())["queue_len"] == 0:
            await asyncio.sleep(0.01)
        os.killpg(server.process.pid, signal.SIGINT)
        others = await until_closed(client)
        for text in await asyncio.gather(*streams):
            assert text.endswith("data: [DONE]\n\n")
        for answer in await asyncio.gather(*answers):
            assert answer["usage"]["completion_tokens"] == 40
    assert {status for status, _ in others} == {200, 503}
    assert {retry_after for status, retry_after in others if status == 503} == {"1"}
    rest, _ = await asyncio.to_thread(server.process.communicate, timeout=120)
    assert (server.process.returncode, "shutting down" in rest) == (0, True)


async def until_closed(client):
    """Status and Retry-After of answers to others until the port is closed."""
    answers = set()
    while True:
        for path in ("/health", "/v1/models"):
            try:
                answer = await client.get(path)
            except httpx.ConnectError:
                return answers
            except httpx.TransportError:  # an idle connection is closed when HAProxy reloads
                continue
            answers.add((answer.status_code, answer.headers.get("retry-after")))
        await asyncio.sleep(0.05)


def test_the_server_ends_with_one_line_and_a_status_when_rays_raylet_has_ended():
    with serving(until="starting the replicas") as server:
        (raylet,) = server.pids("raylet/raylet ")
        os.kill(raylet, signal.SIGKILL)
        rest, _ = server.process.communicate(timeout=60)
        assert server.process.returncode == 1
        assert "Ray's raylet has ended (SIGKILL)" in rest
