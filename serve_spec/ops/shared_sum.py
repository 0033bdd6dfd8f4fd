"""Sums over ranks through memory that all of them address.

Parts of the tensor belong to numbered programs. A program copies its part into its slot, tells the
program of its number on every other rank, waits until it has heard from each of them, and adds up
all parts in the order of ranks.

It has two slots and fills them in turn, so that one meeting a sum is enough. Whoever has heard from
the others in sum k + 1 knows that they are done with sum k, for they begin one sum after they have
ended the other. So the slot of sum k is free in sum k + 2. Sums are counted program by program,
since small tensors leave some of them out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_PROGRAMS = 128
"""At most so many programs make a sum: on a GPU each gets a multiprocessor of its own."""
SLOT_BYTES = 16384
"""Of the largest part."""
CAPACITY_BYTES = NUM_PROGRAMS * SLOT_BYTES
"""Of the largest tensor that is summed so: 256 rows of 4096 numbers in 16 bits."""
SLOTS_BYTES = 2 * CAPACITY_BYTES
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_LEAST_PART = 1024
"""Numbers: smaller parts would not be summed any faster."""


@dataclass(frozen=True)
class SharedMemory:
    """What ranks share, as rank `rank` addresses it. It begins as zeros.

    slots: of each rank, uint8 [SLOTS_BYTES]: what it adds, [2, NUM_PROGRAMS, SLOT_BYTES].
    flags: of each rank, int64 [NUM_PROGRAMS, size]: program p finds at [p, r] the newest sum for
    which program p of rank r has filled its slot.
    counts: int64 [NUM_PROGRAMS], this rank's alone: the sums each program has taken part in.
    """

    rank: int
    slots: tuple[Tensor, ...]
    flags: tuple[Tensor, ...]
    counts: Tensor

    @property
    def size(self) -> int:
        """Of the group."""
        return len(self.slots)


def shared_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of all ranks' tensors, in float32 and in the order of ranks, rounded once.

    parts: each rank's, of one shape and dtype. Every rank that adds so gets the same bits.
    """
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def sum_over_ranks(x: Tensor, memory: SharedMemory) -> None:
    """`shared_sum` of all ranks' x, in its place.

    x: as `fits` has it. All ranks sum the same shapes in the same order, one after the other.
    """
    if x.numel() == 0:
        return
    for program, part in enumerate(x.view(-1).split(part_size(x.numel()))):
        _sum_part(part, program, memory)


def part_size(num_numbers: int) -> int:
    """Numbers of a program's part, a power of two: as few as NUM_PROGRAMS allow."""
    part = _LEAST_PART
    while part * NUM_PROGRAMS < num_numbers:
        part *= 2
    return part


def fits(x: Tensor) -> bool:
    """Whether x can be summed so."""
    return x.dtype in DTYPES and x.is_contiguous() and x.nbytes <= CAPACITY_BYTES


def flag_bytes(size: int) -> int:
    """Of one rank's flags in a group of `size`."""
    return NUM_PROGRAMS * size * torch.int64.itemsize


def _sum_part(part: Tensor, program: int, memory: SharedMemory) -> None:
    memory.counts[program] += 1
    count = int(memory.counts[program])
    slots = [
        slots.view(part.dtype).view(2, NUM_PROGRAMS, -1)[count % 2, program, : len(part)]
        for slots in memory.slots
    ]
    slots[memory.rank].copy_(part)
    others = [rank for rank in range(memory.size) if rank != memory.rank]
    for rank in others:
        # The largest ever told stays, so that whoever is let go waits for nothing any more.
        memory.flags[rank][program, memory.rank].clamp_(min=count)
    heard = memory.flags[memory.rank][program]
    while any(heard[rank] < count for rank in others):
        time.sleep(0)
    part.copy_(shared_sum(slots))
