"""Draft trees: one launch per level and one to choose, with a program per sequence.

A score's rank is the number of better ones, counted block by block: so few scores are not worth a
sort.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops import draft_tree
from serve_spec.ops.dispatch import dependent_launch, reference_of
from serve_spec.ops.dispatch_triton import wait_for_previous
from serve_spec.ops.draft_tree import Beam, Level

MAX_CANDIDATES = 1024
"""Per sequence; more are ranked faster by a sort."""
_CHUNK = 16


def grow_beam(before: Beam, token_ids: Tensor, scores: Tensor, step: int) -> tuple[Level, Beam]:
    """See `draft_tree.grow_beam`."""
    if token_ids[0].numel() > MAX_CANDIDATES:
        return reference_of(draft_tree.grow_beam)(before, token_ids, scores, step)
    batch_size, width, topk = token_ids.shape
    token_ids, scores = token_ids.flatten(1), scores.flatten(1)
    total, parents = torch.empty_like(scores), torch.empty_like(token_ids)
    beam = Beam(
        token_ids=token_ids.new_empty(batch_size, topk),
        scores=scores.new_empty(batch_size, topk),
        numbers=token_ids.new_empty(batch_size, topk),
        befores=token_ids.new_empty(batch_size, topk),
        masks=token_ids.new_empty(batch_size, topk),
    )
    _grow_kernel[(batch_size,)](
        total, parents, *beam, token_ids, scores, before.scores, before.numbers, before.masks,
        topk + (step - 1) * topk * topk if step else 0, step * topk,
        WIDTH=width, TOPK=topk, COLUMNS=triton.next_power_of_2(width * topk), CHUNK=_CHUNK,
        num_warps=4 if width * topk <= 256 else 8, **dependent_launch(token_ids.device),
    )  # fmt: skip
    return Level(token_ids, total, parents, scores), beam


def choose_drafts(
    levels: Sequence[Level], num_steps: Tensor, num_draft_tokens: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `draft_tree.choose_drafts`."""
    if sum(level.scores.shape[1] for level in levels) > MAX_CANDIDATES:
        return reference_of(draft_tree.choose_drafts)(levels, num_steps, num_draft_tokens, width)
    token_ids, scores, parents, logprobs = (
        torch.cat(columns, dim=1) for columns in zip(*levels, strict=True)
    )
    batch_size, num_candidates = scores.shape
    width = min(width, num_candidates)
    chosen = token_ids.new_zeros(batch_size, width)
    before = token_ids.new_zeros(batch_size, width, dtype=torch.int32)
    shown = logprobs.new_zeros(batch_size, width)
    places = torch.empty_like(parents, dtype=torch.int32)
    _choose_kernel[(batch_size,)](
        chosen, before, shown, places, token_ids, scores, parents, logprobs, num_steps,
        num_draft_tokens, num_candidates, width,
        TOPK=levels[0].scores.shape[1], COLUMNS=triton.next_power_of_2(num_candidates),
        CHUNK=_CHUNK, num_warps=8, **dependent_launch(token_ids.device),
    )  # fmt: skip
    return chosen, before, shown


@triton.jit(do_not_specialize=["first_number", "first_bit"])
def _grow_kernel(
    total, parents, beam_ids, beam_scores, beam_numbers, beam_befores, beam_masks,
    token_ids, scores, before_scores, before_numbers, before_masks, first_number, first_bit,
    WIDTH: tl.constexpr, TOPK: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    wait_for_previous(DEPENDENT)
    first, before = b * WIDTH * TOPK, b * WIDTH
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH * TOPK
    place = tl.where(inside, column // TOPK, 0)
    value = _total(token_ids, scores, before_scores, first, before, column, WIDTH, TOPK)
    rank = tl.zeros([COLUMNS], dtype=tl.int32)
    for start in range(0, WIDTH * TOPK, CHUNK):
        other = start + tl.arange(0, CHUNK)
        others = _total(token_ids, scores, before_scores, first, before, other, WIDTH, TOPK)
        rank += _num_before(value, column, others, other, WIDTH * TOPK)
    tl.store(total + first + column, value, mask=inside)
    number = tl.load(before_numbers + before + place)
    tl.store(parents + first + column, number, mask=inside)
    is_best = inside & (rank < TOPK)
    at = b * TOPK + rank
    tl.store(beam_ids + at, tl.load(token_ids + first + column, mask=inside), mask=is_best)
    tl.store(beam_scores + at, value, mask=is_best)
    tl.store(beam_numbers + at, (first_number + column).to(tl.int64), mask=is_best)
    tl.store(beam_befores + at, place.to(tl.int64), mask=is_best)
    own = tl.full([COLUMNS], 1, dtype=tl.int64) << (first_bit + rank).to(tl.int64)
    path = tl.load(before_masks + before + place) | own
    tl.store(beam_masks + at, path, mask=is_best)


@triton.jit
def _total(
    token_ids, scores, before_scores, first, before, column,
    WIDTH: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """Return scores from the root on; -inf for no token, and past the candidates."""
    inside = column < WIDTH * TOPK
    token = tl.load(token_ids + first + column, mask=inside, other=-1)
    score = tl.load(scores + first + column, mask=inside, other=0.0)
    above = tl.load(before_scores + before + tl.where(inside, column // TOPK, 0))
    value = above + tl.where(score > 0.0, 0.0, score)
    return tl.where((token >= 0) & (value == value), value, float("-inf"))


@triton.jit
def _num_before(value, column, others, other, num_columns):
    """Return how many of `others` [M] rank before each `value` [N]: int32 [N]."""
    better = others[None, :] > value[:, None]
    better |= (others[None, :] == value[:, None]) & (other[None, :] < column[:, None])
    better &= (other < num_columns)[None, :]
    return tl.sum(better.to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["num_candidates", "width"])
def _choose_kernel(
    chosen, before, shown, places, token_ids, scores, parents, logprobs, num_steps,
    num_draft_tokens, num_candidates, width,
    TOPK: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    wait_for_previous(DEPENDENT)
    steps, count = tl.load(num_steps + b), tl.load(num_draft_tokens + b)
    first = b * num_candidates
    column = tl.arange(0, COLUMNS)
    inside = column < num_candidates
    value = _counting(scores, first, column, num_candidates, steps, TOPK)
    rank = tl.zeros([COLUMNS], dtype=tl.int32)
    for start in range(0, num_candidates, CHUNK):
        other = start + tl.arange(0, CHUNK)
        others = _counting(scores, first, other, num_candidates, steps, TOPK)
        rank += _num_before(value, column, others, other, num_candidates)
    is_chosen = inside & (rank < count) & (rank < width)
    # Places are counted from 1, in order of numbers.
    place = tl.cumsum(is_chosen.to(tl.int32), axis=0)
    tl.store(places + first + column, place, mask=inside)
    tl.debug_barrier()
    at = b * width + place - 1
    tl.store(chosen + at, tl.load(token_ids + first + column, mask=inside), mask=is_chosen)
    tl.store(shown + at, tl.load(logprobs + first + column, mask=inside), mask=is_chosen)
    parent = tl.load(parents + first + column, mask=inside, other=-1)
    above = tl.load(places + first + tl.maximum(parent, 0), mask=inside & (parent >= 0), other=0)
    tl.store(before + at, above, mask=is_chosen)


@triton.jit
def _counting(scores, first, column, num_candidates, steps, TOPK: tl.constexpr):
    """Return the scores of candidates; -inf for levels that are not used."""
    level = tl.where(column < TOPK, 0, 1 + (column - TOPK) // (TOPK * TOPK))
    counts = (column < num_candidates) & (level < steps)
    return tl.load(scores + first + column, mask=counts, other=float("-inf"))
