"""The throughput equation: what K drafts a round buy, and from which accept rate on they pay.

    tokens per round   n(a, K) = 1 + a + ... + a^K      (= (1 - a^(K+1)) / (1 - a) for a < 1)
    time of a round    t(K)    = K · t_draft + t_target(batch_size · (K + 1) rows)
    speedup over off   S(a, K) = n(a, K) · t(0) / t(K)

The accept rate a is the chance that a draft is kept, given that all before it were; it is taken to
be the same at every position. Source: Leviathan et al., "Fast Inference from Transformers via
Speculative Decoding", section 3.

`round_ms[K]` is t(K) in ms throughout: positive, for K = 0, 1, ... without gaps; K = 0 is off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class BreakEven(NamedTuple):
    """The accept rate at which `num_steps` drafts a round are as fast as none."""

    accept_rate: float
    num_steps: int


def round_times(
    *, draft_ms: float, target_ms: float, verify_ms_per_row: float, batch_size: int, max_steps: int
) -> list[float]:
    """t(K) of a linear machine for K = 0..max_steps, in ms.

    draft_ms: one draft forward of the batch. target_ms: one round of the batch without drafts.
    verify_ms_per_row: what each row beyond a sequence's first adds to the target's forward.
    """
    step_ms = draft_ms + verify_ms_per_row * batch_size
    return [target_ms + num_steps * step_ms for num_steps in range(max_steps + 1)]


def tokens_per_round(accept_rate: float, num_steps: int) -> float:
    """n(a, K), tokens a sequence emits in a round on average: 1..K+1."""
    tokens = 1.0
    for _ in range(num_steps):
        tokens = 1.0 + accept_rate * tokens
    return tokens


def speedup(accept_rate: float, num_steps: int, round_ms: Sequence[float]) -> float:
    """S(a, K): tokens per ms with K drafts a round, relative to off."""
    return tokens_per_round(accept_rate, num_steps) * round_ms[0] / round_ms[num_steps]


def best_num_steps(accept_rate: float, round_ms: Sequence[float]) -> int:
    """The fastest K, 0 included; the fewest steps of equals."""
    return max(range(len(round_ms)), key=lambda k: (speedup(accept_rate, k, round_ms), -k))


def break_even_rate(num_steps: int, round_ms: Sequence[float]) -> float | None:
    """The a at which K = `num_steps` ≥ 1 is as fast as off; None: it never is.

    0 where it is faster than off even if no draft is kept.
    """
    needed = round_ms[num_steps] / round_ms[0]
    if needed > num_steps + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):  # halves the interval down to the last bits of a float
        middle = (low + high) / 2
        if tokens_per_round(middle, num_steps) < needed:
            low = middle
        else:
            high = middle
    return high if needed > 1 else 0.0


def break_even(round_ms: Sequence[float]) -> BreakEven | None:
    """The smallest accept rate at which any depth pays, and that depth; None: none ever does."""
    points = [
        BreakEven(rate, num_steps)
        for num_steps in range(1, len(round_ms))
        if (rate := break_even_rate(num_steps, round_ms)) is not None
    ]
    return min(points, default=None)
