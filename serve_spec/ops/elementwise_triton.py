"""Embeddings, norms and rotary embedding: a launch each, one pass over memory."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_spec.core.context import Rotation
from serve_spec.ops.dispatch import dependent_launch
from serve_spec.ops.dispatch_triton import let_next_start, wait, wait_for_previous
from serve_spec.ops.linear_triton import load_sum

_EMBED_BLOCK = 1024


def embed(
    weight: Tensor, token_ids: Tensor, first_id: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """See `elementwise.embed`."""
    token_ids = token_ids.contiguous()
    num_rows, width = weight.shape
    out = weight.new_empty((len(token_ids), width), dtype=dtype or weight.dtype)
    if len(token_ids):
        _embed_kernel[(len(token_ids), triton.cdiv(width, _EMBED_BLOCK))](
            out, weight, token_ids, first_id or 0, num_rows, width, weight.stride(0),
            BLOCK=_EMBED_BLOCK, num_warps=4, **dependent_launch(weight.device),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first_id", "num_rows"])
def _embed_kernel(
    out, weight, token_ids, first_id, num_rows, width, stride,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    wait_for_previous(DEPENDENT)
    row = tl.maximum(tl.load(token_ids + token), 0) - first_id
    is_here = inside & (row >= 0) & (row < num_rows)
    values = tl.load(weight + row * stride + at, mask=is_here, other=0.0)
    tl.store(out + token * width + at, values.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """See `elementwise.rms_norm`. The rows of x may be strided, their elements not."""
    rows = x.reshape(-1, x.shape[-1])
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(rows[None], None, weight, out.view(rows.shape), None, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `elementwise.add_rms_norm`. Rows may be strided, their elements not."""
    rows = residual.reshape(-1, residual.shape[-1])
    partials = x if x.dim() > residual.dim() else x[None]
    partials = partials.reshape(len(partials), *rows.shape)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    _launch(partials, rows, weight, out, total, eps)
    return out.view(residual.shape), total.view(residual.shape)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, out: Tensor, sums: Tensor | None, eps: float
) -> None:
    """Launch the kernel. x: partial sums [n, T, width]."""
    num_partials, num_rows, width = x.shape
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(num_rows,)](
        x, residual, weight, out, sums, width,
        x.stride(1), 0 if residual is None else residual.stride(0), out.stride(0), x.stride(0), eps,
        NUM_PARTIALS=num_partials, BLOCK=block,
        num_warps=min(max(block // 512, 1), 16), **dependent_launch(x.device),
    )  # fmt: skip


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, out, total, width, x_stride, residual_stride, out_stride, partial_stride,
    eps,
    NUM_PARTIALS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    gain = tl.load(weight + at, mask=inside, other=0.0)
    wait_for_previous(DEPENDENT)
    places = x + row * x_stride + at
    values = load_sum(places, inside, partial_stride, NUM_PARTIALS, out.dtype.element_ty)
    if residual is not None:
        addend = tl.load(residual + row * residual_stride + at, mask=inside, other=0.0)
        values = (values.to(tl.float32) + addend.to(tl.float32)).to(values.dtype)
        tl.store(total + row * width + at, values, mask=inside)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / width + eps)
    tl.store(out + row * out_stride + at, values * scale * gain.to(tl.float32), mask=inside)


_HEADS_PER_PROGRAM = 8
_ROTATE_WARPS = 4


def rotate_and_store(
    heads: Tensor, rotation: Rotation, slots: Tensor, keys: Tensor, values: Tensor, num_heads: int
) -> Tensor:
    """See `elementwise.rotate_and_store`; the rotated queries are contiguous here."""
    num_rows, num_all, head_dim = heads.shape[-3:]
    assert heads.stride()[-2:] == (head_dim, 1), "the heads of a token are contiguous"
    num_partials = len(heads) if heads.dim() == 4 else 1
    for pool in (keys, values):
        assert pool.is_contiguous(), "a layer of the pool is contiguous"
    query = keys.new_empty((num_rows, num_heads, head_dim))
    if num_rows == 0:
        return query
    _rotate_and_store_kernel[(num_rows, triton.cdiv(num_all, _HEADS_PER_PROGRAM))](
        heads, rotation.cos_table, rotation.sin_table, rotation.positions, slots,
        query, keys, values, heads.stride(-3), heads.stride(0),
        NUM_PARTIALS=num_partials, NUM_HEADS=num_heads, NUM_KV_HEADS=keys.shape[1],
        HALF=head_dim // 2, BLOCK_HEADS=_HEADS_PER_PROGRAM,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=_ROTATE_WARPS, **dependent_launch(heads.device),
    )  # fmt: skip
    return query


@triton.jit
def _rotate_and_store_kernel(
    heads, cos_table, sin_table, positions, slots, query, keys, values, row_stride, partial_stride,
    NUM_PARTIALS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Slots and positions are read before the kernel waits (see `dispatch.dependent_launch`)."""
    let_next_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row, cache_modifier=".cg").to(tl.int64)
    position = tl.load(positions + row, cache_modifier=".cg").to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    is_dim = dim < HALF
    # The second half of a table row: there the sines have their own sign.
    angle = position * (2 * HALF) + HALF + dim
    cos = tl.load(cos_table + angle, mask=is_dim, other=0.0)
    sin = tl.load(sin_table + angle, mask=is_dim, other=0.0)
    wait(DEPENDENT)

    is_head = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & is_dim
    source = heads + row * row_stride + head * (2 * HALF) + dim
    dtype = query.dtype.element_ty
    first = load_sum(source, is_head, partial_stride, NUM_PARTIALS, dtype)
    second = load_sum(source + HALF, is_head, partial_stride, NUM_PARTIALS, dtype)
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
