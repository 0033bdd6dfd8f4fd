"""A rank that sums in memory it shares with other processes: python -m ... FOLDER RANK SIZE.

Kernels run under Triton's interpreter. Ends with exit code 0 if every sum was right to the bit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import tests.helpers.triton  # noqa: F401  before kernels

from serve_spec.ops import shared_sum_triton  # isort: skip
from serve_spec.ops.shared_sum import (  # isort: skip
    DTYPES,
    NUM_PROGRAMS,
    SLOTS_BYTES,
    SharedMemory,
    flag_bytes,
    shared_sum,
)

COUNTS = (1, 3000, 1024)
TURNS = 12


def shared_memory(folder: Path, rank: int, size: int) -> SharedMemory:
    """As rank `rank` sees it; whoever comes first makes a file, of zeros."""
    num_bytes = SLOTS_BYTES + flag_bytes(size)
    files = [
        torch.from_file(str(folder / str(r)), shared=True, size=num_bytes, dtype=torch.uint8)
        for r in range(size)
    ]
    return SharedMemory(
        rank,
        slots=tuple(file[:SLOTS_BYTES] for file in files),
        flags=tuple(file[SLOTS_BYTES:].view(torch.int64).view(-1, size) for file in files),
        counts=torch.zeros(NUM_PROGRAMS, dtype=torch.int64),
    )


def main(folder: Path, rank: int, size: int) -> bool:
    """Whether all sums were right."""
    memory = shared_memory(folder, rank, size)
    for turn in range(TURNS):
        dtype, count = DTYPES[turn % len(DTYPES)], COUNTS[turn % len(COUNTS)]
        generator = torch.Generator().manual_seed(turn)
        parts = list(torch.randn(size, count, generator=generator).to(dtype))
        expected = shared_sum(parts)
        shared_sum_triton.sum_over_ranks(parts[rank], memory)
        if not torch.equal(parts[rank], expected):
            return False
    return True


if __name__ == "__main__":
    sys.exit(0 if main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])) else 1)
