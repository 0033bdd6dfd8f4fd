"""Two replicas with the real engine under Ray Serve: many streams, and one replica killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from serve_spec import LLM, SamplingParams
from tests.helpers.checkpoints import make_eagle3, make_target
from tests.serving.cluster import eventually, local_serve

NUM_STREAMS = 32
PROMPTS = [f"def f{i}(x):" for i in range(NUM_STREAMS)]
TEMPERATURES = (0.0, 0.8)
STOP = ["e", "zq"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A random target with a head that is right sometimes, and a configuration for two of them."""
    root = tmp_path_factory.mktemp("pair")
    target = make_target(root / "target", layer_scale=0.3)
    draft = make_eagle3(root / "eagle3", target, mimic=True)
    return {
        "model": {"path": str(target), "max_model_len": 256},
        "speculative": {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(draft),
            "speculative_num_steps": 3,
            "speculative_adaptive_strategy": "ema",
        },
        "cache": {"page_size": 8, "num_pages": 1024},
        "scheduler": {"max_num_seqs": NUM_STREAMS},
        "router": {"batch_wait_ms": 5.0, "max_batch_size": 4, "routing_stats_period_s": 0.2},
        "replica": {
            "num_replicas": 2,
            "torch_num_threads": 1,
            "health_check_period_s": 1.0,
            "graceful_shutdown_timeout_s": 0.0,
        },
        "stats": {"push_interval_s": 0.2, "stale_after_s": 2.0},
    }


def params(index: int, max_tokens: int) -> dict[str, Any]:
    """How stream `index` draws: every other one greedily, every fourth with stop strings."""
    stop = {"stop": STOP} if index % 4 == 3 else {}
    return {
        "max_tokens": max_tokens,
        "temperature": TEMPERATURES[index % 2],
        "seed": index,
        "ignore_eos": True,
        **stop,
    }


@pytest.fixture(scope="module")
def offline(settings: dict[str, Any]) -> dict[int, list[tuple[str, int]]]:
    """Texts and token counts of the offline engine, by max_tokens."""
    llm = LLM({**settings, "replica": {}})
    try:
        return {
            max_tokens: [
                (answer.text, len(answer.token_ids))
                for answer in llm.generate(
                    PROMPTS,
                    [SamplingParams(**params(i, max_tokens)) for i in range(NUM_STREAMS)],
                )
            ]
            for max_tokens in (24, 200)
        }
    finally:
        llm.shutdown()


@pytest.fixture(scope="module")
def url(settings: dict[str, Any], offline: object) -> Iterator[str]:
    with local_serve(num_cpus=4) as url:
        from ray import serve

        from serve_spec.serving import build_app

        serve.run(build_app({"config": settings}), name="fleet", route_prefix="/")
        yield url


@dataclass
class Stream:
    """One completion as its client sees it."""

    text: str = ""
    num_chunks: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    error: object = None


async def listen(client: httpx.AsyncClient, stream: Stream, body: dict[str, Any]) -> None:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            stream.error = stream.error or chunk.get("error")
            stream.usage = chunk.get("usage") or stream.usage
            for choice in chunk.get("choices", ()):
                stream.text += choice["text"]
                stream.num_chunks += 1
                stream.finish_reason = choice["finish_reason"] or stream.finish_reason


async def all_streams(url: str, max_tokens: int, meanwhile: Any = None) -> list[Stream]:
    """Every stream at once; `meanwhile(streams, client)` runs beside them."""
    limits = httpx.Limits(max_connections=NUM_STREAMS + 2)
    streams = [Stream() for _ in PROMPTS]
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as client:
        bodies = [{"prompt": p, **params(i, max_tokens)} for i, p in enumerate(PROMPTS)]
        running = [listen(client, *pair) for pair in zip(streams, bodies, strict=True)]
        if meanwhile is not None:
            running.append(meanwhile(streams, client))
        await asyncio.gather(*running)
    return streams


def said(streams: list[Stream]) -> list[tuple[str, int]]:
    assert [stream.error for stream in streams] == [None] * NUM_STREAMS
    return [(stream.text, stream.usage["completion_tokens"]) for stream in streams]


def router(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/server_info", timeout=30).raise_for_status().json()["router"])


def pids() -> dict[str, int]:
    """Process of each engine replica, by the replica's name."""
    import ray

    found = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if "EngineReplica" in actor["name"]:
            handle = ray.get_actor(actor["name"], namespace=actor["namespace"])
            pid = ray.get(handle.__ray_call__.remote(lambda self: os.getpid()))
            found[actor["name"].rpartition("#")[2]] = pid
    return found


def test_many_streams_say_what_the_offline_engine_says(url: str, offline: Any) -> None:
    streams = asyncio.run(all_streams(url, 24))
    assert said(streams) == offline[24]
    seen = router(url)
    assert len(seen["replica_batch_sizes"]) == 2, "both replicas had some"
    assert set(seen["submission_size_histogram"]) - {"1"}, "some requests travelled together"
    assert seen["in_flight"] == 0


def test_a_killed_replica_takes_no_stream_with_it_and_returns(url: str, offline: Any) -> None:
    before = pids()
    victims: list[str] = []

    async def kill(streams: list[Stream], client: httpx.AsyncClient) -> None:
        while sum(stream.num_chunks > 0 for stream in streams) < NUM_STREAMS // 2:
            await asyncio.sleep(0.001)
        sizes = (await client.get("/server_info")).json()["router"]["replica_batch_sizes"]
        victim = max(before, key=lambda name: int(sizes.get(name, 0)))
        assert sizes[victim] > 0
        os.kill(before[victim], signal.SIGKILL)
        victims.append(victim)

    streams = asyncio.run(all_streams(url, 200, kill))
    assert said(streams) == offline[200]
    seen = router(url)
    assert seen["num_interrupted"] > 0
    assert seen["in_flight"] == 0
    after = eventually(pids, lambda found: len(found) == 2 and not set(victims) & set(found))
    assert set(before) - set(victims) <= set(after), "the other one lives on"
    eventually(
        lambda: httpx.get(f"{url}/health", timeout=30).json(),
        lambda health: health.get("healthy_replicas") == 2,
    )
    assert said(asyncio.run(all_streams(url, 24))) == offline[24]


def test_clients_that_leave_in_the_middle_of_a_batch_free_their_pages_alone(
    url: str, offline: Any
) -> None:
    async def scenario() -> list[Stream]:
        leavers = [Stream() for _ in range(8)]
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            tasks = [
                asyncio.create_task(
                    listen(client, leaver, {"prompt": PROMPTS[i], **params(0, 200)})
                )
                for i, leaver in enumerate(leavers)
            ]

            async def leave(streams: list[Stream], _: httpx.AsyncClient) -> None:
                while not all(stream.num_chunks for stream in streams[:4]):
                    await asyncio.sleep(0.001)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

            return await all_streams(url, 24, leave)

    assert said(asyncio.run(scenario())) == offline[24]

    def all_free(info: dict[str, Any]) -> bool:
        states = [state for state in info["internal_states"] if not state["stale"]]
        kv = [state["kv"] for state in states]
        return (
            info["router"]["in_flight"] == 0
            and sum(info["router"]["replica_batch_sizes"].values()) == 0
            and len(states) == 2
            and all(pages["free_pages"] == pages["total_pages"] for pages in kv)
        )

    eventually(
        lambda: httpx.get(f"{url}/server_info", timeout=30).raise_for_status().json(), all_free
    )
