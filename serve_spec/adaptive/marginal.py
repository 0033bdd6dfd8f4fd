"""What one more request costs a batch: the time its tokens take from everybody, per token.

    θ(b) = max over k of  b · tokens per row (k) / round ms (b, k)        tokens per ms of b rows

k runs over the shapes: chains, and trees where there are any.
A batch that grows from b to 2b rows emits θ(2b) - θ(b) tokens per ms more, shared by b newcomers.
The inverse of one newcomer's share is its marginal cost in ms per token: at an idle engine the time
per token of a request alone, near a full one many times that. Doublings, not single rows, because
costs on captured shapes are staircases: a single row is free on a stair and dear at its edge. And
never less than in a smaller batch: where a table says so, it is noise, and whoever fills up one
engine first because the next rows look cheap has believed it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.objective import STAIRS_PER_DRAFT, Floats
from serve_spec.core.draft_shape import DraftShape

# A batch that gains nothing from more rows is as dear as a number that JSON can spell.
_LEAST_GAIN = 1e-6


def marginal_ms_by_rows(
    costs: CostModel,
    accept_rates: Floats,
    *,
    context: float,
    bound: Callable[[int], int],
    trees: Callable[[int], Mapping[DraftShape, Floats]] = lambda size: {},
) -> dict[int, float]:
    """ms per token of one more request, by rows there are already: 0, 1, 2, 4, ..

    An entry holds from its number of rows to the next; the last covers the largest measured batch.

    Args:
        costs: what rounds take.
        accept_rates: chance that a draft is kept once reached, by position, [max_steps] or fewer.
        context: tokens per sequence.
        bound: most drafts per row that a batch of so many rows may have.
        trees: what such a batch may draft instead, with the accept rate of every level.
    """
    sizes = [0, 1]
    while 2 * sizes[-1] <= costs.max_batch_size:
        sizes.append(2 * sizes[-1])

    def best(size: int) -> float:
        rates = accept_rates[: bound(size)]
        tiers = tier_speeds(costs, rates, batch_size=size, context=context)
        branched = [
            tree_speed(costs, tree, levels, batch_size=size, context=context)
            for tree, levels in trees(size).items()
        ]
        return max([float(tiers.tokens_per_ms.max()), *branched])

    speeds = [0.0, *(best(size) for size in sizes[1:])]
    points = zip(sizes, speeds, strict=True)
    ms = [
        (bigger - size) / max(_LEAST_GAIN, faster - speed)
        for (size, speed), (bigger, faster) in pairwise(points)
    ]
    return dict(zip(sizes, accumulate(ms, max), strict=False))


@dataclass(frozen=True)
class TierSpeeds:
    """What every tier would do for a batch whose rows are like the traffic. [max_steps + 1] each.

    Where `tokens_per_ms` falls below its first entry, drafting does not pay.
    """

    round_ms: Floats
    tokens_per_ms: Floats


def tier_speeds(
    costs: CostModel, accept_rates: Floats, *, batch_size: int, context: float
) -> TierSpeeds:
    """Every tier from 0 to as many drafts as there are accept rates, all rows drafting alike.

    Args:
        costs: what rounds take.
        accept_rates: chance that a draft is kept once reached, by position.
        batch_size: rows, at least 1.
        context: tokens per sequence.
    """
    tiers = min(len(accept_rates), costs.max_steps) + 1
    tokens = np.cumsum(np.cumprod(np.append(1.0, accept_rates)))[:tiers]
    verify_ms = costs.verify_knots(batch_size, context, 0)
    verify_ms = verify_ms * costs.verify_factors(batch_size)[::STAIRS_PER_DRAFT]
    draft_ms = costs.draft_curve(batch_size, context)
    ms = draft_ms[:tiers] + verify_ms[:tiers] + costs.host_ms(batch_size)
    return TierSpeeds(ms, batch_size * tokens / ms)


def tree_speed(
    costs: CostModel, tree: DraftShape, accept_rates: Floats, *, batch_size: int, context: float
) -> float:
    """Tokens per ms of a batch whose rows all draft the tree and are like the traffic.

    Args:
        costs: what rounds take.
        accept_rates: chance that a draft of a level is kept once reached, [tree.depth].
        batch_size: rows, at least 1.
        context: tokens per sequence.

    Raises:
        KeyError: the costs do not know the tree.
    """
    num_drafts = batch_size * tree.size
    stages_ms = costs.stages_ms(tree, batch_size, batch_size, num_drafts, context, 0)
    tokens = batch_size * (1.0 + float(np.cumprod(accept_rates).sum()))
    return tokens / (sum(stages_ms) + costs.host_ms(batch_size))
