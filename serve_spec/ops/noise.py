"""Counter-based Gumbel noise: a pure function of (seed, position, token id).

There is no generator state, so noise does not depend on the batch, on speculation, on preemption or
on a retry. The draft reads the same values (coupled drafting: Daliri, Musco, Suresh, "Coupling
without Communication", arXiv 2408.07978).

The hash is two rounds of a 32-bit avalanche mixer over the token id, each keyed with one word of
(seed, position). Ten Philox rounds over a vocabulary would cost a small model's forward on a CPU.
The hash has the same bits on every device; the logarithms may differ in the last place.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF


class Stream(IntEnum):
    """Independent noise for rejection sampling: drafting, acceptance, recovered tokens.

    A recovered token drawn with its draft's noise would not follow the target's distribution.
    """

    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return two 32-bit key words per row, for `gumbel_noise` and `uniform_noise`.

    seeds: int32 [R, 2], low and high word; positions: int64 [R]. Returns int32 [R, 2].
    """
    low, high = seeds.unbind(1)
    # Constants are 0x9E3779B9 and 0x85EBCA6B as signed words.
    first = mix_words(low ^ mix_words(positions.to(torch.int32)))
    second = mix_words(first ^ mix_words(high ^ -1640531527) ^ -2048144789)
    return torch.stack([first, second], dim=1)


def stream_seeds(stream: Stream, seeds: Tensor, roots: Tensor) -> Tensor:
    """Return seeds [R, 2] of another stream, new in every round.

    seeds: int32 [R, 2]; roots: int64 [R], the first position that each row's round draws. Block
    verification uses the noise of all positions of a block, so the next round must not reuse it.
    """
    low, high = seeds.unbind(1)
    low = mix_words(low ^ mix_words(roots.to(torch.int32)))
    high = mix_words(low ^ high ^ mix_words(torch.full_like(low, stream)))
    return torch.stack([mix_words(low ^ high ^ -2048144789), high], dim=1)  # 0x85EBCA6B


def uniform_noise(keys: Tensor) -> Tensor:
    """Return a uniform number in (0, 1) for every row; int32 [R, 2] -> float64 [R]."""
    return keys[:, 1].double() * 2.0**-32 + (0.5 + 2.0**-33)


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise for every (row, token id).

    keys: int32 [R, 2] from `noise_keys`, on the device to compute on. Returns float32 [R, V].

    The uniform is v = (h + 0.5) / 2^32 and the noise -log(-log1p(-v)), so that small v, the largest
    noise, has full relative precision in float32 (values up to 22.9). v is kept below 1, so noise
    is never minus infinity.
    """
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
    bits = mix_words(token_ids * -1640531527 + keys[:, :1])  # 0x9E3779B9 as a signed word
    bits = mix_words(bits ^ keys[:, 1:])
    # Halves, because a 32-bit word does not fit float32's 24 bits.
    high, low = (bits >> 16) & 0xFFFF, bits & 0xFFFF
    uniform = high.to(torch.float32) * 2.0**-16 + (low.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp_(max=1.0 - 2.0**-24)))


def cached_noise(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """Return `gumbel_noise` of a seed and position, float32 [V or more], from an LRU cache.

    Drafts and verification of a step read the same noise.
    """
    width = -(-vocab_size // 1024) * 1024
    return _noise_of_block(seed, position // _BLOCK, width, device)[position % _BLOCK]


_BLOCK = 4
MAX_CACHED = 64
"""Requests whose newest noise is cached; for more, computing it costs less than the look-up."""


@lru_cache(maxsize=MAX_CACHED)
def _noise_of_block(seed: int, block: int, width: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return the noise of `_BLOCK` positions, computed at once."""
    positions = torch.arange(block * _BLOCK, (block + 1) * _BLOCK)
    seeds = torch.tensor([seed_words(seed)] * _BLOCK, dtype=torch.int32)
    return gumbel_noise(noise_keys(seeds, positions).to(device), width).unbind()


def mix_words(x: Tensor) -> Tensor:
    """Mix int32 words (constants: C. Wellons' `lowbias32`, public domain)."""
    # Right shifts of int32 copy the sign bit; the masks make them unsigned.
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261  # 0x846CA68B
    return x ^ ((x >> 16) & 0xFFFF)


def seed_words(seed: int) -> tuple[int, int]:
    """Return the low and high 32 bits of a seed as int32 values."""
    return _signed(seed & _MASK32), _signed((seed >> 32) & _MASK32)


def _signed(word: int) -> int:
    """Return an unsigned 32-bit word as the int32 with the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word
