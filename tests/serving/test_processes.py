"""Whatever signal ends the command, none of its processes, ports and folders outlives it."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ray.serve._private import haproxy

from serve_spec.serving import processes
from serve_spec.serving.errors import no_router, starting
from serve_spec.serving.processes import holder_of_port
from serve_spec.serving.proxy import run_haproxy
from serve_spec.serving.proxy.settings import haproxy_script
from tests.serving.cluster import ROOT, eventually, free_port, pids_with

# A server that ends with status 3 when it is asked to, whose own child ended before, and left a
# grandchild in a session of its own that ignores SIGTERM.
SERVER = """
import os, signal, subprocess, sys, time
from serve_spec.serving.processes import private_folder, supervise

LEFT = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
PARENT = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True)"

def work():
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: sys.exit(3))
    subprocess.run([sys.executable, "-c", PARENT, sys.executable, "-c", LEFT])
    print(os.getpid(), private_folder(), flush=True)
    time.sleep(600)

sys.exit(supervise(work))
"""


@pytest.fixture
def command(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=ROOT,
        env={**os.environ, "OF_TEST": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    pid, folder = process.stdout.readline().split()
    yield process, int(pid), Path(folder)
    for left in pids_with(f"OF_TEST={tmp_path}"):
        os.kill(left, signal.SIGKILL)
    process.communicate()


ENDINGS = {
    "SIGTERM": (lambda command, _: command.terminate(), 3),
    "SIGTERM to the group": (lambda command, _: os.killpg(command.pid, signal.SIGTERM), 3),
    "Ctrl-C": (lambda command, _: os.killpg(command.pid, signal.SIGINT), 3),
    "a terminal that is closed": (lambda command, _: command.send_signal(signal.SIGHUP), 3),
    "SIGQUIT": (lambda command, _: command.send_signal(signal.SIGQUIT), -signal.SIGQUIT),
    "SIGKILL": (lambda command, _: command.kill(), -signal.SIGKILL),
    "SIGKILL to the group": (lambda command, _: os.killpg(command.pid, signal.SIGKILL), -9),
    "SIGKILL of the server": (lambda _, server: os.kill(server, signal.SIGKILL), 128 + 9),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_outlives_the_command_whatever_ends_it(command, tmp_path, ending):
    process, server, folder = command
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(pids_with(f"OF_TEST={tmp_path}")) == 3, "command, server, and what it left"
    end, status = ENDINGS[ending]
    end(process, server)
    assert process.wait(timeout=60) == status
    eventually(lambda: pids_with(f"OF_TEST={tmp_path}"), lambda left: not left)
    eventually(folder.exists, lambda exists: not exists)


def test_the_folders_of_servers_that_were_killed_are_removed(command):
    _, _, locked = command
    left = locked.with_name("serve-spec.left")
    left.mkdir()
    (left / "admin.sock").touch()
    private = processes.private_folder.__wrapped__()
    assert (left.exists(), locked.exists(), private.exists()) == (False, True, True)


def test_the_folders_of_ray_nodes_that_have_ended_are_removed(folder):
    kinds = {name: folder / name for name in ("served", "ended", "new", "other")}
    with socket.socket(socket.AF_UNIX) as served:
        for name, path in kinds.items():
            path.mkdir()
            if name != "other":
                with socket.socket(socket.AF_UNIX) as ended:
                    server = served if name == "served" else ended
                    server.bind(str(path / "admin.sock"))
                    server.listen()
            if name != "new":
                os.utime(path, (0, 0))
        run_haproxy.remove_ended(path / "admin.sock" for path in kinds.values())
    assert [name for name, path in kinds.items() if path.exists()] == ["served", "new", "other"]


def test_a_second_signal_ends_a_server_that_does_not_react(tmp_path):
    code = SERVER.replace("sys.exit(3)", "None").replace(
        "time.sleep(600)\n\n", "[time.sleep(1) for _ in range(600)]\n\n"
    )
    code = f"import serve_spec.serving.processes as p; p._IMPATIENT_S = 1\n{code}"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=2)
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGKILL


def test_the_holder_of_a_port_is_named():
    assert holder_of_port(free_port()) == ""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert f"process {os.getpid()} (" in holder_of_port(server.getsockname()[1])
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        assert f"process {os.getpid()} (" in holder_of_port(server.getsockname()[1])


def configuration(folder, *, backends=(), **ports):
    """Return HAProxy's configuration as Ray writes it."""
    folder.mkdir(exist_ok=True)
    options = haproxy.HTTPOptions(host="127.0.0.1", port=ports.pop("port", 8000))
    names = {"socket_path": "admin.sock", "server_state_file": "state"}
    files = {name: str(folder / file) for name, file in names.items()}
    config = haproxy.HAProxyConfig(http_options=options, metrics_enabled=False, **files, **ports)
    api = haproxy.HAProxyApi(config, config_file_path=str(folder / "haproxy.cfg"))
    api.set_backend_configs({backend.name: backend for backend in backends})
    api._generate_config_file_internal()
    return folder / "haproxy.cfg"


BACKEND = haproxy.BackendConfig("http-app", "/", app_name="app")


@pytest.fixture
def folder():
    """A folder that all may read, with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as tmp:
        folder = Path(tmp) / "node"
        folder.mkdir(mode=0o755)
        yield folder


def test_only_this_user_reaches_haproxys_socket_and_only_this_host_its_statistics(
    folder, monkeypatch
):
    text = configuration(folder, backends=[BACKEND]).read_text()
    assert "mode 666 level admin" in text
    corrected = run_haproxy.corrected(text, is_starting=False)
    assert f"stats socket {folder}/admin.sock mode 600 level admin" in corrected
    binds = [line.strip() for line in corrected.splitlines() if line.strip().startswith("bind")]
    assert binds == ["bind 127.0.0.1:9101", "bind 127.0.0.1:8000", "bind 127.0.0.1:8404"]
    monkeypatch.setenv("SERVE_SPEC_MONITORING_HOST", "*")
    corrected = run_haproxy.corrected(text, is_starting=False)
    assert ("bind *:9101" in corrected, "bind *:8404" in corrected) == (True, True)
    assert corrected.count("\n") == text.count("\n")


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    run_haproxy.make_private(folder)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700] * 2
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(SystemExit, match=r"belongs to user .* RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"):
        run_haproxy.make_private(folder)


def test_without_an_application_haproxy_answers_503(folder):
    text = configuration(folder).read_text()
    for is_starting, error, after_s in ((True, starting(), 5), (False, no_router(), 1)):
        corrected = run_haproxy.corrected(text, is_starting=is_starting)
        (line,) = [line.strip() for line in corrected.splitlines() if "Retry-After" in line]
        head, _, body = line.partition(" string ")
        assert head.endswith(f"503 content-type application/json hdr Retry-After {after_s}")
        assert json.loads(body.strip("'")) == error.body()
    text = configuration(folder, backends=[BACKEND]).read_text()
    assert "return status 404" in run_haproxy.corrected(text, is_starting=False)


def test_haproxy_ends_with_the_process_that_runs_it(folder):
    ports = [free_port() for _ in range(3)]
    names = "port", "stats_port", "metrics_port"
    config = configuration(folder, **dict(zip(names, ports, strict=True)))
    code = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); input()"
    settings = haproxy_script()
    haproxy_command = [settings["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(config)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code, *haproxy_command],
        env={**os.environ, **settings},
        stdin=pipe,
        stdout=pipe,
        text=True,
    ) as manager:
        pid = int(manager.stdout.readline())
        for port in ports:
            eventually(lambda port=port: holder_of_port(port), lambda by: f"process {pid} " in by)
        assert (folder / "admin.sock").stat().st_mode & 0o777 == 0o600
        manager.kill()
    for port in ports:
        eventually(lambda port=port: holder_of_port(port), lambda by: not by)
    eventually(Path(f"/proc/{pid}/exe").exists, lambda runs: not runs)
