"""Sums over ranks through memory that all of them address.

Parts of the tensor belong to numbered programs. A program sends its part to the program of its
number on every other rank, word by word, each word with the number of the sum; takes the others'
words from its own memory as they come; and adds up all parts in the order of ranks. Nobody tells
anybody that a part is complete: 8 bytes are one access, so a word that has the number is there.
(NCCL's low-latency protocol does so, too.)

A program has two slots for each rank, filled in turn. Whoever has the others' words of sum k + 1
knows that they are done with sum k, for they begin one sum after they have ended the other. So
sum k + 2 may take the place of sum k. Sums are counted program by program, since small tensors
leave some of them out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_spec.ops.norm import add_rms_norm

NUM_PROGRAMS = 256
"""At most so many programs make a sum: a GPU runs them all at once."""
SLOT_WORDS = 4096
"""Of 4 bytes, in the largest part."""
CAPACITY_BYTES = 2 << 20
"""Of the largest tensor that is summed so: 256 rows of 4096 numbers in 16 bits."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WORD_BYTES = 4
NUMBER_MASK = 0x7FFFFFFF
"""The part of a sum's number that goes with every word."""

_LEAST_PART = 512
"""Words: smaller parts would not be summed any faster."""


@dataclass(frozen=True)
class SharedMemory:
    """What ranks share, as rank `rank` addresses it. It begins as zeros.

    slots: of each rank, int64 `slots_shape(size)`: what others have sent it. A word is in the lower
    half of its entry, the number of the sum in the upper one.
    counts: int64 [NUM_PROGRAMS], this rank's alone: the sums each program has taken part in.
    released: int64 [1], this rank's alone: unless it is 0, nothing is waited for any more.
    """

    rank: int
    slots: tuple[Tensor, ...]
    counts: Tensor
    released: Tensor

    @property
    def size(self) -> int:
        """Of the group."""
        return len(self.slots)


def slots_shape(size: int) -> tuple[int, int, int, int]:
    """Of one rank's slots in a group of `size`: in turn, of each program, from each rank, words."""
    return 2, NUM_PROGRAMS, size, SLOT_WORDS


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
    words = as_words(x)
    if len(words) == 0:
        return
    for program, part in enumerate(words.split(part_words(len(words)))):
        part.copy_(_sum_of_part(part, x.dtype, program, memory))


def sum_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, memory: SharedMemory
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm(shared_sum of all ranks' x, residual)`; a program has a row.

    x, residual: [T, width], contiguous, of one dtype, x as `rows_fit` has it; neither is changed.
    """
    parts = as_words(x).view(x.shape[0], -1)
    sums = [_sum_of_part(part, x.dtype, row, memory) for row, part in enumerate(parts)]
    return add_rms_norm(torch.stack(sums).view(x.dtype), residual, weight, eps)


def as_words(x: Tensor) -> Tensor:
    """A contiguous x as int32 words, one dimension; two numbers of 16 bits make one."""
    return x.view(-1).view(torch.int32)


def part_words(num_words: int) -> int:
    """Words of a program's part, a power of two: as few as NUM_PROGRAMS allow."""
    part = _LEAST_PART
    while part * NUM_PROGRAMS < num_words:
        part *= 2
    return part


def fits(x: Tensor) -> bool:
    """Whether x can be summed so."""
    return (
        x.dtype in DTYPES
        and x.is_contiguous()
        and x.nbytes <= CAPACITY_BYTES
        and x.nbytes % WORD_BYTES == 0
        and x.data_ptr() % WORD_BYTES == 0
    )


def rows_fit(x: Tensor) -> bool:
    """Whether the rows of x [T, width] can be summed so, one by each program."""
    num_rows, width = x.shape
    row_bytes = width * x.itemsize
    return (
        fits(x)
        and 0 < num_rows <= NUM_PROGRAMS
        and row_bytes <= SLOT_WORDS * WORD_BYTES
        and row_bytes % WORD_BYTES == 0
    )


def _sum_of_part(part: Tensor, dtype: torch.dtype, program: int, memory: SharedMemory) -> Tensor:
    """The words of the sum; part: this rank's."""
    memory.counts[program] += 1
    count = int(memory.counts[program])
    number = count & NUMBER_MASK
    for rank in range(memory.size):
        if rank != memory.rank:
            sent = (part.long() & 0xFFFFFFFF) | (number << 32)
            memory.slots[rank][count % 2, program, memory.rank, : len(part)] = sent
    parts = []
    for rank in range(memory.size):
        if rank == memory.rank:
            parts.append(part.clone())
            continue
        slot = memory.slots[memory.rank][count % 2, program, rank, : len(part)]
        while not ((slot >> 32) == number).all() and not memory.released:
            time.sleep(0)
        parts.append(slot.to(torch.int32))
    return as_words(shared_sum([words.view(dtype) for words in parts]))
