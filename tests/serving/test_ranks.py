"""A replica's ranks are Ray's actors: one placement group each, one fate, and nothing left over."""

import asyncio
import os
import signal
from functools import partial

import httpx
import pytest

from serve_spec import LLM, SamplingParams
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.serving.deployment.app import build_app
from serve_spec.serving.deployment.engine_actor import placement_of
from tests.e2e.fleet import Stream, client_of, fleet_settings, texts_of
from tests.serving.cluster import actor_pids, eventually, local_serve

NUM_STREAMS = 4
PROMPTS = [f"def f{i}(x):" for i in range(NUM_STREAMS)]
LONG = 600


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A random pair in float32, on one rank."""
    settings = fleet_settings(tmp_path_factory.mktemp("pair"))
    settings["model"] |= {"dtype": "float32", "device": "cpu"}
    settings["speculative"]["speculative_adaptive"] = False
    return settings


@pytest.fixture(scope="module")
def texts(settings):
    """The messages of one rank, without Ray."""
    llm = LLM({**settings, "replica": {}})
    params = [SamplingParams(**params_of(i)) for i in range(NUM_STREAMS)]
    texts = [output.text for output in llm.generate(PROMPTS, params)]
    llm.shutdown()
    return texts


@pytest.fixture(scope="module")
def url(settings):
    """Two replicas of two ranks each."""
    replica = {
        "num_replicas": 2,
        "num_cpus": 0.2,
        "num_gpus": 2,
        "torch_num_threads": 1,
        "health_check_period_s": 0.5,
        "graceful_shutdown_timeout_s": 0.0,
    }
    shared = {**settings, "replica": replica}
    shared["model"] = {**settings["model"], "tensor_parallel_size": 2}
    shared["router"] = {"routing_policy": "balanced", "routing_stats_period_s": 0.2}
    with local_serve(num_cpus=4, num_gpus=4) as url:
        from ray import serve

        serve.run(build_app({"config": shared}), name="ranks", route_prefix="/")
        yield url


def params_of(index):
    """Every other one is drawn, the others are greedy."""
    return {"max_tokens": LONG, "temperature": 0.8 * (index % 2), "seed": index, "ignore_eos": True}


def groups():
    """Placement groups that hold something."""
    from ray.util import placement_group_table

    return [g for g in placement_group_table().values() if g["state"] == "CREATED"]


def test_every_replica_has_a_placement_group_of_one_node_with_a_bundle_for_each_rank(url):
    import ray

    assert ray.available_resources().get("GPU", 0) == 0
    assert len(groups()) == 2
    for group in groups():
        assert group["strategy"] == "STRICT_PACK"
        assert list(group["bundles"].values()) == [{"CPU": 0.1, "GPU": 1.0}] * 2
    assert len(actor_pids("_Follower")) == len(actor_pids("Engine")) == 2


@pytest.mark.parametrize("actor", ["_Follower", "Engine"])
def test_a_killed_rank_costs_no_token_and_its_replica_comes_back(url, texts, actor):
    before = actor_pids(actor)

    async def scenario():
        streams = [Stream() for _ in PROMPTS]
        async with client_of(url) as client:
            running = [
                asyncio.create_task(stream.listen(client, PROMPTS[i], **params_of(i)))
                for i, stream in enumerate(streams)
            ]
            while not all(stream.num_chunks for stream in streams):
                await asyncio.sleep(0.001)
            os.kill(min(before), signal.SIGKILL)
            await asyncio.gather(*running)
        return streams

    assert [text for text, _ in texts_of(asyncio.run(scenario()))] == texts
    eventually(lambda: set(actor_pids(actor)), lambda now: len(now) == 2 and now != set(before))
    eventually(lambda: httpx.get(f"{url}/health").json()["healthy_replicas"], lambda n: n == 2)
    assert len(groups()) == 2


def test_nothing_of_a_replica_outlives_it(url):
    from ray import serve

    serve.delete("ranks")
    for actor in ("_Follower", "Engine"):
        eventually(partial(actor_pids, actor), lambda found: not found)
    eventually(groups, lambda found: not found)


@pytest.mark.parametrize(
    ("num_ranks", "num_cpus", "num_gpus", "strategy", "bundle"),
    [
        (1, 2, 1, "STRICT_PACK", {"CPU": 2, "GPU": 1}),
        (4, 2, 4, "SPREAD", {"CPU": 0.5, "GPU": 1}),
        (2, 1, 0, "STRICT_PACK", {"CPU": 0.5}),
    ],
)
def test_ranks_share_what_a_replica_reserves_and_go_where_the_configuration_says(
    settings, num_ranks, num_cpus, num_gpus, strategy, bundle
):
    config = ServeSpecConfig.load(
        settings,
        tensor_parallel_size=num_ranks,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        placement_group_strategy=strategy,
    )
    assert placement_of(config) == {
        "ray_actor_options": {"num_cpus": 0, "num_gpus": 0},
        "placement_group_bundles": [bundle] * num_ranks,
        "placement_group_strategy": strategy,
    }


@pytest.mark.parametrize(
    ("num_ranks", "reserved", "named"),
    [
        (2, {"num_gpus": 1}, "num_gpus=1: .* set num_gpus to 2"),
        (2, {"num_cpus": 0}, "raise num_cpus"),
        (1, {"num_cpus": 0}, "raise num_cpus"),
    ],
)
def test_what_ranks_can_not_share_is_refused_before_anything_starts(
    settings, num_ranks, reserved, named
):
    config = {**settings, "model": {**settings["model"], "tensor_parallel_size": num_ranks}}
    with pytest.raises(ConfigError, match=named):
        build_app({"config": config, **reserved})
