"""A fleet of two replicas of a random pair, its clients, and its processes to be killed."""

import asyncio
import json
import math
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from serve_spec import LLM, SamplingParams
from tests.helpers.checkpoints import make_eagle3, make_target

NUM_STREAMS = 64
PROMPTS = [f"def f{i}(x):" for i in range(NUM_STREAMS)]
SHORT, LONG = 16, 128
STOP = ["e", "zq"]


def fleet_settings(root):
    """A random target with a head that is right sometimes, and a configuration for two of them."""
    target = make_target(root / "target", layer_scale=0.3, max_position_embeddings=4096)
    draft = make_eagle3(root / "eagle3", target, mimic=True)
    return {
        "model": {"path": str(target), "max_model_len": 4096},
        "speculative": {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(draft),
            "speculative_num_steps": 3,
            "speculative_adaptive_strategy": "ema",
        },
        "cache": {"page_size": 8, "num_pages": 2048},
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


def params(index, max_tokens):
    """How stream `index` draws: every other one greedily, every fourth with stop strings."""
    stop = {"stop": STOP} if index % 4 == 3 else {}
    return {
        "max_tokens": max_tokens,
        "temperature": 0.8 * (index % 2),
        "seed": index,
        "ignore_eos": True,
        **stop,
    }


def offline_answers(settings):
    """Texts and token counts of the offline engine, by max_tokens."""
    llm = LLM({**settings, "replica": {}})
    try:
        return {
            max_tokens: [
                (answer.text, len(answer.token_ids))
                for answer in llm.generate(
                    PROMPTS, [SamplingParams(**params(i, max_tokens)) for i in range(NUM_STREAMS)]
                )
            ]
            for max_tokens in (SHORT, LONG)
        }
    finally:
        llm.shutdown()


@dataclass
class Stream:
    """One completion as its client sees it."""

    text: str = ""
    num_chunks: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    error: object = None
    is_done: bool = False
    longest_gap_s: float = 0.0
    """The longest silence after its first chunk."""
    _heard_s: float = math.inf

    @property
    def num_resumes(self):
        return int(self.usage["speculation"]["num_resumes"])

    async def listen(self, client, prompt, **body):
        body |= {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    self._take(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.error = error

    def _take(self, data):
        if data == "[DONE]":
            self.is_done = True
        elif data == "Internal Server Error":  # Serve's proxy, for a router that is gone
            self.error = data
        elif data:
            chunk, now_s = json.loads(data), time.monotonic()
            self.longest_gap_s = max(self.longest_gap_s, now_s - self._heard_s)
            self._heard_s = now_s
            self.error = self.error or chunk.get("error")
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk.get("choices", ()):
                self.text += choice["text"]
                self.num_chunks += 1


def client_of(url):
    limits = httpx.Limits(max_connections=2 * NUM_STREAMS)
    return httpx.AsyncClient(base_url=url, timeout=120, limits=limits)


async def keep_asking(url, offline, until):
    """Repeat every eighth stream until stopped; each must have its text."""

    async def ask_again(index, client):
        while not until.is_set():
            stream = Stream()
            await stream.listen(client, PROMPTS[index], **params(index, LONG))
            assert texts_of([stream]) == [offline[index]]

    async with client_of(url) as client:
        await asyncio.gather(*(ask_again(index, client) for index in range(0, NUM_STREAMS, 8)))


async def _all_streams(url, max_tokens, meanwhile):
    streams = [Stream() for _ in PROMPTS]
    async with client_of(url) as client:
        running = [
            stream.listen(client, PROMPTS[i], **params(i, max_tokens))
            for i, stream in enumerate(streams)
        ]
        if meanwhile is not None:
            running.append(meanwhile(streams, client))
        await asyncio.gather(*running)
    return streams


def all_streams(url, max_tokens, meanwhile=None):
    """Every stream at once, to its end; `meanwhile(streams, client)` runs beside them."""
    return asyncio.run(_all_streams(url, max_tokens, meanwhile))


def texts_of(streams):
    """What all of them heard, if all of them heard it to the end."""
    assert [stream.error for stream in streams] == [None] * len(streams)
    return [(stream.text, stream.usage["completion_tokens"]) for stream in streams]


async def under_way(streams):
    """Returns when most streams have begun: some random texts hold back an incomplete character."""
    while sum(bool(stream.num_chunks or stream.error) for stream in streams) < NUM_STREAMS * 3 / 4:
        await asyncio.sleep(0.001)


async def router_state(client):
    answer = (await client.get("/server_info")).raise_for_status()
    return dict(answer.json()["router"])


def server_info(url):
    return dict(httpx.get(f"{url}/server_info", timeout=60).raise_for_status().json())


def actors(deployment):
    """Live replicas of `Deployment` or `application#Deployment` by Serve's name for them."""
    import ray

    return {
        actor["name"].rpartition("#")[2]: ray.get_actor(actor["name"], actor["namespace"])
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if f"{deployment}#" in actor["name"]
    }


def pids(deployment="EngineReplica"):
    """Processes of a deployment's replicas; empty while one of them is going or coming."""
    import ray
    from ray.exceptions import RayError

    try:
        return {
            name: int(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())))
            for name, actor in actors(deployment).items()
        }
    except (RayError, ValueError):
        return {}


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def held(deployment="EngineReplica"):
    """What each engine replica reports: requests by router, and pages."""
    import ray
    from ray.exceptions import RayError

    try:
        return {
            name: ray.get(actor.record_routing_stats.remote())
            for name, actor in actors(deployment).items()
        }
    except RayError:  # one is coming or going
        return {}


def holds_nothing(replicas):
    """No request and no page on any of two replicas."""
    return len(replicas) == 2 and all(
        sum(state["num_requests"].values()) == 0
        and state["kv"]["free_pages"] == state["kv"]["total_pages"]
        for state in replicas.values()
    )
