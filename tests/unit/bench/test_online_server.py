"""Servers of `bench online`: starting, stopping, variants."""

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from serve_spec.bench.online.server import (
    announced_url,
    own_server,
    serve_command,
    serve_file,
    server_variant,
)
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.serving.deployment.app import load_config
from serve_spec.serving.deployment.command import announcement
from serve_spec.serving.deployment.plan import Plan, read_plan

SERVER = """
import pathlib, signal, sys, time

def stop(*_):
    pathlib.Path(sys.argv[1]).write_text("stopped")
    raise SystemExit

signal.signal(signal.SIGTERM, stop)
print("loading the model ...", flush=True)
print("ready: tiny at http://127.0.0.1:8123/llm   (Ctrl-C stops it)", flush=True)
print(("x" * 999 + "\\n") * 200, flush=True)  # more than a pipe holds
pathlib.Path(sys.argv[1]).write_text("up")
time.sleep(60)
"""


def wait_for(file):
    while not (file.exists() and (text := file.read_text())):
        time.sleep(0.01)
    return text


def test_a_server_is_started_as_an_operator_would_and_announces_its_address(tmp_path):
    (tmp_path / "model").mkdir()
    model = {"path": str(tmp_path / "model"), "served_model_name": "meta/llama at home"}
    config = ServeSpecConfig.load({"model": model})
    for configs in ((config,), ()):
        plan = Plan({}, configs, "0.0.0.0", 8124, "/llm")
        urls = [announced_url(line) for line in announcement(plan).splitlines()]
        assert [url for url in urls if url] == ["http://127.0.0.1:8124/llm"]
    assert serve_command("deploy/tiny.yaml", None)[-2:] == ["serve", "deploy/tiny.yaml"]
    assert serve_command("deploy/tiny.yaml", 8123)[-2:] == ["--port", "8123"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_server_is_waited_for_read_and_stopped_also_after_a_failure(tmp_path, fails):
    state = tmp_path / "state"
    with (
        pytest.raises(ZeroDivisionError) if fails else nullcontext(),
        own_server([sys.executable, "-c", SERVER, str(state)]) as url,
    ):
        assert url == "http://127.0.0.1:8123/llm"
        wait_for(state)  # only a server whose output is read gets so far
        assert 1 / (not fails)
    assert state.read_text() == "stopped"


CORES = """
import os, time
print(f"ready: http://x/{'-'.join(map(str, sorted(os.sched_getaffinity(0))))}", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core cannot be divided")
def test_clients_and_server_have_cores_of_their_own_and_all_come_back():
    everything = os.sched_getaffinity(0)
    with own_server([sys.executable, "-c", CORES], client_cores=1) as url:
        server = {int(core) for core in url.rsplit("/", 1)[1].split("-")}
        assert server == everything - os.sched_getaffinity(0)
        assert len(everything) - len(server) == 1
    assert os.sched_getaffinity(0) == everything
    with own_server([sys.executable, "-c", CORES]) as url:
        assert url.rsplit("/", 1)[1] == "-".join(map(str, sorted(everything)))
        assert os.sched_getaffinity(0) == everything
    with pytest.raises(ConfigError, match="--client-cores"):
        own_server([sys.executable, "-c", CORES], client_cores=len(everything)).__enter__()


def test_a_server_that_does_not_start_is_refused_with_its_status():
    command = [sys.executable, "-c", "print('no such file'); raise SystemExit(3)"]
    with pytest.raises(ConfigError, match="ended with status 3 before it was ready"):
        own_server(command).__enter__()


TWO = "num_replicas=2,routing_policy=balanced"


@pytest.fixture
def deploy(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": {"path": "model"}}))
    app = {
        "name": "serve_spec",
        "route_prefix": "/llm",
        "import_path": "serve_spec.serving:build_app",
        "args": {"config": str(tmp_path / "config.yaml"), "num_replicas": 3},
    }
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump({"http_options": {"port": 8123}, "applications": [app]}))
    return file


def test_a_variant_is_the_file_with_its_keys_set(deploy):
    variant = server_variant(deploy, TWO)
    assert (variant.name, variant.num_replicas) == (TWO, 2)
    with serve_file(variant) as file:
        plan = read_plan(file)
    (config,) = plan.configs
    assert (config.replica.num_replicas, config.router.routing_policy) == (2, "balanced")
    assert plan.url == "http://127.0.0.1:8123/llm"
    assert not Path(file).exists()
    assert server_variant(deploy, "routing_policy=prefix").num_replicas == 3
    of_config = server_variant(deploy.parent / "config.yaml", "num_replicas=4")
    (app,) = of_config.deployment["applications"]
    assert load_config(app["args"]).replica.num_replicas == of_config.num_replicas == 4


def test_a_server_is_started_with_the_flags_of_the_benchmark():
    keys = {"max_num_seqs": 5, "served_model_name": "a b"}
    expected = ["--port", "8001", "--set", "max_num_seqs=5", "--set"]
    assert serve_command("asset:tiny", 8001, keys)[6:] == [*expected, 'served_model_name="a b"']
    variant = server_variant("asset:tiny", "num_replicas=2", keys)
    (app,) = variant.deployment["applications"]
    assert app["args"] == {"model": "asset:tiny", "num_replicas": "2", **keys}


@pytest.mark.parametrize("name", ["", "num_replicas", "num_replicas=2,", "=2", "num_replica=2"])
def test_invalid_variants_are_refused(deploy, name):
    with pytest.raises(ConfigError):
        server_variant(deploy, name)


def test_a_file_without_our_application_or_devices_for_its_ranks_is_refused(deploy):
    with pytest.raises(ConfigError, match="set num_gpus to 2"):
        server_variant(deploy, "tensor_parallel_size=2,num_gpus=1")
    server_variant(deploy, "tensor_parallel_size=2,num_gpus=2")
    given = yaml.safe_load(deploy.read_text())
    given["applications"][0]["import_path"] = "elsewhere:app"
    deploy.write_text(yaml.safe_dump(given))
    with pytest.raises(ConfigError, match="no application imports"):
        server_variant(deploy, "num_replicas=2")
