"""Flash attention over a paged cache, its work cut on the device.

A tile is some query tokens of one request times the query heads of one kv head: its lines. A tile
reads its cache once. A small kernel lists the tiles of a forward before its first layer and gives
each program a range of them. If tiles are short, a program gets a whole tile. If some are long, the
cache entries of all tiles are laid end to end and cut into ranges of equal length, one for each
program that the device holds at once (the partition of stream-K, arXiv 2301.03598): every
multiprocessor reads as much as any other, also with few requests or uneven lengths. Where ranges at
most half longer than that let every program read one tile only, they are taken instead. Every layer
launches a fixed grid over the ranges, so that a CUDA graph serves every batch of its shape.

Splits of a tile are added in one order: the same bits every time. How tiles are cut, and so the
bits, depends on all lengths of a forward.

Splits are added by a launch of their own where few tiles leave most multiprocessors idle, and where
tiles are large. Where many small tiles fill the device, that launch would cost more than the rare
cut gains, so the program that finishes a tile last adds them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_spec.core.caches import PagedCache
from serve_spec.core.draft import MAX_TREE_TOKENS
from serve_spec.ops.dispatch import dependent_launch
from serve_spec.ops.dispatch_triton import let_next_read, let_next_start, wait
from serve_spec.ops.paged_attention import AttentionPlan

# Tiles times kv heads that fill a device. From more than half of them on, the last program of a
# tile merges.
_PROGRAMS = 128
# Ranges are multiples of this many cache entries.
_UNIT = tl.constexpr(16)
# Scores of entries that a line does not see, and where its highest score starts: far above, so that
# they weigh nothing also where a line sees nothing else.
_HIDDEN = tl.constexpr(-1.0e30)
_LOWEST = tl.constexpr(-1.0e20)
_LOG2_E = tl.constexpr(math.log2(math.e))  # softmax is computed with powers of two
_LAST_TREE_TOKEN = tl.constexpr(MAX_TREE_TOKENS - 1)
_FP8 = torch.float8_e4m3fn
# What weights, of at most 1, are multiplied by in float16, so that small ones are not lost.
_WEIGHT = tl.constexpr(2.0**15)
# Below what any split weighs.
_NOTHING = tl.constexpr(-3.0e38)
# Fields of a tile: request, first token, tokens, first and last cache entry, position of the first
# token (of the first entry of its tree), the place of its entries among those of all tiles, and how
# many of them there are, rounded up.
_TILE_FIELDS = tl.constexpr(8)
# Fields of a range: first tile, last tile, first entry, last entry.
_RANGE_FIELDS = tl.constexpr(4)


@dataclass(frozen=True)
class Tiling:
    """How the work of a group is cut.

    `tokens`, `lines`: of a tile; lines are a power of two from 16. `block`: cache entries read at
    once. `programs`: how many a multiprocessor holds. `min_split`: fewest cache entries of a split;
    tiles are cut only if one has more than two of them. `in_waves`: arithmetic takes the time, so
    tiles are also cut where a few more than there are programs would take twice as long.
    `is_last_merging`: the last program of a tile adds its splits, instead of a launch of its own,
    `merge_splits` at a time.
    """

    tokens: int
    lines: int
    block: int
    num_warps: int
    num_stages: int
    programs: int = 1
    min_split: int = 128
    in_waves: bool = False
    is_last_merging: bool = False
    merge_splits: int = 16


def _choose_tiling(
    num_requests: int,
    max_query_len: int,
    heads: tuple[int, int],
    width: int,
    dtype: torch.dtype,
    *,
    is_fp8: bool = False,
) -> Tiling:
    """Return the tiling for so many requests; heads: query heads and kv heads.

    width: of keys or values, the larger, a power of two. dtype: of queries. Blocks, warps and
    stages of small tiles were measured on one H200 (docs/decisions/003-attention-work.md).
    """
    group = heads[0] // heads[1]
    # Without tensor cores, or with wide heads, larger tiles do not fit into registers.
    max_lines = 128 if dtype != torch.float32 and width <= 128 else 64
    tokens = max(1, min(max_query_len, max_lines // group))
    lines = max(16, triton.next_power_of_2(tokens * group))
    num_programs = num_requests * triton.cdiv(max_query_len, tokens) * heads[1]
    if lines > 64:
        return Tiling(tokens, lines, 64, num_warps=8, num_stages=3, in_waves=True)
    programs = 1
    if dtype == torch.float32:
        block, warps, stages = 16, 4 if lines <= 16 else 8, 2
    elif lines > 32:
        block, warps, stages = 64, 4 if width <= 128 else 8, 3
    elif num_programs <= 2 * _PROGRAMS:  # each has to have much under way
        block, warps, stages, programs = (128, 4, 2, 2) if lines <= 16 else (64, 4, 3, 2)
        if lines <= 16 and num_programs <= _PROGRAMS // 16:
            warps, stages, programs = 8, 3, 1
        elif lines <= 16 and _PROGRAMS // 4 < num_programs <= _PROGRAMS // 2:
            block, stages = 64, 4
    else:
        block, warps, stages, programs = 64 if lines <= 16 else 128, 4, 2, 2
    if is_fp8 and dtype != torch.float32:  # as many bytes per block, unless they take all registers
        block = min(2 * block, 32 * warps)
    # Blocks of wide heads have fewer entries.
    block = max(16, block * 128 // max(128, width))
    is_last_merging = num_programs > _PROGRAMS // 2
    # About as many as a long tile has.
    merge_splits = 4 if is_last_merging else 8 if num_programs > _PROGRAMS // 4 else 16
    return Tiling(
        tokens,
        lines,
        block,
        warps,
        stages,
        programs,
        min_split=256 if is_last_merging else 128,
        is_last_merging=is_last_merging,
        merge_splits=merge_splits,
    )


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    cache: PagedCache,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `paged_attention.paged_attention`.

    A launch for every group: tiles of many tokens leave room for few programs.
    """
    num_tokens, num_heads, _ = query.shape
    out = query.new_empty((num_tokens, num_heads, values.shape[2]))
    if not num_tokens:
        return out
    heads = num_heads, keys.shape[1]
    width = triton.next_power_of_2(max(query.shape[2], values.shape[2]))
    begin = 0
    for num_requests, max_query_len in plan.groups:
        # Those that fill the tokens: others of a single group are most likely padding.
        likely = num_requests
        if len(plan.groups) == 1:
            likely = min(likely, triton.cdiv(num_tokens, max_query_len))
        tiling = _choose_tiling(
            likely, max_query_len, heads, width, query.dtype, is_fp8=keys.dtype == _FP8
        )
        is_last = begin + num_requests == len(plan.kv_lens)
        group = _Group(begin, num_requests, max_query_len, tiling, is_last)
        begin += num_requests
        _launch(query, (keys, values), sinks, plan, cache, group, out)
    return out


@dataclass(frozen=True)
class _Group:
    """Requests `first .. first + num_requests - 1` of up to `max_query_len` query tokens each.

    `fills_up`: write the tokens that no request owns, too.
    """

    first: int
    num_requests: int
    max_query_len: int
    tiling: Tiling
    fills_up: bool

    def has_trees(self, plan: AttentionPlan) -> bool:
        """Return whether these requests may be trees; larger ones are prefill chunks."""
        return plan.tree_mask is not None and self.max_query_len <= MAX_TREE_TOKENS


@dataclass(frozen=True)
class _Work:
    """The work of one group, all int32.

    `tiles` [cap, 8]; `ranges` [programs, 4]; `counts` [3]: tiles, tokens that requests own, entries
    of a range (0: no tile is cut). `arrivals` [cap, kv_heads]: zeros.
    """

    tiles: Tensor
    ranges: Tensor
    counts: Tensor
    arrivals: Tensor | None


def _launch(
    query: Tensor,
    entries: tuple[Tensor, Tensor],
    sinks: Tensor | None,
    plan: AttentionPlan,
    cache: PagedCache,
    group: _Group,
    out: Tensor,
) -> None:
    """Write the tokens of these requests to `out`. entries: keys and values."""
    tiling, (keys, values) = group.tiling, entries
    (num_tokens, num_heads, key_width), value_width = query.shape, values.shape[2]
    num_kv_heads = keys.shape[1]
    assert query.stride()[1:] == (key_width, 1), "the heads of a token lie side by side"
    for dense in (keys, values, plan.tables):
        assert dense.is_contiguous(), "a pool's layers and page tables are dense"
    assert (sinks is not None) == cache.has_sinks, "a layer with sinks gives their logits"
    scale, cap_scale = _score_scales(cache)
    programs = max(1, _num_multiprocessors(query.device) * tiling.programs // num_kv_heads)
    key = "work", cache.window, num_kv_heads, group
    work = plan.prepared(
        key, lambda: _plan_work(plan, cache.window, group, num_tokens, programs, num_kv_heads)
    )
    # Of a program's tiles, the first and the last may be cut.
    partial_shape = 2 * programs, num_kv_heads, tiling.lines
    partials = query.new_empty((*partial_shape, value_width), dtype=torch.float32)
    stats = query.new_empty(partial_shape, dtype=torch.float32)
    num_mixed = _num_mixed(values, tiling)
    block_dv = max(16 * num_mixed, triton.next_power_of_2(value_width))
    # Merging must not take the registers that attending needs.
    merge_warps, numbers = (tiling.num_warps, 4) if tiling.is_last_merging else (4, 2)
    merge_lines = max(1, min(tiling.lines, 32 * merge_warps * numbers // block_dv))
    shape = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "DV": value_width,
        "BLOCK_DV": block_dv,
        "LINES": tiling.lines,
        "MERGE_SPLITS": tiling.merge_splits,
        "MERGE_LINES": merge_lines,
        **dependent_launch(query.device),
    }
    _attend_kernel[(num_kv_heads, len(work.ranges))](
        query, keys, values, plan.tables[group.first :],
        plan.tree_mask if group.has_trees(plan) else None, sinks,
        work.tiles, work.ranges, work.counts, work.arrivals, out, partials, stats,
        num_tokens if group.fills_up else 0, query.stride(0), plan.tables.stride(0), scale,
        _value_scale(values, query, cache),
        DK=key_width, BLOCK_DK=max(16, triton.next_power_of_2(key_width)),
        PAGE_SIZE=plan.page_size, WINDOW=cache.window, CAP_SCALE=cap_scale,
        NUM_MIXED=num_mixed, IS_GPU=_is_gpu(query.device),
        BLOCK=tiling.block, HAS_FREE_BLOCKS=tiling.lines > 64 and cache.window is None,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **shape,
    )  # fmt: skip
    if not tiling.is_last_merging:
        num_lines = min(tiling.tokens * shape["GROUP"], tiling.lines)
        num_blocks = triton.cdiv(num_lines, merge_lines)
        _merge_kernel[(num_kv_heads, num_blocks, min(len(work.tiles), 16))](
            work.tiles, work.counts, out, partials, stats, num_warps=merge_warps, **shape,
        )  # fmt: skip


def _num_mixed(values: Tensor, tiling: Tiling) -> int:
    """Return 2 if values are multiplied in pairs (see `_of_pair`), else 1.

    Tiles of more lines multiply by what is in shared memory, as floats.
    """
    return 2 if values.dtype == _FP8 and tiling.lines < 64 and values.shape[2] % 2 == 0 else 1


def _value_scale(values: Tensor, query: Tensor, cache: PagedCache) -> float | None:
    """Return the factor of what the kernel adds up; None: 1."""
    scale = cache.value_scale
    if values.dtype == _FP8 and query.dtype != torch.float32:
        scale /= _WEIGHT.value
    return None if scale == 1.0 else scale


def _score_scales(cache: PagedCache) -> tuple[float, float | None]:
    """Return `scale` and CAP_SCALE of the kernel, which takes powers of two."""
    scale = cache.score_scale * _LOG2_E.value
    if cache.softcap is None:
        return scale, None
    return cache.softcap * _LOG2_E.value, 2 * scale / cache.softcap


def _plan_work(
    plan: AttentionPlan,
    window: int | None,
    group: _Group,
    num_tokens: int,
    programs: int,
    num_kv_heads: int,
) -> _Work:
    """Launch the listing of the group's tiles, and of ranges for so many `programs`."""
    device, tiling = plan.tables.device, group.tiling
    num_tiles = min(
        group.num_requests * triton.cdiv(group.max_query_len, tiling.tokens),
        num_tokens // tiling.tokens + group.num_requests,
    )
    num_ranges = max(programs, num_tiles)
    tiles = torch.empty((num_tiles, _TILE_FIELDS.value), dtype=torch.int32, device=device)
    ranges = torch.empty((num_ranges, _RANGE_FIELDS.value), dtype=torch.int32, device=device)
    counts = torch.empty(3, dtype=torch.int32, device=device)
    arrivals = None
    if tiling.is_last_merging:
        arrivals = torch.zeros((num_tiles, num_kv_heads), dtype=torch.int32, device=device)
    _plan_kernel[(group.num_requests,)](
        plan.query_starts[group.first :], plan.kv_lens[group.first :], tiles, ranges, counts,
        # No constant: it is another one at every level of a tree.
        plan.tree_len or 0, plan.tables.shape[1] * plan.page_size, programs, num_ranges,
        IS_TREE=group.has_trees(plan), WINDOW=window,
        TILE=tiling.tokens, MIN_SPLIT=tiling.min_split, IN_WAVES=tiling.in_waves, BLOCK=64,
        BLOCK_REQUESTS=triton.next_power_of_2(group.num_requests),
        num_warps=1 if group.num_requests <= 64 else 4, **dependent_launch(device),
    )  # fmt: skip
    return _Work(tiles, ranges, counts, arrivals)


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8  # under the interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def _is_gpu(device: torch.device) -> bool:
    """Return whether kernels are compiled; else Triton's interpreter runs them."""
    return device.type == "cuda"


@triton.jit(do_not_specialize=["tree_len", "capacity", "programs", "num_ranges"])
def _plan_kernel(
    query_starts, kv_lens, tiles, ranges, counts, tree_len, capacity, programs, num_ranges,
    IS_TREE: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, MIN_SPLIT: tl.constexpr,
    IN_WAVES: tl.constexpr, BLOCK_REQUESTS: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """List the tiles of one request, and the ranges that begin or end among their entries."""
    request, num_requests = tl.program_id(0), tl.num_programs(0)
    wait(DEPENDENT)
    every = tl.arange(0, BLOCK_REQUESTS)
    is_request = every < num_requests
    start = tl.load(query_starts + every, mask=is_request, other=0)
    query_len = tl.load(query_starts + every + 1, mask=is_request, other=0) - start
    kv_len = tl.load(kv_lens + every, mask=is_request, other=0)
    num_tiles = (query_len + TILE - 1) // TILE
    last = (num_tiles - 1) * TILE
    _, first_seen, end_seen = _visible(
        last, query_len - last, query_len, kv_len, tree_len, capacity, IS_TREE, WINDOW
    )
    # Of the longest tile; the others of a request take as much room.
    span = tl.maximum(end_seen - first_seen, 1)
    if WINDOW is not None:
        # Behind a window, full tiles see more than a last one of few tokens.
        full = tl.maximum(span, tl.minimum(end_seen, WINDOW - 1 + TILE))
        span = tl.where(num_tiles > 1, full, span)
    width = (span + _UNIT - 1) // _UNIT * _UNIT
    longest = tl.max(tl.where(num_tiles > 0, width, 0), axis=0)
    fair = (tl.sum(num_tiles * width, axis=0) + programs - 1) // programs
    if IN_WAVES:
        longest = tl.maximum(
            longest, _in_waves(num_tiles, width, query_len, programs, TILE, WINDOW)
        )
    is_cut = longest > tl.maximum(2 * MIN_SPLIT, fair + fair // 4)
    split = tl.maximum((fair + _UNIT - 1) // _UNIT * _UNIT, MIN_SPLIT)
    # If splits that are little longer let every program have one of one tile, take those.
    is_aligned = split < 0
    for step in tl.static_range(8):
        longer = tl.maximum(fair + fair * step // 16, MIN_SPLIT)
        num_splits = (width + longer - 1) // longer
        fits = tl.sum(num_tiles * num_splits, axis=0) <= programs
        needed = tl.max(tl.where(num_tiles > 0, (width + num_splits - 1) // num_splits, 1), axis=0)
        split = tl.where(fits & ~is_aligned, (needed + _UNIT - 1) // _UNIT * _UNIT, split)
        is_aligned |= fits
    width = tl.where(is_cut & is_aligned, (width + split - 1) // split * split, width)
    room = num_tiles * width
    total = tl.sum(room, axis=0)
    all_tiles = tl.sum(num_tiles, axis=0)
    if request == 0:
        tl.store(counts, all_tiles)
        tl.store(counts + 1, tl.load(query_starts + num_requests))
        tl.store(counts + 2, tl.where(is_cut, split, 0))
        # The other programs have nothing to do.
        for first in range(
            tl.where(is_cut, (total + split - 1) // split, all_tiles), num_ranges, BLOCK
        ):
            number = first + tl.arange(0, BLOCK)
            tl.store(ranges + number * _RANGE_FIELDS, 0, mask=number < num_ranges)
            tl.store(ranges + number * _RANGE_FIELDS + 1, 0, mask=number < num_ranges)

    before, is_own = every < request, every == request
    first_tile = tl.sum(tl.where(before, num_tiles, 0), axis=0)
    first_entry = tl.sum(tl.where(before, room, 0), axis=0)
    own_start = tl.sum(tl.where(is_own, start, 0), axis=0)
    own_query_len = tl.sum(tl.where(is_own, query_len, 0), axis=0)
    own_kv_len = tl.sum(tl.where(is_own, kv_len, 0), axis=0)
    own_tiles = tl.sum(tl.where(is_own, num_tiles, 0), axis=0)
    own_width = tl.sum(tl.where(is_own, width, 0), axis=0)
    for first_number in range(0, own_tiles, BLOCK):
        number = first_number + tl.arange(0, BLOCK)
        is_tile = number < own_tiles
        # The last tiles see most: they go first, and the others fill the gaps.
        first = (own_tiles - 1 - number) * TILE
        tokens = tl.minimum(own_query_len - first, TILE)
        position, begin, end = _visible(
            first, tokens, own_query_len, own_kv_len, tree_len, capacity, IS_TREE, WINDOW
        )
        tile, entry = first_tile + number, first_entry + number * own_width
        field = tiles + tile * _TILE_FIELDS
        tl.store(field, request, mask=is_tile)
        tl.store(field + 1, own_start + first, mask=is_tile)
        tl.store(field + 2, tokens, mask=is_tile)
        tl.store(field + 3, begin, mask=is_tile)
        tl.store(field + 4, tl.maximum(end, begin), mask=is_tile)
        tl.store(field + 5, position, mask=is_tile)
        tl.store(field + 6, entry, mask=is_tile)
        tl.store(field + 7, own_width, mask=is_tile)
        if not is_cut:
            field = ranges + tile * _RANGE_FIELDS
            tl.store(field, tile, mask=is_tile)
            tl.store(field + 1, tile + 1, mask=is_tile)
            tl.store(field + 2, entry, mask=is_tile)
            tl.store(field + 3, entry + own_width, mask=is_tile)
    end_entry = first_entry + own_tiles * own_width
    if is_cut & (own_tiles > 0):
        for first_number in range(first_entry // split, (end_entry - 1) // split + 1, BLOCK):
            number = first_number + tl.arange(0, BLOCK)
            begin = number * split
            end = tl.minimum(begin + split, total)
            field = ranges + number * _RANGE_FIELDS
            begins = (begin >= first_entry) & (begin < end_entry)
            tl.store(field, first_tile + (begin - first_entry) // own_width, mask=begins)
            tl.store(field + 2, begin, mask=begins)
            ends = (begin < total) & (end > first_entry) & (end <= end_entry)
            tl.store(field + 1, first_tile + (end - 1 - first_entry) // own_width + 1, mask=ends)
            tl.store(field + 3, end, mask=ends)
    let_next_read(DEPENDENT)


@triton.jit
def _in_waves(
    num_tiles, width, query_len, programs, TILE: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """Return how many entries a program reads if each takes one whole tile after another."""
    seen = width
    if WINDOW is None:
        # Earlier tiles of a request see less than its last.
        seen -= tl.where(num_tiles > 1, (query_len - TILE) // 2, 0)
    count = tl.sum(num_tiles, axis=0)
    mean = tl.sum(num_tiles * seen, axis=0) // tl.maximum(count, 1)
    return (count + programs - 1) // programs * mean


@triton.jit
def _visible(
    first, tokens, query_len, kv_len, tree_len, capacity,
    IS_TREE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the position of a tile's first token (of its tree), and which entries it sees."""
    if IS_TREE:
        position = kv_len - tl.where(tree_len > 0, tree_len, query_len) + first * 0
        end = kv_len + first * 0
    else:
        position = kv_len - query_len + first
        end = position + tokens
    begin = position * 0
    if WINDOW is not None:
        begin = tl.maximum(position - (WINDOW - 1), 0)
    return position, begin, tl.minimum(end, capacity)


@triton.jit(do_not_specialize=["num_tokens", "table_stride"])
def _attend_kernel(
    query, keys, values, tables, tree_mask, sinks, tiles, ranges, counts, arrivals,
    out, partials, stats, num_tokens, query_stride, table_stride, scale, value_scale,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP_SCALE: tl.constexpr, LINES: tl.constexpr, BLOCK: tl.constexpr,
    HAS_FREE_BLOCKS: tl.constexpr, NUM_MIXED: tl.constexpr, IS_GPU: tl.constexpr,
    MERGE_SPLITS: tl.constexpr, MERGE_LINES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The plan is read before the kernel waits for queries, keys and values."""
    head, program = tl.program_id(0), tl.program_id(1)
    let_next_start(DEPENDENT)
    line = tl.arange(0, LINES)
    key_dim = tl.arange(0, BLOCK_DK)
    fields = ranges + program * _RANGE_FIELDS
    first_tile, end_tile = _planned(fields), _planned(fields + 1)
    first_entry, end_entry = _planned(fields + 2), _planned(fields + 3)
    # Values that all tiles share are computed again, because keeping them costs registers.
    for tile in tl.range(first_tile, end_tile, disable_licm=True):
        fields = tiles + tile * _TILE_FIELDS
        request, first_token = _planned(fields), _planned(fields + 1)
        num_lines = _planned(fields + 2) * GROUP
        begin, end = _planned(fields + 3), _planned(fields + 4)
        first_position = _planned(fields + 5)
        entry, width = _planned(fields + 6), _planned(fields + 7)
        is_first = entry >= first_entry
        is_whole = is_first & (entry + width <= end_entry)
        end = tl.minimum(end, begin + end_entry - entry)
        begin += tl.maximum(first_entry - entry, 0)

        is_line = line < num_lines
        token = first_token + line // GROUP
        query_head = head * GROUP + line % GROUP
        at = token.to(tl.int64) * query_stride + query_head * DK
        is_query = is_line[:, None]
        if DK != BLOCK_DK:
            is_query &= (key_dim < DK)[None, :]
        if tree_mask is None:
            ancestors = tl.full([LINES], 0, tl.int64)
            own = first_position + line // GROUP
        else:
            ancestors = tl.load(tree_mask + token, mask=is_line, other=1)
            bits = (ancestors[:, None] >> tl.arange(0, _LAST_TREE_TOKEN + 1)[None, :]) & 1
            own = first_position + tl.sum(bits, axis=1).to(tl.int32) - 1
        table = tables + request.to(tl.int64) * table_stride
        page = _pages(table, begin, end, PAGE_SIZE, BLOCK)
        wait(DEPENDENT)
        q = tl.load(query + at[:, None] + key_dim[None, :], mask=is_query, other=0.0)

        highest = tl.full([LINES], _LOWEST, tl.float32)
        total = tl.full([LINES], 0.0, tl.float32)
        mixed = _nothing_mixed(LINES, BLOCK_DV, NUM_MIXED)
        if sinks is not None:
            # Once per tile: in its first split.
            sink = tl.load(sinks + query_head, mask=is_line, other=0.0).to(tl.float32)
            highest = tl.where(is_first, sink * _LOG2_E, highest)
            total = tl.where(is_first, 1.0, total)
        if HAS_FREE_BLOCKS:
            # Blocks that all lines see need no mask.
            num_free = tl.minimum(end, first_position + (0 if tree_mask is not None else 1)) - begin
            middle = begin + tl.maximum(num_free, 0) // BLOCK * BLOCK
            highest, total, mixed = _attend(
                q, keys, values, table, page, begin, middle, head, first_position, own, ancestors,
                highest, total, mixed, scale,
                NUM_KV_HEADS, DK, DV, BLOCK_DK, BLOCK_DV, PAGE_SIZE, WINDOW, CAP_SCALE, BLOCK,
                tree_mask is not None, True, IS_GPU,
            )  # fmt: skip
            begin = middle
            page = _pages(table, begin, end, PAGE_SIZE, BLOCK)
        highest, total, mixed = _attend(
            q, keys, values, table, page, begin, end, head, first_position, own, ancestors,
            highest, total, mixed, scale,
            NUM_KV_HEADS, DK, DV, BLOCK_DK, BLOCK_DV, PAGE_SIZE, WINDOW, CAP_SCALE, BLOCK,
            tree_mask is not None, False, IS_GPU,
        )  # fmt: skip

        sums = _joined(mixed)
        sums /= tl.where(total > 0.0, total, 1.0)[:, None]
        if value_scale is not None:
            sums *= value_scale
        if is_whole:
            _store_lines(
                out, sums, head, first_token, line, is_line, NUM_KV_HEADS, GROUP, DV, BLOCK_DV
            )
        else:
            _store_split(
                out, partials, stats, counts, arrivals,
                tl.where(total > 0.0, highest + tl.log2(total), _HIDDEN), sums, head, tile,
                2 * program + tl.where(is_first, 1, 0), entry, width, first_token, num_lines,
                NUM_KV_HEADS, GROUP, DV, BLOCK_DV, LINES, MERGE_SPLITS, MERGE_LINES,
            )  # fmt: skip
    wait(DEPENDENT)  # programs without a tile, too
    if (num_tokens > 0) & (program == tl.num_programs(1) - 1):
        # Tokens that no request owns get zeros, from the program that has least to do.
        nothing = tl.full([LINES, BLOCK_DV], 0.0, tl.float32)
        step: tl.constexpr = LINES // GROUP
        for spare in range(tl.load(counts + 1), num_tokens, step):
            is_spare = (line < step * GROUP) & (spare + line // GROUP < num_tokens)
            _store_lines(
                out, nothing, head, spare, line, is_spare, NUM_KV_HEADS, GROUP, DV, BLOCK_DV
            )


@triton.jit
def _nothing_mixed(LINES: tl.constexpr, BLOCK_DV: tl.constexpr, NUM_MIXED: tl.constexpr):
    """Return zeros: one tensor of all dimensions, or one of the even ones and one of the others."""
    zeros = tl.full([LINES, BLOCK_DV // NUM_MIXED], 0.0, tl.float32)
    return (zeros, zeros) if NUM_MIXED == 2 else (zeros,)


@triton.jit
def _joined(mixed):
    """Return the only tensor, or the numbers of two by turns."""
    return tl.interleave(mixed[0], mixed[1]) if len(mixed) == 2 else mixed[0]


@triton.jit
def _planned(place):
    """Load what the plan kernel wrote, from L2: this kernel may not have waited yet."""
    return tl.load(place, cache_modifier=".cg")


@triton.jit
def _pages(table, begin, end, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the ids of the pages of the entries begin .. begin + BLOCK - 1, 0 from `end` on."""
    position = begin + tl.arange(0, BLOCK)
    place = table + position // PAGE_SIZE
    return tl.load(place, mask=position < end, other=0, cache_modifier=".cg")


@triton.jit
def _store_split(
    out, partials, stats, counts, arrivals, weight, mixed, head, tile, place, entry, width,
    first_token, num_lines, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, LINES: tl.constexpr, MERGE_SPLITS: tl.constexpr,
    MERGE_LINES: tl.constexpr,
):  # fmt: skip
    """Write one of several splits of a tile; with `arrivals`, the last program merges them."""
    line, dim = tl.arange(0, LINES), tl.arange(0, BLOCK_DV)
    is_line = line < num_lines
    row = (place * NUM_KV_HEADS + head) * LINES + line
    tl.store(stats + row, weight, mask=is_line)
    part = partials + row[:, None] * DV + dim[None, :]
    tl.store(part, mixed, mask=is_line[:, None] & (dim < DV)[None, :])
    if arrivals is not None:
        first_range, num_splits = _splits(counts, entry, width)
        # All threads have stored their part before one of them counts the program.
        tl.debug_barrier()
        arrived = arrivals + tile * NUM_KV_HEADS + head
        if tl.atomic_add(arrived, 1, sem="acq_rel") == num_splits - 1:
            tl.atomic_xchg(arrived, 0)  # for the next layer
            for first_line in range(0, num_lines, MERGE_LINES):
                _merge(
                    out, partials, stats, head, first_range, num_splits, first_token, num_lines,
                    first_line, NUM_KV_HEADS, GROUP, DV, BLOCK_DV, LINES, MERGE_SPLITS, MERGE_LINES,
                )  # fmt: skip


@triton.jit
def _splits(counts, entry, width):
    """Return the first range that has a split of a tile, and how many have one."""
    split = _planned(counts + 2)
    first_range = entry // split
    return first_range, (entry + width - 1) // split - first_range + 1


@triton.jit
def _attend(
    q, keys, values, table, page, begin, end, head, first_position, own, ancestors,
    highest, total, mixed, scale,
    NUM_KV_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP_SCALE: tl.constexpr, BLOCK: tl.constexpr,
    IS_TREE: tl.constexpr, IS_FREE: tl.constexpr, IS_GPU: tl.constexpr,
):  # fmt: skip
    """Add the entries begin .. end - 1 to a softmax. IS_FREE: whole blocks that all lines see.

    page: ids of the pages of the first block. Those of others are loaded one block ahead, so that
    the blocks can be loaded several ahead. mixed: the weighted sum of values, or
    those of the first and of the second numbers of pairs: see `_of_pair`.
    """
    # Values, or pairs of them, of an entry.
    NUM_VALUES: tl.constexpr = DV // len(mixed)
    BLOCK_VALUES: tl.constexpr = BLOCK_DV // len(mixed)
    IN_FLOAT16: tl.constexpr = keys.dtype.element_ty == tl.float8e4nv and q.dtype != tl.float32
    if len(mixed) == 2:
        values = values.to(tl.pointer_type(tl.int16), bitcast=True)
    q, down = _queries(q, IN_FLOAT16)
    key_dim, value_dim = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_VALUES)
    position = begin + tl.arange(0, BLOCK)
    for _ in range(begin, end, BLOCK):
        inside = position < end
        entry = (page * PAGE_SIZE + position % PAGE_SIZE) * NUM_KV_HEADS + head
        entry = entry.to(tl.int64)[:, None]
        key = keys + entry * DK + key_dim[None, :]
        value = values + entry * NUM_VALUES + value_dim[None, :]
        if IS_FREE and DK == BLOCK_DK:
            k = tl.load(key)
        elif DK == BLOCK_DK:
            k = tl.load(key, mask=inside[:, None], other=0.0)
        else:
            k = tl.load(key, mask=inside[:, None] & (key_dim < DK)[None, :], other=0.0)
        if IS_FREE and DV == BLOCK_DV:
            v = tl.load(value)
        elif DV == BLOCK_DV:
            v = tl.load(value, mask=inside[:, None], other=0.0)
        else:
            v = tl.load(value, mask=inside[:, None] & (value_dim < NUM_VALUES)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if IN_FLOAT16:
            scores *= down[:, None]
        if CAP_SCALE is not None:
            # The tanh of scaled scores over softcap, which `scale` multiplies.
            scores = 1.0 - 2.0 / (tl.exp2(scores * CAP_SCALE) + 1.0)
        if not IS_FREE:
            seen = _seen(position, first_position, own, ancestors, WINDOW, IS_TREE)
            scores = tl.where(seen & inside[None, :], scores, _HIDDEN)
        higher = tl.maximum(highest, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weights, axis=1)
        weights = (weights * _WEIGHT if IN_FLOAT16 else weights).to(q.dtype)
        mixed = _mix(mixed, fade, weights, v, IS_GPU)
        highest = higher
        position += BLOCK
        page = tl.load(table + position // PAGE_SIZE, mask=position < end, other=0)
    return highest, total, mixed


@triton.jit
def _queries(q, IN_FLOAT16: tl.constexpr):
    """Return queries for the product with keys, and what multiplies the scores of each line.

    Every number of FP8 is one of float16 and of bfloat16, but Hopper converts it to float16 alone.
    Queries become float16, too: each line is multiplied by a power of two that makes its largest
    number 256 to 512, so that what is lost is below 2^-33 of that.
    """
    largest = tl.max(tl.abs(q.to(tl.float32)), axis=1)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, 27), 227)
    up = ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - 8) << 23).to(tl.float32, bitcast=True)
    return ((q.to(tl.float32) * up[:, None]).to(tl.float16), down) if IN_FLOAT16 else (q, down)


@triton.jit
def _mix(mixed, fade, weights, v, IS_GPU: tl.constexpr):
    """Return sums that have faded, with weighted values added; see `_attend`."""
    first = _of_pair(v, weights.dtype, 0, IS_GPU) if len(mixed) == 2 else v.to(weights.dtype)
    sums: tl.tuple = (tl.dot(weights, first, mixed[0] * fade[:, None], input_precision="ieee"),)
    if len(mixed) == 2:
        second = _of_pair(v, weights.dtype, 1, IS_GPU)
        sums += (tl.dot(weights, second, mixed[1] * fade[:, None], input_precision="ieee"),)
    return sums


# PTX for a register of two pairs of numbers of FP8: its first or second bytes become float16.
_OF_PAIR = """{
.reg .b32 x;
.reg .b16 y, z;
prmt.b32 x, $1, 0, BYTES;
mov.b32 {y, z}, x;
cvt.rn.f16x2.e4m3x2 $0, y;
}"""
_FIRST_OF_PAIR = tl.constexpr(_OF_PAIR.replace("BYTES", "0x4420"))
_SECOND_OF_PAIR = tl.constexpr(_OF_PAIR.replace("BYTES", "0x4431"))


@triton.jit
def _of_pair(x, dtype: tl.constexpr, INDEX: tl.constexpr, IS_GPU: tl.constexpr):
    """Return the first or second number of each pair of FP8, of int16, as floats.

    Tensor cores take their second factor from shared memory in units of 16 bits. Numbers of eight
    bits would be loaded one by one.
    """
    if IS_GPU and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            _SECOND_OF_PAIR if INDEX else _FIRST_OF_PAIR,
            "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    byte = (x >> (8 * INDEX)) & 255
    return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def _seen(position, first_position, own, ancestors, WINDOW: tl.constexpr, IS_TREE: tl.constexpr):
    """Return which positions [N] the lines [M] at positions `own` see: [M, N]."""
    near = position[None, :] >= 0
    if WINDOW is not None:
        near &= position[None, :] > own[:, None] - WINDOW
    if not IS_TREE:
        return near & (position[None, :] <= own[:, None])
    draft = position - first_position
    bit = tl.minimum(tl.maximum(draft, 0), _LAST_TREE_TOKEN)
    is_ancestor = ((ancestors[:, None] >> bit[None, :]) & 1) == 1
    return tl.where((draft < 0)[None, :], near, is_ancestor)


@triton.jit
def _merge_kernel(
    tiles, counts, out, partials, stats,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    LINES: tl.constexpr, MERGE_SPLITS: tl.constexpr, MERGE_LINES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    head, first_line = tl.program_id(0), tl.program_id(1) * MERGE_LINES
    let_next_start(DEPENDENT)
    num_tiles = tl.where(_planned(counts + 2) > 0, _planned(counts), 0)
    for tile in range(tl.program_id(2), num_tiles, tl.num_programs(2)):
        fields = tiles + tile * _TILE_FIELDS
        first_token, num_lines = _planned(fields + 1), _planned(fields + 2) * GROUP
        first_range, num_splits = _splits(counts, _planned(fields + 6), _planned(fields + 7))
        wait(DEPENDENT)
        if (num_splits > 1) & (first_line < num_lines):
            _merge(
                out, partials, stats, head, first_range, num_splits, first_token, num_lines,
                first_line, NUM_KV_HEADS, GROUP, DV, BLOCK_DV, LINES, MERGE_SPLITS, MERGE_LINES,
            )  # fmt: skip
    wait(DEPENDENT)  # programs without a tile, too


@triton.jit
def _merge(
    out, partials, stats, head, first_range, num_splits, first_token, num_lines, first_line,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    LINES: tl.constexpr, MERGE_SPLITS: tl.constexpr, MERGE_LINES: tl.constexpr,
):  # fmt: skip
    """Add MERGE_LINES lines of all splits of a tile, MERGE_SPLITS at a time."""
    line, dim = first_line + tl.arange(0, MERGE_LINES), tl.arange(0, BLOCK_DV)
    is_number = (line < num_lines)[:, None] & (dim < DV)[None, :]
    highest = tl.full([MERGE_LINES, BLOCK_DV], _NOTHING, tl.float32)
    total = tl.full([MERGE_LINES, BLOCK_DV], 0.0, tl.float32)
    mixed = tl.full([MERGE_LINES, BLOCK_DV], 0.0, tl.float32)
    for first_split in range(0, num_splits, MERGE_SPLITS):
        # All loads go first, so that they wait for memory together.
        numbers: tl.tuple = ()
        weights: tl.tuple = ()
        for number in tl.static_range(MERGE_SPLITS):
            split = first_split + number
            place = 2 * (first_range + split) + tl.where(split == 0, 1, 0)
            row = ((place * NUM_KV_HEADS + head) * LINES + line)[:, None]
            is_part = is_number & (split < num_splits)
            part = tl.load(partials + row * DV + dim[None, :], mask=is_part, other=0.0)
            # A weight is loaded for each number, in their layout: threads exchange nothing.
            weight = tl.load(stats + row + dim[None, :] * 0, mask=is_part, other=_NOTHING)
            numbers += (part,)
            weights += (weight,)
        higher = highest
        for number in tl.static_range(MERGE_SPLITS):
            higher = tl.maximum(higher, weights[number])
        fade = tl.exp2(highest - higher)
        total *= fade
        mixed *= fade
        for number in tl.static_range(MERGE_SPLITS):
            factor = tl.exp2(weights[number] - higher)
            total += factor
            mixed += numbers[number] * factor
        highest = higher
    _store_lines(
        out, mixed / total, head, first_token, line, line < num_lines,
        NUM_KV_HEADS, GROUP, DV, BLOCK_DV,
    )  # fmt: skip


@triton.jit
def _store_lines(
    out, numbers, head, first_token, line, mask,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Write numbers to the tokens and heads of these lines."""
    token = (first_token + line // GROUP).to(tl.int64)
    dim = tl.arange(0, BLOCK_DV)
    at = ((token * NUM_KV_HEADS + head) * GROUP + line % GROUP) * DV
    if DV == BLOCK_DV:
        tl.store(out + at[:, None] + dim[None, :], numbers, mask=mask[:, None])
    else:
        is_number = mask[:, None] & (dim < DV)[None, :]
        tl.store(out + at[:, None] + dim[None, :], numbers, mask=is_number)
