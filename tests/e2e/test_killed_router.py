"""Two routers behind HAProxy, one of which is killed: every answer is whole or ends with an error.

The engine is a fake one, which needs no time but what it is told to take.
"""

import asyncio

import httpx
import pytest

from serve_spec.config import RouterConfig
from serve_spec.serving.command import APP_IMPORT_PATH
from serve_spec.serving.proxy import own_settings
from tests.e2e.fleet import (
    NUM_STREAMS,
    Stream,
    client_of,
    held,
    holds_nothing,
    kill,
    pids,
    server_info,
)
from tests.serving.cluster import eventually, local_serve
from tests.serving.fake_engine import FakeStream, ReportingLoop
from tests.serving.texts import drafting, word_tokenizer, write_text_files

NUM_PLAIN = 16
NUM_KILLS = 2
MAX_TOKENS = 48
ROUND_S = 0.05
WITHIN_S = 120


class PacedStream(FakeStream):
    """Deltas with a pause after each."""

    async def __aiter__(self):
        async for delta in super().__aiter__():
            yield delta
            await asyncio.sleep(ROUND_S)


class PacedLoop(ReportingLoop):
    """A fake engine whose requests take a second."""

    async def submit(self, *args, **options):
        stream = await super().submit(*args, **options)
        stream.__class__ = PacedStream
        return stream


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    model = tmp_path_factory.mktemp("models") / "fake"
    write_text_files(model, tokenizer=word_tokenizer())
    args = {
        "config": drafting(model),
        "engine_loop": f"{__name__}:PacedLoop",
        "num_replicas": 2,
        "num_cpus": 0.1,
        "max_client_share": 1.0,
        "health_check_period_s": 1.0,
        "graceful_shutdown_timeout_s": 0.0,
    }
    routers = {"name": "Router", "num_replicas": 2}
    app = {"name": "fake", "import_path": APP_IMPORT_PATH, "args": args, "deployments": [routers]}
    with local_serve(num_cpus=4, environment=own_settings(RouterConfig())) as url:
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [app]}))
        eventually(lambda: pids("Router"), lambda found: len(found) == 2, WITHIN_S)
        eventually(lambda: is_up(url), bool, WITHIN_S)
        yield url


def is_up(url):
    return httpx.get(f"{url}/health", timeout=60).status_code == 200


def are_both_used(url):
    """Whether HAProxy gives two requests at once to different routers."""
    body = {"prompt": "hold on", "max_tokens": 9, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        return answer.status_code == 200 and server_info(url)["router"]["in_flight"] == 0


async def complete(client, prompt):
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS}
    return await client.post("/v1/completions", json=body)


async def kill_under_load(url, pid):
    """Return streams and other answers, during which a process was killed."""
    streams = [Stream() for _ in range(NUM_STREAMS)]
    async with client_of(url) as client:
        listening = asyncio.gather(
            *(s.listen(client, f"a b {i}", max_tokens=MAX_TOKENS) for i, s in enumerate(streams))
        )
        plain = asyncio.gather(*(complete(client, f"a b {i}") for i in range(NUM_PLAIN)))
        while not all(stream.num_chunks for stream in streams):
            await asyncio.sleep(0.001)
        kill(pid)
        await listening
        return streams, await plain


def text_of(index):
    """Return what the engine says to `a b <index>`."""
    return f"a b {index} " * (MAX_TOKENS // 3)


def whole_or_errors(streams, answers):
    """Return the error objects; what has none must be whole."""
    errors = []
    for i, stream in enumerate(streams):
        if stream.error is None:
            assert (stream.is_done, stream.text) == (True, text_of(i))
        else:
            assert text_of(i).startswith(stream.text)
            errors.append(stream.error)
    for i, answer in enumerate(answers):
        content = answer.json()
        if answer.status_code == 200:
            assert content["choices"][0]["text"] == text_of(i)
        else:
            errors.append(content["error"])
    return errors


@pytest.mark.parametrize("_kill", range(NUM_KILLS))
def test_a_killed_router_leaves_each_of_64_streams_its_text_or_an_error_object(url, _kill):
    routers = eventually(lambda: pids("Router"), lambda found: len(found) == 2, WITHIN_S)
    eventually(lambda: are_both_used(url), bool, WITHIN_S)
    streams, answers = asyncio.run(kill_under_load(url, min(routers.values())))
    errors = whole_or_errors(streams, answers)
    assert [error["code"] for error in errors] == ["server_lost"] * len(errors)
    assert 0 < len(errors) < NUM_STREAMS + NUM_PLAIN, "the other router's answers are whole"
    eventually(lambda: pids("Router"), lambda found: found and found != routers, WITHIN_S)
    eventually(held, holds_nothing, WITHIN_S)
