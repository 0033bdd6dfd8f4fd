"""Admission in three launches: survival by request, the last slot admitted, what requests verify.

One program finds the last slot of the whole batch by bisection over the bits of survival, which
are ordered like the numbers: nothing is sorted, and the result is the same in every run.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops import admission
from serve_spec.ops.admission import LARGEST_LOGIT, LEAST_SURVIVAL, Admission
from serve_spec.ops.dispatch import dependent_launch, reference_of
from serve_spec.ops.dispatch_triton import wait_for_previous

MAX_SLOTS = 16384
"""Of one batch; more do not fit the registers of one program and are sorted by the reference."""
_LARGEST_LOGIT, _LEAST_SURVIVAL = tl.constexpr(LARGEST_LOGIT), tl.constexpr(LEAST_SURVIVAL)


def admit_drafts(
    logprobs: Tensor,
    query_lens: Tensor,
    depth_limits: Tensor,
    kinds: Tensor,
    calibration: Tensor,
    budget: Tensor,
    drafts: Tensor | None = None,
    parents: Tensor | None = None,
) -> Admission:
    """See `admission.admit_drafts`."""
    if logprobs.numel() > MAX_SLOTS:
        return reference_of(admission.admit_drafts)(
            logprobs, query_lens, depth_limits, kinds, calibration, budget, drafts, parents
        )
    num_requests, width = logprobs.shape
    tree = drafts, parents
    inputs = query_lens, depth_limits, kinds, calibration, *tree
    assert all(x is None or x.is_contiguous() for x in inputs), "requests and slots are dense"
    assert logprobs.stride(1) == 1, "the logprobs of a request are dense"
    moved = [x if parents is None or x is None else torch.empty_like(x) for x in tree]
    survival = logprobs.new_empty(logprobs.shape)
    keys = survival.view(torch.int32)
    lens, last = torch.empty_like(query_lens), query_lens.new_empty(2)
    columns = max(32, triton.next_power_of_2(width))  # `gather` stays inside a warp
    _survival_kernel[(num_requests,)](
        survival, logprobs, parents, query_lens, depth_limits, kinds, calibration, width,
        logprobs.stride(0), LEVELS=calibration.shape[1], COLUMNS=columns,
        num_warps=1, **dependent_launch(logprobs.device),
    )  # fmt: skip
    block = triton.next_power_of_2(logprobs.numel())
    _last_kernel[(1,)](
        last, keys, budget, logprobs.numel(), BLOCK=block,
        num_warps=min(max(block // 512, 4), 16), **dependent_launch(logprobs.device),
    )  # fmt: skip
    _admit_kernel[(num_requests,)](
        lens, *moved, keys, last, query_lens, drafts, parents, width,
        COLUMNS=columns, num_warps=1, **dependent_launch(logprobs.device),
    )  # fmt: skip
    return Admission(lens, survival, *moved)


@triton.jit(do_not_specialize=["width", "stride"])
def _survival_kernel(
    survival, logprobs, parents, query_lens, depth_limits, kinds, calibration, width, stride,
    LEVELS: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per request; a turn goes one level down. 0 for slots that do not exist."""
    b = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    at = b * width + column
    wait_for_previous(DEPENDENT)
    exists = (column < width) & (column < tl.load(query_lens + b) - 1)
    logprob = tl.load(logprobs + b * stride + column, mask=exists, other=float("-inf"))
    exists &= logprob > float("-inf")
    above, level = column - 1, column
    if parents is not None:
        above = tl.load(parents + at, mask=exists, other=0) - 1
        level = tl.zeros([COLUMNS], dtype=tl.int32)
        for _ in range(LEVELS):
            level = tl.where(above < 0, 0, tl.gather(level, tl.maximum(above, 0), 0) + 1)
    exists &= level < tl.minimum(tl.load(depth_limits + b), LEVELS)
    logprob = tl.where(exists, tl.minimum(logprob, -1e-30), -1.0)
    rest = tl.where(
        logprob > -0.01, -logprob * (1 + logprob * (0.5 + logprob / 6)), 1 - tl.exp(logprob)
    )
    logit = tl.minimum(tl.maximum(logprob - tl.log(rest), -_LARGEST_LOGIT), _LARGEST_LOGIT)
    line = calibration + (tl.load(kinds + b) * LEVELS + level) * 2
    value = tl.load(line, mask=exists, other=0.0) * logit + tl.load(line + 1, exists, other=0.0)
    exists &= value == value
    probability = tl.minimum(1.0 / (1.0 + tl.exp(-value)), 1.0)
    product = tl.full([COLUMNS], 1.0, dtype=tl.float32)
    for _ in range(LEVELS):
        before = tl.where(above < 0, 1.0, tl.gather(product, tl.maximum(above, 0), 0))
        at_least = tl.maximum(before * probability, _LEAST_SURVIVAL)
        product = tl.where(exists & (before > 0.0), at_least, 0.0)
    tl.store(survival + at, product, mask=column < width)


@triton.jit(do_not_specialize=["num_slots"])
def _last_kernel(last, keys, budget, num_slots, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Find the key of the last slot admitted, and the last place where slots of it are."""
    place = tl.arange(0, BLOCK)
    wait_for_previous(DEPENDENT)
    key = tl.load(keys + place, mask=place < num_slots, other=0)
    room = tl.maximum(tl.load(budget), 0)
    # The least key that no more slots than there is room for are above; any, if they fill it.
    low = tl.zeros([], dtype=tl.int32)
    high = tl.where(tl.sum((key > 0).to(tl.int32), axis=0) <= room, 0, tl.max(key, axis=0))
    while low < high:
        middle = (low + high) // 2
        count = tl.sum((key > middle).to(tl.int32), axis=0)
        low = tl.where(count > room, middle + 1, tl.where(count == room, middle, low))
        high = tl.where(count > room, high, middle)
    tl.store(last, high)
    room -= tl.sum((key > high).to(tl.int32), axis=0)
    is_equal = (key == high) & (key > 0)
    is_admitted = is_equal & (tl.cumsum(is_equal.to(tl.int32), axis=0) <= room)
    tl.store(last + 1, tl.max(tl.where(is_admitted, place, -1), axis=0))


@triton.jit(do_not_specialize=["width"])
def _admit_kernel(
    lens, new_drafts, new_parents, keys, last, query_lens, drafts, parents, width,
    COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per request counts what is admitted, and moves it to the front."""
    b = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    at = b * width + column
    wait_for_previous(DEPENDENT)
    inside = column < width
    key, least = tl.load(keys + at, mask=inside, other=0), tl.load(last)
    is_admitted = (key > least) | ((key == least) & inside & (at <= tl.load(last + 1)))
    count = tl.sum(is_admitted.to(tl.int32), axis=0)
    tl.store(lens + b, tl.where(tl.load(query_lens + b) > 0, count + 1, 0))
    if parents is not None:
        place = tl.cumsum(is_admitted.to(tl.int32), axis=0)
        above = tl.load(parents + at, mask=is_admitted, other=0)
        before = tl.where(above > 0, tl.gather(place, tl.maximum(above - 1, 0), 0), 0)
        # The others follow, as 0.
        to = b * width + tl.where(is_admitted, place - 1, count + column - place)
        tl.store(new_drafts + to, tl.load(drafts + at, mask=is_admitted, other=0), mask=inside)
        tl.store(new_parents + to, before, mask=inside)
