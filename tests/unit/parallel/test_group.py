"""What ranks exchange over gloo. Ranks are threads here."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from serve_spec.parallel.group import SINGLE
from tests.helpers.follower import joined

SIZE = 3


@pytest.fixture(scope="module")
def groups():
    groups = joined(SIZE)
    yield groups
    for group in groups:
        group.close()


def on_all(groups, run):
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(run, groups))


def drawn(rank, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (7, 1000)])
def test_sums_change_their_own_tensor_and_are_the_same_to_the_last_bit_on_every_rank(
    groups, shape, dtype
):
    def run(group):
        x = drawn(group.rank, *shape).to(dtype)
        assert group.all_reduce(x) is x
        return x

    sums = on_all(groups, run)
    expected = torch.stack([drawn(rank, *shape).to(dtype) for rank in range(SIZE)]).sum(0)
    torch.testing.assert_close(sums[0], expected, rtol=0.02, atol=0.05)
    assert all(torch.equal(found, sums[0]) for found in sums)


@pytest.mark.parametrize("missing", [0, 2])
def test_columns_come_together_in_the_order_of_ranks(groups, missing):
    expected = torch.cat([drawn(rank, 2, 5) for rank in range(SIZE)], 1)
    width = expected.shape[1] - missing
    for found in on_all(groups, lambda group: group.gather_columns(drawn(group.rank, 2, 5), width)):
        assert torch.equal(found, expected[:, :width])


@pytest.mark.parametrize("source", range(SIZE))
def test_one_ranks_tensor_takes_the_place_of_all_and_all_get_the_smallest_number(groups, source):
    def run(group):
        x = torch.tensor([group.rank, -group.rank])
        group.broadcast(x, source)
        return x.tolist()

    assert on_all(groups, run) == [[source, -source]] * SIZE
    assert on_all(groups, lambda group: group.smallest(7 - group.rank)) == [5] * SIZE


def test_alone_nothing_is_copied_or_changed():
    x = drawn(0, 3)
    assert SINGLE.size == 1
    assert SINGLE.all_reduce(x) is SINGLE.gather_columns(x, 3) is SINGLE.broadcast(x) is x
    assert SINGLE.smallest(4) == 4


def num_threads():
    return len(os.listdir("/proc/self/task"))


def test_closing_ranks_leaves_no_thread_behind_and_frees_the_one_that_waits():
    before = num_threads()
    groups = joined(SIZE)
    assert num_threads() > before
    for group in groups:
        group.close()
        group.close()
    assert num_threads() <= before
    with pytest.raises(RuntimeError, match="closed"):
        groups[0].all_reduce(torch.ones(3))
    first, second, third = joined(SIZE)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.all_reduce, torch.ones(3))
        second.close()
        third.close()
        with pytest.raises(RuntimeError):
            waiting.result()
    first.close()
