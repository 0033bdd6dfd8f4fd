"""Counter-based Gumbel noise: a pure function of (seed, position, token id).

No generator state exists, so the noise a token sees cannot depend on the batch it is computed in,
on speculation, on preemption or on a retry. The draft reads the same values (coupled drafting:
Daliri, Musco, Suresh, "Coupling without Communication", arXiv 2408.07978).

The hash is two rounds of a 32-bit avalanche mixer over the token id, each keyed with one word
derived from (seed, position). It is not Philox: ten Philox rounds over a whole vocabulary cost a
small model's forward on a CPU, and nothing here needs cryptographic strength. The hash is integer
arithmetic, the same bits on every device; the logarithms may differ in the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TypeAlias

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF


def row_keys(seeds: list[int], positions: list[int]) -> Tensor:
    """Two 32-bit key words per row, from 64-bit seeds and absolute positions.

    Returns int32 [R, 2] on the CPU. Host integers: R is small, and Python's own arithmetic leaves
    no doubt about overflow.
    """
    keys = []
    for seed, position in zip(seeds, positions, strict=True):
        low, high = seed & _MASK32, (seed >> 32) & _MASK32
        first = _mix_int(low ^ _mix_int(position & _MASK32))
        second = _mix_int(first ^ _mix_int(high ^ 0x9E3779B9) ^ 0x85EBCA6B)
        keys.append((_signed(first), _signed(second)))
    return torch.tensor(keys, dtype=torch.int32).reshape(len(keys), 2)


class Stream(IntEnum):
    """Noise besides that of the sampling law, for rounds that sample drafts and reject some.

    Were a token drawn in place of a lost draft to see that draft's own noise, it would not follow
    the target's distribution.
    """

    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


StreamKeys: TypeAlias = Callable[[Stream, list[int], list[int], list[int]], Tensor]
"""See `stream_keys`."""


def stream_keys(stream: Stream, seeds: list[int], roots: list[int], positions: list[int]) -> Tensor:
    """`row_keys` of another stream, whose noise is new in every round.

    roots: the position that each row's round decides first. Whether a block of drafts is kept
    depends on the noise of all its positions; the next round must not see it again.
    """
    apart = [_stream_seed(stream, *row) for row in zip(seeds, roots, strict=True)]
    return row_keys(apart, positions)


def uniform_noise(keys: Tensor) -> Tensor:
    """One number in (0, 1) for every row; int32 [R, 2] -> float64 [R]."""
    return keys[:, 1].double() * 2.0**-32 + (0.5 + 2.0**-33)


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every (row, token id).

    keys: int32 [R, 2] from `row_keys`, on the device to compute on. Returns float32 [R, V].

    The uniform is v = (h + 0.5) / 2^32 and the noise -log(-log1p(-v)): small v, where the winners
    live, keeps full relative precision in float32 (values up to 22.9), and v is kept below 1 so
    that a token can never see minus infinity.
    """
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    bits = mix_words(token_ids * -1640531527 + keys[:, :1])  # 0x9E3779B9 as a signed word
    bits = mix_words(bits ^ keys[:, 1:])
    # Halves: a 32-bit word does not fit float32's 24 bits, and the small values are the winners.
    high, low = (bits >> 16) & 0xFFFF, bits & 0xFFFF
    uniform = high.to(torch.float32) * 2.0**-16 + (low.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp_(max=1.0 - 2.0**-24)))


def mix_words(x: Tensor) -> Tensor:
    """Avalanche mixer on int32 words (constants: C. Wellons' `lowbias32`, public domain)."""
    # Right shifts of int32 copy the sign bit, hence the masks: the law is on unsigned words.
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261  # 0x846CA68B
    return x ^ ((x >> 16) & 0xFFFF)


def _mix_int(x: int) -> int:
    """`mix_words` on one unsigned Python integer."""
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _MASK32
    x ^= x >> 15
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def _stream_seed(stream: Stream, seed: int, root: int) -> int:
    """64 bits that have nothing in common with those of another stream, seed or root."""
    low = _mix_int((seed & _MASK32) ^ _mix_int(root & _MASK32))
    high = _mix_int(low ^ ((seed >> 32) & _MASK32) ^ _mix_int(stream))
    return high << 32 | _mix_int(low ^ high ^ 0x85EBCA6B)


def seed_words(seed: int) -> tuple[int, int]:
    """Low and high 32 bits of a seed, as int32 holds them."""
    return _signed(seed & _MASK32), _signed((seed >> 32) & _MASK32)


def _signed(word: int) -> int:
    """An unsigned 32-bit word as the int32 with the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word
