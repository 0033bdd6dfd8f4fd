"""Two replicas with the real engine behind HAProxy: many streams, and whatever may die, dies."""

import httpx
import pytest

from serve_spec.config import RouterConfig
from serve_spec.serving.proxy import own_settings
from tests.e2e.fleet import (
    LONG,
    NUM_STREAMS,
    SHORT,
    all_streams,
    kill,
    pids,
    router_state,
    said,
    server_info,
    under_way,
)
from tests.serving.cluster import actor_pids, eventually, local_serve


@pytest.fixture(scope="module")
def url(settings, offline):
    # As `serve-spec serve` sets it.
    with local_serve(num_cpus=4, environment=own_settings(RouterConfig())) as url:
        from ray import serve

        from serve_spec.serving import build_app

        serve.run(build_app({"config": settings}), name="fleet", route_prefix="/")
        eventually(lambda: router_of(url), lambda router: len(router["replica_batch_sizes"]) == 2)
        yield url


def router_of(url):
    return server_info(url)["router"]


def test_many_streams_say_what_the_offline_engine_says(url, offline):
    streams = all_streams(url, SHORT)
    assert said(streams) == offline[SHORT]
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
    assert said(streams) == offline[LONG]
    num_resumed = sum(stream.num_resumes for stream in streams)
    assert 0 < num_resumed <= NUM_STREAMS - bystanders[0], "the other replica's noticed nothing"
    router = server_info(url)["router"]
    assert router["num_resumed"] == num_resumed
    assert router["in_flight"] == 0
    eventually(lambda: actor_pids("Engine"), lambda found: len(engines & found) == 1, within_s=2)
    after = eventually(pids, lambda found: len(found) == 2 and not set(victims) & set(found))
    assert set(before) - set(victims) <= set(after), "the other one lives on"
    eventually(
        lambda: httpx.get(f"{url}/health", timeout=60).json(),
        lambda health: health.get("healthy_replicas") == 2,
    )
    assert said(all_streams(url, SHORT)) == offline[SHORT]


def test_a_killed_engine_ends_its_replica_alone_and_takes_no_stream_with_it(url, offline):
    before = pids()
    engines = eventually(lambda: actor_pids("Engine"), lambda found: len(found) == 2)

    async def murder(streams, _):
        await under_way(streams)
        kill(min(engines))

    streams = all_streams(url, LONG, murder)
    assert said(streams) == offline[LONG]
    assert any(stream.num_resumes for stream in streams)
    after = eventually(pids, lambda found: len(found) == 2 and found != before)
    assert len(set(before) & set(after)) == 1, "the other one lives on"


def test_a_killed_stats_actor_takes_its_memory_and_no_stream_with_it(url, offline):
    import ray

    def actor():
        try:
            return ray.get_actor("SpecStats", namespace="fleet")
        except ValueError:
            return None

    old = eventually(actor, bool)

    async def murder(streams, client):
        await under_way(streams)
        ray.kill(old, no_restart=True)
        info = (await client.get("/server_info")).raise_for_status().json()
        assert info["internal_states"], "the replicas are asked instead"

    assert said(all_streams(url, LONG, murder)) == offline[LONG]
    new = eventually(actor, lambda found: found is not None and found != old)
    eventually(lambda: ray.get(new.status.remote()), lambda status: status["replicas"])
