"""Sums, broadcasts and gathers over ranks through memory that all of them address.

Parts of the tensor belong to numbered programs. Each program numbers its exchanges, because small
tensors leave some programs out. There are two algorithms for sums.

Both need no flag. A word is written by one access, so one that differs from `EMPTY` has arrived,
as in TensorRT-LLM's Lamport protocol. The receiver empties its place after reading it.

At once, which is faster for small tensors: a program sends its part to the program of its number on
every other rank, and adds all parts in the order of ranks. A broadcast is the same exchange, of
which all ranks keep one rank's words.

In shards, for large tensors or many ranks (a reduce-scatter, then an all-gather): every rank adds
one shard of the part and sends the result to all. It sends 2 · (1 - 1/size) · N of N bytes, where
the other algorithm sends (size - 1) · N.

A gather of columns is written into the result of every rank, and marked by flags. Between two
gathers there must be a sum: it ends after the result of the first one was used on all ranks.

A program has two slots for each rank, used alternately. Once it has completed exchange k + 1, all
ranks have begun it: it received their words or flags, or, in shards, the result of rank 0, which
needs the addends of all. Before, they ended exchange k and emptied its slots, so that exchange
k + 2 may use them. (The shard of rank 0 is never empty.)
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
MAX_BROADCAST_BYTES = 1 << 16
GATHER_BLOCK = 4096
"""Numbers of a row that a program of a gather sends at once."""
SHARD_WORDS = SLOT_WORDS // 2
"""In the largest shard: two ranks', of the largest part. Addends of a shard lie in the first half
of a slot, its result in the second."""
SHARD_ALIGNMENT = 4
"""Words: shards begin at multiples of what a thread loads in one instruction."""
EMPTY = -0x7FFF8000
"""A word that has not arrived: two of -0.0 in 16 bits. It is sent as 0, which adds the same."""
GATHER_NUMBERS = 16 << 20
"""Float32 numbers of the largest gather: 130 rows of a vocabulary of 128,256."""

_LEAST_PART = 512
"""Words: smaller parts would not be summed any faster."""
_LEAST_SPARED = 3 << 16
"""Bytes that a rank has to send less in shards, which wait twice: so many are spared of 16 rows of
4,096 by four ranks (4.4 µs instead of 5.0), and none by two ranks."""


@dataclass(frozen=True)
class SharedMemory:
    """Memory that ranks share, as rank `rank` addresses it. All but the slots begins as zeros.

    slots: of each rank, int32 `slots_shape(size)`: words that ranks have sent it. They begin, and
    are left, as `EMPTY`.
    flags: of each rank, int64 `flags_shape(size)`: the number of the last gather of which another
    has sent its columns.
    gathered: of each rank, float32 [GATHER_NUMBERS]: the result of its last gather.
    counts: int64 [NUM_PROGRAMS], this rank's alone: exchanges each program has taken part in.
    released: int64 [1], this rank's alone: unless it is 0, nothing is waited for any more.
    """

    rank: int
    slots: tuple[Tensor, ...]
    flags: tuple[Tensor, ...]
    gathered: tuple[Tensor, ...]
    counts: Tensor
    released: Tensor

    @property
    def size(self) -> int:
        """Of the group."""
        return len(self.slots)


def slots_shape(size: int) -> tuple[int, int, int, int]:
    """Return the shape of a rank's slots: by use, program, source rank and word."""
    return 2, NUM_PROGRAMS, size, SLOT_WORDS


def flags_shape(size: int) -> tuple[int, int]:
    """Return the shape of a rank's flags: by program and source rank."""
    return NUM_PROGRAMS, size


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


@has_kernel
def broadcast_words(x: Tensor, source: int, memory: SharedMemory) -> None:
    """Replace x by rank `source`'s x: token ids, indices or counts; see `fits_broadcast`."""
    words = as_words(x)
    for program, part in enumerate(words.split(part_words(len(words)))):
        part.copy_(_exchanged_words(part, program, memory)[source])


@has_kernel
def gather_columns(x: Tensor, start: int, width: int, memory: SharedMemory) -> Tensor:
    """Return [R, width], of which columns start .. are this rank's x, the others other ranks'.

    x: float32 [R, columns] with contiguous rows; its columns past the width are left out. See
    `fits_gather`. The result is overwritten by the next gather, before which there is a sum.
    """
    shape, size = (len(x), width), len(x) * width
    own = x[:, : max(0, min(x.shape[1], width - start))]
    for rank in range(memory.size):
        memory.gathered[rank][:size].view(shape)[:, start : start + own.shape[1]] = own
    for program in range(num_gather_programs(x)):
        memory.counts[program] += 1
        for rank in _others(memory):
            memory.flags[rank][program, memory.rank] = memory.counts[program]
        flags = memory.flags[memory.rank][program]
        while (flags[_others(memory)] != memory.counts[program]).any():
            if memory.released:
                break
            time.sleep(0)
    return memory.gathered[memory.rank][:size].view(shape)


def as_words(x: Tensor) -> Tensor:
    """Return a contiguous x as int32 words, one dimension; two numbers of 16 bits make one."""
    return x.view(-1).view(torch.int32)


def part_words(num_words: int) -> int:
    """Return the words of a program's part, a power of two: as few as NUM_PROGRAMS allow."""
    part = _LEAST_PART
    while part * NUM_PROGRAMS < num_words:
        part *= 2
    return part


def num_gather_programs(x: Tensor) -> int:
    """Return how many programs send x [R, columns]: one for each block, while there are so many."""
    return min(NUM_PROGRAMS, len(x) * -(-x.shape[1] // GATHER_BLOCK))


def fits(x: Tensor) -> bool:
    """Return whether x can be summed so."""
    return (
        x.dtype in DTYPES
        and x.is_contiguous()
        and x.nbytes <= CAPACITY_BYTES
        and x.nbytes % WORD_BYTES == 0
        and x.data_ptr() % WORD_BYTES == 0
    )


def fits_broadcast(x: Tensor) -> bool:
    """Return whether `broadcast_words` takes x: few integers of 32 or 64 bits."""
    is_words = x.dtype in (torch.int32, torch.int64) and x.is_contiguous()
    return is_words and 0 < x.nbytes <= MAX_BROADCAST_BYTES


def fits_gather(x: Tensor, width: int) -> bool:
    """Return whether `gather_columns` takes x [R, columns]."""
    return x.dtype == torch.float32 and x.stride(1) == 1 and len(x) * width <= GATHER_NUMBERS


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


def goes_in_shards(num_bytes: int, size: int) -> bool:
    """Return whether a tensor of so many bytes is summed in shards by so many ranks."""
    at_once, in_shards = size - 1, 2 * (1 - 1 / size)
    return num_bytes * (at_once - in_shards) >= _LEAST_SPARED


def shard_words(num_words: int, size: int) -> int:
    """Return how many words of a part each rank adds; the last ranks may have fewer, or none."""
    return -(-num_words // (size * SHARD_ALIGNMENT)) * SHARD_ALIGNMENT


def _sum_of_part(part: Tensor, dtype: torch.dtype, program: int, memory: SharedMemory) -> Tensor:
    """Return the words of the sum; part: this rank's."""
    return as_words(shared_sum([w.view(dtype) for w in _exchanged_words(part, program, memory)]))


def _exchanged_words(part: Tensor, program: int, memory: SharedMemory) -> list[Tensor]:
    """Return all ranks' words of a part; part: this rank's."""
    memory.counts[program] += 1
    turn = int(memory.counts[program]) % 2
    parts = [torch.where(part == EMPTY, 0, part)] * memory.size
    for rank in _others(memory):
        memory.slots[rank][turn, program, memory.rank, : len(part)] = parts[memory.rank]
    for rank in _others(memory):
        slot = memory.slots[memory.rank][turn, program, rank, : len(part)]
        while (slot == EMPTY).any() and not memory.released:
            time.sleep(0)
        parts[rank] = slot.clone()
        slot.fill_(EMPTY)
    return parts


def _others(memory: SharedMemory) -> list[int]:
    return [rank for rank in range(memory.size) if rank != memory.rank]
