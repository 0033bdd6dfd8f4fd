"""Exchanges of the GPUs of one host in one launch, for tensors so small that latency counts.

A kernel begins when the one before it has ended, and with it all its programs: so two slots are
enough here, too (see `shared_sum`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops.dispatch import dependent_launch
from serve_spec.ops.dispatch_triton import wait_for_previous
from serve_spec.ops.linear_triton import load_sum
from serve_spec.ops.shared_sum import (
    EMPTY,
    GATHER_BLOCK,
    NUM_PROGRAMS,
    SHARD_WORDS,
    SLOT_WORDS,
    WORD_BYTES,
    SharedMemory,
    as_words,
    goes_in_shards,
    num_gather_programs,
    part_words,
    shard_words,
)

_PROGRAMS, _SLOT = tl.constexpr(NUM_PROGRAMS), tl.constexpr(SLOT_WORDS)
_RESULTS, _EMPTY = tl.constexpr(SHARD_WORDS), tl.constexpr(EMPTY)
_WORDS_PER_THREAD = 4
_NORM_WORDS_PER_THREAD = 8


def sum_over_ranks(x: Tensor, memory: SharedMemory) -> None:
    """See `shared_sum.sum_over_ranks`. Launches on the current stream."""
    num_words = as_words(x).numel()
    if not num_words:
        return
    part = part_words(num_words)
    places, setting = _way(x, part, memory)
    _sum_kernel[(triton.cdiv(num_words, part),)](
        x, num_words, *places, **setting, WORDS=part,
        num_warps=_num_warps(part, _WORDS_PER_THREAD), **dependent_launch(x.device),
    )  # fmt: skip


def sum_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, memory: SharedMemory
) -> tuple[Tensor, Tensor]:
    """See `shared_sum.sum_add_norm`. Launches on the current stream."""
    num_rows, width = residual.shape
    num_words = residual.nbytes // WORD_BYTES // num_rows
    block = triton.next_power_of_2(num_words)
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    places, setting = _way(residual, num_words, memory)
    _sum_add_norm_kernel[(num_rows,)](
        x, residual, weight, out, total, num_words, width, eps, num_rows * width,
        *places, **setting, NUM_PARTIALS=len(x) if x.dim() > residual.dim() else 1, WORDS=block,
        num_warps=_num_warps(block, _NORM_WORDS_PER_THREAD), **dependent_launch(x.device),
    )  # fmt: skip
    return out, total


def broadcast_words(x: Tensor, source: int, memory: SharedMemory) -> None:
    """See `shared_sum.broadcast_words`. Launches on the current stream."""
    words = as_words(x)
    part = part_words(words.numel())
    _broadcast_kernel[(triton.cdiv(words.numel(), part),)](
        words, words.numel(), memory.counts, memory.released, memory.slots,
        RANK=memory.rank, SIZE=memory.size, SOURCE=source, WORDS=part,
        num_warps=_num_warps(part, _WORDS_PER_THREAD), **dependent_launch(x.device),
    )  # fmt: skip


def gather_columns(x: Tensor, start: int, width: int, memory: SharedMemory) -> Tensor:
    """See `shared_sum.gather_columns`. Launches on the current stream."""
    num_rows = len(x)
    _gather_kernel[(num_gather_programs(x),)](
        x, num_rows, max(0, min(x.shape[1], width - start)), x.stride(0), start, width,
        memory.counts, memory.released, memory.gathered, memory.flags,
        RANK=memory.rank, SIZE=memory.size, BLOCK=GATHER_BLOCK,
        num_warps=8, **dependent_launch(x.device),
    )  # fmt: skip
    return memory.gathered[memory.rank][: num_rows * width].view(num_rows, width)


def _way(x: Tensor, part: int, memory: SharedMemory) -> tuple[list[Any], dict[str, int]]:
    """What kernels pass on to `_sum_over_ranks`; part: words of a program."""
    in_shards = goes_in_shards(x.nbytes, memory.size)
    return [memory.counts, memory.released, memory.slots], {
        "RANK": memory.rank,
        "SIZE": memory.size,
        "PER_WORD": WORD_BYTES // x.itemsize,
        "SHARD": shard_words(part, memory.size) if in_shards else 0,
    }


def _num_warps(words: int, words_per_thread: int) -> int:
    return min(max(words // (32 * words_per_thread), 1), 16)


@triton.jit
def _sum_kernel(
    x, num_words, counts, released, slots,
    RANK: tl.constexpr, SIZE: tl.constexpr, PER_WORD: tl.constexpr, SHARD: tl.constexpr,
    WORDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * WORDS
    wait_for_previous(DEPENDENT)
    own, count = x + start * PER_WORD, num_words - start
    total = _sum_over_ranks(
        own, x.dtype.element_ty, 0, count, counts, released, slots,
        RANK, SIZE, PER_WORD, SHARD, WORDS, 1,
    )  # fmt: skip
    at = tl.arange(0, WORDS * PER_WORD)
    tl.store(own + at, total, mask=at < count * PER_WORD)


@triton.jit
def _sum_add_norm_kernel(
    x, residual, weight, out, total, num_words, width, eps, addend_stride,
    counts, released, slots,
    RANK: tl.constexpr, SIZE: tl.constexpr, PER_WORD: tl.constexpr, SHARD: tl.constexpr,
    NUM_PARTIALS: tl.constexpr, WORDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, WORDS * PER_WORD)
    gain = tl.load(weight + at, mask=at < width, other=0.0)
    wait_for_previous(DEPENDENT)
    addend = tl.load(residual + row * width + at, mask=at < width, other=0.0)
    values = _sum_over_ranks(
        x + row * width, out.dtype.element_ty, addend_stride, num_words, counts, released, slots,
        RANK, SIZE, PER_WORD, SHARD, WORDS, NUM_PARTIALS,
    )  # fmt: skip
    values = (values.to(tl.float32) + addend.to(tl.float32)).to(values.dtype)
    tl.store(total + row * width + at, values, mask=at < width)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values) / width + eps)
    tl.store(out + row * width + at, values * scale * gain.to(tl.float32), mask=at < width)


@triton.jit
def _sum_over_ranks(
    x, dtype: tl.constexpr, addend_stride, num_words, counts, released, slots,
    RANK: tl.constexpr, SIZE: tl.constexpr, PER_WORD: tl.constexpr, SHARD: tl.constexpr,
    WORDS: tl.constexpr, NUM_PARTIALS: tl.constexpr,
):  # fmt: skip
    """The sum of all ranks' parts, as numbers [WORDS · PER_WORD] of `dtype`.

    x: where this rank's part is, or the first of its addends. SHARD: words in a shard, 0 for none.
    """
    count = tl.load(counts + tl.program_id(0)) + 1
    at = tl.arange(0, WORDS * PER_WORD)
    own = load_sum(x + at, at < num_words * PER_WORD, addend_stride, NUM_PARTIALS, dtype)
    own = _words(own, WORDS, PER_WORD)
    if SHARD == 0:
        total = _at_once(
            own, tl.arange(0, WORDS) < num_words, dtype, count, counts, released, slots,
            RANK, SIZE, WORDS, PER_WORD,
        )  # fmt: skip
    else:
        total = _in_shards(
            own, num_words, dtype, count, counts, released, slots,
            RANK, SIZE, WORDS, PER_WORD, SHARD,
        )  # fmt: skip
    return total


@triton.jit
def _at_once(
    own, inside, dtype: tl.constexpr, count, counts, released, slots,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr, PER_WORD: tl.constexpr,
):  # fmt: skip
    slot = _send(own, inside, count, counts, slots, RANK, SIZE, WORDS)
    total = tl.zeros([WORDS * PER_WORD], dtype=tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += _numbers(own, dtype, PER_WORD)
        else:
            place = slots[RANK] + slot + rank * _SLOT
            words = _received(place, inside, released, 1)
            _empty(place, inside, 1)
            total += _numbers(words[0], dtype, PER_WORD)
    return total.to(dtype)


@triton.jit
def _in_shards(
    own, num_words, dtype: tl.constexpr, count, counts, released, slots,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr, PER_WORD: tl.constexpr,
    SHARD: tl.constexpr,
):  # fmt: skip
    """Send every rank its shard, add up the own one, and exchange the results."""
    program = tl.program_id(0)
    slot = ((count & 1) * _PROGRAMS + program) * SIZE * _SLOT
    at = tl.arange(0, WORDS)
    inside = at < num_words
    for step in tl.static_range(SIZE):
        # Every rank starts with a different receiver, so that none receives from all at once.
        place = slots[(RANK + step) % SIZE] + slot + RANK * _SLOT + at % SHARD
        is_theirs = inside & (at // SHARD == (RANK + step) % SIZE)
        tl.store(place, own, mask=is_theirs, cache_modifier=".wt")
    tl.debug_barrier()  # as in `_send`
    tl.store(counts + program, count)
    ROOM: tl.constexpr = triton.next_power_of_2(SHARD)
    shard = tl.arange(0, ROOM)
    mine = (shard < SHARD) & (RANK * SHARD + shard < num_words)
    addends = _received(slots[RANK] + slot + shard, mine, released, SIZE)
    total = tl.zeros([ROOM * PER_WORD], dtype=tl.float32)
    for rank in tl.static_range(SIZE):
        total += _numbers(addends[rank], dtype, PER_WORD)
    result = _words(total.to(dtype), ROOM, PER_WORD)
    for step in tl.static_range(SIZE):
        place = slots[(RANK + step) % SIZE] + slot + RANK * _SLOT + _RESULTS + shard
        tl.store(place, result, mask=mine, cache_modifier=".wt")
    _empty(slots[RANK] + slot + shard, mine, SIZE)
    place = slots[RANK] + slot + at // SHARD * _SLOT + _RESULTS + at % SHARD
    words = _received(place, inside, released, 1)
    _empty(place, inside, 1)
    return _numbers(words[0], dtype, PER_WORD).to(dtype)


@triton.jit
def _broadcast_kernel(
    x, num_words, counts, released, slots,
    RANK: tl.constexpr, SIZE: tl.constexpr, SOURCE: tl.constexpr, WORDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    wait_for_previous(DEPENDENT)
    at = program * WORDS + tl.arange(0, WORDS)
    inside = at < num_words
    own = tl.load(x + at, mask=inside, other=0)
    own = tl.where(own == _EMPTY, 0, own)
    count = tl.load(counts + program) + 1
    slot = _send(own, inside, count, counts, slots, RANK, SIZE, WORDS)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            place = slots[RANK] + slot + rank * _SLOT
            while _are_empty(place, inside, released):
                pass
            if rank == SOURCE:
                tl.store(x + at, tl.load(place, mask=inside, volatile=True), mask=inside)
            _empty(place, inside, 1)


@triton.jit
def _send(
    own, inside, count, counts, slots,
    RANK: tl.constexpr, SIZE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Send this rank's words to all others; return where theirs arrive."""
    program = tl.program_id(0)
    slot = ((count & 1) * _PROGRAMS + program) * SIZE * _SLOT + tl.arange(0, WORDS)
    for step in tl.static_range(1, SIZE):
        place = slots[(RANK + step) % SIZE] + slot + RANK * _SLOT
        # Written through, so that no cache of this GPU keeps what is waited for elsewhere.
        tl.store(place, own, mask=inside, cache_modifier=".wt")
    # All have read the count before it is changed, and nothing is waited for that is not sent.
    tl.debug_barrier()
    tl.store(counts + program, count)
    return slot


@triton.jit
def _empty(place, inside, NUM: tl.constexpr):
    """Empty the places of words that have arrived, once all threads have read them."""
    tl.debug_barrier()
    for rank in tl.static_range(NUM):
        tl.store(place + rank * _SLOT, tl.full(place.shape, _EMPTY, tl.int32), mask=inside)


@triton.jit
def _gather_kernel(
    x, num_rows, num_columns, stride, start, width, counts, released, gathered, flags,
    RANK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    wait_for_previous(DEPENDENT)
    blocks_of_row = tl.cdiv(num_columns, BLOCK)
    for block in tl.range(program, num_rows * blocks_of_row, tl.num_programs(0)):
        row = block // blocks_of_row
        column = block % blocks_of_row * BLOCK + tl.arange(0, BLOCK)
        inside = column < num_columns
        numbers = tl.load(x + row.to(tl.int64) * stride + column, mask=inside)
        for step in tl.static_range(SIZE):
            place = gathered[(RANK + step) % SIZE] + row.to(tl.int64) * width + start + column
            tl.store(place, numbers, mask=inside)
    count = tl.load(counts + program) + 1
    _exchange_flags(count, released, flags, RANK, SIZE)
    tl.store(counts + program, count)


@triton.jit
def _exchange_flags(count, released, flags, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Set the flags of this program's stores on all other ranks, and wait for theirs."""
    first = tl.program_id(0) * SIZE
    rank = tl.arange(0, triton.next_power_of_2(SIZE))
    place = flags[0] + first + RANK + tl.zeros_like(rank)
    for other in tl.static_range(1, SIZE):
        place = tl.where(rank == other, flags[other] + first + RANK, place)
    # One thread sets the flag for all; the release makes their stores visible to every GPU first.
    tl.debug_barrier()
    flag = tl.zeros_like(rank).to(tl.int64) + count
    tl.atomic_xchg(place, flag, mask=(rank < SIZE) & (rank != RANK), sem="release", scope="sys")
    own = flags[RANK] + first
    while _num_missing(own, count, released, RANK, SIZE) > 0:
        pass


@triton.jit
def _num_missing(flags, count, released, RANK: tl.constexpr, SIZE: tl.constexpr):
    """Return how many flags lack the count; 0 once the ranks are released.

    Every thread reads for itself: copies of one small tensor need not agree within a warp.
    """
    over = tl.load(released, volatile=True)
    missing = 0
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            missing += (tl.load(flags + rank, volatile=True) != count).to(tl.int32)
    return missing * (over == 0).to(tl.int32)


@triton.jit
def _received(place, inside, released, NUM: tl.constexpr):
    """Return the words of NUM ranks, the first at `place`, once all have arrived."""
    words, over = _look(place, inside, released, NUM)
    while _are_waited_for(words, over, inside, NUM):
        words, over = _look(place, inside, released, NUM)
    return words


@triton.jit
def _are_empty(place, inside, released):
    words, over = _look(place, inside, released, 1)
    return _are_waited_for(words, over, inside, 1)


@triton.jit
def _look(place, inside, released, NUM: tl.constexpr):
    """Load all words, then wait for them together; volatile, for polling."""
    words = (tl.load(place, mask=inside, other=0, volatile=True),)
    for rank in tl.static_range(1, NUM):
        word = tl.load(place + rank * _SLOT, mask=inside, other=0, volatile=True)
        words += (word,)  # type: ignore[assignment]
    return words, tl.load(released, volatile=True)


@triton.jit
def _are_waited_for(words, over, inside, NUM: tl.constexpr):
    # All threads agree, though some may have seen the release of this rank, and others not yet.
    empty = words[0] == _EMPTY
    for rank in tl.static_range(1, NUM):
        empty |= words[rank] == _EMPTY
    return tl.max((inside & empty & (over == 0)).to(tl.int32), axis=0) > 0


@triton.jit
def _words(numbers, WORDS: tl.constexpr, PER_WORD: tl.constexpr):
    """Return numbers [WORDS · PER_WORD] as words to send, the first in its word's lower half."""
    if PER_WORD == 1:
        words = numbers.to(tl.int32, bitcast=True)
    else:
        halves = numbers.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        low, high = tl.split(tl.reshape(halves, [WORDS, 2]))
        words = low | (high << 16)
    return tl.where(words == _EMPTY, 0, words)


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
