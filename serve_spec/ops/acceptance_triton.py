"""Acceptance, advancing of request slots, and the host's read-back: one program per request."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops.acceptance import MAX_ROWS, AcceptedPath
from serve_spec.ops.dependent_launch import dependent_launch
from serve_spec.ops.noise_triton import load_row_keys

_COUNT_BLOCK = 128


def accept_path(
    row_tokens: Tensor,
    parents: Tensor,
    drawn: Tensor,
    query_starts: Tensor,
    max_depth: int,
    forced: Tensor | None = None,
) -> AcceptedPath:
    """See `acceptance.accept_path`."""
    accepted = _empty_path(query_starts, max_depth)
    _walk(accepted, row_tokens, parents, drawn, query_starts, forced)
    return accepted


def accept_and_advance(
    row_tokens: Tensor,
    parents: Tensor,
    drawn: Tensor,
    query_starts: Tensor,
    recent: Tensor,
    lengths: Tensor,
    request_slots: Tensor,
    results: Tensor,
    forced: Tensor | None = None,
) -> AcceptedPath:
    """See `acceptance.accept_and_advance`."""
    accepted = _empty_path(query_starts, results.shape[1] - 3)
    _walk(
        accepted, row_tokens, parents, drawn, query_starts, forced,
        recent, lengths, request_slots, results,
    )  # fmt: skip
    return accepted


def forced_counts(seeds: Tensor, positions: Tensor, num_steps: Tensor, survival: Tensor) -> Tensor:
    """See `acceptance.forced_counts`."""
    counts = torch.empty_like(num_steps, dtype=torch.int32)
    dependent = dependent_launch(seeds.device)
    _count_kernel[(triton.cdiv(len(counts), _COUNT_BLOCK),)](
        counts, seeds, positions, num_steps, survival, len(counts),
        STEPS=survival.shape[1], BLOCK=_COUNT_BLOCK, DEPENDENT=dependent,
        num_warps=4, launch_pdl=dependent,
    )  # fmt: skip
    return counts


def tree_masks(parents: Tensor, query_starts: Tensor) -> Tensor:
    """See `acceptance.tree_masks`."""
    masks = torch.empty_like(parents, dtype=torch.int64)
    dependent = dependent_launch(parents.device)
    _mask_kernel[(len(query_starts),)](
        masks, parents, query_starts, len(parents),
        ROWS=MAX_ROWS, DEPENDENT=dependent, num_warps=1, launch_pdl=dependent,
    )  # fmt: skip
    return masks


def _empty_path(query_starts: Tensor, max_depth: int) -> AcceptedPath:
    shape = (len(query_starts) - 1, max_depth + 1)
    device = query_starts.device
    return AcceptedPath(
        token_ids=torch.empty(shape, dtype=torch.int64, device=device),
        num_correct=torch.empty(shape[0], dtype=torch.int32, device=device),
        path=torch.empty(shape, dtype=torch.int32, device=device),
    )


def _walk(
    accepted: AcceptedPath,
    row_tokens: Tensor,
    parents: Tensor,
    drawn: Tensor,
    query_starts: Tensor,
    forced: Tensor | None,
    recent: Tensor | None = None,
    lengths: Tensor | None = None,
    request_slots: Tensor | None = None,
    results: Tensor | None = None,
) -> None:
    num_sequences, width = accepted.path.shape
    dependent = dependent_launch(query_starts.device)
    _walk_kernel[(num_sequences,)](
        *accepted, row_tokens, parents, drawn, query_starts, forced,
        recent, lengths, request_slots, results, 0 if recent is None else recent.shape[1],
        DEPTH=width - 1, WIDTH=triton.next_power_of_2(width), ROWS=MAX_ROWS,
        DEPENDENT=dependent, num_warps=1, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit
def _walk_kernel(
    token_ids, num_correct, path, row_tokens, parents, drawn, query_starts, forced,
    recent, lengths, request_slots, results, window,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """All rows of a sequence are in registers; a step finds the child and reads its draw."""
    b = tl.program_id(0)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin = tl.load(query_starts + b)
    num_rows = tl.load(query_starts + b + 1) - begin
    offsets = tl.arange(0, ROWS)
    inside = offsets < num_rows
    is_draft = inside & (offsets > 0)
    tokens = tl.load(row_tokens + begin + offsets, mask=is_draft, other=-1).to(tl.int32)
    above = tl.load(parents + begin + offsets, mask=is_draft, other=-1)
    columns = tl.arange(0, WIDTH)
    emitted = tl.zeros([WIDTH], dtype=tl.int32)
    rows = tl.zeros([WIDTH], dtype=tl.int32)
    limit = DEPTH
    if forced is not None:
        limit = tl.minimum(tl.load(forced + b), DEPTH)
    has_rows = num_rows > 0
    draw = tl.load(drawn + begin, mask=has_rows, other=0).to(tl.int32)
    current = tl.zeros([], dtype=tl.int32)
    kept = tl.zeros([], dtype=tl.int32)
    going = has_rows & (limit > 0)
    while going:
        fits = (above == current) & (tokens >= 0)
        if forced is None:
            fits = fits & (tokens == draw)
        child = tl.min(tl.where(fits, offsets, ROWS), axis=0)
        going = child < ROWS
        if going:
            token = tl.load(row_tokens + begin + child).to(tl.int32)
            draw = tl.load(drawn + begin + child).to(tl.int32)
            emitted = tl.where(columns == kept, token, emitted)
            kept += 1
            rows = tl.where(columns == kept, child, rows)
            current = child
            going = kept < limit
    emitted = tl.where((columns == kept) & has_rows, draw, emitted)
    tl.store(num_correct + b, kept)
    wide = columns <= DEPTH
    at = b * (DEPTH + 1) + columns
    tl.store(token_ids + at, emitted.to(tl.int64), mask=wide)
    tl.store(path + at, rows, mask=wide)
    if results is not None:
        broken = tl.max((is_draft & (tokens < 0)).to(tl.int32), axis=0)
        verdict = results + b * (DEPTH + 3)
        tl.store(verdict, kept)
        tl.store(verdict + 1, broken)
        tl.store(verdict + 2 + columns, emitted, mask=wide)
        if has_rows:
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
    """In float64, as the host does it: the word and the table are exact there."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < num_sequences
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.where(inside, b, 0)
    _, word = load_row_keys(seeds, b, tl.load(positions + b))
    uniform = word.to(tl.int32, bitcast=True).to(tl.float64) * 2.0**-32 + 0.5
    steps = tl.minimum(tl.maximum(tl.load(num_steps + b), 0), STEPS)
    count = tl.zeros([BLOCK], dtype=tl.int32)
    for step in range(STEPS):
        chance = tl.load(survival + steps * STEPS + step)
        count += (uniform < chance).to(tl.int32)
    tl.store(counts + b, count, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _mask_kernel(
    masks, parents, query_starts, num_rows, ROWS: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One program per sequence; every row walks to the root. The last program does the padding."""
    b = tl.program_id(0)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin = tl.load(query_starts + b)
    offsets = tl.arange(0, ROWS)
    if b == tl.num_programs(0) - 1:
        for first in range(begin, num_rows, ROWS):
            rows = first + offsets
            tl.store(masks + rows, tl.zeros([ROWS], dtype=tl.int64), mask=rows < num_rows)
    else:
        inside = offsets < tl.load(query_starts + b + 1) - begin
        row = tl.where(inside, offsets, -1)
        mask = tl.zeros([ROWS], dtype=tl.int64)
        step = tl.zeros([], dtype=tl.int32)
        while (tl.max(row, axis=0) >= 0) & (step < ROWS):
            here = tl.full([ROWS], 1, dtype=tl.int64) << tl.maximum(row, 0).to(tl.int64)
            mask |= tl.where(row >= 0, here, 0)
            row = tl.load(parents + begin + row, mask=row >= 0, other=-1)
            step += 1
        tl.store(masks + begin + offsets, mask, mask=inside)
