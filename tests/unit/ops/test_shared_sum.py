"""Sums in shared memory: the law and its kernel, beside ranks that have come before them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from tests.helpers.triton import DEVICE

from serve_spec.ops import shared_sum as plain  # isort: skip
from serve_spec.ops import shared_sum_triton  # isort: skip
from serve_spec.ops.shared_sum import (  # isort: skip
    CAPACITY_BYTES,
    DTYPES,
    NUM_PROGRAMS,
    SLOT_BYTES,
    SLOTS_BYTES,
    SharedMemory,
    fits,
    part_size,
    shared_sum,
)


SumOverRanks = Callable[[Tensor, SharedMemory], None]
both = pytest.mark.parametrize(
    "sum_over_ranks",
    [plain.sum_over_ranks, shared_sum_triton.sum_over_ranks],
    ids=["law", "kernel"],
)


def drawn(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Far apart in size, so that another order or precision of the sum would show.
    sizes = 10.0 ** torch.randint(-2, 3, (count,), generator=generator)
    return (torch.randn(count, generator=generator) * sizes).to(DEVICE, dtype)


class Rank:
    """The one under test; all others have stored their parts and told it before it begins."""

    def __init__(self, rank: int, size: int, sum_over_ranks: SumOverRanks) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=DEVICE)

        self.memory = SharedMemory(
            rank,
            slots=tuple(zeros(SLOTS_BYTES, dtype=torch.uint8) for _ in range(size)),
            flags=tuple(zeros(NUM_PROGRAMS, size, dtype=torch.int64) for _ in range(size)),
            counts=zeros(NUM_PROGRAMS, dtype=torch.int64),
        )
        self.counts = [0] * NUM_PROGRAMS
        self.sum_over_ranks = sum_over_ranks

    def slots(self, rank: int, dtype: torch.dtype) -> Tensor:
        """[2, NUM_PROGRAMS, numbers]"""
        return self.memory.slots[rank].view(dtype).view(2, NUM_PROGRAMS, -1)

    def sum(self, parts: list[Tensor]) -> Tensor:
        """This rank's result, after the others have played their roles."""
        memory = self.memory
        share = part_size(parts[0].numel())
        pieces = [part.split(share) for part in parts]
        for program in range(len(pieces[0])):
            self.counts[program] += 1
            count = self.counts[program]
            for rank in set(range(memory.size)) - {memory.rank}:
                piece = pieces[rank][program]
                self.slots(rank, piece.dtype)[count % 2, program, : len(piece)] = piece
                memory.flags[memory.rank][program, rank] = count
        x = parts[memory.rank].clone()
        self.sum_over_ranks(x, memory)
        return x


@both
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (2, 4)])
def test_parts_of_all_ranks_are_added_and_rounded_once(
    rank: int, size: int, dtype: torch.dtype, sum_over_ranks: SumOverRanks
) -> None:
    parts = [drawn(3000, dtype, seed) for seed in range(size)]
    expected = shared_sum(parts)
    assert torch.equal(Rank(rank, size, sum_over_ranks).sum(parts), expected)
    if dtype != torch.float32:
        in_turn = parts[0]
        for part in parts[1:]:
            in_turn = in_turn + part
        assert size == 2 or not torch.equal(in_turn, expected), "rounded once, not every time"


@both
def test_the_order_of_ranks_is_the_order_of_the_sum(sum_over_ranks: SumOverRanks) -> None:
    big, one = torch.tensor([2.0**24]), torch.tensor([1.0])
    assert shared_sum([big, one, one]).item() == 2.0**24
    assert shared_sum([one, one, big]).item() == 2.0**24 + 2
    for rank in range(3):
        found = Rank(rank, 3, sum_over_ranks).sum([x.to(DEVICE) for x in (big, one, one)])
        assert found.item() == 2.0**24


@both
def test_sums_of_any_sizes_follow_each_other(sum_over_ranks: SumOverRanks) -> None:
    """Programs that small sums leave out keep their own count, so their slots still alternate."""
    rank = Rank(1, 2, sum_over_ranks)
    for turn, count in enumerate((5, 4096, 1, 9000, 2048, 3, 9000, 9000, 1025)):
        dtype = DTYPES[turn % len(DTYPES)]
        parts = [drawn(count, dtype, 10 * turn + r) for r in range(2)]
        assert torch.equal(rank.sum(parts), shared_sum(parts))
    assert rank.memory.counts.tolist() == rank.counts
    assert len(set(rank.counts)) > 2


@both
def test_a_program_tells_each_other_rank_of_every_sum_and_nobody_else(
    sum_over_ranks: SumOverRanks,
) -> None:
    rank = Rank(1, 3, sum_over_ranks)
    for count in (3000, 1000, 2500):
        rank.sum([drawn(count, torch.float32, r) for r in range(3)])
    for other in (0, 2):
        flags = rank.memory.flags[other]
        assert flags[:, 1].tolist() == rank.counts
        assert not flags[:, [0, 2]].any()
    assert rank.counts[:4] == [3, 2, 2, 0]
    assert not rank.memory.flags[1][:, 1].any(), "it has nothing to tell itself"


@both
def test_what_the_others_may_still_read_is_left_alone(sum_over_ranks: SumOverRanks) -> None:
    """Of two sums, one after the other, both parts stay; the third takes the place of the first."""
    rank = Rank(0, 2, sum_over_ranks)
    parts = [[drawn(1000, torch.float32, 2 * turn + r) for r in range(2)] for turn in range(3)]
    rank.sum(parts[0])
    rank.sum(parts[1])
    slots = rank.slots(0, torch.float32)[:, 0, :1000]
    assert torch.equal(slots[1], parts[0][0])
    assert torch.equal(slots[0], parts[1][0])
    rank.sum(parts[2])
    assert torch.equal(slots[1], parts[2][0])
    assert torch.equal(slots[0], parts[1][0])


@both
def test_whoever_has_heard_the_last_word_waits_for_nothing(sum_over_ranks: SumOverRanks) -> None:
    rank = Rank(0, 2, sum_over_ranks)
    last = torch.iinfo(torch.int64).max
    rank.memory.flags[0].fill_(last)
    for _ in range(3):
        sum_over_ranks(drawn(3000, torch.bfloat16, 0), rank.memory)
    rank.memory.flags[1].fill_(last)
    sum_over_ranks(drawn(3000, torch.bfloat16, 0), rank.memory)
    assert (rank.memory.flags[1] == last).all(), "nor is it taken back by a late word"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tensor_that_fits_has_room_for_each_of_its_parts(dtype: torch.dtype) -> None:
    capacity = CAPACITY_BYTES // dtype.itemsize
    assert fits(torch.empty(capacity, dtype=dtype))
    assert not fits(torch.empty(capacity + 1, dtype=dtype))
    for count in (1, 1000, 1025, 4096, 128 * 1024, 128 * 1024 + 1, capacity - 1, capacity):
        part = part_size(count)
        assert part * dtype.itemsize <= SLOT_BYTES
        assert part * NUM_PROGRAMS >= count


@both
def test_the_largest_sum_uses_every_program(sum_over_ranks: SumOverRanks) -> None:
    capacity = CAPACITY_BYTES // 2
    parts = [drawn(capacity, torch.bfloat16, r) for r in range(2)]
    rank = Rank(0, 2, sum_over_ranks)
    assert torch.equal(rank.sum(parts), shared_sum(parts))
    assert rank.counts == [1] * NUM_PROGRAMS


def test_other_tensors_do_not_fit() -> None:
    assert not fits(torch.zeros(4, dtype=torch.int64))
    assert not fits(torch.zeros(4, 4)[:, :2])
    assert not fits(torch.zeros(4, dtype=torch.float64))


@both
def test_nothing_is_a_sum_of_nothing(sum_over_ranks: SumOverRanks) -> None:
    rank = Rank(0, 2, sum_over_ranks)
    sum_over_ranks(torch.empty(0, 4096, device=DEVICE), rank.memory)
    assert not rank.memory.counts.any()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="on one stream they would wait for each other")
def test_a_rank_of_the_kernel_and_one_of_the_law_understand_each_other() -> None:
    kernel = Rank(0, 2, shared_sum_triton.sum_over_ranks).memory
    law = dataclasses.replace(kernel, rank=1, counts=torch.zeros_like(kernel.counts))
    with ThreadPoolExecutor(1) as pool:
        for turn, count in enumerate((3000, 10, 5000, 3000, 1, 1024)):
            parts = [drawn(count, DTYPES[turn % len(DTYPES)], 2 * turn + r) for r in range(2)]
            expected = shared_sum(parts)
            other = pool.submit(plain.sum_over_ranks, parts[1], law)
            shared_sum_triton.sum_over_ranks(parts[0], kernel)
            other.result()
            assert torch.equal(parts[0], expected)
            assert torch.equal(parts[1], expected)
