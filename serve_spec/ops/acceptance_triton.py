"""Acceptance, request slots and results in one launch: one program per request."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_spec.core.draft import MAX_TREE_TOKENS
from serve_spec.ops.acceptance import AcceptedPath, RequestTokens
from serve_spec.ops.dispatch import dependent_launch
from serve_spec.ops.dispatch_triton import wait_for_previous
from serve_spec.ops.noise_triton import load_noise_keys

_COUNT_BLOCK = 128


def accept_and_advance(
    input_ids: Tensor,
    parents: Tensor,
    drawn: Tensor,
    query_starts: Tensor,
    known: RequestTokens,
    results: Tensor,
    forced: Tensor | None = None,
) -> AcceptedPath:
    """See `acceptance.accept_and_advance`."""
    num_sequences, max_depth = len(results), results.shape[1] - 3
    token_ids = input_ids.new_empty(num_sequences, max_depth + 1)
    path = results.new_empty(num_sequences, max_depth + 1)
    accepted = AcceptedPath(token_ids, results.new_empty(num_sequences), path)
    _accept_kernel[(num_sequences,)](
        *accepted, input_ids, parents, drawn, query_starts, forced,
        *known, results, known.recent.shape[1],
        DEPTH=max_depth, WIDTH=triton.next_power_of_2(max_depth + 1), TOKENS=MAX_TREE_TOKENS,
        num_warps=1, **dependent_launch(query_starts.device),
    )  # fmt: skip
    return accepted


def forced_counts(seeds: Tensor, positions: Tensor, num_steps: Tensor, survival: Tensor) -> Tensor:
    """See `acceptance.forced_counts`."""
    counts = torch.empty_like(num_steps, dtype=torch.int32)
    _count_kernel[(triton.cdiv(len(counts), _COUNT_BLOCK),)](
        counts, seeds, positions, num_steps, survival, len(counts),
        STEPS=survival.shape[1], BLOCK=_COUNT_BLOCK,
        num_warps=4, **dependent_launch(seeds.device),
    )  # fmt: skip
    return counts


def tree_masks(parents: Tensor, query_starts: Tensor) -> Tensor:
    """See `acceptance.tree_masks`."""
    masks = torch.empty_like(parents, dtype=torch.int64)
    _mask_kernel[(len(query_starts),)](
        masks, parents, query_starts, len(parents),
        TOKENS=MAX_TREE_TOKENS, num_warps=1, **dependent_launch(parents.device),
    )  # fmt: skip
    return masks


@triton.jit
def _accept_kernel(
    token_ids, num_correct, path, input_ids, parents, drawn, query_starts, forced,
    recent, lengths, request_slots, results, window,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per sequence, its tokens in registers; each iteration accepts a child."""
    b = tl.program_id(0)
    wait_for_previous(DEPENDENT)
    begin = tl.load(query_starts + b)
    num_tokens = tl.load(query_starts + b + 1) - begin
    offsets = tl.arange(0, TOKENS)
    inside = offsets < num_tokens
    is_draft = inside & (offsets > 0)
    tokens = tl.load(input_ids + begin + offsets, mask=is_draft, other=-1).to(tl.int32)
    above = tl.load(parents + begin + offsets, mask=is_draft, other=-1)
    columns = tl.arange(0, WIDTH)
    emitted = tl.zeros([WIDTH], dtype=tl.int32)
    accepted = tl.zeros([WIDTH], dtype=tl.int32)
    limit = DEPTH
    if forced is not None:
        limit = tl.minimum(tl.load(forced + b), DEPTH)
    has_tokens = num_tokens > 0
    draw = tl.load(drawn + begin, mask=has_tokens, other=0).to(tl.int32)
    current = tl.zeros([], dtype=tl.int32)
    kept = tl.zeros([], dtype=tl.int32)
    going = has_tokens & (limit > 0)
    while going:
        fits = (above == current) & (tokens >= 0)
        if forced is None:
            fits = fits & (tokens == draw)
        child = tl.min(tl.where(fits, offsets, TOKENS), axis=0)
        going = child < TOKENS
        if going:
            token = tl.load(input_ids + begin + child).to(tl.int32)
            draw = tl.load(drawn + begin + child).to(tl.int32)
            emitted = tl.where(columns == kept, token, emitted)
            kept += 1
            accepted = tl.where(columns == kept, child, accepted)
            current = child
            going = kept < limit
    emitted = tl.where((columns == kept) & has_tokens, draw, emitted)
    tl.store(num_correct + b, kept)
    wide = columns <= DEPTH
    at = b * (DEPTH + 1) + columns
    tl.store(token_ids + at, emitted.to(tl.int64), mask=wide)
    tl.store(path + at, accepted, mask=wide)
    broken = tl.max((is_draft & (tokens < 0)).to(tl.int32), axis=0)
    packed = results + b * (DEPTH + 3)
    tl.store(packed, kept)
    tl.store(packed + 1, broken)
    tl.store(packed + 2 + columns, emitted, mask=wide)
    if has_tokens:
        request_slot = tl.load(request_slots + b)
        length = tl.load(lengths + request_slot)
        places = recent + request_slot * window + ((length + columns) & (window - 1))
        tl.store(places, tl.maximum(emitted, 0), mask=columns <= kept)
        tl.store(lengths + request_slot, length + kept + 1)


@triton.jit(do_not_specialize=["num_sequences"])
def _count_kernel(
    counts, seeds, positions, num_steps, survival, num_sequences,
    STEPS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute in float64, as the reference does: the word and the table are exact there."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < num_sequences
    wait_for_previous(DEPENDENT)
    b = tl.where(inside, b, 0)
    _, word = load_noise_keys(seeds, b, tl.load(positions + b))
    uniform = word.to(tl.int32, bitcast=True).to(tl.float64) * 2.0**-32 + 0.5
    steps = tl.minimum(tl.maximum(tl.load(num_steps + b), 0), STEPS)
    count = tl.zeros([BLOCK], dtype=tl.int32)
    for step in range(STEPS):
        probability = tl.load(survival + steps * STEPS + step)
        count += (uniform < probability).to(tl.int32)
    tl.store(counts + b, count, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _mask_kernel(
    masks, parents, query_starts, num_tokens, TOKENS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One program per sequence follows every token to its root. The last one writes the padding."""
    b = tl.program_id(0)
    wait_for_previous(DEPENDENT)
    begin = tl.load(query_starts + b)
    offsets = tl.arange(0, TOKENS)
    if b == tl.num_programs(0) - 1:
        for first in range(begin, num_tokens, TOKENS):
            index = first + offsets
            tl.store(masks + index, tl.zeros([TOKENS], dtype=tl.int64), mask=index < num_tokens)
    else:
        inside = offsets < tl.load(query_starts + b + 1) - begin
        above = tl.where(inside, offsets, -1)
        mask = tl.zeros([TOKENS], dtype=tl.int64)
        step = tl.zeros([], dtype=tl.int32)
        while (tl.max(above, axis=0) >= 0) & (step < TOKENS):
            here = tl.full([TOKENS], 1, dtype=tl.int64) << tl.maximum(above, 0).to(tl.int64)
            mask |= tl.where(above >= 0, here, 0)
            above = tl.load(parents + begin + above, mask=above >= 0, other=-1)
            step += 1
        tl.store(masks + begin + offsets, mask, mask=inside)


_MAX_BLOCK = 4096


def move_accepted(
    pools: Sequence[Tensor], slots: Tensor, query_starts: Tensor, path: Tensor, num_correct: Tensor
) -> None:
    """See `acceptance.move_accepted`."""
    for pool in pools:
        num_layers = 1 if pool.dim() == 2 else pool.shape[0]
        num_slots = pool.shape[0] if pool.dim() == 2 else pool.shape[1]
        width = pool.numel() // (num_layers * num_slots)
        block = min(triton.next_power_of_2(width), _MAX_BLOCK)
        _move_kernel[(len(num_correct), num_layers, triton.cdiv(width, block))](
            pool, slots, query_starts, path, num_correct, path.shape[1], num_slots, width,
            BLOCK=block, num_warps=4, **dependent_launch(slots.device),
        )  # fmt: skip


@triton.jit
def _move_kernel(
    pool, slots, query_starts, path, num_correct, path_width, num_slots, width,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per block of a layer and sequence, moved in ascending order.

    path[j + 1] > j, so no row is read after it was written, and one thread reads and writes every
    number.
    """
    b, layer = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    wait_for_previous(DEPENDENT)
    begin = tl.load(query_starts + b)
    pool += layer.to(tl.int64) * num_slots * width
    for j in range(1, tl.load(num_correct + b) + 1):
        row = tl.load(path + b * path_width + j)
        if row != j:
            source = pool + tl.load(slots + begin + row) * width
            target = pool + tl.load(slots + begin + j) * width
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)
