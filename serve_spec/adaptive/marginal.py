"""What one more request costs a batch: the time its tokens take from everybody, per token.

    θ(b) = max over k of  b · tokens per row (k) / round ms (b, k)        tokens per ms of b rows

A batch that grows from b to 2b rows emits θ(2b) - θ(b) tokens per ms more, shared by b newcomers.
The inverse of one newcomer's share is its marginal cost in ms per token: at an idle engine the time
per token of a request alone, near a full one many times that. Doublings, not single rows, because
costs on captured shapes are staircases: a single row is free on a stair and dear at its edge.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.objective import Floats

# A batch that gains nothing from more rows is as dear as a number that JSON can spell.
_LEAST_GAIN = 1e-6


def marginal_ms_by_rows(
    costs: CostModel, accept_rates: Floats, *, context: float, bound: Callable[[int], int]
) -> dict[int, float]:
    """ms per token of one more request, by rows there are already: 0, 1, 2, 4, ..

    An entry holds from its number of rows to the next; the last covers the largest measured batch.

    Args:
        costs: what rounds take.
        accept_rates: chance that a draft is kept once reached, by position, [max_steps] or fewer.
        context: tokens per sequence.
        bound: most drafts per row that a batch of so many rows may have.
    """
    sizes = [0, 1]
    while 2 * sizes[-1] <= costs.max_batch_size:
        sizes.append(2 * sizes[-1])
    speeds = [0.0, *(_speed(costs, accept_rates[: bound(b)], b, context) for b in sizes[1:])]
    points = zip(sizes, speeds, strict=True)
    return {
        size: (bigger - size) / max(_LEAST_GAIN, faster - speed)
        for (size, speed), (bigger, faster) in pairwise(points)
    }


def _speed(costs: CostModel, accept_rates: Floats, batch_size: int, context: float) -> float:
    """Tokens per ms of `batch_size` rows at the number of drafts that pays best."""
    tiers = min(len(accept_rates), costs.max_steps) + 1
    tokens = np.cumsum(np.cumprod(np.append(1.0, accept_rates)))[:tiers]
    ms = (
        costs.draft_curve(batch_size, context)[:tiers]
        + costs.verify_knots(batch_size, context, 0)[:tiers]
        + costs.host_ms(batch_size)
    )
    return float((batch_size * tokens / ms).max())
