"""Ray Serve's own commands: deploy, status, shutdown; and updates of a fleet that serves."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.fleet import (
    LONG,
    SHORT,
    all_streams,
    keep_asking,
    pids,
    said,
    under_way,
)
from tests.serving.cluster import ROOT, eventually, free_port, local_ray

SERVE = Path(sys.executable).with_name("serve")
BUILDER = "serve_spec.serving:build_app"
TINY = ROOT / "deploy/tiny.yaml"
WITHIN_S = 240


def serve(*arguments):
    """What one of Ray Serve's commands prints."""
    command = [str(argument) for argument in (SERVE, *arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def is_up(url):
    try:
        return httpx.get(f"{url}/health", timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def complete(url):
    body = {"model": "tiny", "prompt": "def fibonacci(n):", "max_tokens": 16, "temperature": 0}
    return dict(httpx.post(f"{url}/v1/completions", json=body, timeout=60).json())


@dataclass
class Deployment:
    """A Serve file and where it is served."""

    file: Path
    content: dict[str, Any]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.content['http_options']['port']}"

    @property
    def app(self):
        return dict(self.content["applications"][0])

    def save(self):
        self.file.write_text(yaml.safe_dump(self.content))
        return self.file


@pytest.fixture(scope="module")
def cluster():
    # Serve would try thrice to start a replica, and hear the same reason thrice.
    environment = {"RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1"}
    with local_ray(num_cpus=6, include_dashboard=True, environment=environment):
        yield


@pytest.fixture
def tiny(cluster, tmp_path):
    """The shipped file, on a port of its own."""
    content = yaml.safe_load(TINY.read_text())
    content["http_options"]["port"] = free_port()
    deployment = Deployment(tmp_path / TINY.name, content)
    deployment.save()
    return deployment


def test_serve_deploy_run_status_and_shutdown_do_what_ray_s_documentation_says(tiny):
    told = set()

    def is_told_to_go_on():
        try:
            answer = httpx.get(f"{tiny.url}/health", timeout=60)
        except httpx.TransportError:
            return False
        told.add((answer.status_code, answer.json().get("error", {}).get("code")))
        return answer.status_code == 200

    serve("deploy", tiny.file)
    eventually(is_told_to_go_on, bool, WITHIN_S)
    assert told == {(503, "starting"), (200, None)}
    assert complete(tiny.url)["choices"][0]["text"].strip()
    status = yaml.safe_load(serve("status"))
    app = status["applications"]["serve_spec"]
    assert app["status"] == "RUNNING", app
    assert {d["status"] for d in app["deployments"].values()} == {"HEALTHY"}
    assert set(app["deployments"]) == {"Router", "EngineReplica"}
    names = ["--name", "named", "--route-prefix", "/named"]
    serve("run", "--non-blocking", *names, BUILDER, "model=asset:tiny", "num_cpus=0.5")
    answers = [complete(url)["choices"] for url in (tiny.url, f"{tiny.url}/named")]
    assert answers[0] == answers[1]
    serve("shutdown", "-y")
    left = httpx.get(f"{os.environ['RAY_DASHBOARD_ADDRESS']}/api/serve/applications/", timeout=60)
    assert left.raise_for_status().json()["applications"] == {}
    assert not is_up(tiny.url)


def test_a_model_that_can_not_be_loaded_ends_the_command_with_the_reason(cluster, tmp_path):
    file = tmp_path / "too_small.yaml"
    # Only the engine knows how many pages it needs.
    file.write_text("model: {path: 'asset:tiny/target'}\ncache: {num_pages: 1}\n")
    command = [sys.executable, "-m", "serve_spec", "serve", str(file), "--port", str(free_port())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 1
    assert "num_pages=1 of page_size=16 hold 16 tokens" in done.stderr
    serve("shutdown", "-y")


@pytest.fixture(scope="module")
def fleet(cluster, settings, offline, tmp_path_factory):
    """Two routers, two replicas; whoever is told to go may end what runs."""
    settings["replica"]["graceful_shutdown_timeout_s"] = 60.0
    content = yaml.safe_load(TINY.read_text())
    content["http_options"]["port"] = free_port()
    content["applications"][0] |= {
        "args": {"config": settings},
        "deployments": [{"name": "Router", "num_replicas": 2}, {"name": "EngineReplica"}],
    }
    fleet = Deployment(tmp_path_factory.mktemp("fleet") / "fleet.yaml", content)
    serve("deploy", fleet.save())
    eventually(is_settled, bool, WITHIN_S)
    return fleet


def is_settled():
    """Whether Serve has made everything what the file says."""
    from ray import serve

    app = serve.status().applications.get("serve_spec")
    return (
        app is not None
        and app.status == "RUNNING"
        and all(
            deployment.status == "HEALTHY" and deployment.replica_states == {"RUNNING": 2}
            for deployment in app.deployments.values()
        )
    )


def test_a_new_user_config_changes_the_policy_of_running_replicas(fleet, offline):
    before = pids()

    async def update(streams, _):
        await under_way(streams)
        (engines,) = (d for d in fleet.app["deployments"] if d["name"] == "EngineReplica")
        engines["user_config"] = {"speculative_adaptive": False, "speculative_num_steps": 0}
        await asyncio.to_thread(serve, "deploy", fleet.save())

    streams = all_streams(fleet.url, LONG, update)
    assert said(streams) == offline[LONG]
    eventually(is_settled, bool)
    assert pids() == before, "nobody was started anew"
    streams = all_streams(fleet.url, SHORT)
    assert said(streams) == offline[SHORT]
    assert {stream.usage["speculation"]["num_draft_tokens"] for stream in streams} == {0}


async def test_a_rolling_update_of_the_engine_loses_nothing_and_leaves_no_gap(
    fleet, settings, offline
):
    before = set(pids().values())
    settings["scheduler"]["max_num_seqs"] += 1

    def is_updated():
        return is_settled() and not before & set(pids().values())

    async def update(done):
        try:
            await asyncio.to_thread(serve, "deploy", fleet.save())
            await asyncio.to_thread(eventually, is_updated, bool, WITHIN_S)
        finally:
            done.set()

    done = asyncio.Event()
    # Busy all the while: whichever replica is told to go has streams.
    await asyncio.gather(keep_asking(fleet.url, offline[LONG], done), update(done))
    assert len(pids()) == 2
    assert said(await asyncio.to_thread(all_streams, fleet.url, SHORT)) == offline[SHORT]
