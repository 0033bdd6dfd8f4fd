"""A Ray of two nodes on two hosts: routers, replicas and proxies on both, and one that is lost."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
import yaml

from serve_spec.config import ServeSpecConfig
from serve_spec.serving.deployment.plan import APP_IMPORT_PATH
from serve_spec.serving.proxy.settings import haproxy_files, haproxy_script, throughput_settings
from tests.e2e.fleet import Stream, client_of, fleet_settings, server_info, texts_of
from tests.serving.cluster import ROOT, eventually, isolated_environment, pids_with, short_tmp
from tests.serving.hosts import HOSTS, entered, on_host, two_hosts, unplug
from tests.serving.texts import drafting, word_tokenizer, write_text_files

RAY = Path(sys.executable).with_name("ray")
SERVE_SPEC = RAY.with_name("serve-spec")
GCS_PORT, HTTP_PORT = 6379, 8000
STALL_S = 2.0
NUM_STREAMS = 16
MAX_TOKENS = 160
WITHIN_S = 80
NODE = [
    "--num-cpus=1",
    "--num-gpus=1",
    f"--object-store-memory={80 * 2**20}",
    "--disable-usage-stats",
    "--block",
]


@pytest.fixture(scope="module", params=["HAProxy", "Python"])
def proxy(request):
    """What each node has in front of the routers."""
    return request.param


@pytest.fixture(scope="module")
def hosts(proxy):
    with two_hosts() as names:
        yield names


class Cluster:
    """A Ray with a node on each host, and a process on the first one that uses it.

    This process starts no Ray: its threads would stay on that host.
    """

    def __init__(self, hosts, tmp):
        one, other = hosts
        self.address = f"{HOSTS[one]}:{GCS_PORT}"
        head = ["--head", f"--port={GCS_PORT}", "--include-dashboard=false", f"--temp-dir={tmp}"]
        joining = [f"--address={self.address}"]
        # A host has its own files below the folder of Ray.
        own = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs own {tmp} && exec "$@"', "sh"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        driver = [sys.executable, "-m", "tests.serving.ray_driver"]
        self._tmp = tmp
        self._processes = [
            subprocess.Popen([*_ray_start(one), *head], cwd=ROOT, **quiet),
            subprocess.Popen([*on_host(other, *own), *_ray_start(other), *joining], **quiet),
            driver := subprocess.Popen(driver, cwd=ROOT, **pipes),
        ]
        self._driver = driver

    def ask(self, *words):
        """Return the answer of the driver, see `ray_driver`."""
        self._driver.stdin.write(json.dumps(words) + "\n")
        self._driver.stdin.flush()
        return json.loads(self._driver.stdout.readline())

    def kill(self):
        """End both nodes, of which one may be out of reach, and the driver."""
        for pid in pids_with(f"RAY_TMPDIR={self._tmp}") - {os.getpid()}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            with process:
                process.kill()


def _ray_start(host):
    return [RAY, "start", f"--node-ip-address={HOSTS[host]}", *NODE]


@pytest.fixture(scope="module")
def cluster(hosts, proxy):
    """A Ray with a node on each host; this process is on the first one."""
    before = dict(os.environ)
    with ExitStack() as stack:
        tmp = stack.enter_context(short_tmp())
        stack.callback(os.environ.update, before)
        stack.callback(os.environ.clear)
        os.environ.update(isolated_environment(tmp))
        if proxy == "HAProxy":
            os.environ.update(throughput_settings(ServeSpecConfig.load("asset:tiny").router))
            os.environ.update(haproxy_script() | haproxy_files(Path(tmp, "haproxy")))
        stack.enter_context(entered(hosts[0]))
        cluster = Cluster(hosts, tmp)
        stack.callback(cluster.kill)
        cluster.ask("join", cluster.address, HTTP_PORT)
        yield cluster


def test_a_replica_that_fits_no_node_is_announced_in_one_line(cluster, tmp_path):
    wide = fleet_settings(tmp_path)
    wide["model"]["tensor_parallel_size"] = 2
    wide["replica"] = {"num_cpus": 2, "num_gpus": 2}
    file = tmp_path / "wide.yaml"
    file.write_text(yaml.safe_dump(wide))
    command = [SERVE_SPEC, "serve", file, f"--address={cluster.address}"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as server:
        printed = [server.stderr.readline()]
        while printed[-1] and not printed[-1].startswith("num_cpus="):
            printed.append(server.stderr.readline())
        server.kill()
    line = printed[-1]
    assert line, "".join(printed)
    assert line == (
        "num_cpus=2, num_gpus=2: a replica needs a node with CPU 2, GPU 2, and waits, for there "
        "is none; add one, lower them, or set placement_group_strategy='PACK' for ranks on any "
        "nodes\n"
    )


@pytest.fixture(scope="module")
def urls(cluster, tmp_path_factory):
    """An application with a router and a replica on each node, by the proxies of the nodes."""
    model = tmp_path_factory.mktemp("models") / "fake"
    write_text_files(model, tokenizer=word_tokenizer(), max_position_embeddings=4096)
    args = {
        "config": drafting(model),
        "engine_loop": "tests.serving.fake_engine:PacedLoop",
        "num_cpus": 1,
        "num_replicas": 2,
        "push_interval_s": 0.1,
        "routing_policy": "balanced",
        "max_batch_size": 1,  # spread them
        "stall_timeout_s": STALL_S,
    }
    routers = {"name": "Router", "num_replicas": 2, "max_replicas_per_node": 1}
    app = {"name": "fake", "import_path": APP_IMPORT_PATH, "args": args, "deployments": [routers]}
    cluster.ask("deploy", app)
    urls = [f"http://{host}:{HTTP_PORT}" for host in HOSTS.values()]
    for url in urls:
        eventually(lambda url=url: _num_replicas(url), lambda num: num == 2, WITHIN_S)
    return urls


def _num_replicas(url):
    """Replicas that are connected to a router behind the proxy."""
    try:
        return len(server_info(url)["router"]["replica_batch_sizes"])
    except httpx.HTTPError:
        return 0


async def ask(url, num, meanwhile=None):
    """Streams from one proxy, once all have ended; `meanwhile(streams)` runs beside them."""
    streams = [Stream() for _ in range(num)]
    async with client_of(url) as client:
        prompts = [f"a{index} b c" for index in range(num)]
        running = [
            stream.listen(client, prompt, max_tokens=MAX_TOKENS)
            for stream, prompt in zip(streams, prompts, strict=True)
        ]
        if meanwhile is not None:
            running.append(meanwhile(streams))
        await asyncio.gather(*running)
    return streams


def num_tokens(url):
    """Tokens of each replica."""
    return [state["counters"]["decode_tokens"] for state in server_info(url)["internal_states"]]


def have_grown(before, after):
    """Whether both replicas have made tokens since."""
    return all(new > old for old, new in zip(before, after, strict=True))


def test_both_proxies_answer_from_replicas_on_both_hosts(urls, cluster):
    for deployment in ("Router", "EngineReplica"):
        assert cluster.ask("nodes", deployment) == sorted(HOSTS.values())
    before = num_tokens(urls[0])
    for url in urls:
        streams = asyncio.run(ask(url, NUM_STREAMS // 2))
        assert [count for _, count in texts_of(streams)] == [MAX_TOKENS] * len(streams)
        after = eventually(partial(num_tokens, url), partial(have_grown, before))
        before = after


def test_streams_go_on_when_a_node_is_lost(urls, hosts, proxy):
    """HAProxy spreads them over routers on both nodes; those of the lost router break off."""
    here, _ = urls

    async def lose_node(streams):
        while not all(stream.num_chunks for stream in streams):
            await asyncio.sleep(0.01)
        unplug(hosts[1])

    streams = asyncio.run(ask(here, NUM_STREAMS, lose_node))
    if proxy == "HAProxy":
        broken = [stream.error for stream in streams if stream.error is not None]
        assert len(broken) < NUM_STREAMS
        assert all(isinstance(error, httpx.RemoteProtocolError) for error in broken), broken
        streams = [stream for stream in streams if stream.error is None]
    assert [count for _, count in texts_of(streams)] == [MAX_TOKENS] * len(streams)
    assert any(stream.num_resumes for stream in streams)
    assert any(not stream.num_resumes for stream in streams)
    for stream in asyncio.run(ask(here, NUM_STREAMS)):
        assert texts_of([stream]), "later requests"
