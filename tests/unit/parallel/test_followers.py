"""Followers come, obey and go; whatever ends one is known to the others, and at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from serve_spec.parallel import orders as orders_module
from serve_spec.parallel.followers import Followers, RankLost
from serve_spec.parallel.launch import launch
from tests.helpers.follower import CPU, follow

SOON_S = 30.0
"""Far below what a wait for a lost rank would take, far above what a busy machine needs."""
TOY = "tests.helpers.follower"


@pytest.fixture(autouse=True)
def _no_process_ends_with_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders_module, "_GRACE_S", 1e6)


def start(settings: str, size: int = 2) -> Followers:
    """Followers as threads: a line does not know better."""
    followers = Followers(size)

    def run(rank: int) -> None:
        with suppress(ValueError):
            follow(settings, rank, size, followers.address)

    for rank in range(1, size):
        threading.Thread(target=run, args=(rank,), daemon=True).start()
    try:
        followers.accept({})
    except BaseException:
        followers.stop()
        raise
    return followers


@pytest.fixture
def two() -> Iterator[Followers]:
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


def test_one_that_can_not_start_says_why() -> None:
    with pytest.raises(RankLost, match="rank 1 of 2 can not start: ValueError: no such model"):
        start("say no")


def test_one_that_does_not_join_is_not_waited_for() -> None:
    followers = start("stay away")
    with pytest.raises(RankLost, match="rank 1 of 2 failed: ValueError: no memory left"):
        followers.join(CPU)
    followers.stop()


def test_nobody_else_can_call() -> None:
    followers = Followers(2)
    assert os.stat(followers.address).st_mode & 0o077 == 0
    followers.stop()


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
    assert process.poll() is not None
