"""A Ray of the test's own: nothing is shared with, or found by, any other Ray on the machine."""

import os
import shutil
import socket
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


def isolated_environment(tmp):
    """Environment of a Ray that runs in `tmp` and can import the tests."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": tmp,
        "RAY_AUTH_MODE": "disabled",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # Busy machines answer late, which is not what is tested here. A proxy that is not up after
        # five seconds, or silent for ten, would be killed and started anew, streams and all.
        "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "5",
        "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "5",
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        # Metrics and load reach their readers every ten seconds by default.
        "RAY_metrics_report_interval_ms": "1000",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "serve_spec.serving.proxy:install",
    }


@contextmanager
def short_tmp():
    """A folder with a short name: Ray's socket paths must fit into 107 bytes."""
    tmp = tempfile.mkdtemp(prefix="r", dir="/tmp")
    try:
        yield tmp
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


@contextmanager
def local_ray(num_cpus, *, num_gpus=0, include_dashboard=False, environment=None):
    """A Ray that ends with the body, and its Serve with it. Commands started here find it.

    num_gpus: those that Ray believes in; there need not be any.
    environment: more variables.
    """
    with short_tmp() as tmp:
        before = dict(os.environ)
        os.environ.update(isolated_environment(tmp) | (environment or {}))
        import ray
        from ray import serve

        try:
            context = ray.init(
                "local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                include_dashboard=include_dashboard,
                dashboard_port=free_port(),
                log_to_driver=False,
                object_store_memory=80 * 2**20,
            )
            os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]
            if include_dashboard:
                os.environ["RAY_DASHBOARD_ADDRESS"] = f"http://{context.dashboard_url}"
            yield
        finally:
            serve.shutdown()
            ray.shutdown()
            os.environ.clear()
            os.environ.update(before)


@contextmanager
def local_serve(num_cpus, num_gpus=0, environment=None):
    """Serve on a local Ray; the base URL of its HTTP proxy."""
    with local_ray(num_cpus, num_gpus=num_gpus, environment=environment):
        from ray import serve

        port = free_port()
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": "127.0.0.1", "port": port},
            logging_config={"log_level": "ERROR", "enable_access_log": False},
        )
        yield f"http://127.0.0.1:{port}"


def actor_pids(name):
    """Processes of this test's Ray in which a method of an actor class runs."""
    return {
        pid
        for pid in pids_with(f"RAY_TMPDIR={os.environ.get('RAY_TMPDIR')}")
        if command_of(pid).startswith(f"ray::{name}.")
    }


def pids_with(variable):
    """Processes that run with `NAME=value` in their environment."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (path / "environ").read_bytes().split(b"\0"):
                found.add(int(path.name))
        except OSError:
            continue
    return found


def command_of(pid):
    """The command of a process, empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def free_port():
    """A free TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def eventually(ask, accept, within_s=60):
    """Asks until the answer is acceptable; gives up at last, showing the last one."""
    deadline = time.monotonic() + within_s
    while not accept(answer := ask()):
        assert time.monotonic() < deadline, f"still {answer!r} after {within_s:.0f} s"
        time.sleep(0.05)
    return answer
