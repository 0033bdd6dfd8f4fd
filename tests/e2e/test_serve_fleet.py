"""A fleet that Ray Serve's own commands deploy: streams outlive what is killed or updated."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from tests.e2e.fleet import (
    LONG,
    NUM_STREAMS,
    SHORT,
    all_streams,
    fleet_settings,
    keep_asking,
    kill,
    offline_answers,
    pids,
    router_state,
    server_info,
    texts_of,
    under_way,
)
from tests.serving.cluster import ROOT, actor_pids, eventually, free_port, local_ray

SERVE = Path(sys.executable).with_name("serve")
BUILDER = "serve_spec.serving:build_app"
WITHIN_S = 240


def run(*command):
    """Run a command to its end; return its status and what it printed."""
    command = [str(word) for word in command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S)
    return done.returncode, done.stdout, done.stderr


def serve(*arguments):
    """Return what one of Ray Serve's commands prints."""
    status, printed, errors = run(SERVE, *arguments)
    assert status == 0, printed + errors
    return printed


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A configuration of two replicas. Replicas that are told to go end their streams first."""
    settings = fleet_settings(tmp_path_factory.mktemp("pair"))
    settings["replica"]["graceful_shutdown_timeout_s"] = 60.0
    return settings


@pytest.fixture(scope="module")
def offline(settings):
    """Texts and token counts of the offline engine, by max_tokens."""
    return offline_answers(settings)


@pytest.fixture(scope="module")
def cluster():
    # Serve would try three times to start a replica, with the same error.
    environment = {"RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1"}
    with local_ray(num_cpus=6, include_dashboard=True, environment=environment):
        yield


class Fleet:
    """The shipped Serve file with two replicas of a random pair."""

    def __init__(self, settings, file):
        self._file = file
        self._content = yaml.safe_load((ROOT / "deploy/tiny.yaml").read_text())
        self._content["http_options"]["port"] = port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        (app,) = self._content["applications"]
        self.router, self.engines = {"name": "Router"}, {"name": "EngineReplica"}
        app |= {"args": {"config": settings}, "deployments": [self.router, self.engines]}

    def deploy(self):
        self._file.write_text(yaml.safe_dump(self._content))
        serve("deploy", self._file)


@pytest.fixture(scope="module")
def fleet(cluster, settings, offline, tmp_path_factory):
    fleet = Fleet(settings, tmp_path_factory.mktemp("fleet") / "fleet.yaml")
    fleet.deploy()
    told = set()
    eventually(lambda: is_told_to_go_on(fleet.url, told), bool, WITHIN_S)
    assert told == {(503, "starting"), (200, None)}
    eventually(lambda: is_settled(num_routers=1), bool, WITHIN_S)
    eventually(
        lambda: server_info(fleet.url)["router"], lambda r: len(r["replica_batch_sizes"]) == 2
    )
    return fleet


@pytest.fixture
def url(fleet):
    return fleet.url


@pytest.fixture(scope="module")
def with_two_routers(fleet):
    """Serve replaces the only replica of a deployment with a gap."""
    fleet.router["num_replicas"] = 2
    fleet.deploy()
    eventually(is_settled, bool, WITHIN_S)


def is_told_to_go_on(url, told):
    """Return whether the model serves; add the status and the error code of the answer."""
    try:
        answer = httpx.get(f"{url}/health", timeout=60)
    except httpx.TransportError:
        return False
    told.add((answer.status_code, answer.json().get("error", {}).get("code")))
    return answer.status_code == 200


def is_settled(num_routers=2):
    """Return whether Serve has applied the whole file."""
    from ray import serve

    app = serve.status().applications.get("serve_spec")
    if app is None or app.status != "RUNNING":
        return False
    running = {name: d.replica_states for name, d in app.deployments.items()}
    wanted = {"Router": {"RUNNING": num_routers}, "EngineReplica": {"RUNNING": 2}}
    return running == wanted and {d.status for d in app.deployments.values()} == {"HEALTHY"}


def test_serve_status_names_the_application_and_its_deployments(fleet):
    app = yaml.safe_load(serve("status"))["applications"]["serve_spec"]
    assert app["status"] == "RUNNING", app
    statuses = {name: deployment["status"] for name, deployment in app["deployments"].items()}
    assert statuses == {"Router": "HEALTHY", "EngineReplica": "HEALTHY"}


def test_many_streams_say_what_the_offline_engine_says(url, offline):
    streams = all_streams(url, SHORT)
    assert texts_of(streams) == offline[SHORT]
    assert {stream.num_resumes for stream in streams} == {0}
    info = eventually(lambda: server_info(url), lambda info: len(info["internal_states"]) == 2)
    for state in info["internal_states"]:
        assert info["fleet"]["counters"].keys() <= state["counters"].keys(), "it sums what is sent"
        assert info["fleet"]["kv"].keys() <= state["kv"].keys()
        assert isinstance(state["speculative_num_steps"], int)
        assert state["avg_spec_accept_length"] >= 1
        assert isinstance(state["last_reason"], str)
    router = info["router"]
    assert len(router["replica_batch_size_histograms"]) == 2, "both replicas had some"
    assert set(router["submission_size_histogram"]) - {"1"}, "some requests travelled together"
    assert router["in_flight"] == 0


def test_a_killed_replica_takes_no_stream_with_it_and_returns(url, offline):
    before, engines = pids(), actor_pids("Engine")
    victims = []
    bystanders = []

    async def murder(streams, client):
        await under_way(streams)
        sizes = (await router_state(client))["replica_batch_sizes"]
        victim = max(before, key=lambda name: int(sizes.get(name, 0)))
        kill(before[victim])
        victims.append(victim)
        bystanders.append(sum(sizes.values()) - sizes[victim])

    streams = all_streams(url, LONG, murder)
    assert texts_of(streams) == offline[LONG]
    num_resumed = sum(stream.num_resumes for stream in streams)
    assert 0 < num_resumed <= NUM_STREAMS - bystanders[0], "the other replica's noticed nothing"
    router = server_info(url)["router"]
    assert router["num_resumed"] == num_resumed
    assert router["in_flight"] == 0
    eventually(lambda: actor_pids("Engine"), lambda found: len(engines & found) == 1, within_s=2)
    after = eventually(pids, lambda found: len(found) == 2 and not set(victims) & set(found))
    assert set(before) - set(victims) <= set(after), "the other one goes on"
    eventually(
        lambda: httpx.get(f"{url}/health", timeout=60).json(),
        lambda health: health.get("healthy_replicas") == 2,
    )
    assert texts_of(all_streams(url, SHORT)) == offline[SHORT]


def test_a_killed_engine_ends_its_replica_alone_and_takes_no_stream_with_it(url, offline):
    before = pids()
    engines = eventually(lambda: actor_pids("Engine"), lambda found: len(found) == 2)

    async def murder(streams, _):
        await under_way(streams)
        kill(min(engines))

    streams = all_streams(url, LONG, murder)
    assert texts_of(streams) == offline[LONG]
    assert any(stream.num_resumes for stream in streams)
    after = eventually(pids, lambda found: len(found) == 2 and found != before)
    assert len(set(before) & set(after)) == 1, "the other one goes on"


def test_a_killed_stats_actor_takes_its_memory_and_no_stream_with_it(url, offline):
    import ray

    def actor():
        try:
            return ray.get_actor("SpecStats", namespace="serve_spec")
        except ValueError:
            return None

    old = eventually(actor, bool)

    async def murder(streams, client):
        await under_way(streams)
        ray.kill(old, no_restart=True)
        info = (await client.get("/server_info")).raise_for_status().json()
        assert info["internal_states"], "the replicas are asked instead"

    assert texts_of(all_streams(url, LONG, murder)) == offline[LONG]
    new = eventually(actor, lambda found: found is not None and found != old)
    eventually(lambda: ray.get(new.status.remote()), lambda status: status["replicas"])


def test_a_new_user_config_changes_the_policy_of_running_replicas(fleet, offline, with_two_routers):
    before = pids()
    fleet.engines["user_config"] = {"speculative_adaptive": False, "speculative_num_steps": 0}

    async def update(streams, _):
        await under_way(streams)
        await asyncio.to_thread(fleet.deploy)

    assert texts_of(all_streams(fleet.url, LONG, update)) == offline[LONG]
    eventually(is_settled, bool)
    assert pids() == before, "no replica was started anew"
    streams = all_streams(fleet.url, SHORT)
    assert texts_of(streams) == offline[SHORT]
    assert {stream.usage["speculation"]["num_draft_tokens"] for stream in streams} == {0}


async def test_a_rolling_update_of_the_engine_loses_nothing_and_leaves_no_gap(
    fleet, settings, offline, with_two_routers
):
    before = set(pids().values())
    settings["scheduler"]["max_num_seqs"] += 1

    def is_updated():
        return is_settled() and not before & set(pids().values())

    async def update(done):
        try:
            await asyncio.to_thread(fleet.deploy)
            await asyncio.to_thread(eventually, is_updated, bool, WITHIN_S)
        finally:
            done.set()

    done = asyncio.Event()
    # Busy all the while: each replica that is told to go has streams.
    await asyncio.gather(keep_asking(fleet.url, offline[LONG], done), update(done))
    assert len(pids()) == 2
    assert texts_of(await asyncio.to_thread(all_streams, fleet.url, SHORT)) == offline[SHORT]


def test_serve_run_adds_an_application_and_serve_shutdown_leaves_nothing(fleet):
    names = ["--name", "named", "--route-prefix", "/named"]
    keys = ["num_cpus=0.5", "speculative_adaptive_strategy=ema"]  # which measures no costs
    serve("run", "--non-blocking", *names, BUILDER, "model=asset:tiny", *keys)
    body = {"prompt": "def fibonacci(n):", "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{fleet.url}/named/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"].strip()
    serve("shutdown", "-y")
    left = httpx.get(f"{os.environ['RAY_DASHBOARD_ADDRESS']}/api/serve/applications/", timeout=60)
    assert left.raise_for_status().json()["applications"] == {}
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{fleet.url}/health", timeout=60)


def test_a_model_that_can_not_be_loaded_ends_the_command_with_the_reason(cluster, tmp_path):
    file = tmp_path / "too_small.yaml"
    # Only the engine knows how many pages it needs.
    file.write_text("model: {path: 'asset:tiny/target'}\ncache: {num_pages: 1}\n")
    command = ("-m", "serve_spec", "serve", file, "--port", free_port())
    status, _, errors = run(sys.executable, *command)
    assert status == 1
    assert "num_pages=1 of page_size=16 hold 16 tokens" in errors
