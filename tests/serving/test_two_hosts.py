"""A router and a replica on two hosts, made of network namespaces with a cable between them."""

import os
import pickle
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.serving.cluster import ROOT

HOSTS = {f"ss-{end}-{os.getpid()}": f"10.77.0.{end}" for end in (1, 2)}


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """The names of two hosts that reach each other and nothing else."""
    one, other = HOSTS
    with ExitStack() as stack:
        try:
            for name in HOSTS:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            cable = ("type", "veth", "peer", "name", "eth", "netns", other)
            ip("link", "add", "eth", "netns", one, *cable)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
        for name, address in HOSTS.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth", "up")
        yield one, other


def test_a_replica_on_another_host_proves_the_secret_and_is_lost_with_its_host(hosts):
    one, other = hosts
    with ExitStack() as stack:

        def start(host, *arguments):
            command = ["ip", "netns", "exec", host, sys.executable, "-m"]
            command += ["tests.serving.host_process", *arguments]
            process = stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            return process.stdout

        router = start(one, "router", HOSTS[one])
        address = router.readline().strip()
        name, host, port, _ = pickle.loads(bytes.fromhex(address))
        guessed = pickle.dumps((name, host, port, b"guessed")).hex()
        assert start(other, "replica", guessed).readline() == f"{host}:{port} is not router\n"
        assert start(other, "replica", address).readline() == "connected\n"
        assert router.readline() == "connected\n"
        ip("-n", other, "link", "set", "eth", "down")
        assert router.readline() == "r1 503\n"
