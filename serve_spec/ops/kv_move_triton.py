"""KV of the accepted drafts of a tree moves to where a chain has it: one launch per pool."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops.dependent_launch import dependent_launch

_MAX_BLOCK = 4096


def move_accepted(
    pools: Sequence[Tensor],
    slots: Tensor,
    query_starts: Tensor,
    path: Tensor,
    num_correct: Tensor,
) -> None:
    """See `kv_move.move_accepted`."""
    dependent = dependent_launch(slots.device)
    for pool in pools:
        num_layers = 1 if pool.dim() == 2 else pool.shape[0]
        num_slots = pool.shape[0] if pool.dim() == 2 else pool.shape[1]
        width = pool.numel() // (num_layers * num_slots)
        block = min(triton.next_power_of_2(width), _MAX_BLOCK)
        _move_kernel[(len(num_correct), num_layers, triton.cdiv(width, block))](
            pool, slots, query_starts, path, num_correct, path.shape[1], num_slots, width,
            BLOCK=block, DEPENDENT=dependent, num_warps=4, launch_pdl=dependent,
        )  # fmt: skip


@triton.jit
def _move_kernel(
    pool, slots, query_starts, path, num_correct, path_width, num_slots, width,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per block of a layer and sequence, moved in ascending order.

    path[j + 1] > j, so no entry is read after it was written, and one thread reads and writes every
    number.
    """
    b, layer = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin = tl.load(query_starts + b)
    pool += layer.to(tl.int64) * num_slots * width
    for j in range(1, tl.load(num_correct + b) + 1):
        row = tl.load(path + b * path_width + j)
        if row != j:
            source = pool + tl.load(slots + begin + row) * width
            target = pool + tl.load(slots + begin + j) * width
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
