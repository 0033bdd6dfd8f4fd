"""A router and a replica on two hosts, without Ray."""

import pickle
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.serving.cluster import ROOT
from tests.serving.hosts import HOSTS, on_host, two_hosts, unplug


@pytest.fixture
def hosts():
    with two_hosts() as names:
        yield names


def test_a_replica_on_another_host_proves_the_secret_and_is_lost_with_its_host(hosts):
    one, other = hosts
    with ExitStack() as stack:

        def start(host, *arguments):
            command = on_host(host, sys.executable, "-m", "tests.serving.host_process", *arguments)
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
        unplug(other)
        assert router.readline() == "r1 503\n"
