"""What `bench kernels` is measured against: figures of one GPU and one shape, and aims.

The figures are those of an H200 and Llama-3.1-8B's shape in bfloat16, 256 prompt and 256 new
tokens. "Leading" is SGLang 0.5.15 with FlashInfer there: plain decoding, and an EAGLE-3 head of one
layer with 32k output rows whose accept length is simulated at 2.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Aim: TypeAlias = dict[str, Any]
"""A figure beside its aim: figure, value, aim, at_most, miss_percent (0: reached)."""

LINEARS_MS: Mapping[int, float] = {
    1: 4.73, 2: 4.89, 4: 4.94, 8: 5.05, 16: 5.21, 32: 5.34, 48: 5.45, 64: 5.48, 96: 5.78,
    128: 6.04, 192: 7.31, 256: 8.74, 384: 11.8, 512: 14.8,
}  # fmt: skip
"""torch's products over all weights, one CUDA graph, by rows."""

LEADING_STEP_MS: Mapping[int, float] = {1: 4.79, 8: 5.05, 16: 5.24, 32: 5.59, 64: 6.31, 128: 7.77}
"""Its plain step by batch size; the aim is to be no slower."""

ROUND_STEPS = 3
"""Drafts of the rounds that have an aim."""
ACCEPT_LENGTH = 2.5
ROUND_AIM_MS: Mapping[int, float] = {1: 5.8, 8: 6.2, 32: 8.0, 64: 10.5, 128: 17.5}
LEADING_ROUND_MS: Mapping[int, float] = {
    1: 6.80, 8: 7.46, 16: 8.07, 32: 9.19, 64: 12.78, 128: 21.41,
}  # fmt: skip
EFFICIENCY_AIM: Mapping[int, float] = {3: 0.80, 7: 0.70}
"""Speed over plain, per token of accept length, at batch size 1; by drafts."""

LEADING_ADAPTIVE: Mapping[int, float] = {32: 7779.0, 64: 7990.0, 128: 13010.0}
"""Tokens per second of its adaptive policy, as it is shipped."""
OVER_LEADING_AIM: Mapping[int, float] = {32: 1.15, 64: 1.6, 128: 1.27}
OVER_BEST_FIXED_AIM = 0.99

IDLE_SHARE_AIM = 0.05
SWITCH_AIM_US = 50.0


def at_most(figure: str, value: float, aim: float) -> Aim:
    """A figure that should not exceed its aim."""
    excess = value - aim
    return _aim(figure, value, aim, excess, at_most=True)


def at_least(figure: str, value: float, aim: float) -> Aim:
    """A figure that should reach its aim."""
    return _aim(figure, value, aim, aim - value, at_most=False)


def _aim(figure: str, value: float, aim: float, shortfall: float, *, at_most: bool) -> Aim:
    # Of an aim of nothing, anything is all of it too much.
    share = shortfall / aim if aim else float(shortfall > 0)
    return {
        "figure": figure,
        "value": value,
        "aim": aim,
        "at_most": at_most,
        "miss_percent": round(100 * max(0.0, share), 1),
    }
