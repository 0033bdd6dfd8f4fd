"""Split flash decoding: every sequence's cache in shares, which a second launch sums up.

A program takes one kv head of one sequence and a share of its cache. The query heads of that kv
head times the sequence's rows are the lines of one tile, so keys and values are read once. Shares
are cut where the lengths on the device say, and added in one order: the same bits every time.
Another number of shares is another order, so bits depend on the number of sequences a launch is
made for, but not on what the other ones hold.

That the last program of a head sums up, and not a launch of its own, was tried: at one sequence it
took 10 to 34 µs instead of 8 to 10, for one program then reads all shares while the others rest.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops.dependent_launch import dependent_launch
from serve_spec.ops.paged_attention import MAX_TREE_ROWS, PagedLayout

# Programs that fill a device, and the most shares of one sequence's head. From half as many pairs
# of sequence and kv head on, summing up costs more than shares gain.
_PROGRAMS = 128
_MAX_SPLITS = 16
# Shares are multiples of this many cache entries.
_SHARE_UNIT = tl.constexpr(16)
# Numbers that one program sums up at once: 64 registers of each of its 128 threads.
_MERGE_NUMBERS = 8192
_HIDDEN = tl.constexpr(-1.0e30)
_LAST_TREE_ROW = tl.constexpr(MAX_TREE_ROWS - 1)


@dataclass(frozen=True)
class Tiling:
    """How a launch is cut: shares per sequence and head, cache entries per tile, warps, stages."""

    splits: int
    block: int
    num_warps: int
    num_stages: int


def _choose_tiling(num_pairs: int, num_lines: int, dtype: torch.dtype) -> Tiling:
    """For `num_pairs` sequences times kv heads of `num_lines` rows times query heads each.

    Measured on one H200 at 512 entries of context (docs/results/kernels-h200).
    """
    splits = 1
    if num_pairs < _PROGRAMS // 2:
        while splits < _MAX_SPLITS and num_pairs * splits < _PROGRAMS:
            splits *= 2
    if dtype == torch.float32:
        # No tensor cores: larger tiles do not fit into registers.
        return Tiling(splits, block=16, num_warps=4 if num_lines <= 16 else 8, num_stages=2)
    if num_lines > 64:  # rows of trees: what is summed up alone fills half of the registers
        return Tiling(splits, block=64 if num_lines <= 128 else 32, num_warps=8, num_stages=2)
    if num_lines > 32:
        return Tiling(splits, block=64, num_warps=4, num_stages=3)
    if splits == 1 and num_pairs <= _PROGRAMS:  # few programs: each has to have much under way
        return Tiling(splits, block=128, num_warps=8 if num_lines <= 16 else 4, num_stages=3)
    is_wide = num_lines > 16
    if num_pairs <= 2 * _PROGRAMS:
        return Tiling(splits, block=64, num_warps=4, num_stages=3 if is_wide else 4)
    return Tiling(splits, block=128 if is_wide else 64, num_warps=4, num_stages=2)


def paged_attention(query: Tensor, keys: Tensor, values: Tensor, layout: PagedLayout) -> Tensor:
    """See `paged_attention.paged_attention`. head_dim: a power of two from 16 on.

    A launch for every group: what holds many rows of one sequence leaves room for few sequences.
    """
    out = query.new_empty(query.shape)
    num_rows, num_kv_heads = query.shape[0], keys.shape[1]
    if not num_rows:
        return out
    parts = tuple(layout.parts())
    for part in parts:
        num_sequences = part.tables.shape[0]
        if len(parts) == 1:
            # Those that fill the rows: others of the launch are most likely padding.
            num_sequences = triton.cdiv(num_rows, part.max_query_len)
        num_lines = query.shape[1] // num_kv_heads * part.max_query_len
        tiling = _choose_tiling(num_sequences * num_kv_heads, num_lines, query.dtype)
        _launch(query, keys, values, part, tiling, out, fills_up=part is parts[-1])
    return out


def _launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: PagedLayout,
    tiling: Tiling,
    out: Tensor,
    *,
    fills_up: bool,
) -> None:
    """Writes the rows of these sequences; fills_up: and those that nobody owns."""
    num_rows, num_heads, head_dim = query.shape
    num_sequences, num_kv_heads = layout.tables.shape[0], keys.shape[1]
    assert query.stride()[1:] == (head_dim, 1), "the heads of a row lie side by side"
    for dense in (keys, values, layout.tables):
        assert dense.is_contiguous(), "a pool's layers and page tables are dense"
    lines = triton.next_power_of_2(num_heads // num_kv_heads * layout.max_query_len)
    pairs, splits = num_sequences * num_kv_heads, tiling.splits
    partials = stats = None
    if splits > 1:
        partials = query.new_empty((pairs, splits, lines, head_dim), dtype=torch.float32)
        stats = query.new_empty((pairs, splits, 2, lines), dtype=torch.float32)
    tree_len = layout.tree_len or 0  # no constant: it is another one at every level of a tree
    shape = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "WINDOW": layout.window,
        "SPLITS": splits,
        "LINES": lines,
        "DEPENDENT": dependent_launch(query.device),
    }
    launch = {"num_warps": tiling.num_warps, "launch_pdl": shape["DEPENDENT"]}
    _attend_kernel[(num_kv_heads, splits, num_sequences)](
        query, keys, values, layout.tables, layout.query_starts, layout.kv_lens, layout.tree_mask,
        out, partials, stats,
        num_rows if fills_up else 0, query.stride(0), layout.tables.stride(0), tree_len,
        math.log2(math.e) / head_dim**0.5,
        PAGE_SIZE=layout.page_size, BLOCK_LINES=max(lines, 16), BLOCK=tiling.block,
        num_stages=tiling.num_stages, **shape, **launch,
    )  # fmt: skip
    if splits > 1:
        merged = max(1, min(lines, _MERGE_NUMBERS // (splits * head_dim)))
        _merge_kernel[(num_kv_heads, lines // merged, num_sequences)](
            layout.query_starts, layout.kv_lens, out, partials, stats, tree_len,
            MERGE_LINES=merged, **shape, **launch,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "table_stride", "tree_len"])
def _attend_kernel(
    query, keys, values, tables, query_starts, kv_lens, tree_mask,
    out, partials, stats,
    num_rows, query_stride, table_stride, tree_len, scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, LINES: tl.constexpr,
    BLOCK_LINES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    head, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    num_owned = tl.load(query_starts + tl.num_programs(2))
    first_row, query_len, kv_len, begin, share, num_shares = _shares(
        query_starts, kv_lens, sequence, tree_len, WINDOW, SPLITS
    )
    if split >= num_shares:
        return
    begin += split * share
    end = tl.minimum(tl.minimum(begin + share, kv_len), table_stride * PAGE_SIZE)
    end = tl.where(query_len > 0, end, begin)

    line = tl.arange(0, BLOCK_LINES)
    dim = tl.arange(0, HEAD_DIM)
    is_line = line < query_len * GROUP
    row = first_row + line // GROUP
    at = row.to(tl.int64) * query_stride + (head * GROUP + line % GROUP) * HEAD_DIM
    q = tl.load(query + at[:, None] + dim[None, :], mask=is_line[:, None], other=0.0)
    first_position = kv_len - tl.where(tree_len > 0, tree_len, query_len)
    if tree_mask is None:
        ancestors = tl.full([BLOCK_LINES], 0, tl.int64)
        own = first_position + line // GROUP
    else:
        ancestors = tl.load(tree_mask + row, mask=is_line, other=1)
        bits = (ancestors[:, None] >> tl.arange(0, _LAST_TREE_ROW + 1)[None, :]) & 1
        own = first_position + tl.sum(bits, axis=1).to(tl.int32) - 1

    highest = tl.full([BLOCK_LINES], _HIDDEN, tl.float32)
    total = tl.full([BLOCK_LINES], 0.0, tl.float32)
    mixed = tl.full([BLOCK_LINES, HEAD_DIM], 0.0, tl.float32)
    # Page ids are loaded one tile ahead, so that the tiles themselves can be loaded several ahead.
    table = tables + sequence.to(tl.int64) * table_stride
    position = begin + tl.arange(0, BLOCK)
    page = tl.load(table + position // PAGE_SIZE, mask=position < end, other=0)
    for _ in range(begin, end, BLOCK):
        inside = position < end
        entry = (page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE) * NUM_KV_HEADS + head
        entry = entry[:, None] * HEAD_DIM + dim[None, :]
        k = tl.load(keys + entry, mask=inside[:, None], other=0.0)
        v = tl.load(values + entry, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = _seen(position, first_position, own, ancestors, WINDOW, tree_mask is not None)
        scores = tl.where(seen & inside[None, :], scores, _HIDDEN)
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
        highest = higher
        position += BLOCK
        page = tl.load(table + position // PAGE_SIZE, mask=position < end, other=0)

    if num_shares == 1:
        _store_lines(
            out, mixed, total, head, first_row, line, is_line, NUM_KV_HEADS, GROUP, HEAD_DIM
        )
    if SPLITS > 1 and num_shares > 1:
        pair = sequence * NUM_KV_HEADS + head
        place = (pair * SPLITS + split) * LINES
        tl.store(stats + place * 2 + line, highest, mask=is_line)
        tl.store(stats + place * 2 + LINES + line, total, mask=is_line)
        part = partials + (place + line)[:, None] * HEAD_DIM
        tl.store(part + dim[None, :], mixed, mask=is_line[:, None])
    if split == 0:
        # Rows past the last sequence's get zeros; the sequences share them out.
        nothing = tl.full([LINES, HEAD_DIM], 0.0, tl.float32)
        spare_line = tl.arange(0, LINES)
        for spare in range(num_owned + sequence, num_rows, tl.num_programs(2)):
            _store_lines(
                out, nothing, tl.full([LINES], 1.0, tl.float32), head, spare, spare_line,
                spare_line < GROUP, NUM_KV_HEADS, GROUP, HEAD_DIM,
            )  # fmt: skip


@triton.jit
def _seen(position, first_position, own, ancestors, WINDOW: tl.constexpr, IS_TREE: tl.constexpr):
    """Which positions [N] the lines [M] at positions `own` see: [M, N]."""
    near = position[None, :] >= 0
    if WINDOW is not None:
        near &= position[None, :] > own[:, None] - WINDOW
    if not IS_TREE:
        return near & (position[None, :] <= own[:, None])
    draft = position - first_position
    bit = tl.minimum(tl.maximum(draft, 0), _LAST_TREE_ROW)
    is_ancestor = ((ancestors[:, None] >> bit[None, :]) & 1) == 1
    return tl.where((draft < 0)[None, :], near, is_ancestor)


@triton.jit(do_not_specialize=["tree_len"])
def _merge_kernel(
    query_starts, kv_lens, out, partials, stats, tree_len,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, LINES: tl.constexpr, MERGE_LINES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    head, sequence = tl.program_id(0), tl.program_id(2)
    first_line = tl.program_id(1) * MERGE_LINES
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first_row, query_len, _, _, _, num_shares = _shares(
        query_starts, kv_lens, sequence, tree_len, WINDOW, SPLITS
    )
    if (num_shares > 1) & (first_line < query_len * GROUP):
        pair = sequence * NUM_KV_HEADS + head
        _merge(
            out, partials, stats, head, pair, num_shares, first_row, query_len, first_line,
            NUM_KV_HEADS, GROUP, HEAD_DIM, SPLITS, LINES, MERGE_LINES,
        )  # fmt: skip


@triton.jit
def _shares(query_starts, kv_lens, sequence, tree_len, WINDOW: tl.constexpr, SPLITS: tl.constexpr):
    """A sequence's first row, rows and length; first entry seen, entries per share, shares."""
    first_row = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - first_row
    kv_len = tl.load(kv_lens + sequence)
    newest = tl.where(tree_len > 0, tree_len, query_len)
    begin = tl.maximum(kv_len - newest - (WINDOW - 1), 0) if WINDOW is not None else 0
    # At least one entry: the first share writes rows whatever there is to see.
    length = tl.maximum(tl.where(query_len > 0, kv_len - begin, 0), 1)
    share = (length + (SPLITS * _SHARE_UNIT - 1)) // (SPLITS * _SHARE_UNIT) * _SHARE_UNIT
    return first_row, query_len, kv_len, begin, share, (length + share - 1) // share


@triton.jit
def _merge(
    out, partials, stats, head, pair, num_shares, first_row, query_len, first_line,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr, LINES: tl.constexpr, MERGE_LINES: tl.constexpr,
):  # fmt: skip
    """Sums up MERGE_LINES lines of all shares."""
    line = first_line + tl.arange(0, MERGE_LINES)
    is_line = line < query_len * GROUP
    split = tl.arange(0, SPLITS)
    is_part = (split < num_shares)[:, None] & is_line[None, :]
    place = ((pair * SPLITS + split) * LINES)[:, None]
    # The large load goes first: what comes after it waits for threads, and would hold it up.
    part = partials + (place + line[None, :])[:, :, None] * HEAD_DIM
    mixed = tl.load(
        part + tl.arange(0, HEAD_DIM)[None, None, :],
        mask=is_part[:, :, None], other=0.0,
    )  # fmt: skip
    statistic = stats + place * 2 + line[None, :]
    highest = tl.load(statistic, mask=is_part, other=_HIDDEN)
    total = tl.load(statistic + LINES, mask=is_part, other=0.0)
    weights = tl.exp2(highest - tl.max(highest, axis=0)[None, :])
    _store_lines(
        out, tl.sum(mixed * weights[:, :, None], axis=0), tl.sum(total * weights, axis=0),
        head, first_row, line, is_line, NUM_KV_HEADS, GROUP, HEAD_DIM,
    )  # fmt: skip


@triton.jit
def _store_lines(
    out, mixed, total, head, first_row, line, mask,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Writes mixed / total to the rows and heads of these lines."""
    row = (first_row + line // GROUP).to(tl.int64)
    at = ((row * NUM_KV_HEADS + head) * GROUP + line % GROUP) * HEAD_DIM
    at = at[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    total = tl.where(total > 0.0, total, 1.0)
    tl.store(out + at, mixed / total[:, None], mask=mask[:, None])
