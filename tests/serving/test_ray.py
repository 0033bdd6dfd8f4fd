"""All of serving on a real Ray, behind HAProxy and in front of a fake engine."""

import asyncio
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest

from serve_spec.config import RouterConfig
from serve_spec.metrics import METRICS
from serve_spec.serving.deployment.app import load_config, requests_per_replica
from serve_spec.serving.deployment.plan import APP_IMPORT_PATH, read_deployment
from serve_spec.serving.proxy.settings import own_settings
from serve_spec.serving.statistics.telemetry import LABELS, exported_names
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
from tests.serving.cluster import ROOT, eventually, local_serve
from tests.serving.fake_engine import RATES
from tests.serving.texts import drafting, word_tokenizer, write_text_files

MAX_ONGOING = 4
MAX_QUEUED = 4
COMPLETIONS = "/v1/completions"
HOLD = {"prompt": "hold on", "max_tokens": 9, "stream": True}
# Of requests that are rejected or lose their replica, which may be none.
NOT_CAUSED = {
    "serve_spec_rejected_requests",
    "serve_spec_resumed_requests",
    "serve_spec_preemptions",
    "serve_spec_fleet_effective_speedup_ratio",
}
# Replicas are named by rank: a replacement goes on with the series of the one before it.
EXPORTED = (
    'deployment="EngineReplica"',
    r'ray_serve_spec_batch_size{[^}]*replica="0"',
    r'first_tokens_total{[^}]*measured_at="router"[^}]*} [1-9]',
)
QUICK = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 2,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 0.5,
    "look_back_period_s": 1.0,
    "metrics_interval_s": 0.5,
}
UNLIMITED = {"num_replicas": 2, "max_ongoing_requests": 100, "max_queued_requests": 100}
NUM_PLAIN = 16
MAX_TOKENS = 48
WITHIN_S = 120


def growing():
    """Engines that scale as the shipped file's, but for a small and hasty fleet."""
    (app,) = read_deployment(ROOT / "deploy/four-replicas.yaml")["applications"]
    (engines,) = (d for d in app["deployments"] if d["name"] == "EngineReplica")
    scaling = {**engines["autoscaling_config"], **QUICK}
    return {"name": "EngineReplica", "num_replicas": "auto", "autoscaling_config": scaling}


def is_up(url):
    return httpx.get(f"{url}/health", timeout=60).status_code == 200


@pytest.fixture(scope="module")
def applications(tmp_path_factory):
    """One of one replica, one below /other that grows, one of two routers at /paced."""
    model = tmp_path_factory.mktemp("models") / "fake"
    write_text_files(model, tokenizer=word_tokenizer())
    args = {
        "config": drafting(model),
        "engine_loop": "tests.serving.fake_engine:ReportingLoop",
        "num_cpus": 0.1,
        "max_ongoing_requests": MAX_ONGOING,
        "max_queued_requests": MAX_QUEUED,
        "max_client_share": 1.0,
        "push_interval_s": 0.1,
        "stale_after_s": 1.0,
        "health_check_period_s": 1.0,
        "graceful_shutdown_timeout_s": 0.0,
    }
    app = {"name": "fake", "import_path": APP_IMPORT_PATH, "args": args}
    more = {"num_replicas": 2, "history_s": 2.0}
    other = {
        **app,
        "name": "other",
        "route_prefix": "/other",
        "args": {**args, **more},
        "deployments": [growing()],
    }
    paced = {
        **app,
        "name": "paced",
        "route_prefix": "/paced",
        "args": {**args, **UNLIMITED, "engine_loop": "tests.serving.fake_engine:PacedLoop"},
        "deployments": [{"name": "Router", "num_replicas": 2}],
    }
    return [app, other, paced]


def deploy(applications):
    """As `serve deploy` does."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    apps = ServeDeploySchema.model_validate({"applications": applications})
    _get_global_client().deploy_apps(apps)


@pytest.fixture(scope="module")
def url(applications):
    """Serve, with the applications."""
    with local_serve(num_cpus=4, environment=own_settings(RouterConfig())) as url:
        deploy(applications)
        for prefix in (url, f"{url}/other", f"{url}/paced"):
            eventually(partial(is_up, prefix), bool, WITHIN_S)
        yield url


@pytest.fixture
def client(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture
def api(url):
    """The official client."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def info(client):
    return client.get("/server_info").raise_for_status().json()


def idle(info):
    """Nothing in flight, nothing queued, every page free, as the replica itself reports."""
    states = info["internal_states"]
    return (
        info["router"]["in_flight"] == info["router"]["queue_len"] == 0
        and bool(states)
        and all(s["num_running"] == 0 and s["kv"]["free_pages"] == 100 for s in states)
    )


def test_the_official_client_streams_with_usage(api):
    asked = {"prompt": [7, 8], "max_tokens": 3, "stream_options": {"include_usage": True}}
    chunks = list(api.completions.create(model="fake", stream=True, **asked))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "<7> <8> <7> "
    assert chunks[-1].usage.total_tokens == 5


def test_the_official_client_understands_our_errors(api):
    with pytest.raises(openai.BadRequestError) as bad:
        api.completions.create(model="fake", prompt="a", suffix="b")
    assert bad.value.param == "suffix"
    with pytest.raises(openai.NotFoundError) as unknown:
        api.completions.create(model="other", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError) as long:
        api.completions.create(model="fake", prompt="a " * 100)
    assert (long.value.status_code, long.value.code) == (413, "context_length_exceeded")
    with pytest.raises(openai.InternalServerError, match="boom"):
        api.completions.create(model="fake", prompt="fail")


def test_the_official_client_raises_when_a_stream_breaks_off(api):
    stream = api.completions.create(model="fake", prompt="break", max_tokens=9, stream=True)
    assert next(stream).choices[0].text == "break break "
    with pytest.raises(openai.APIError, match="boom"):
        list(stream)


def test_the_request_id_is_passed_through_in_utf8_or_made_and_sent_once(client):
    sent = client.get("/v1/models", headers={"x-request-id": "mine"})
    assert sent.headers.get_list("x-request-id") == ["mine"]
    body = {"prompt": "a b", "max_tokens": 4}
    (made,) = client.post(COMPLETIONS, json=body).headers.get_list("x-request-id")
    assert made
    answer = client.post(COMPLETIONS, json=body, headers={b"x-request-id": b"caf\xe9"})
    assert answer.status_code == 200
    assert (b"x-request-id", "café".encode()) in answer.headers.raw


def test_a_stream_begins_at_once_and_a_client_that_leaves_it_frees_its_pages(client):
    with client.stream("POST", COMPLETIONS, json=HOLD) as stream:
        lines = stream.iter_lines()  # kept: httpx closes the stream with its iterator
        first = next(lines)
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "hold on "
        assert info(client)["router"]["in_flight"] == 1
        eventually(lambda: info(client), lambda i: i["internal_states"][0]["num_running"] == 1)
    eventually(lambda: info(client), idle)


def test_a_client_that_leaves_without_an_answer_frees_its_pages(client):
    with pytest.raises(httpx.ReadTimeout):
        client.post(COMPLETIONS, json=HOLD | {"stream": False}, timeout=0.5)
    eventually(lambda: info(client), idle)


async def test_a_burst_that_fits_is_served_in_full(client):
    asked = [{"prompt": f"p{i}", "max_tokens": 4} for i in range(MAX_ONGOING + MAX_QUEUED)]
    async with httpx.AsyncClient(base_url=client.base_url, timeout=60) as crowd:
        answers = await asyncio.gather(*(crowd.post(COMPLETIONS, json=body) for body in asked))
    assert [(a.status_code, a.text) for a in answers if a.status_code != 200] == []
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts == [f"p{i} " * 4 for i in range(MAX_ONGOING + MAX_QUEUED)]


def test_another_application_on_the_cluster_is_another_fleet(client):
    def replicas(path):
        states = client.get(path).raise_for_status().json()["internal_states"]
        return {state["replica"] for state in states}

    (other,) = eventually(lambda: replicas("/other/server_info"), bool)
    (ours,) = eventually(lambda: replicas("/server_info"), bool)
    assert ours != other


def test_a_request_that_kills_its_replica_is_resumed_once(client):
    answer = client.post(COMPLETIONS, json={"prompt": "poison now", "max_tokens": 9})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "replicas_lost"
    eventually(
        lambda: client.post(COMPLETIONS, json={"prompt": "a"}).status_code, lambda s: s == 200
    )
    eventually(lambda: info(client), idle)


def are_both_used(url):
    """Whether HAProxy gives two requests at once to different routers."""
    with httpx.stream("POST", url + COMPLETIONS, json=HOLD, timeout=60) as answer:
        return answer.status_code == 200 and server_info(url)["router"]["in_flight"] == 0


async def kill_under_load(url, pid):
    """Return streams and other answers, during which a process was killed."""
    streams = [Stream() for _ in range(NUM_STREAMS)]
    async with client_of(url) as client:
        listening = asyncio.gather(
            *(s.listen(client, f"a b {i}", max_tokens=MAX_TOKENS) for i, s in enumerate(streams))
        )
        asked = [{"prompt": f"a b {i}", "max_tokens": MAX_TOKENS} for i in range(NUM_PLAIN)]
        plain = asyncio.gather(*(client.post(COMPLETIONS, json=body) for body in asked))
        while not all(stream.num_chunks for stream in streams):
            await asyncio.sleep(0.001)
        kill(pid)
        await listening
        return streams, await plain


def text_of(index):
    """Return the engine's answer to `a b <index>`."""
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


@pytest.mark.parametrize("_kill", range(2))
def test_a_killed_router_leaves_each_of_64_streams_its_text_or_an_error_object(url, _kill):
    url = f"{url}/paced"
    router = "paced#Router"
    routers = eventually(lambda: pids(router), lambda found: len(found) == 2, WITHIN_S)
    eventually(lambda: are_both_used(url), bool, WITHIN_S)
    streams, answers = asyncio.run(kill_under_load(url, min(routers.values())))
    errors = whole_or_errors(streams, answers)
    assert [error["code"] for error in errors] == ["server_lost"] * len(errors)
    assert 0 < len(errors) < NUM_STREAMS + NUM_PLAIN, "the other router's answers are whole"
    eventually(lambda: pids(router), lambda found: found and found != routers, WITHIN_S)
    eventually(partial(held, "paced#EngineReplica"), holds_nothing, WITHIN_S)


def test_routers_behind_one_port_agree_on_counters_also_after_one_was_killed(url):
    url, router = f"{url}/paced", "paced#Router"
    before = eventually(lambda: pids(router), lambda found: len(found) == 2, WITHIN_S)
    counter = r"^vllm:request_success_total{.*stop.* (\S+)$|^vllm:prompt_tokens_total{.* (\S+)$"

    def counts():
        found = (re.findall(counter, httpx.get(url + "/metrics", timeout=30).text, re.MULTILINE)
                 for _ in range(8))  # fmt: skip
        return [tuple(float("".join(each)) for each in figures) for figures in found]

    def ask():
        body = {"prompt": "a b", "max_tokens": 4}
        return httpx.post(url + COMPLETIONS, json=body, timeout=60)

    ask().raise_for_status()
    seen = eventually(counts, lambda found: len(set(found)) == 1 and any(found[0]), WITHIN_S)
    kill(min(before.values()))
    eventually(lambda: pids(router), lambda found: len(found) == 2 and found != before, WITHIN_S)
    eventually(ask, lambda answer: answer.status_code == 200, WITHIN_S)
    again = eventually(counts, lambda found: len(set(found)) == 1 and found[0] > seen[0], WITHIN_S)
    assert all(now >= then for now, then in zip(again[0], seen[0], strict=True))


def exported():
    import ray

    (node,) = ray.nodes()
    port = node["MetricsExportPort"]
    return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text


def test_every_metric_reaches_prometheus_under_the_names_we_say(url):
    body = {"prompt": "a b", "max_tokens": 6, "of_another_server": 1}
    caused = [metric for metric in METRICS if metric.name not in NOT_CAUSED]
    wanted = {name for metric in caused for name in exported_names(metric)}

    def ask():  # Ray drops gauges of rounds after 20 s
        assert httpx.post(url + COMPLETIONS, json=body).status_code == 200

    def look():
        ask()
        text = exported()
        names = {name for name in wanted if not re.search(rf"^{name}{{", text, re.MULTILINE)}
        return names | {line for line in EXPORTED if not re.search(line, text)}, text

    _, text = eventually(look, lambda seen: not seen[0])
    for line in text.splitlines():
        if line.startswith("ray_serve_spec_"):
            assert all(f'{label}="' in line for label in LABELS), line
    ours = eventually(
        lambda: (ask(), httpx.get(url + "/metrics", timeout=30).text)[1],
        lambda text: wanted <= {re.split(r"[{ ]", line)[0] for line in text.splitlines()},
    )
    assert "ray_serve_spec" in ours
    assert "ray_serve_deployment" not in ours
    (generated,) = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", ours, re.MULTILINE)
    assert float(generated) > 0


def test_the_page_and_its_figures_come_through_serve(url):
    assert "<title>serve_spec</title>" in httpx.get(url + "/").text
    status = eventually(
        lambda: httpx.get(url + "/status.json").json(), lambda s: bool(s["replicas"])
    )
    assert status["replicas"][0]["history"]["time_s"]
    assert Path(httpx.get(url + "/static/status.js").url.path).name == "status.js"


@contextmanager
def asking(client):
    """Streams that follow each other while the body runs; each must be complete."""
    done, texts = threading.Event(), []

    def ask():
        body = {"prompt": "a b", "stream": True, "max_tokens": 4}
        while not done.is_set():
            texts.append(client.post("/other/v1/completions", json=body).text)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield
        finally:
            done.set()
        asked.result()
    assert texts
    assert [text for text in texts if not text.endswith("data: [DONE]\n\n")] == []
    assert len({_text_of(text) for text in texts}) == 1


def _text_of(stream):
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def test_replicas_come_and_go_with_the_requests_and_start_from_what_the_fleet_knows(client):
    def started_from():
        states = client.get("/other/server_info").json()["internal_states"]
        return [state["started_from"] for state in states if not state["stale"]]

    client.post("/other/v1/completions", json={"prompt": "a b"}).raise_for_status()
    eventually(started_from, lambda found: found == [None])
    # Two calls with four requests: Serve's own policy would count two, and two are the target.
    held = {"prompt": ["hold on"] * 4, "max_tokens": 9, "stream": True}
    with asking(client):
        with client.stream("POST", "/other/v1/completions", json=held) as answer:
            lines = answer.iter_lines()  # kept: the stream closes with its generator
            assert "hold on" in next(lines)
            found = eventually(started_from, lambda found: len(found) == 2, WITHIN_S)
            assert sorted(map(repr, found)) == sorted([repr(None), repr(RATES)])
        eventually(lambda: len(started_from()), lambda number: number == 1, WITHIN_S)


@contextmanager
def probing(url):
    """Ask every 0.2 s while the body runs; yields the statuses of the answers."""
    statuses, ended = [], threading.Event()

    def probe():
        with httpx.Client(timeout=60) as client:
            while not ended.wait(0.2):
                body = {"prompt": "a", "max_tokens": 1}
                statuses.append(client.post(url + COMPLETIONS, json=body).status_code)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield statuses
    finally:
        ended.set()
        thread.join()


def test_scaling_restarts_nothing_that_stays_and_fails_no_request(url, applications):
    """As if `num_replicas`, or the number of routers, were changed in a file and deployed again."""
    url, (*others, paced) = f"{url}/paced", applications

    def scale(num_replicas, num_routers):
        args = {**paced["args"], "num_replicas": num_replicas}
        routers = {"name": "Router", "num_replicas": num_routers}
        deploy([*others, {**paced, "args": args, "deployments": [routers]}])
        limit = num_replicas * places
        eventually(
            lambda: server_info(url)["router"]["max_in_flight"],
            lambda most: most == limit,
            WITHIN_S,
        )
        return live("paced#EngineReplica", num_replicas), live("paced#Router", num_routers)

    def live(name, number):
        found = eventually(lambda: pids(name), lambda found: len(found) == number, WITHIN_S)
        return set(found.items())

    places = requests_per_replica(load_config({"config": paced["args"]["config"], **UNLIMITED}))
    scale(2, 2)
    with probing(url) as statuses:
        engines, routers = scale(2, 2)
        one, same_routers = scale(1, 2)
        three, one_router = scale(3, 1)
        again, _ = scale(2, 2)
    assert one < engines, "one of the two is left"
    assert same_routers == routers
    assert one < three
    assert one_router < routers
    assert again < three
    assert set(statuses) == {200}
    assert len(statuses) > 9


def test_of_an_application_that_is_taken_down_nothing_is_left(url):
    from ray import serve
    from ray.util import list_named_actors

    def left():
        actors = list_named_actors(all_namespaces=True)
        return [a for a in actors if a["namespace"] == "other" or "other#" in a["name"]]

    assert left()
    serve.delete("other")
    eventually(left, lambda actors: not actors)
