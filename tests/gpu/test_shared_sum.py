"""GPUs sum in memory they share. As a program this is a rank beside the one of the tests."""

import pickle
import sys
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

import pytest
import torch

from serve_spec.ops.elementwise import add_rms_norm
from serve_spec.ops.linear import sum_partials
from serve_spec.ops.shared_sum import DTYPES, fits, residual_fits, shared_sum
from serve_spec.parallel.channel import RankChannel
from serve_spec.parallel.device_group import DeviceGroup, join
from serve_spec.parallel.worker_ranks import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

WIDTH = 4096
EPS = 1e-5

T = TypeVar("T")


def drawn(group, *shape, seed, dtype):
    """What every rank adds, on this rank's GPU."""
    parts = []
    for rank in range(group.size):
        generator = torch.Generator().manual_seed(seed * group.size + rank)
        parts.append(torch.randn(shape, generator=generator).to(group._device, dtype))
    return parts


def is_exact(group, num_rows, dtype, seed):
    parts = drawn(group, num_rows, WIDTH, seed=seed, dtype=dtype)
    expected = shared_sum(parts)
    x = parts[group.rank]
    assert fits(x)
    return group.all_reduce(x) is x and torch.equal(x, expected)


def memory_is_shared(group):
    return group._shared_sum is not None


def sums_are_exact(group):
    """Every rank compares with the same reference, so all of them have the same bits."""
    found = []
    for turn in range(4):
        for dtype in DTYPES:
            for num_rows in (1, 3, 32, 200 if dtype.itemsize == 2 else 100):
                found.append(is_exact(group, num_rows, dtype, turn))
    return all(found)


def too_large_sums_are_right(group):
    parts = drawn(group, 600, WIDTH, seed=0, dtype=torch.bfloat16)
    expected = shared_sum(parts)
    x = parts[group.rank]
    assert not fits(x)
    group.all_reduce(x)
    close = torch.allclose(x.float(), expected.float(), atol=0.1)
    return close and all(torch.equal(other, x) for other in of_all_ranks(group, x))


def of_all_ranks(group, x):
    return [group.broadcast(x.clone(), rank) for rank in range(group.size)]


def broadcasts_are_exact(group):
    found = []
    for turn in range(9):
        for count in (1, 32, 700, 40_000):
            for dtype in (torch.int32, torch.int64):
                ids = torch.arange(count, device=group._device, dtype=dtype) * 3 - turn
                for source in range(group.size):
                    mine = ids + 100 * group.rank
                    found.append(torch.equal(group.broadcast(mine, source), ids + 100 * source))
    return all(found)


def gathers_are_exact(group):
    """Gather whole and padded widths, some too large for shared memory."""
    found = []
    for turn, (num_rows, columns, padding) in enumerate(
        [
            (1, 64_128, 0),
            (32, 64_128, 1),
            (3, 1000, 7),
            (130, 64_128, 0),
            (1, 5, 4),
            (300, 64_128, 0),
        ]
    ):
        parts = drawn(group, num_rows, columns, seed=turn, dtype=torch.float32)
        width = columns * group.size - padding
        expected = torch.cat(parts, 1)[:, :width]
        for _ in range(3):
            found.append(torch.equal(group.gather_columns(parts[group.rank], width), expected))
    return all(found)


class Norm:
    """One norm over ranks: what goes into it, and what should come of it."""

    def __init__(self, group, num_rows, width, dtype, seed=0):
        self.group = group
        self.x = torch.empty(num_rows, width, dtype=dtype, device=group._device)
        self.residual, self.weight = torch.empty_like(self.x), torch.empty_like(self.x[0])
        self.draw(seed)

    def draw(self, seed):
        shape, dtype = self.x.shape, self.x.dtype
        parts = drawn(self.group, *shape, seed=seed, dtype=dtype)
        self.x.copy_(parts[self.group.rank])
        self.residual.copy_(drawn(self.group, *shape, seed=seed + 1000, dtype=dtype)[0])
        self.weight.copy_(drawn(self.group, shape[1], seed=seed + 2000, dtype=dtype)[0])
        self.expected = add_rms_norm(shared_sum(parts), self.residual, self.weight, EPS)

    def run(self):
        return self.group.add_norm(self.x, self.residual, self.weight, EPS)

    def is_exact(self, found):
        """The stream to the bit; its norm within a rounding, as squares come in any order."""
        (normed, total), (expected, stream) = found, self.expected
        rounding = max(torch.finfo(normed.dtype).eps, 1e-6)
        close = torch.allclose(normed.float(), expected.float(), rtol=rounding, atol=1e-30)
        return torch.equal(total, stream) and close


def norms_are_exact(group):
    """And the same on every rank, whose parts of a draw would differ otherwise."""
    found = []
    for turn in range(3):
        for dtype in DTYPES:
            for width in (4096, 5120):
                for num_rows in (1, 3, 32, 128, 256):
                    norm = Norm(group, num_rows, width, dtype, turn)
                    if residual_fits(norm.x):
                        results = norm.run()
                        alike = all(
                            torch.equal(other, result)
                            for result in results
                            for other in of_all_ranks(group, result)
                        )
                        found.append(norm.is_exact(results) and alike)
    # Too large are: of 16 bits, 256 rows of 5120; of float32, 256 of 4096, and any row of 5120.
    assert len(found) == 3 * (2 * (5 + 4) + 4)
    return all(found)


def norms_of_addends_are_those_of_their_sums(group):
    found = []
    for num_rows in (1, 3, 32, 64, 300):
        norm = Norm(group, num_rows, WIDTH, torch.bfloat16)
        for num_addends in (2, 4):
            addends = torch.stack([norm.x.float() * (k + 1) / 7 for k in range(num_addends)])
            norm.x = addends
            results = [result.clone() for result in norm.run()]
            norm.x = sum_partials(addends, norm.residual)
            found += [torch.equal(a, b) for a, b in zip(results, norm.run(), strict=True)]
    return all(found)


def norms_of_too_many_rows_are_right(group):
    found = []
    for num_rows, width in ((600, WIDTH), (256, 5120), (300, 1024)):
        norm = Norm(group, num_rows, width, torch.bfloat16)
        assert not residual_fits(norm.x)
        for mine, expected in zip(norm.run(), norm.expected, strict=True):
            found.append(torch.allclose(mine.float(), expected.float(), rtol=0.02, atol=0.1))
            found += [torch.equal(other, mine) for other in of_all_ranks(group, mine)]
    return all(found)


def graphs_of_sums_and_norms_can_be_replayed(group):
    """As a model's: every result goes into what comes next. Rows and widths take turns."""
    shapes = [(rows, width) for rows in (1, 256, 3, 32, 128) for width in (WIDTH, 5120)]
    norms = [
        Norm(group, rows, width, torch.bfloat16)
        for rows, width in shapes
        if rows * width <= 256 * WIDTH
    ]
    assert all(residual_fits(norm.x) for norm in norms)

    def stage():
        results = []
        for norm in norms * 3:
            _, total = found = norm.run()
            results.append((group.all_reduce(total.clone()), found))
        return results

    graph, results = recorded(stage)
    found = []
    for replay in range(4):
        for i, norm in enumerate(norms):
            norm.draw(100 * replay + i)
        graph.replay()
        for norm, (doubled, result) in zip(norms * 3, results, strict=True):
            # All ranks have the same stream.
            found.append(torch.equal(doubled, shared_sum([norm.expected[1]] * group.size)))
            found.append(norm.is_exact(result))
    torch.cuda.synchronize()
    group.smallest(0)
    return all(found)


def recorded(stage):
    """The graph, and what it writes to; all has been loaded before."""
    stage()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = stage()
    return graph, result


def a_thousand_sums_in_a_row_are_right(group):
    parts = [drawn(group, 8, WIDTH, seed=i, dtype=torch.bfloat16) for i in range(7)]
    sums = [shared_sum(each) for each in parts]
    wrong = torch.zeros((), dtype=torch.int64, device=group._device)
    for i in range(1000):
        rows = 1 + i % 8
        x = parts[i % 7][group.rank][:rows].clone()
        wrong += (group.all_reduce(x) != sums[i % 7][:rows]).sum()
    return int(wrong) == 0


def a_thousand_norms_in_a_row_are_right(group):
    norms = [Norm(group, rows, WIDTH, torch.bfloat16, rows) for rows in (8, 1, 3, 32, 2, 5, 128)]
    wrong = torch.zeros((), dtype=torch.int64, device=group._device)
    for i in range(1000):
        norm = norms[i % 7]
        wrong += (norm.run()[1] != norm.expected[1]).sum()
    return int(wrong) == 0


CHECKS: dict[str, Callable[[DeviceGroup], bool]] = {
    check.__name__: check
    for check in (
        memory_is_shared,
        sums_are_exact,
        too_large_sums_are_right,
        broadcasts_are_exact,
        gathers_are_exact,
        norms_are_exact,
        norms_of_addends_are_those_of_their_sums,
        norms_of_too_many_rows_are_right,
        graphs_of_sums_and_norms_can_be_replayed,
        a_thousand_sums_in_a_row_are_right,
        a_thousand_norms_in_a_row_are_right,
    )
}


def start(size):
    torch.cuda.set_device(0)
    worker_ranks = launch("tests.gpu.test_shared_sum", size, None)
    group = worker_ranks.join(torch.device("cuda", 0))
    assert isinstance(group, DeviceGroup)
    return worker_ranks, group


@pytest.fixture(scope="module", params=[2, 4], ids=["two", "four"])
def ranks(request):
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    worker_ranks, group = start(request.param)
    yield worker_ranks, group
    worker_ranks.stop()


@pytest.mark.parametrize("check", CHECKS)
def test_on_every_rank(ranks, check):
    worker_ranks, group = ranks
    worker_ranks.broadcast(check)
    with worker_ranks.in_step():
        assert agreed(group, check)


def test_a_rank_that_closes_waits_for_no_other():
    """A second group of this process, besides: its other rank never sums."""
    worker_ranks, group = start(2)
    assert group._shared_sum is not None
    x = torch.ones(32, WIDTH, dtype=torch.bfloat16, device="cuda:0")
    weight = torch.ones_like(x[0])
    # Kernels that would have to be loaded could wait for those that wait. The norm's is loaded
    # while none does, and the sum's has been on trial.
    for _ in range(3):
        group.add_norm(x, x, weight, EPS)
        group.all_reduce(x)
    waiting = torch.cuda.Event()
    waiting.record()
    assert not waiting.query()
    group.close()
    waiting.synchronize()
    worker_ranks.stop()


def agreed(group, check):
    return bool(group.smallest(int(CHECKS[check](group))))


def follow(settings, rank, size, address):
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    with RankChannel(address, rank) as channel:
        channel.ready()
        with closing(join(rank, size, device, address, channel.host)) as group:
            for order in channel:
                agreed(group, str(order))


if __name__ == "__main__":
    follow(*pickle.load(sys.stdin.buffer))
