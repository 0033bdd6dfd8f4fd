"""Sums over the GPUs of one host in one launch, for numbers small enough that latency counts.

A kernel begins when the one before it has ended, and with it all its programs: so two slots are
enough here, too (see `shared_sum`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops.dependent_launch import dependent_launch
from serve_spec.ops.shared_sum import NUM_PROGRAMS, SLOT_BYTES, SharedMemory, part_size

_NUMBERS_PER_THREAD = 8


def sum_over_ranks(x: Tensor, memory: SharedMemory) -> None:
    """See `shared_sum.sum_over_ranks`. Launches on the current stream."""
    if x.numel():
        _launch(x, memory, part_size(x.numel()), _NUMBERS_PER_THREAD)


def _launch(x: Tensor, memory: SharedMemory, part: int, numbers_per_thread: int) -> None:
    dependent = dependent_launch(x.device)
    _sum_kernel[(triton.cdiv(x.numel(), part),)](
        x, x.numel(), memory.counts,
        tuple(slots.view(x.dtype) for slots in memory.slots), memory.flags,
        RANK=memory.rank, SIZE=memory.size,
        PROGRAMS=NUM_PROGRAMS, SLOT=SLOT_BYTES // x.itemsize, PART=part, DEPENDENT=dependent,
        num_warps=min(max(part // (32 * numbers_per_thread), 1), 16), launch_pdl=dependent,
    )  # fmt: skip


@triton.jit
def _sum_kernel(
    x, num_numbers, counts, slots, flags,
    RANK: tl.constexpr, SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr, SLOT: tl.constexpr, PART: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    place = tl.arange(0, PART)
    at = program * PART + place
    inside = at < num_numbers
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    own = tl.load(x + at, mask=inside, other=0.0)
    count = tl.load(counts + program) + 1
    slot = ((count & 1) * PROGRAMS + program) * SLOT + place
    tl.store(slots[RANK] + slot, own, mask=inside)
    # One thread tells for all of them, so all must have stored. All have read the count, too.
    tl.debug_barrier()
    tl.store(counts + program, count)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            tl.atomic_max(flags[rank] + program * SIZE + RANK, count, sem="release", scope="sys")
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            flag = flags[RANK] + program * SIZE + rank
            # Compiles to a load.
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < count:
                pass
    # One thread has heard for all of them: none may read before.
    tl.debug_barrier()
    total = tl.zeros([PART], dtype=tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += own.to(tl.float32)
        else:
            total += tl.load(slots[rank] + slot, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + at, total.to(x.dtype.element_ty), mask=inside)
