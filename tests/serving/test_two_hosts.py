"""A router and a replica, or two ranks of a replica, on two hosts, without Ray."""

import pickle
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace

import pytest

from tests.serving.cluster import ROOT
from tests.serving.hosts import HOSTS, on_host, two_hosts, unplug


@pytest.fixture
def hosts():
    with two_hosts() as names:
        yield names


@pytest.fixture
def start():
    """Return a function that starts `host_process` on a host and returns what it prints."""
    with ExitStack() as stack:

        def start(host, *arguments):
            command = on_host(host, sys.executable, "-m", "tests.serving.host_process", *arguments)
            process = stack.enter_context(
                subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            return process.stdout

        yield start


def test_a_replica_on_another_host_proves_the_secret_and_is_lost_with_its_host(hosts, start):
    one, other = hosts
    router = start(one, "router", HOSTS[one])
    address = router.readline().strip()
    name, host, port, _ = pickle.loads(bytes.fromhex(address))
    guessed = pickle.dumps((name, host, port, b"guessed")).hex()
    assert start(other, "replica", guessed).readline() == f"{host}:{port} is not router\n"
    assert start(other, "replica", address).readline() == "connected\n"
    assert router.readline() == "connected\n"
    unplug(other)
    assert router.readline() == "r1 503\n"


def test_ranks_on_two_hosts_compute_together_until_one_is_lost(hosts, start):
    one, other = hosts
    rank_0 = start(one, "rank-0", HOSTS[one])
    address = pickle.loads(bytes.fromhex(rank_0.readline()))
    guessed = pickle.dumps(replace(address, secret=b"guessed")).hex()
    assert (
        f"{address.host}:{address.port} is not rank 0's" in start(other, "rank-1", guessed).read()
    )
    start(other, "rank-1", pickle.dumps(address).hex())
    assert rank_0.readline() == "[2.0, 2.0, 2.0]\n"
    unplug(other)
    assert "rank 1 of 2 disconnected" in rank_0.read()
