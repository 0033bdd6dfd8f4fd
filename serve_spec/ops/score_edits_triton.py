"""Score edits and grammar masks, a launch each; rows without them read a flag or a place only."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops.dispatch import dependent_launch
from serve_spec.ops.dispatch_triton import wait_for_previous
from serve_spec.ops.score_edits import GENERATED_ONCE, HELD_BACK, IN_PROMPT, LEAST, ScoreEdits

_PARTS = 16
"""Programs per row: few, because most rows have no edits and no mask."""
_BLOCK = 2048
_IN_PROMPT = tl.constexpr(IN_PROMPT)
_HELD_BACK = tl.constexpr(HELD_BACK)
_GENERATED_ONCE = tl.constexpr(GENERATED_ONCE)


def edit_scores(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    token_ids: Tensor,
    depths: Tensor,
    edits: ScoreEdits,
    backs: Tensor | None = None,
) -> None:
    """See `score_edits.edit_scores`."""
    for x in (owners, positions, token_ids, depths):
        assert x.is_contiguous(), "tensors over tokens are contiguous"
    _edit_kernel[(_PARTS, logits.shape[0])](
        logits, logits.stride(0), owners, positions, token_ids, depths, backs,
        *edits, logits.shape[1],
        BLOCK=_BLOCK,
        num_warps=4, enable_fp_fusion=False, **dependent_launch(logits.device),
    )  # fmt: skip


def count_tokens(request_slots: Tensor, results: Tensor, edits: ScoreEdits) -> None:
    """See `score_edits.count_tokens`."""
    width = results.shape[1]
    _count_kernel[(len(request_slots),)](
        request_slots, results, edits.is_on, edits.marks, edits.marks.shape[1],
        WIDTH=width, COLUMNS=triton.next_power_of_2(width - 2),
        num_warps=1, **dependent_launch(results.device),
    )  # fmt: skip


@triton.jit
def _edit_kernel(
    logits, row_stride, owners, positions, token_ids, depths, backs,
    is_on, bias, marks, repetition, frequency, presence, min_lengths,
    num_ids, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per (part of the vocabulary, row)."""
    part, row = tl.program_id(0), tl.program_id(1)
    wait_for_previous(DEPENDENT)
    owner = tl.load(owners + row)
    if tl.load(is_on + tl.maximum(owner, 0), mask=owner >= 0, other=0) > 0:
        divisor = tl.load(repetition + owner)
        per_time = tl.load(frequency + owner)
        at_all = tl.load(presence + owner)
        holds_back = tl.load(positions + row) < tl.load(min_lengths + owner)
        depth = tl.load(depths + row)
        logits += row.to(tl.int64) * row_stride
        bias += owner.to(tl.int64) * num_ids
        marks += owner.to(tl.int64) * num_ids
        for start in range(part * BLOCK, num_ids, tl.num_programs(0) * BLOCK):
            ids = start + tl.arange(0, BLOCK)
            inside = ids < num_ids
            mark = tl.load(marks + ids, mask=inside, other=0)
            count = mark // _GENERATED_ONCE
            at = row
            for _ in range(depth):
                count += (ids == tl.load(token_ids + at)).to(tl.int32)
                at -= 1 if backs is None else tl.load(backs + at)
            score = tl.load(logits + ids, mask=inside, other=0.0)
            score += tl.load(bias + ids, mask=inside, other=0.0)
            is_generated = count > 0
            is_seen = is_generated | ((mark & _IN_PROMPT) > 0)
            repeated = tl.where(score > 0, tl.math.div_rn(score, divisor), score * divisor)
            score = tl.where(is_seen, repeated, score)
            score = score - per_time * count.to(tl.float32)
            score = score - at_all * is_generated.to(tl.float32)
            is_held = holds_back & ((mark & _HELD_BACK) > 0)
            tl.store(logits + ids, tl.where(is_held, float("-inf"), score), mask=inside)


@triton.jit
def _count_kernel(
    request_slots, results, is_on, marks, num_ids,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per sequence."""
    b = tl.program_id(0)
    wait_for_previous(DEPENDENT)
    request_slot = tl.load(request_slots + b)
    if tl.load(is_on + request_slot) > 0:
        packed = results + b * WIDTH
        columns = tl.arange(0, COLUMNS)
        inside = (columns <= tl.load(packed)) & (columns < WIDTH - 2)
        tokens = tl.load(packed + 2 + columns, mask=inside, other=-1)
        at = marks + request_slot.to(tl.int64) * num_ids + tl.maximum(tokens, 0)
        tl.atomic_add(at, _GENERATED_ONCE, mask=tokens >= 0)


_LEAST = tl.constexpr(LEAST)


def mask_scores(
    logits: Tensor, owners: Tensor, offsets: Tensor, places: Tensor, words: Tensor
) -> None:
    """See `score_edits.mask_scores`."""
    _mask_kernel[(_PARTS, logits.shape[0])](
        logits, logits.stride(0), owners, offsets, places, len(places), places.stride(0),
        words, words.shape[1], logits.shape[1],
        BLOCK=_BLOCK, num_warps=4, **dependent_launch(logits.device),
    )  # fmt: skip


@triton.jit
def _mask_kernel(
    logits, row_stride, owners, offsets, places, num_owners, place_stride,
    words, num_words, num_ids,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per (part of the vocabulary, row)."""
    part, row = tl.program_id(0), tl.program_id(1)
    wait_for_previous(DEPENDENT)
    owner, offset = tl.load(owners + row), tl.load(offsets + row)
    is_owned = (owner >= 0) & (owner < num_owners) & (offset < place_stride)
    place = tl.load(places + owner * place_stride + offset, mask=is_owned, other=-1)
    if place >= 0:
        logits += row.to(tl.int64) * row_stride
        words += place.to(tl.int64) * num_words
        for start in range(part * BLOCK, num_ids, tl.num_programs(0) * BLOCK):
            ids = start + tl.arange(0, BLOCK)
            inside = ids < num_ids
            word = tl.load(words + ids // 32, mask=inside, other=0)
            score = tl.load(logits + ids, mask=inside, other=0.0)
            score = tl.where(score < _LEAST, _LEAST, score)
            is_allowed = ((word >> (ids % 32)) & 1) != 0
            tl.store(logits + ids, tl.where(is_allowed, score, float("-inf")), mask=inside)
