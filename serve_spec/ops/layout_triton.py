"""The token layout in one launch: one program per sequence, and one for the padding."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops.dispatch import dependent_launch
from serve_spec.ops.dispatch_triton import let_next_read, wait, wait_for_previous
from serve_spec.ops.layout import Extended, Followed, Sequences, TokenLayout

_BLOCK = 128
_NEVER = tl.constexpr(2**31 - 1)


def lay_out_tokens(
    pages: Tensor,
    page_size: int,
    scratch_slot: int,
    sequences: Sequences,
    num_tokens: int,
    drafted: Extended | Followed | None = None,
) -> TokenLayout:
    """See `layout.lay_out_tokens`."""
    request_slots, starts, query_lens, offset, by_slot = sequences
    num_sequences, device = len(request_slots), pages.device
    lens, even_len = (None, query_lens) if isinstance(query_lens, int) else (query_lens, 0)
    made, shift = drafted if isinstance(drafted, Extended) else (None, 0)
    depths, level = drafted if isinstance(drafted, Followed) else (None, 0)
    for dense in (request_slots, starts, depths, made, lens):
        assert dense is None or dense.is_contiguous(), "tensors over sequences are contiguous"
    layout = TokenLayout(
        owners=torch.empty(num_tokens, dtype=torch.int32, device=device),
        offsets=torch.empty(num_tokens, dtype=torch.int32, device=device),
        request_slots=torch.empty(num_tokens, dtype=torch.int32, device=device),
        positions=torch.empty(num_tokens, dtype=torch.int64, device=device),
        slots=torch.empty(num_tokens, dtype=torch.int64, device=device),
        query_starts=torch.empty(num_sequences + 1, dtype=torch.int32, device=device),
        kv_lens=torch.empty(num_sequences, dtype=torch.int32, device=device),
        tables=torch.empty((num_sequences, pages.shape[1]), dtype=torch.int32, device=device),
    )
    _layout_kernel[(num_sequences + 1,)](
        *layout, request_slots, starts, lens, pages, made, depths,
        pages.stride(0), pages.shape[1], num_sequences, num_tokens, page_size, scratch_slot,
        offset, even_len, shift, level,
        BY_SLOT=by_slot, SEQUENCES=1 if lens is None else triton.next_power_of_2(num_sequences),
        BLOCK=_BLOCK, num_warps=4, **dependent_launch(device),
    )  # fmt: skip
    return layout


def read_tokens(
    recent: Tensor, layout: TokenLayout, ahead: int = 0, drafts: Tensor | None = None
) -> Tensor:
    """See `layout.read_tokens`."""
    tokens = torch.empty_like(layout.positions)
    num_drafts, width = (0, 0) if drafts is None else drafts.shape
    _token_kernel[(triton.cdiv(len(tokens), _BLOCK),)](
        tokens, recent, drafts, layout.request_slots, layout.positions, layout.owners,
        layout.offsets, len(tokens), recent.shape[1], ahead, num_drafts, width,
        BLOCK=_BLOCK, num_warps=4, **dependent_launch(tokens.device),
    )  # fmt: skip
    return tokens


@triton.jit(
    do_not_specialize=[
        "table_width", "num_sequences", "num_tokens", "offset", "even_len", "shift", "level",
    ]
)  # fmt: skip
def _layout_kernel(
    owners, offsets, token_slots, positions, slots, query_starts, kv_lens, tables,
    request_slots, starts, query_lens, pages, made, depths,
    page_stride, table_width, num_sequences, num_tokens, page_size, scratch_slot,
    offset, even_len, shift, level,
    BY_SLOT: tl.constexpr, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """query_lens: None if each sequence has `even_len` tokens. made, depths: None if not given."""
    b = tl.program_id(0)
    wait(DEPENDENT)
    if query_lens is None:
        begin = tl.minimum(b * even_len, num_tokens)
        count = even_len
    else:
        sequence = tl.arange(0, SEQUENCES)
        lens = tl.load(query_lens + sequence, mask=sequence < num_sequences, other=0)
        begin = tl.minimum(tl.sum(tl.where(sequence < b, lens, 0), axis=0), num_tokens)
        count = tl.load(query_lens + b, mask=b < num_sequences, other=0)
    tl.store(query_starts + b, begin)
    if b == num_sequences:
        for first in range(begin, num_tokens, BLOCK):
            index = first + tl.arange(0, BLOCK)
            inside = index < num_tokens
            tl.store(owners + index, tl.full([BLOCK], -1, dtype=tl.int32), mask=inside)
            tl.store(offsets + index, tl.zeros([BLOCK], dtype=tl.int32), mask=inside)
            tl.store(token_slots + index, tl.full([BLOCK], -1, dtype=tl.int32), mask=inside)
            tl.store(positions + index, tl.zeros([BLOCK], dtype=tl.int64), mask=inside)
            scratch = tl.zeros([BLOCK], dtype=tl.int64) + scratch_slot
            tl.store(slots + index, scratch, mask=inside)
    else:
        request_slot = tl.load(request_slots + b)
        start = tl.load(starts + (request_slot if BY_SLOT else b)).to(tl.int64) + offset
        end = start + count
        tl.store(kv_lens + b, end.to(tl.int32))
        first_written = tl.zeros([], dtype=tl.int64)
        if made is not None:
            known = tl.load(made + request_slot).to(tl.int64) + shift
            has_gap = start > known
            first_written = tl.where(has_gap, _NEVER, tl.maximum(known, 0))
            tl.store(made + request_slot, (tl.where(has_gap, known, end) - shift).to(tl.int32))
        if depths is not None:
            first_written = tl.where(tl.load(depths + b) <= level, _NEVER, first_written)
        table = pages + request_slot.to(tl.int64) * page_stride
        num_pages = tl.minimum((tl.maximum(end, 0) + page_size - 1) // page_size, table_width)
        for first in range(0, num_pages, BLOCK):
            at = first + tl.arange(0, BLOCK)
            page = tl.load(table + at, mask=at < num_pages, other=0)
            tl.store(tables + b.to(tl.int64) * table_width + at, page, mask=at < num_pages)
        for first in range(0, tl.minimum(count, num_tokens - begin), BLOCK):
            place = first + tl.arange(0, BLOCK)
            index = begin + place
            inside = (place < count) & (index < num_tokens)
            position = start + place
            is_written = inside & (position >= first_written)
            position = tl.maximum(position, 0)
            column = position // page_size
            is_written = is_written & (column < table_width)
            page = tl.load(table + column, mask=is_written, other=0).to(tl.int64)
            slot = tl.where(is_written, page * page_size + position % page_size, scratch_slot)
            tl.store(owners + index, tl.zeros([BLOCK], dtype=tl.int32) + b, mask=inside)
            tl.store(offsets + index, place, mask=inside)
            of_request = tl.zeros([BLOCK], dtype=tl.int32) + request_slot
            tl.store(token_slots + index, of_request, mask=inside)
            tl.store(positions + index, position, mask=inside)
            tl.store(slots + index, slot, mask=inside)
    let_next_read(DEPENDENT)


@triton.jit(do_not_specialize=["num_tokens", "ahead", "num_drafts", "width"])
def _token_kernel(
    tokens, recent, drafts, request_slots, positions, owners, offsets,
    num_tokens, window, ahead, num_drafts, width,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """num_drafts: sequences with drafts; drafts: None without."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_tokens
    wait_for_previous(DEPENDENT)
    request_slot = tl.load(request_slots + index, mask=inside, other=-1).to(tl.int64)
    column = (tl.load(positions + index, mask=inside, other=0) + ahead) & (window - 1)
    token = tl.load(recent + request_slot * window + column, mask=request_slot >= 0, other=0)
    token = token.to(tl.int64)
    if drafts is not None:
        owner = tl.load(owners + index, mask=inside, other=-1).to(tl.int64)
        offset = tl.load(offsets + index, mask=inside, other=0)
        is_draft = (offset > 0) & (offset <= width) & (owner < num_drafts)
        draft = tl.load(drafts + owner * width + offset - 1, mask=is_draft, other=0)
        token = tl.where(is_draft, draft, token)
    tl.store(tokens + index, token, mask=inside)
