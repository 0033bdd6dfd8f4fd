"""Ranks share memory or agree not to; processes add in one memory."""

import logging
import socket
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from serve_spec.ops.shared_sum import CAPACITY_BYTES, NUM_PROGRAMS
from serve_spec.parallel import shared_sum as shared_sum_module
from serve_spec.parallel.group import SINGLE
from serve_spec.parallel.shared_sum import (
    SharedSum,
    _check_host,
    _RelativeKeys,
    _together,
    _Unavailable,
    open_shared_sum,
)
from tests.helpers.follower import CPU, joined
from tests.helpers.ranks import shared_memory

SIZE = 2


@pytest.fixture(scope="module")
def groups():
    groups = joined(SIZE)
    yield groups
    for group in groups:
        group.close()


def test_a_released_rank_waits_for_no_other():
    shared = SharedSum(shared_memory(2, CPU)[0])
    timer = threading.Timer(0.2, shared.release)
    timer.start()
    x = torch.ones(3, 1000)
    for _ in range(3):
        shared.add_up(x)
        shared.add_norm(x, x, torch.ones(1000), 1e-5)
    timer.join()


def test_a_group_sums_in_shared_memory_what_fits_and_the_rest_as_ever():
    groups = joined(SIZE)
    memories = shared_memory(SIZE, CPU)
    weight = torch.ones(1000)

    def run(group):
        memory = memories[group.rank]
        group._shared_sum = SharedSum(memory)

        def add_norm(num_rows, width):
            x = torch.full((num_rows, width), group.rank + 1.0)
            normed, total = group.add_norm(x, torch.ones_like(x), torch.full((width,), 2.0), 1e-5)
            assert (total == 4.0).all()
            torch.testing.assert_close(normed, torch.full_like(x, 2.0))

        small = torch.full((3, 1000), group.rank + 1.0)
        assert group.all_reduce(small) is small
        assert (small == 3.0).all()
        assert memory.counts[:7].tolist() == [1, 1, 1, 1, 1, 1, 0]
        add_norm(2, 1000)
        assert memory.counts[:7].tolist() == [2, 2, 1, 1, 1, 1, 0]
        large = torch.full((CAPACITY_BYTES // 4 + 1,), group.rank + 1.0)
        whole = torch.full((3, 1000), group.rank + 1)
        assert (group.all_reduce(large) == 3.0).all()
        assert (group.all_reduce(whole) == 3).all()
        add_norm(CAPACITY_BYTES // 4000 + 1, 1000)
        assert memory.counts[:7].tolist() == [2, 2, 1, 1, 1, 1, 0]
        for turn in range(3):
            columns = torch.full((2, 3), group.rank + turn)
            expected = torch.cat([columns - group.rank, columns - group.rank + 1], 1)[:, :5]
            assert torch.equal(group.gather_columns(columns.float(), 5), expected)
        add_norm(NUM_PROGRAMS + 1, 1)
        assert memory.counts[:7].tolist() == [9, 5, 1, 1, 1, 1, 0], "a sum that fits, then a norm"

    with ThreadPoolExecutor(SIZE) as pool:
        list(pool.map(run, groups))
    for group in groups:
        group.close()
        with pytest.raises(RuntimeError, match="closed"):
            group.all_reduce(torch.ones(3))
        with pytest.raises(RuntimeError, match="closed"):
            group.add_norm(torch.ones(3, 1000), torch.ones(3, 1000), weight, 1e-5)
    assert all(memory.released for memory in memories), "no rank waits"


def test_ranks_that_cannot_share_memory_agree_to_do_without(groups, monkeypatch, caplog):
    """As on GPUs that do not reach each other: no CPU has what torch shares."""
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "")  # puts back what is set
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "")
    monkeypatch.setattr(logging.getLogger("serve_spec"), "propagate", True)
    with ThreadPoolExecutor(SIZE) as pool:
        found = list(pool.map(lambda group: open_shared_sum(group, HashStore(), CPU), groups))
    assert found == [None] * SIZE
    logged = {line.split(":")[0] for line in caplog.messages}
    assert logged == {f"sums of rank {rank} go through NCCL" for rank in range(SIZE)}


def test_memory_that_failed_its_trial_is_given_back_at_once(monkeypatch):
    taken = []

    def allocate(device, size):
        memory = torch.zeros(size, device=device)
        taken.append(weakref.ref(memory))
        return memory

    def fail(*_):
        raise ArithmeticError("wrong on trial")

    monkeypatch.setattr(shared_sum_module, "_allocate", allocate)
    monkeypatch.setattr(shared_sum_module, "_share", lambda own, *_: own)
    monkeypatch.setattr(shared_sum_module, "_try", fail)
    assert open_shared_sum(SINGLE, HashStore(), CPU) is None
    assert [memory() for memory in taken] == [None]


def test_what_fails_on_one_rank_is_given_up_by_all(groups):
    def run(group):
        def step():
            if group.rank == 1:
                raise ValueError("no way\nto the other GPU")
            return 7

        with pytest.raises(_Unavailable) as caught:
            _together(group, step)
        assert _together(group, lambda: group.rank) == group.rank, "the ranks are still in step"
        return str(caught.value)

    with ThreadPoolExecutor(SIZE) as pool:
        reasons = list(pool.map(run, groups))
    assert "another rank" in reasons[0]
    assert reasons[1] == "ValueError: no way"


@pytest.mark.parametrize("names", [("a", "a"), ("a", "b"), ("b", "a")])
def test_only_ranks_of_one_host_try(groups, names, monkeypatch):
    here = threading.local()
    monkeypatch.setattr(socket, "gethostname", lambda: here.name)

    def run(group):
        here.name = names[group.rank]
        try:
            _check_host(group)
        except _Unavailable:
            return False
        return True

    with ThreadPoolExecutor(SIZE) as pool:
        assert list(pool.map(run, groups)) == [names[0] == names[1]] * SIZE


def test_ranks_meet_however_often_their_processes_have_met_before():
    """torch's numbers go on throughout a process; here one has had seven exchanges, one none."""
    store = HashStore()

    def meet(rank, first):
        # Called as torch calls it: from C++.
        own = _RelativeKeys(store)
        keys = PrefixStore("torch", own)
        found = []
        for number in range(first, first + 3):
            keys.set(f"{number}/{rank}", f"{number - first} of {rank}")
            keys.wait([f"{number}/{1 - rank}"])
            found.append(keys.get(f"{number}/{1 - rank}"))
        found += own.multi_get([f"torch/{first}/{r}" for r in range(2)])
        return found

    with ThreadPoolExecutor(2) as pool:
        received = list(pool.map(meet, (0, 1), (7, 0)))
    for rank in range(2):
        expected = [f"{number} of {1 - rank}".encode() for number in range(3)]
        assert received[rank] == [*expected, b"0 of 0", b"0 of 1"]
