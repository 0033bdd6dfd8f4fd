"""Grammar masks in one launch; rows without one read their place only."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops.dependent_launch import dependent_launch
from serve_spec.ops.token_masks import LEAST

_PARTS = 16
"""Programs per row: few, because most rows have no mask."""
_BLOCK = 2048
_LEAST = tl.constexpr(LEAST)


def mask_scores(
    logits: Tensor, owners: Tensor, offsets: Tensor, places: Tensor, words: Tensor
) -> None:
    """See `token_masks.mask_scores`."""
    dependent = dependent_launch(logits.device)
    _mask_kernel[(_PARTS, logits.shape[0])](
        logits, logits.stride(0), owners, offsets, places, len(places), places.stride(0),
        words, words.shape[1], logits.shape[1],
        BLOCK=_BLOCK, DEPENDENT=dependent, num_warps=4, launch_pdl=dependent,
    )  # fmt: skip


@triton.jit
def _mask_kernel(
    logits, row_stride, owners, offsets, places, num_owners, place_stride,
    words, num_words, num_ids,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per (part of the vocabulary, row)."""
    part, row = tl.program_id(0), tl.program_id(1)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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
