"""The token layout in one launch: one program per sequence, and one for the padding."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops.dispatch import dependent_launch
from serve_spec.ops.dispatch_triton import wait_for_previous
from serve_spec.ops.layout import TokenLayout

_BLOCK = 128


def lay_out_tokens(
    query_lens: Tensor,
    starts: Tensor,
    first_valid: Tensor,
    tables: Tensor,
    page_size: int,
    num_tokens: int,
    scratch_slot: int,
) -> TokenLayout:
    """See `layout.lay_out_tokens`."""
    num_sequences = len(query_lens)
    device = query_lens.device
    for dense in (query_lens, starts, first_valid):
        assert dense.is_contiguous(), "tensors over sequences are contiguous"
    layout = TokenLayout(
        owners=torch.empty(num_tokens, dtype=torch.int32, device=device),
        offsets=torch.empty(num_tokens, dtype=torch.int32, device=device),
        positions=torch.empty(num_tokens, dtype=torch.int64, device=device),
        slots=torch.empty(num_tokens, dtype=torch.int64, device=device),
        query_starts=torch.empty(num_sequences + 1, dtype=torch.int32, device=device),
    )
    _layout_kernel[(num_sequences + 1,)](
        *layout, query_lens, starts, first_valid, tables, tables.stride(0), tables.shape[1],
        num_sequences, num_tokens, page_size, scratch_slot,
        SEQUENCES=triton.next_power_of_2(num_sequences), BLOCK=_BLOCK,
        num_warps=4, **dependent_launch(device),
    )  # fmt: skip
    return layout


def ring_tokens(recent: Tensor, request_slots: Tensor, positions: Tensor) -> Tensor:
    """See `layout.ring_tokens`."""
    tokens = torch.empty_like(positions, dtype=torch.int64)
    _ring_kernel[(triton.cdiv(len(tokens), _BLOCK),)](
        tokens, recent, request_slots, positions, len(tokens), recent.shape[1],
        BLOCK=_BLOCK, num_warps=4, **dependent_launch(positions.device),
    )  # fmt: skip
    return tokens


@triton.jit(do_not_specialize=["num_sequences", "num_tokens", "table_width"])
def _layout_kernel(
    owners, offsets, positions, slots, query_starts,
    query_lens, starts, first_valid, tables, table_stride, table_width,
    num_sequences, num_tokens, page_size, scratch_slot,
    SEQUENCES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    wait_for_previous(DEPENDENT)
    sequence = tl.arange(0, SEQUENCES)
    lens = tl.load(query_lens + sequence, mask=sequence < num_sequences, other=0)
    begin = tl.minimum(tl.sum(tl.where(sequence < b, lens, 0), axis=0), num_tokens)
    tl.store(query_starts + b, begin)
    if b == num_sequences:
        for first in range(begin, num_tokens, BLOCK):
            index = first + tl.arange(0, BLOCK)
            inside = index < num_tokens
            tl.store(owners + index, tl.full([BLOCK], -1, dtype=tl.int32), mask=inside)
            tl.store(offsets + index, tl.zeros([BLOCK], dtype=tl.int32), mask=inside)
            tl.store(positions + index, tl.zeros([BLOCK], dtype=tl.int64), mask=inside)
            scratch = tl.zeros([BLOCK], dtype=tl.int64) + scratch_slot
            tl.store(slots + index, scratch, mask=inside)
    else:
        count = tl.minimum(tl.load(query_lens + b), num_tokens - begin)
        start = tl.load(starts + b).to(tl.int64)
        valid_from = tl.maximum(tl.load(first_valid + b).to(tl.int64), 0)
        for first in range(0, count, BLOCK):
            offset = first + tl.arange(0, BLOCK)
            inside = offset < count
            index = begin + offset
            position = start + offset
            is_valid = inside & (position >= valid_from)
            position = tl.maximum(position, 0)
            column = position // page_size
            is_valid = is_valid & (column < table_width)
            page = tl.load(
                tables + b.to(tl.int64) * table_stride + column, mask=is_valid, other=0
            ).to(tl.int64)
            slot = tl.where(is_valid, page * page_size + position % page_size, scratch_slot)
            tl.store(owners + index, tl.zeros([BLOCK], dtype=tl.int32) + b, mask=inside)
            tl.store(offsets + index, offset, mask=inside)
            tl.store(positions + index, position, mask=inside)
            tl.store(slots + index, slot, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _ring_kernel(
    tokens, recent, request_slots, positions, num_tokens, window,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_tokens
    wait_for_previous(DEPENDENT)
    request_slot = tl.load(request_slots + index, mask=inside, other=-1).to(tl.int64)
    column = tl.load(positions + index, mask=inside, other=0) & (window - 1)
    token = tl.load(recent + request_slot * window + column, mask=request_slot >= 0, other=0)
    tl.store(tokens + index, token.to(tl.int64), mask=inside)
