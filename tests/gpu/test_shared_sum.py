"""Two GPUs sum in memory they share. As a program this is the rank beside the one of the tests."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch
from torch import Tensor

from serve_spec.ops.shared_sum import DTYPES, fits, shared_sum
from serve_spec.parallel.followers import Followers
from serve_spec.parallel.group import DeviceGroup, join
from serve_spec.parallel.launch import launch
from serve_spec.parallel.line import Address
from serve_spec.parallel.orders import Orders

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

WIDTH = 4096
CHAIN = 64


def drawn(group: DeviceGroup, *shape: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    """What every rank adds, on this rank's GPU."""
    parts = []
    for rank in range(group.size):
        generator = torch.Generator().manual_seed(seed * group.size + rank)
        parts.append(torch.randn(shape, generator=generator).to(group._device, dtype))
    return parts


def is_lawful(group: DeviceGroup, num_rows: int, dtype: torch.dtype, seed: int) -> bool:
    parts = drawn(group, num_rows, WIDTH, seed=seed, dtype=dtype)
    expected = shared_sum(parts)
    x = parts[group.rank]
    assert fits(x)
    return group.all_reduce(x) is x and torch.equal(x, expected)


def memory_is_shared(group: DeviceGroup) -> bool:
    return group._shared_sum is not None


def sums_are_lawful(group: DeviceGroup) -> bool:
    """Every rank compares with the same law, so all of them have the same bits."""
    found = []
    for turn in range(4):
        for dtype in DTYPES:
            for num_rows in (1, 3, 32, 200 if dtype.itemsize == 2 else 100):
                found.append(is_lawful(group, num_rows, dtype, turn))
    return all(found)


def too_large_sums_are_right(group: DeviceGroup) -> bool:
    parts = drawn(group, 600, WIDTH, seed=0, dtype=torch.bfloat16)
    expected = shared_sum(parts)
    x = parts[group.rank]
    assert not fits(x)
    group.all_reduce(x)
    everybodys = group.all_gather(x[None], 0)
    close = torch.allclose(x.float(), expected.float(), atol=0.1)
    return close and all(torch.equal(other, x) for other in everybodys)


def graphs_of_sums_can_be_replayed(group: DeviceGroup) -> bool:
    """With new inputs every time; sizes of several parts take turns within the graph."""
    rows = [(1, 3, 32, 200)[i % 4] for i in range(CHAIN)]
    static = [torch.zeros(n, WIDTH, dtype=torch.bfloat16, device=group._device) for n in rows]
    outs = [torch.empty_like(x) for x in static]

    def stage() -> None:
        for x, out in zip(static, outs, strict=True):
            out.copy_(x)
            group.all_reduce(out)

    stage()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stage()
    found = []
    for replay in range(4):
        expected = []
        for i, x in enumerate(static):
            parts = drawn(group, *x.shape, seed=replay * CHAIN + i, dtype=x.dtype)
            x.copy_(parts[group.rank])
            expected.append(shared_sum(parts))
        graph.replay()
        found += [torch.equal(out, sums) for out, sums in zip(outs, expected, strict=True)]
    torch.cuda.synchronize()
    group.smallest(0)
    return all(found)


def a_thousand_sums_in_a_row_are_right(group: DeviceGroup) -> bool:
    parts = [drawn(group, 8, WIDTH, seed=i, dtype=torch.bfloat16) for i in range(7)]
    sums = [shared_sum(each) for each in parts]
    wrong = torch.zeros((), dtype=torch.int64, device=group._device)
    for i in range(1000):
        rows = 1 + i % 8
        x = parts[i % 7][group.rank][:rows].clone()
        wrong += (group.all_reduce(x) != sums[i % 7][:rows]).sum()
    return int(wrong) == 0


CHECKS: dict[str, Callable[[DeviceGroup], bool]] = {
    check.__name__: check
    for check in (
        memory_is_shared,
        sums_are_lawful,
        too_large_sums_are_right,
        graphs_of_sums_can_be_replayed,
        a_thousand_sums_in_a_row_are_right,
    )
}


def start() -> tuple[Followers, DeviceGroup]:
    torch.cuda.set_device(0)
    followers = launch("tests.gpu.test_shared_sum", 2, None)
    group = followers.join(torch.device("cuda", 0))
    assert isinstance(group, DeviceGroup)
    return followers, group


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[Followers, DeviceGroup]]:
    followers, group = start()
    yield followers, group
    followers.stop()


@pytest.mark.parametrize("check", CHECKS)
def test_on_both_ranks(two: tuple[Followers, DeviceGroup], check: str) -> None:
    followers, group = two
    followers.tell(check)
    with followers.in_step():
        assert agreed(group, check)


def test_a_rank_that_closes_waits_for_no_other() -> None:
    """A second group of this process, besides: its other rank never sums."""
    followers, group = start()
    assert group._shared_sum is not None
    for _ in range(3):
        group.all_reduce(torch.ones(32, WIDTH, device="cuda:0"))
    waiting = torch.cuda.Event()
    waiting.record()
    assert not waiting.query()
    group.close()
    waiting.synchronize()
    followers.stop()


def agreed(group: DeviceGroup, check: str) -> bool:
    """Whether it holds on every rank."""
    return bool(group.smallest(int(CHECKS[check](group))))


def follow(settings: None, rank: int, size: int, address: Address) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with Orders(address, rank) as orders:
        orders.ready()
        with closing(join(rank, size, device, address, orders.host)) as group:
            for order in orders:
                agreed(group, str(order))


if __name__ == "__main__":
    follow(*pickle.load(sys.stdin.buffer))
