"""Sums over the GPUs of one host in one launch, for tensors small enough that latency counts.

A kernel begins when the one before it has ended, and with it all its programs: so two slots are
enough here, too (see `shared_sum`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops.dependent_launch import dependent_launch
from serve_spec.ops.shared_sum import (
    NUM_PROGRAMS,
    NUMBER_MASK,
    SLOT_WORDS,
    SharedMemory,
    as_words,
    part_words,
)

_WORDS_PER_THREAD = 4
_NORM_WORDS_PER_THREAD = 8


def sum_over_ranks(x: Tensor, memory: SharedMemory) -> None:
    """See `shared_sum.sum_over_ranks`. Launches on the current stream."""
    if x.numel():
        _launch_sum(x, memory, part_words(as_words(x).numel()), _WORDS_PER_THREAD)


def sum_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, memory: SharedMemory
) -> tuple[Tensor, Tensor]:
    """See `shared_sum.sum_add_norm`. Launches on the current stream."""
    return _launch_norm(x, residual, weight, eps, memory, _NORM_WORDS_PER_THREAD)


def _launch_sum(x: Tensor, memory: SharedMemory, part: int, words_per_thread: int) -> None:
    words = as_words(x)
    dependent = dependent_launch(x.device)
    _sum_kernel[(triton.cdiv(words.numel(), part),)](
        words, x, words.numel(), memory.counts, memory.released, memory.slots,
        RANK=memory.rank, SIZE=memory.size, PROGRAMS=NUM_PROGRAMS, SLOT=SLOT_WORDS,
        MASK=NUMBER_MASK, WORDS=part, PER_WORD=words.itemsize // x.itemsize, DEPENDENT=dependent,
        num_warps=_num_warps(part, words_per_thread), launch_pdl=dependent,
    )  # fmt: skip


def _launch_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    memory: SharedMemory,
    words_per_thread: int,
) -> tuple[Tensor, Tensor]:
    num_rows, width = x.shape
    words = as_words(x)
    block = triton.next_power_of_2(words.numel() // num_rows)
    out, total = torch.empty_like(x), torch.empty_like(x)
    dependent = dependent_launch(x.device)
    _sum_add_norm_kernel[(num_rows,)](
        words, residual, weight, out, total, words.numel() // num_rows, width, eps,
        memory.counts, memory.released, memory.slots,
        RANK=memory.rank, SIZE=memory.size, PROGRAMS=NUM_PROGRAMS, SLOT=SLOT_WORDS,
        MASK=NUMBER_MASK, WORDS=block, PER_WORD=words.itemsize // x.itemsize, DEPENDENT=dependent,
        num_warps=_num_warps(block, words_per_thread), launch_pdl=dependent,
    )  # fmt: skip
    return out, total


def _num_warps(words: int, words_per_thread: int) -> int:
    return min(max(words // (32 * words_per_thread), 1), 16)


@triton.jit
def _sum_kernel(
    words, x, num_words, counts, released, slots,
    RANK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, SLOT: tl.constexpr,
    MASK: tl.constexpr, WORDS: tl.constexpr, PER_WORD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * WORDS
    inside = start + tl.arange(0, WORDS) < num_words
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    own = tl.load(words + start + tl.arange(0, WORDS), mask=inside, other=0)
    total = _exchange(
        own, inside, x.dtype.element_ty, counts, released, slots,
        RANK, SIZE, PROGRAMS, SLOT, MASK, WORDS, PER_WORD,
    )  # fmt: skip
    at = start * PER_WORD + tl.arange(0, WORDS * PER_WORD)
    tl.store(x + at, total, mask=at < num_words * PER_WORD)


@triton.jit
def _sum_add_norm_kernel(
    words, residual, weight, out, total, num_words, width, eps, counts, released, slots,
    RANK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, SLOT: tl.constexpr,
    MASK: tl.constexpr, WORDS: tl.constexpr, PER_WORD: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    word = tl.arange(0, WORDS)
    at = tl.arange(0, WORDS * PER_WORD)
    gain = tl.load(weight + at, mask=at < width, other=0.0)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    own = tl.load(words + row * num_words + word, mask=word < num_words, other=0)
    addend = tl.load(residual + row * width + at, mask=at < width, other=0.0)
    values = _exchange(
        own, word < num_words, out.dtype.element_ty, counts, released, slots,
        RANK, SIZE, PROGRAMS, SLOT, MASK, WORDS, PER_WORD,
    )  # fmt: skip
    values = (values.to(tl.float32) + addend.to(tl.float32)).to(values.dtype)
    tl.store(total + row * width + at, values, mask=at < width)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / width + eps)
    tl.store(out + row * width + at, values * scale * gain.to(tl.float32), mask=at < width)


@triton.jit
def _exchange(
    own, inside, dtype: tl.constexpr, counts, released, slots,
    RANK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr, SLOT: tl.constexpr,
    MASK: tl.constexpr, WORDS: tl.constexpr, PER_WORD: tl.constexpr,
):  # fmt: skip
    """The sum of all ranks' parts, as numbers [WORDS · PER_WORD]; own: this rank's, as words."""
    program = tl.program_id(0)
    count = tl.load(counts + program) + 1
    number = count & MASK
    slot = ((count & 1) * PROGRAMS + program) * SIZE * SLOT + tl.arange(0, WORDS)
    sent = (own.to(tl.int64) & 0xFFFFFFFF) | (number << 32)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            # Written through, so that no cache of this GPU keeps what is waited for elsewhere.
            place = slots[rank] + slot + RANK * SLOT
            tl.store(place, sent, mask=inside, cache_modifier=".wt")
    # All have read the count before it is changed, and nothing is waited for that is not sent.
    tl.debug_barrier()
    tl.store(counts + program, count)
    total = tl.zeros([WORDS * PER_WORD], dtype=tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += _numbers(own, dtype, PER_WORD)
        else:
            place = slots[RANK] + slot + rank * SLOT
            word, over = _look(place, inside, released)
            while _is_waited_for(word, over, number, inside):
                word, over = _look(place, inside, released)
            total += _numbers(word.to(tl.int32), dtype, PER_WORD)
    return total.to(dtype)


@triton.jit
def _look(place, inside, released):
    """Both at once, for each takes as long as the other; volatile: read again and again."""
    word = tl.load(place, mask=inside, other=0, volatile=True)
    return word, tl.load(released, volatile=True)


@triton.jit
def _is_waited_for(word, over, number, inside):
    # All threads agree, though some may have seen the release of this rank, and others not yet.
    missing = inside & ((word >> 32) != number) & (over == 0)
    return tl.max(missing.to(tl.int32), axis=0) > 0


@triton.jit
def _numbers(words, dtype: tl.constexpr, PER_WORD: tl.constexpr):
    """float32 [WORDS · PER_WORD], the lower half of each word first."""
    if PER_WORD == 1:
        numbers = words.to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.int16).to(dtype, bitcast=True)
        high = (words >> 16).to(tl.int16).to(dtype, bitcast=True)
        numbers = tl.interleave(low, high).to(tl.float32)
    return numbers
