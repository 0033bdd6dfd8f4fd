"""Followers come, obey and go; whatever ends one is known to the others, and at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from serve_spec.parallel import line
from serve_spec.parallel import orders as orders_module
from serve_spec.parallel.followers import Followers, RankLost
from serve_spec.parallel.launch import launch
from tests.helpers.follower import CPU, follow

SOON_S = 30.0
"""Far below what a wait for a lost rank would take, far above what a busy machine needs."""
TOY = "tests.helpers.follower"


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.Thread]]:
    """Those of a test's followers; none of them is left behind, and none ends the process."""
    monkeypatch.setattr(orders_module, "_GRACE_S", 1e6)
    threads: list[threading.Thread] = []
    yield threads
    for thread in threads:
        thread.join(SOON_S)
    assert not any(thread.is_alive() for thread in threads)


Start = Callable[..., Followers]


@pytest.fixture
def start(threads: list[threading.Thread]) -> Start:
    """Starts followers as threads: a line does not know better."""

    def start(settings: str, size: int = 2) -> Followers:
        followers = Followers(size)

        def run(rank: int) -> None:
            with suppress(ValueError, RuntimeError):
                follow(settings, rank, size, followers.address)

        for rank in range(1, size):
            threads.append(threading.Thread(target=run, args=(rank,), daemon=True))
            threads[-1].start()
        try:
            followers.accept({})
        except BaseException:
            followers.stop()
            raise
        return followers

    return start


@pytest.fixture
def two(start: Start) -> Iterator[Followers]:
    followers = start("obey", size=3)
    followers.join(CPU)
    yield followers
    followers.stop()


def wait_for_loss(followers: Followers) -> str:
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        try:
            followers.check()
        except RankLost as error:
            return str(error)
        time.sleep(0.02)
    raise AssertionError("nobody noticed")


def test_orders_reach_all_in_their_order(two: Followers) -> None:
    assert two._group is not None
    for _ in range(3):
        two.tell("sum")
        with two.in_step():
            assert two._group.all_reduce(torch.ones(3)).tolist() == [3.0] * 3
    two.check()


def test_what_a_follower_fails_of_is_told_where_rank_0_waits_for_it(two: Followers) -> None:
    assert two._group is not None
    two.tell("fail")
    with (
        pytest.raises(RankLost, match="rank 1 of 3 failed: ValueError: broken weights"),
        two.in_step(),
    ):
        two._group.all_reduce(torch.ones(3))
    with pytest.raises(RankLost, match="broken weights"):
        two.tell("sum")


def test_a_follower_that_fails_between_rounds_is_known_before_the_next(two: Followers) -> None:
    two.tell("fail")
    assert "rank 2 of 3 failed: ValueError: broken weights" in wait_for_loss(two)


def test_an_error_of_rank_0_is_its_own_and_ends_all(two: Followers) -> None:
    """The others are in the middle of something that it will never finish."""
    two.tell("sum")
    with pytest.raises(KeyError, match="mine"), two.in_step():
        raise KeyError("mine")
    with pytest.raises(RankLost, match="rank 0 of 3 failed while the others went on: KeyError"):
        two.tell("sum")


def test_after_the_end_nothing_can_be_ordered_and_ending_again_is_nothing(two: Followers) -> None:
    two.stop()
    two.stop()
    with pytest.raises(RankLost, match="shut down"):
        two.tell("sum")


def test_one_that_can_not_start_says_why(start: Start) -> None:
    with pytest.raises(RankLost, match="rank 1 of 2 cannot start: ValueError: no such model"):
        start("say no")


@pytest.mark.parametrize(
    ("settings", "size", "lost"), [("stay away", 2, 1), ("only rank 1 joins", 3, 2)]
)
def test_one_that_does_not_join_is_not_waited_for_and_the_others_hear_of_it(
    start: Start, settings: str, size: int, lost: int
) -> None:
    followers = start(settings, size)
    with pytest.raises(RankLost, match=f"rank {lost} of {size} failed: ValueError: no memory left"):
        followers.join(CPU)
    followers.stop()  # and so all threads end
    assert "join" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("secret", [b"guessed", b""])
def test_a_stranger_is_turned_away_and_keeps_nobody_waiting(start: Start, secret: bytes) -> None:
    followers = Followers(2)
    stranger = replace(followers.address, secret=secret)
    with ThreadPoolExecutor(2) as pool:
        intrusion = pool.submit(line.call, stranger)
        member = pool.submit(follow, "obey", 1, 2, followers.address)
        followers.accept({})
        with pytest.raises(ConnectionRefusedError):
            intrusion.result()
        followers.join(CPU)
        followers.stop()
        member.result()


def test_ranks_meet_at_the_address_that_rank_0_is_given() -> None:
    """As ranks of several hosts do: the loopback's own address is not among those in use."""
    followers = Followers(2, "127.0.0.2")
    with ThreadPoolExecutor(1) as pool:
        member = pool.submit(follow, "obey", 1, 2, followers.address)
        followers.accept({})
        group = followers.join(CPU)
        followers.tell("sum")
        assert group.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
        followers.stop()
        member.result()


def test_whoever_took_rank_0s_place_is_not_believed() -> None:
    """A pickle of a stranger's could do anything."""
    listener = line.listen(line.LOOPBACK)
    port = listener.getsockname()[1]
    with ThreadPoolExecutor(1) as pool, listener:
        member = pool.submit(line.call, line.Address(line.LOOPBACK, port, 0, b"secret"))
        assert line.answer(listener, b"another") is None
        with pytest.raises(ConnectionRefusedError):
            member.result()


def test_a_process_that_ends_before_it_calls_is_noticed() -> None:
    with pytest.raises(RankLost, match="rank 1 of 2 ended with exit code 3 while it started"):
        launch(TOY, 2, "exit")


def test_a_process_that_is_killed_releases_rank_0() -> None:
    followers = launch(TOY, 2, "obey")
    group = followers.join(CPU)
    followers.tell("sleep")
    process = followers._processes[1]
    threading.Timer(0.3, lambda: os.kill(process.pid, signal.SIGKILL)).start()
    with pytest.raises(RankLost, match="rank 1 of 2 ended with exit code -9"), followers.in_step():
        group.all_reduce(torch.ones(3))
    followers.stop()
    assert process.how_it_ended() is not None
