"""A rank that sums in memory it shares with other processes: python -m ... FOLDER RANK SIZE.

Kernels run under Triton's interpreter. Ends with exit code 0 if every sum was right to the bit.
"""

import math
import sys
from pathlib import Path

import torch

import tests.helpers.triton  # noqa: F401  before kernels

from serve_spec.ops import shared_sum_triton  # isort: skip
from serve_spec.ops.shared_sum import (  # isort: skip
    DTYPES,
    EMPTY,
    NUM_PROGRAMS,
    SharedMemory,
    flags_shape,
    shared_sum,
    shares_shape,
    slots_shape,
)

ROWS = (1, 4, 2)
WIDTH = 1500
TURNS = 3
GATHERED = 40_000
"""Of `GATHER_NUMBERS`, which would take longer to make."""


def fill(folder, size):
    """Make the files of slots of all ranks, empty; the others begin as zeros."""
    for rank in range(size):
        torch.full(slots_shape(size), EMPTY, dtype=torch.int32).numpy().tofile(
            folder / f"slots-{rank}"
        )


def shared_memory(folder, rank, size):
    """Return the memory as rank `rank` sees it, in files that `fill` has made."""

    def files(name, shape, dtype):
        size_of_each = math.prod(shape)
        paths = [str(folder / f"{name}-{r}") for r in range(size)]
        return tuple(
            torch.from_file(path, shared=True, size=size_of_each, dtype=dtype).view(shape)
            for path in paths
        )

    return SharedMemory(
        rank,
        slots=files("slots", slots_shape(size), torch.int32),
        shares=files("shares", shares_shape(size), torch.int32),
        flags=files("flags", flags_shape(size), torch.int64),
        gathered=files("gathered", (GATHERED,), torch.float32),
        counts=torch.zeros(NUM_PROGRAMS, dtype=torch.int64),
        released=torch.zeros(1, dtype=torch.int64),
    )


def is_gathered(memory, padding):
    """Whether columns of both ranks come together. (Its many programs take turns, slowly.)"""
    columns = torch.arange(3.0 * memory.size * WIDTH).view(3, -1)
    start, width = memory.rank * WIDTH, memory.size * WIDTH - padding
    mine = columns[:, start : start + WIDTH].contiguous()
    found = shared_sum_triton.gather_columns(mine, start, width, memory)
    return torch.equal(found, columns[:, :width])


def main(folder, rank, size):
    """Whether all sums were right: some stand alone, some are made with the addition after them."""
    memory = shared_memory(folder, rank, size)
    for turn in range(TURNS):
        dtype, rows = DTYPES[turn % len(DTYPES)], ROWS[turn % len(ROWS)]
        generator = torch.Generator().manual_seed(turn)
        drawn = torch.randn(size + 1, rows, WIDTH, generator=generator).to(dtype)
        *parts, residual = drawn
        expected, weight = shared_sum(parts), torch.ones(WIDTH, dtype=dtype)
        _, total = shared_sum_triton.sum_add_norm(parts[rank], residual, weight, 1e-5, memory)
        ids = torch.arange(rank, 700 + rank)
        shared_sum_triton.broadcast_words(ids, turn % size, memory)
        if ids[0] != turn % size or (turn < 2 and not is_gathered(memory, turn)):
            return False
        shared_sum_triton.sum_over_ranks(parts[rank], memory)
        if not torch.equal(parts[rank], expected) or not torch.equal(total, expected + residual):
            return False
    return True


if __name__ == "__main__":
    sys.exit(0 if main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])) else 1)
