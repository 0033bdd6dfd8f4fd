"""Device functions for the noise of `ops/noise.py`: the same bits, logarithms within 2^-22."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language.extra import libdevice

_HIGH_UNIT = tl.constexpr(2.0**-16)
_LOW_UNIT = tl.constexpr(2.0**-32)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LN2 = tl.constexpr(math.log(2.0))
_SERIES_END = tl.constexpr(0.125)


@triton.jit
def mix_words(x):
    """See `noise.mix_words`, on uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def load_noise_keys(seeds, sequence, position):
    """See `noise.noise_keys`. seeds: int32 [B, 2], low word first."""
    low, high = _load_seed(seeds, sequence)
    return _noise_keys(low, high, position)


@triton.jit
def load_stream_keys(seeds, sequence, root, position, STREAM: tl.constexpr):
    """See `noise.stream_seeds`: the keys of another stream, in the round that begins at `root`."""
    low, high = _load_seed(seeds, sequence)
    low = mix_words(low ^ mix_words(root.to(tl.uint32)))
    high = mix_words(low ^ high ^ mix_words(tl.full([], STREAM, dtype=tl.uint32)))
    return _noise_keys(mix_words(low ^ high ^ 0x85EBCA6B), high, position)


@triton.jit
def gumbel_noise_of(token_ids, first, second):
    """Return standard Gumbel noise of token ids under two key words, float32."""
    bits = mix_words(token_ids.to(tl.uint32) * 0x9E3779B9 + first)
    bits = mix_words(bits ^ second)
    high, low = (bits >> 16).to(tl.float32), (bits & 0xFFFF).to(tl.float32)
    uniform = tl.fma(high, _HIGH_UNIT, tl.fma(low, _LOW_UNIT, 0.5 * _LOW_UNIT))
    uniform = tl.minimum(uniform, _BELOW_ONE)
    return _log2(_minus_log1p(uniform)) * -_LN2


@triton.jit
def _load_seed(seeds, sequence):
    low = tl.load(seeds + sequence * 2).to(tl.uint32, bitcast=True)
    high = tl.load(seeds + sequence * 2 + 1).to(tl.uint32, bitcast=True)
    return low, high


@triton.jit
def _noise_keys(low, high, position):
    first = mix_words(low ^ mix_words(position.to(tl.uint32)))
    second = mix_words(first ^ mix_words(high ^ 0x9E3779B9) ^ 0x85EBCA6B)
    return first, second


@triton.jit
def _minus_log1p(v):
    """Return -log(1 - v) for 0 < v < 1, precise near 0."""
    series = tl.fma(v, 1 / 7, 1 / 6)
    series = tl.fma(v, series, 1 / 5)
    series = tl.fma(v, series, 1 / 4)
    series = tl.fma(v, series, 1 / 3)
    series = tl.fma(v, series, 1 / 2)
    series = tl.fma(v, series, 1.0) * v
    return tl.where(v < _SERIES_END, series, _log2(1.0 - v) * -_LN2)


@triton.jit
def _log2(x):
    """Return log2(x) within 2^-22, at a tenth of the cost of the precise function."""
    return tl.log2(x) if _INTERPRETED else libdevice.fast_log2f(x)
