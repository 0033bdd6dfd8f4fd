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

from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF


class Stream(IntEnum):
    """Noise besides that of the sampling law, for rounds that sample drafts and reject some.

    Were a token drawn in place of a lost draft to see that draft's own noise, it would not follow
    the target's distribution.
    """

    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


def row_keys_of(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return two 32-bit key words per row, for `gumbel_noise` and `uniform_noise`.

    seeds: int32 [R, 2], low and high word; positions: int64 [R]. Returns int32 [R, 2].
    """
    low, high = seeds.unbind(1)
    # Constants are 0x9E3779B9 and 0x85EBCA6B as signed words.
    first = mix_words(low ^ mix_words(positions.to(torch.int32)))
    second = mix_words(first ^ mix_words(high ^ -1640531527) ^ -2048144789)
    return torch.stack([first, second], dim=1)


def stream_seeds_of(stream: Stream, seeds: Tensor, roots: Tensor) -> Tensor:
    """Return seeds [R, 2] whose noise is that of another stream, new in every round.

    seeds: int32 [R, 2]; roots: int64 [R], the position that each row's round decides first.
    Whether a block of drafts is kept depends on the noise of all its positions: the next round
    must not see it again.
    """
    low, high = seeds.unbind(1)
    low = mix_words(low ^ mix_words(roots.to(torch.int32)))
    high = mix_words(low ^ high ^ mix_words(torch.full_like(low, stream)))
    return torch.stack([mix_words(low ^ high ^ -2048144789), high], dim=1)  # 0x85EBCA6B


def uniform_noise(keys: Tensor) -> Tensor:
    """One number in (0, 1) for every row; int32 [R, 2] -> float64 [R]."""
    return keys[:, 1].double() * 2.0**-32 + (0.5 + 2.0**-33)


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every (row, token id).

    keys: int32 [R, 2] from `row_keys_of`, on the device to compute on. Returns float32 [R, V].

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


def known_noise(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """`gumbel_noise` of a seed's position, float32 [V or more].

    The newest are kept: drafts and verification read the same, over vocabularies of their own.
    """
    width = -(-vocab_size // 1024) * 1024
    return _noise_of_block(seed, position // _BLOCK, width, device)[position % _BLOCK]


_BLOCK = 4
MAX_KNOWN = 64
"""Requests whose newest noise is kept; with more, making it anew costs less than looking it up."""


@lru_cache(maxsize=MAX_KNOWN)
def _noise_of_block(seed: int, block: int, width: int, device: torch.device) -> tuple[Tensor, ...]:
    """The noise of `_BLOCK` positions, made at once: the text will come to all of them."""
    positions = torch.arange(block * _BLOCK, (block + 1) * _BLOCK)
    seeds = torch.tensor([seed_words(seed)] * _BLOCK, dtype=torch.int32)
    return gumbel_noise(row_keys_of(seeds, positions).to(device), width).unbind()


def mix_words(x: Tensor) -> Tensor:
    """Avalanche mixer on int32 words (constants: C. Wellons' `lowbias32`, public domain)."""
    # Right shifts of int32 copy the sign bit, hence the masks: the law is on unsigned words.
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -2073254261  # 0x846CA68B
    return x ^ ((x >> 16) & 0xFFFF)


def seed_words(seed: int) -> tuple[int, int]:
    """Low and high 32 bits of a seed, as int32 holds them."""
    return _signed(seed & _MASK32), _signed((seed >> 32) & _MASK32)


def _signed(word: int) -> int:
    """An unsigned 32-bit word as the int32 with the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word
