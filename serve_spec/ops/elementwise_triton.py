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
    heads: Tensor,
    rotation: Rotation,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    dtype: torch.dtype,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """See `elementwise.rotate_and_store`; the rotated queries are contiguous here."""
    num_rows, num_all, head_dim = heads.shape[-3:]
    assert heads.stride()[-2:] == (head_dim, 1), "the heads of a token are contiguous"
    num_partials = len(heads) if heads.dim() == 4 else 1
    rotary_dim = rotation.cos_table.shape[-1]
    for pool in (keys, values):
        assert pool.is_contiguous(), "a layer of the pool is contiguous"
    query = heads.new_empty((num_rows, num_heads, head_dim), dtype=dtype)
    if num_rows == 0:
        return query
    key_scale, value_scale = scales if keys.dtype == torch.float8_e4m3fn else (None, None)
    _rotate_and_store_kernel[(num_rows, triton.cdiv(num_all, _HEADS_PER_PROGRAM))](
        heads, rotation.cos_table, rotation.sin_table, rotation.positions, slots,
        query, keys, values, key_scale, value_scale, heads.stride(-3), heads.stride(0),
        NUM_PARTIALS=num_partials, NUM_HEADS=num_heads, NUM_KV_HEADS=keys.shape[1],
        HEAD_DIM=head_dim, HALF=rotary_dim // 2, IS_INTERLEAVED=rotation.is_interleaved,
        BLOCK_HEADS=_HEADS_PER_PROGRAM, BLOCK_HALF=triton.next_power_of_2(rotary_dim // 2),
        BLOCK_REST=triton.next_power_of_2(head_dim - rotary_dim) if rotary_dim < head_dim else None,
        num_warps=_ROTATE_WARPS, **dependent_launch(heads.device),
    )  # fmt: skip
    return query


@triton.jit
def _rotate_and_store_kernel(
    heads, cos_table, sin_table, positions, slots, query, keys, values, key_scale, value_scale,
    row_stride, partial_stride,
    NUM_PARTIALS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Slots and positions are read before the kernel waits (see `dispatch.dependent_launch`)."""
    let_next_start(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row, cache_modifier=".cg").to(tl.int64)
    position = tl.load(positions + row, cache_modifier=".cg").to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    is_pair = pair < HALF
    # The numbers of a pair: `dim` and `dim + gap`.
    dim = 2 * pair if IS_INTERLEAVED else pair
    gap: tl.constexpr = 1 if IS_INTERLEAVED else HALF
    # Of the second number: its sine has its own sign.
    angle = position * (2 * HALF) + gap + dim
    cos = tl.load(cos_table + angle, mask=is_pair, other=0.0)
    sin = tl.load(sin_table + angle, mask=is_pair, other=0.0)
    wait(DEPENDENT)

    is_head = head < NUM_HEADS + 2 * NUM_KV_HEADS
    is_number = is_head & is_pair
    source = heads + row * row_stride + head * HEAD_DIM
    dtype = query.dtype.element_ty
    first = load_sum(source + dim, is_number, partial_stride, NUM_PARTIALS, dtype)
    second = load_sum(source + dim + gap, is_number, partial_stride, NUM_PARTIALS, dtype)
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    x, y = first.to(tl.float32), second.to(tl.float32)
    first = tl.where(is_value, first, (x * cos - y * sin).to(first.dtype))
    second = tl.where(is_value, second, (y * cos + x * sin).to(second.dtype))

    to_query = query + (row * NUM_HEADS + head) * HEAD_DIM
    is_query = head < NUM_HEADS
    _store_pairs(to_query + dim, first, second, gap, is_query & is_pair)
    key = head - NUM_HEADS
    to_key = keys + (slot * NUM_KV_HEADS + key) * HEAD_DIM
    is_key = (key >= 0) & (key < NUM_KV_HEADS)
    scale = None
    if key_scale is not None:
        scale = tl.where(is_value, value_scale, key_scale)
        first, second = _in_fp8(first, scale), _in_fp8(second, scale)
    _store_pairs(to_key + dim, first, second, gap, is_key & is_pair)
    value = key - NUM_KV_HEADS
    to_value = values + (slot * NUM_KV_HEADS + value) * HEAD_DIM
    _store_pairs(to_value + dim, first, second, gap, is_value & is_number)
    if BLOCK_REST is not None:
        rest = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        is_rest = is_head & (rest < HEAD_DIM)
        numbers = load_sum(source + rest, is_rest, partial_stride, NUM_PARTIALS, dtype)
        tl.store(to_query + rest, numbers, mask=is_query & is_rest)
        if key_scale is not None:
            numbers = _in_fp8(numbers, scale)
        tl.store(to_key + rest, numbers, mask=is_key & is_rest)
        tl.store(to_value + rest, numbers, mask=is_value & is_rest)


@triton.jit
def _in_fp8(numbers, scale):
    """Divide numbers and round them to FP8; NaN stays NaN."""
    wide = tl.div_rn(numbers.to(tl.float32), scale + tl.zeros_like(numbers).to(tl.float32))
    return tl.clamp(wide, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def _store_pairs(target, first, second, gap: tl.constexpr, mask):
    tl.store(target, first, mask=mask)
    tl.store(target + gap, second, mask=mask)
