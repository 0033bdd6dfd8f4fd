"""Rotary embedding and both writes to the pool in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from serve_spec.core.context import Rotation
from serve_spec.ops.dependent_launch import dependent_launch
from serve_spec.ops.linear_triton import load_whole

_HEADS_PER_PROGRAM = 8
_NUM_WARPS = 4


def rotate_and_store(
    heads: Tensor, rotation: Rotation, slots: Tensor, keys: Tensor, values: Tensor, num_heads: int
) -> Tensor:
    """See `rotary.rotate_and_store`; the rotated queries are contiguous here."""
    return _launch(heads, rotation, slots, keys, values, num_heads, _HEADS_PER_PROGRAM, _NUM_WARPS)


def _launch(
    heads: Tensor,
    rotation: Rotation,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    heads_per_program: int,
    num_warps: int,
) -> Tensor:
    num_rows, num_all, head_dim = heads.shape[-3:]
    assert heads.stride()[-2:] == (head_dim, 1), "the heads of a token are contiguous"
    num_addends = len(heads) if heads.dim() == 4 else 1
    for pool in (keys, values):
        assert pool.is_contiguous(), "a layer of the pool is contiguous"
    query = keys.new_empty((num_rows, num_heads, head_dim))
    if num_rows == 0:
        return query
    dependent = dependent_launch(heads.device)
    _rotate_and_store_kernel[(num_rows, triton.cdiv(num_all, heads_per_program))](
        heads, rotation.cos_table, rotation.sin_table, rotation.positions, slots,
        query, keys, values, heads.stride(-3), heads.stride(0),
        NUM_ADDENDS=num_addends, NUM_HEADS=num_heads, NUM_KV_HEADS=keys.shape[1],
        HALF=head_dim // 2, BLOCK_HEADS=heads_per_program,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        DEPENDENT=dependent, num_warps=num_warps, launch_pdl=dependent,
    )  # fmt: skip
    return query


@triton.jit
def _rotate_and_store_kernel(
    heads, cos_table, sin_table, positions, slots, query, keys, values, row_stride, addend_stride,
    NUM_ADDENDS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    is_dim = dim < HALF
    # The second half of a table row: there the sines have their own sign.
    angle = position * (2 * HALF) + HALF + dim
    cos = tl.load(cos_table + angle, mask=is_dim, other=0.0)
    sin = tl.load(sin_table + angle, mask=is_dim, other=0.0)

    is_head = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & is_dim
    source = heads + row * row_stride + head * (2 * HALF) + dim
    dtype = query.dtype.element_ty
    first = load_whole(source, is_head, addend_stride, NUM_ADDENDS, dtype)
    second = load_whole(source + HALF, is_head, addend_stride, NUM_ADDENDS, dtype)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    x, y = first.to(tl.float32), second.to(tl.float32)
    first = tl.where(is_value, first, (x * cos - y * sin).to(first.dtype))
    second = tl.where(is_value, second, (y * cos + x * sin).to(second.dtype))

    target = query + (row * NUM_HEADS + head) * (2 * HALF) + dim
    _store_halves(target, first, second, HALF, (head < NUM_HEADS) & is_dim)
    key = head - NUM_HEADS
    target = keys + (slot * NUM_KV_HEADS + key) * (2 * HALF) + dim
    _store_halves(target, first, second, HALF, (key >= 0) & (key < NUM_KV_HEADS) & is_dim)
    value = key - NUM_KV_HEADS
    target = values + (slot * NUM_KV_HEADS + value) * (2 * HALF) + dim
    _store_halves(target, first, second, HALF, is_value & is_head)


@triton.jit
def _store_halves(target, first, second, HALF: tl.constexpr, mask):
    tl.store(target, first, mask=mask)
    tl.store(target + HALF, second, mask=mask)
