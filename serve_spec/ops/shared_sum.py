"""Sums over ranks through memory that all of them address.

Parts of the tensor belong to numbered programs. Each program numbers its sums, because small
tensors leave some programs out. There are two algorithms.

At once, which is faster for small tensors: a program sends its part to the program of its number on
every other rank, word by word, each with the number of the sum. It reads the others' words from its
own memory as they arrive, and adds all parts in the order of ranks. No flag is needed: 8 bytes are
one access, so a word with the number is complete, as in NCCL's low-latency protocol. A program has
two slots for each rank, used alternately: once the others' words of sum k + 1 have arrived, sum k
is over on all ranks, so that sum k + 2 may use its slot.

In shares, for large tensors or many ranks (a reduce-scatter, then an all-gather): every rank adds
one share of the part and sends the result to the others. It sends 2 · (1 - 1/size) · N of N bytes,
where the other algorithm sends 2 · (size - 1) · N, half of them numbers. A flag with the number of
the sum marks a share as complete: first of the addends, then of the sum. A rank sends addends of
sum k + 1 after it has all results of sum k, and results after all addends, so one place holds both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serve_spec.ops.dispatch import has_kernel
from serve_spec.ops.elementwise import add_rms_norm
from serve_spec.ops.linear import sum_partials

NUM_PROGRAMS = 256
"""At most so many programs make a sum: a GPU runs them all at once."""
SLOT_WORDS = 4096
"""Of 4 bytes, in the largest part."""
CAPACITY_BYTES = 2 << 20
"""Of the largest tensor that is summed so: 256 rows of 4096 numbers in 16 bits."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WORD_BYTES = 4
SHARE_WORDS = SLOT_WORDS // 2
"""In the largest share: two ranks', of the largest part."""
SHARE_ALIGNMENT = 16
"""Bytes: shares begin where a thread can take as many at once."""
NUMBER_MASK = 0x7FFFFFFF
"""The part of a sum's number that goes with every word."""

_LEAST_PART = 512
"""Words: smaller parts would not be summed any faster."""
_LEAST_SPARED = 1 << 18
"""Bytes of tensors that a rank has to send less in shares, which take some 4 µs more to begin with.
Of two ranks it never does."""


@dataclass(frozen=True)
class SharedMemory:
    """What ranks share, as rank `rank` addresses it. It begins as zeros.

    slots: of each rank, int64 `slots_shape(size)`: what others have sent it. A word is in the lower
    half of its entry, the number of the sum in the upper one.
    shares: of each rank, int32 `shares_shape(size)`: what others have sent it of sums in shares.
    flags: of each rank, int64 `flags_shape(size)`: in the upper half, the number of the sum of
    which another has sent its share.
    counts: int64 [NUM_PROGRAMS], this rank's alone: the sums each program has taken part in.
    released: int64 [1], this rank's alone: unless it is 0, nothing is waited for any more.
    """

    rank: int
    slots: tuple[Tensor, ...]
    shares: tuple[Tensor, ...]
    flags: tuple[Tensor, ...]
    counts: Tensor
    released: Tensor

    @property
    def size(self) -> int:
        """Of the group."""
        return len(self.slots)


def slots_shape(size: int) -> tuple[int, int, int, int]:
    """Return the shape of a rank's slots: by use, program, source rank and word."""
    return 2, NUM_PROGRAMS, size, SLOT_WORDS


def shares_shape(size: int) -> tuple[int, int, int, int]:
    """Return the shape of a rank's shares: addends and sums, by program, source rank and word."""
    return 2, NUM_PROGRAMS, size, SHARE_WORDS


def flags_shape(size: int) -> tuple[int, int, int]:
    """Return the shape of a rank's flags: of addends and sums, by program and source rank."""
    return 2, NUM_PROGRAMS, size


def shared_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of all ranks' tensors, in float32, in the order of ranks, rounded once.

    parts: each rank's, of one shape and dtype. Every rank that adds so gets the same bits.
    """
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


@has_kernel
def sum_over_ranks(x: Tensor, memory: SharedMemory) -> None:
    """Replace x by the `shared_sum` of all ranks' x.

    x: as `fits` has it. All ranks sum the same shapes in the same order, one after the other. The
    reference sums at once whatever the size, so ranks must not mix it with the kernel.
    """
    words = as_words(x)
    if len(words) == 0:
        return
    for program, part in enumerate(words.split(part_words(len(words)))):
        part.copy_(_sum_of_part(part, x.dtype, program, memory))


@has_kernel
def sum_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, memory: SharedMemory
) -> tuple[Tensor, Tensor]:
    """Return `add_rms_norm(shared_sum of all ranks' x, residual)`; a program has a row.

    residual: [T, width], see `residual_fits`; x: the same, or its partial sums (see `linear`).
    Neither is changed.
    """
    x = sum_partials(x, residual)
    parts = as_words(x).view(x.shape[0], -1)
    sums = [_sum_of_part(part, x.dtype, row, memory) for row, part in enumerate(parts)]
    return add_rms_norm(torch.stack(sums).view(x.dtype), residual, weight, eps)


def as_words(x: Tensor) -> Tensor:
    """Return a contiguous x as int32 words, one dimension; two numbers of 16 bits make one."""
    return x.view(-1).view(torch.int32)


def part_words(num_words: int) -> int:
    """Return the words of a program's part, a power of two: as few as NUM_PROGRAMS allow."""
    part = _LEAST_PART
    while part * NUM_PROGRAMS < num_words:
        part *= 2
    return part


def fits(x: Tensor) -> bool:
    """Return whether x can be summed so."""
    return (
        x.dtype in DTYPES
        and x.is_contiguous()
        and x.nbytes <= CAPACITY_BYTES
        and x.nbytes % WORD_BYTES == 0
        and x.data_ptr() % WORD_BYTES == 0
    )


def residual_fits(x: Tensor) -> bool:
    """Return whether the rows of x [T, width] can be summed so, one by each program."""
    num_rows, width = x.shape
    row_bytes = width * x.itemsize
    return (
        fits(x)
        and 0 < num_rows <= NUM_PROGRAMS
        and row_bytes <= SLOT_WORDS * WORD_BYTES
        and row_bytes % WORD_BYTES == 0
    )


def goes_in_shares(num_bytes: int, size: int) -> bool:
    """Return whether a tensor of so many bytes is summed in shares by so many ranks."""
    at_once, in_shares = size - 1, 2 * (1 - 1 / size)
    return num_bytes * (at_once - in_shares) >= _LEAST_SPARED


def share_numbers(count: int, size: int, itemsize: int) -> int:
    """Return how many of `count` numbers each rank adds; the last ranks may have fewer, or none."""
    aligned = SHARE_ALIGNMENT // itemsize
    return -(-count // (size * aligned)) * aligned


def _sum_of_part(part: Tensor, dtype: torch.dtype, program: int, memory: SharedMemory) -> Tensor:
    """Return the words of the sum; part: this rank's."""
    memory.counts[program] += 1
    count = int(memory.counts[program])
    number = count & NUMBER_MASK
    others = [rank for rank in range(memory.size) if rank != memory.rank]
    for rank in others:
        sent = (part.long() & 0xFFFFFFFF) | (number << 32)
        memory.slots[rank][count % 2, program, memory.rank, : len(part)] = sent
    parts = [part] * memory.size
    for rank in others:
        slot = memory.slots[memory.rank][count % 2, program, rank, : len(part)]
        while not ((slot >> 32) == number).all() and not memory.released:
            time.sleep(0)
        parts[rank] = slot.to(torch.int32)
    return as_words(shared_sum([words.view(dtype) for words in parts]))
