"""Attacks on two replicas of the shipped pair, which other clients must not notice."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from serve_spec.config import RouterConfig
from serve_spec.serving.proxy.settings import own_settings
from tests.e2e.attacks import (
    ATTACKER,
    BYSTANDER,
    CHAT,
    COMPLETIONS,
    HOG,
    STALL_TIMEOUT_S,
    Flood,
    client_at,
    head,
    statuses,
    until_closed,
    watching,
)
from tests.e2e.fleet import held, holds_nothing, kill, pids, server_info
from tests.serving.cluster import ROOT, eventually, local_serve

HEADER_TIMEOUT_S = 2.0
BODY_TIMEOUT_S = 8.0
MAX_SEQS = 16


ENVIRONMENT = {
    # As `serve-spec serve` sets it.
    **own_settings(RouterConfig(header_timeout_s=HEADER_TIMEOUT_S, body_timeout_s=BODY_TIMEOUT_S)),
    "SERVE_SPEC_ROUTER__HEADER_TIMEOUT_S": str(HEADER_TIMEOUT_S),
    # They keep compiled products of 1,024 sizes, 100 MB and more: not the growth looked for.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
    "LRU_CACHE_CAPACITY": "8",
}


@pytest.fixture(scope="module")
def url():
    with local_serve(num_cpus=4, environment=ENVIRONMENT) as url:
        from ray import serve

        from serve_spec.serving import build_app

        args = {
            "config": str(ROOT / "configs" / "tiny.yaml"),
            "num_replicas": 2,
            "num_cpus": 0.5,
            "speculative_adaptive_strategy": "ema",
            # Short rounds, so that a gap in a stream is not one.
            "max_num_batched_tokens": 128,
            "body_timeout_s": BODY_TIMEOUT_S,
            "stall_timeout_s": STALL_TIMEOUT_S,
            "health_check_period_s": 1.0,
            # Whatever ends a process that does not answer, it is not Serve.
            "health_check_timeout_s": 600.0,
            "graceful_shutdown_timeout_s": 0.0,
            "push_interval_s": 1.0,
        }
        serve.run(build_app(args), name="attacked", route_prefix="/")
        yield url


def rss_mb():
    """Memory of the router's and the replicas' processes."""
    processes = {**pids("Router"), **pids()}
    pages = {
        n: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for n, pid in processes.items()
    }
    return {name: round(count * 4096 / 2**20, 1) for name, count in pages.items()}


async def test_texts_that_are_far_too_long_are_refused_and_stop_nobody(url):
    """Point 1: 16 prompts and 3 chats of 7.9 MB."""
    text = "def f(x): return x\n" * (7_900_000 // 19)
    chat = {"messages": [{"role": "user", "content": text}]}
    before = pids()
    async with watching(url) as watch, client_at(url, ATTACKER) as client:
        prompts = await statuses(client, COMPLETIONS, [{"prompt": text}] * 16)
        chats = await statuses(client, CHAT, [chat] * 3)
    assert {*prompts, *chats} == {413}
    assert not watch.stands_still
    assert watch.errors == []
    assert len(watch.texts) == 1
    assert pids() == before, "no replica was replaced"


async def test_two_large_requests_leave_room_for_others(url):
    """Point 4: 4 prompts, n = 96, twice; everybody else is served meanwhile."""
    prompts = [f"def f{i}(x):" for i in range(4)]
    large = {"prompt": prompts, "n": 96, "max_tokens": 400, "ignore_eos": True}
    async with client_at(url, HOG) as hog, client_at(url, BYSTANDER) as client:
        hogs = [asyncio.create_task(hog.post(COMPLETIONS, json=large)) for _ in range(2)]
        while (await router(client))["in_flight"] < MAX_SEQS:
            await asyncio.sleep(0.05)
        for _ in range(5):
            assert await statuses(client, COMPLETIONS, [{"prompt": "x = ", "max_tokens": 4}]) == [
                200
            ]
        state = await router(client)
        refused = [task.result().status_code for task in hogs if task.done()]
        assert refused == [429], "both would not fit into one client's places in the queue"
        assert state["num_clients"] == 1
        for task in hogs:
            task.cancel()
        await asyncio.gather(*hogs, return_exceptions=True)
    eventually(held, holds_nothing)


async def router(client):
    return dict((await client.get("/server_info")).raise_for_status().json()["router"])


LONG = {"max_tokens": 600, "temperature": 0, "ignore_eos": True}


async def test_requests_that_wait_move_to_the_replica_that_comes_back(url):
    """Point 5: a replica is killed under load; its successor gets the waiting requests."""
    before = pids()
    victim = next(iter(before))
    async with client_at(url, BYSTANDER) as client:
        bodies = [{"prompt": f"def f{i}(x):", **LONG} for i in range(2 * MAX_SEQS)]
        running = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for body in bodies]
        while sum((await router(client))["replica_batch_sizes"].values()) < 2 * MAX_SEQS:
            await asyncio.sleep(0.05)
        kill(before[victim])
        while victim in await shown(client):
            await asyncio.sleep(0.1)
        withdrawn = (await router(client))["num_withdrawn"]
        while True:
            sizes = (await router(client))["replica_batch_sizes"]
            names = set(await asyncio.to_thread(pids)) - set(before)
            if any(sizes.get(name) for name in names):
                break
            assert not all(task.done() for task in running), "nothing has moved"
            await asyncio.sleep(0.1)
        num_moved = (await router(client))["num_withdrawn"] - withdrawn
        answers = await asyncio.gather(*running)
        assert {answer.status_code for answer in answers} == {200}
        assert num_moved > 0
    eventually(lambda: len(pids()), lambda count: count == 2)
    eventually(held, holds_nothing)


async def shown(client):
    states = (await client.get("/server_info")).raise_for_status().json()["internal_states"]
    return {state["replica"] for state in states}


async def test_a_stuck_replica_loses_its_streams_to_the_other_and_ends(url):
    """Point 3: a process that is stopped; nothing that it could do itself helps."""
    eventually(lambda: len(server_info(url)["internal_states"]), lambda count: count == 2)
    before = pids()
    victim = next(iter(before))
    async with client_at(url, BYSTANDER) as client:
        bodies = [{"prompt": f"def f{i}(x):", **LONG} for i in range(8)]
        running = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for body in bodies]
        while not (await router(client))["replica_batch_sizes"].get(victim):
            await asyncio.sleep(0.05)
        os.kill(before[victim], signal.SIGSTOP)
        answers = await asyncio.gather(*running)
        assert {answer.status_code for answer in answers} == {200}
        resumes = [a.json()["usage"]["speculation"]["num_resumes"] for a in answers]
        assert set(resumes) == {0, 1}
        eventually(Path(f"/proc/{before[victim]}").exists, lambda is_there: not is_there)
    eventually(lambda: len(pids()), lambda count: count == 2)
    eventually(held, holds_nothing)


async def test_slow_connections_are_closed(url):
    """Point 7: 200 heads and 100 bodies that never end."""
    body = head(COMPLETIONS, 10_000) + b'{"prompt": "'
    kinds = {
        "stuck head": (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n", b""),
        "slow head": (b"POST /v1/completions HTTP/1.1\r\nx-a: ", b"a"),
        "stuck body": (body, b""),
        "slow body": (body, b"a"),
    }
    async with watching(url) as watch:
        heard = await asyncio.gather(
            *(
                until_closed(url, start, drip, every_s=0.2, most_s=30)
                for kind, (start, drip) in kinds.items()
                for _ in range(100 if "head" in kind else 50)
            )
        )
    assert b"open" not in heard
    # A client that goes on sending may lose the answer to the closed connection.
    assert sum(answer.startswith(b"HTTP/1.1 408") for answer in heard) >= 50
    for answer in heard[200:250]:  # the stuck bodies
        status_line, _, body = answer.partition(b"\r\n\r\n")
        assert status_line.startswith(b"HTTP/1.1 408")
        assert json.loads(body)["error"]["code"] == "body_timeout"
    assert watch.errors == []
    assert not watch.stands_still


async def test_storms_of_short_connections_leave_nothing_running(url):
    """Five storms of 100 requests, streamed and not, `n` from 1 to 8; all leave after 0.15 s."""
    bodies = [{"prompt": f"def f{i}(", "n": 1 + i % 8, "stream": i % 2 == 0} for i in range(100)]
    async with watching(url) as watch, client_at(url, ATTACKER, timeout_s=0.15) as client:
        for _ in range(5):
            asked = [client.post(COMPLETIONS, json={**LONG, **body}) for body in bodies]
            await asyncio.gather(*asked, return_exceptions=True)
    assert watch.errors == []
    assert not watch.stands_still
    eventually(held, holds_nothing)


async def test_expensive_nothings_are_cheap_or_refused(url):
    """Point 8."""
    cheap = {"prompt": [5] * 900, "echo": True, "logprobs": 20, "max_tokens": 0, "n": 64}
    refused = [
        {"prompt": "a", "stop": ["x" * 400_000] * 16},
        {"prompt": "a", "stop_token_ids": [1] * 990_000},
    ]
    async with watching(url) as watch, client_at(url, ATTACKER) as client:
        assert await statuses(client, COMPLETIONS, [cheap]) == [200]
        assert await statuses(client, COMPLETIONS, refused) == [400, 400]
    assert watch.errors == []


async def test_a_flood_of_hostile_requests_leaves_nothing_behind(url):
    half, flood = Flood(40, seed=2), Flood(40, seed=3)
    async with watching(url) as watch:
        await half.send(url)
        before = rss_mb()
        await flood.send(url)
    after = rss_mb()
    grown = {name: round(after[name] - before[name], 1) for name in before}
    assert [*half.bad, *flood.bad] == []
    assert 599 not in half.statuses + flood.statuses
    assert watch.errors == []
    assert not watch.stands_still
    assert max(grown.values()) < 50, "memory is flat"
    eventually(held, holds_nothing)
    assert server_info(url)["router"]["in_flight"] == 0
