"""Worker ranks start, run broadcast plans and end; the others notice an end at once."""

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import DistNetworkError, TCPStore

from serve_spec.parallel import channel
from serve_spec.parallel.store_tunnel import open_tunnel
from serve_spec.parallel.worker_ranks import RankLost, WorkerRanks, launch
from tests.helpers.follower import CPU, follow
from tests.helpers.ranks import start_threads

SOON_S = 30.0
"""Far below what a wait for a lost rank would take, far above what a busy machine needs."""
TOY = "tests.helpers.follower"


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Return the threads of worker ranks, all of which end with the test."""
    monkeypatch.setattr(channel, "_GRACE_S", 1e6)
    threads = []
    yield threads
    for thread in threads:
        thread.join(SOON_S)
    assert not any(thread.is_alive() for thread in threads)


@pytest.fixture
def start(threads):
    """Return a function that starts worker ranks as threads."""
    return lambda settings, size=2: start_threads(follow, settings, size, threads)


@pytest.fixture
def two(start):
    worker_ranks = start("run", size=3)
    worker_ranks.join(CPU)
    yield worker_ranks
    worker_ranks.stop()


def wait_for_loss(worker_ranks):
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        try:
            worker_ranks.check()
        except RankLost as error:
            return str(error)
        time.sleep(0.02)
    raise AssertionError("the loss was not noticed")


def test_broadcasts_reach_all_ranks_in_order_until_the_end(two):
    assert two._group is not None
    for _ in range(3):
        two.broadcast("sum")
        with two.in_step():
            assert two._group.all_reduce(torch.ones(3)).tolist() == [3.0] * 3
    two.check()
    two.stop()
    two.stop()
    with pytest.raises(RankLost, match="shut down"):
        two.broadcast("sum")


def test_the_error_of_a_rank_is_raised_where_rank_0_waits_for_it(two):
    assert two._group is not None
    two.broadcast("fail")
    with (
        pytest.raises(RankLost, match="rank 1 of 3 failed: ValueError: broken weights"),
        two.in_step(),
    ):
        two._group.all_reduce(torch.ones(3))
    with pytest.raises(RankLost, match="broken weights"):
        two.broadcast("sum")


def test_a_rank_that_fails_between_rounds_is_known_before_the_next(two):
    two.broadcast("fail")
    assert "rank 2 of 3 failed: ValueError: broken weights" in wait_for_loss(two)


def test_an_error_of_rank_0_is_its_own_and_ends_all(two):
    """The others are in the middle of something that it will never finish."""
    two.broadcast("sum")
    with pytest.raises(KeyError, match="mine"), two.in_step():
        raise KeyError("mine")
    with pytest.raises(RankLost, match="rank 0 of 3 failed while the others went on: KeyError"):
        two.broadcast("sum")


def test_a_rank_that_cannot_start_or_ends_before_it_calls_is_reported(start):
    with pytest.raises(RankLost, match="rank 1 of 2 cannot start: ValueError: no such model"):
        start("say no")
    with pytest.raises(RankLost, match="rank 1 of 2 ended with exit code 3 while it started"):
        launch(TOY, 2, "exit")


@pytest.mark.parametrize(
    ("settings", "size", "lost"), [("stay away", 2, 1), ("only rank 1 joins", 3, 2)]
)
def test_a_rank_that_does_not_join_is_not_waited_for_and_ends_the_others(
    start, settings, size, lost
):
    worker_ranks = start(settings, size)
    with pytest.raises(RankLost, match=f"rank {lost} of {size} failed: ValueError: no memory left"):
        worker_ranks.join(CPU)
    worker_ranks.stop()  # and so all threads end
    assert "join" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("secret", [b"guessed", b""])
def test_an_unknown_connection_is_refused_and_delays_no_rank(start, secret):
    worker_ranks = WorkerRanks(2)
    unknown = replace(worker_ranks.address, secret=secret)
    with ThreadPoolExecutor(2) as pool:
        intrusion = pool.submit(channel.connect, unknown)
        member = pool.submit(follow, "run", 1, 2, worker_ranks.address)
        worker_ranks.accept({})
        with pytest.raises(ConnectionRefusedError):
            intrusion.result()
        worker_ranks.join(CPU)
        worker_ranks.stop()
        member.result()


def test_ranks_meet_at_the_address_that_rank_0_is_given():
    """As ranks of several hosts do: the loopback's own address is not among those in use."""
    worker_ranks = WorkerRanks(2, "127.0.0.2")
    with ThreadPoolExecutor(1) as pool:
        member = pool.submit(follow, "run", 1, 2, worker_ranks.address)
        worker_ranks.accept({})
        group = worker_ranks.join(CPU)
        worker_ranks.broadcast("sum")
        assert group.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
        worker_ranks.stop()
        member.result()


def test_a_rank_refuses_a_listener_without_the_secret():
    """Its pickles could run any code."""
    listener = socket.create_server((channel.LOOPBACK, 0))
    port = listener.getsockname()[1]
    with ThreadPoolExecutor(1) as pool, listener:
        member = pool.submit(channel.connect, channel.Address(channel.LOOPBACK, port, 0, b"secret"))
        assert channel.accept(listener, b"another") is None
        with pytest.raises(ConnectionRefusedError):
            member.result()


def test_a_process_that_is_killed_releases_rank_0():
    worker_ranks = launch(TOY, 2, "run")
    group = worker_ranks.join(CPU)
    worker_ranks.broadcast("sleep")
    process = worker_ranks._processes[1]
    threading.Timer(0.3, lambda: os.kill(process.pid, signal.SIGKILL)).start()
    with (
        pytest.raises(RankLost, match="rank 1 of 2 ended with exit code -9"),
        worker_ranks.in_step(),
    ):
        group.all_reduce(torch.ones(3))
    worker_ranks.stop()
    assert process.exit_reason() is not None


@pytest.mark.parametrize("forgery", ["altered", "repeated", "left out", "not tagged", "sent back"])
def test_a_message_that_the_other_end_did_not_send_next_is_not_unpickled(forgery):
    with socket.create_server((channel.LOOPBACK, 0)) as listener:
        one = channel.Channel(socket.create_connection(listener.getsockname()))
        other = channel.Channel(listener.accept()[0])
    with ThreadPoolExecutor(1) as pool, closing(one), closing(other):
        done = pool.submit(other.authenticate, b"secret", b"worker rank", b"rank 0")
        one.authenticate(b"secret", b"rank 0", b"worker rank")
        done.result()
        raw, between = one._connection, []
        one._connection = SimpleNamespace(send_bytes=between.append, close=raw.close)
        one.send(Bomb())
        one.send("second")
        first, second = between
        if forgery == "repeated":
            other._received.next(first[16:])  # it has been received once
        if forgery == "sent back":
            other.send(Bomb())
            first = raw.recv_bytes()
        forged = {"altered": first[:-1] + b"?", "left out": second, "not tagged": first[16:]}
        raw.send_bytes(forged.get(forgery, first))
        with pytest.raises(EOFError, match="forged message"):
            other.receive()


class Bomb:
    """What runs code where it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize(
    ("host", "reached_at"), [("127.0.0.1", "0100007F"), ("127.0.0.2", "0200007F")]
)
def test_ranks_of_one_host_find_each_other_where_no_other_host_can_connect(host, reached_at):
    """Those of several reach a gate there, and the store itself stays where it was."""
    worker_ranks = WorkerRanks(2, host)
    address = worker_ranks.address
    ports = {f"{port:04X}" for port in (address.port, address.store_port, worker_ranks._store.port)}
    lines = [
        line
        for file in ("tcp", "tcp6")
        for line in Path("/proc/net", file).read_text().splitlines()
    ]
    bound = [line.split()[1].split(":") for line in lines if line.split()[2].endswith(":0000")]
    worker_ranks.stop()
    listening = {port: host for host, port in bound if port in ports}
    assert listening.pop(f"{worker_ranks._store.port:04X}") == "0100007F"
    assert set(listening.values()) == {reached_at}


def test_the_store_of_several_hosts_answers_only_those_who_know_the_secret():
    worker_ranks = WorkerRanks(2, "127.0.0.2")
    address = worker_ranks.address
    soon = timedelta(seconds=1)
    with (
        closing(open_tunnel(address)) as tunnel,
        closing(open_tunnel(replace(address, secret=b"guessed"))) as guessed,
    ):
        member = TCPStore(channel.LOOPBACK, tunnel.port, wait_for_workers=False, timeout=soon)
        member.set("long", "value" * 100_000)  # more than one message
        assert member.clone().get("long") == b"value" * 100_000
        for host, port in [(address.host, address.store_port), (channel.LOOPBACK, guessed.port)]:
            with pytest.raises(DistNetworkError):
                TCPStore(host, port, wait_for_workers=False, timeout=soon)
        worker_ranks.stop()
