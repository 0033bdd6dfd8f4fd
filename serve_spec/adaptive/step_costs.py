"""What the draft steps of a round cost, where not every row takes them all."""

from __future__ import annotations

from functools import lru_cache
from itertools import count, takewhile

import numpy as np

from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.objective import Floats
from serve_spec.adaptive.observations import Indices


def step_costs(costs: CostModel, batch_size: int, context: float) -> Floats:
    """ms that the k-th draft step takes n rows, [batch_size + 1, max_steps]; 0 without rows."""
    if costs.padded:  # the same for one row and for all
        padded: Floats = np.zeros((batch_size + 1, costs.max_steps))
        padded[1:] = np.diff(costs.draft_curve(batch_size, context))
        return padded
    knots, above, share = _row_knots(batch_size)
    curves = np.zeros((len(knots), costs.max_steps + 1))
    for i, num_rows in enumerate(knots[1:], start=1):
        curves[i] = costs.draft_curve(num_rows, context)
    steps = curves[:, 1:] - curves[:, :-1]
    low, high = steps.take(above - 1, axis=0), steps.take(above, axis=0)
    ms: Floats = low + share * (high - low)
    return ms


@lru_cache(maxsize=256)
def _row_knots(batch_size: int) -> tuple[list[int], Indices, Floats]:
    """Numbers of rows that are priced, and where between two of them 0 .. batch_size rows lie.

    knots: 0, the powers of two below `batch_size`, and itself.
    above, share: [batch_size + 1] and [batch_size + 1, 1]; n rows are at `share` of the way to
        knots[above]. Shared between calls, not to be written.
    """
    powers = takewhile(lambda n: n < batch_size, (1 << i for i in count()))
    knots = np.array([0, *powers, batch_size])
    rows = np.arange(batch_size + 1)
    above = np.maximum(1, np.searchsorted(knots, rows))
    share = (rows - knots[above - 1]) / (knots[above] - knots[above - 1])
    return knots.tolist(), above, share[:, None]
