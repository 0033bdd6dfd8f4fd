"""Costs of rounds for the simulator: recorded figures, interpolated, with seeded noise."""

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache

from benchmarks.simulator import RoundShape
from serve_spec.config.cost_table import FORMAT_VERSION, CostTable, TreeCosts
from serve_spec.core.record import StepTimes
from serve_spec.profile.curves import token_curve
from tests.helpers.costs import KEY


@dataclass(frozen=True)
class GridCosts:
    """Rounds measured at some batch sizes and depths, all rows alike; linear between and beyond.

    verify_ms, draft_ms: one line per batch size, one value per depth, in ms. A draft step that only
    some rows take costs what it costs a batch of so many rows.
    """

    batch_sizes: tuple[int, ...]
    num_steps: tuple[int, ...]
    verify_ms: tuple[tuple[float, ...], ...]
    draft_ms: tuple[tuple[float, ...], ...]
    noise_ms_per_row: float = 0.0
    """What each row of a request that samples adds."""
    draft_entry_ms: float = 0.0
    """A missing draft KV entry."""
    prefill_ms_per_token: float = 0.0

    def __call__(self, shape):
        """Milliseconds of a round."""
        verify_ms, draft_ms = 0.0, self.draft_entry_ms * shape.num_extend_tokens
        if shape.batch_size:
            verify_ms = self._verify(shape.batch_size, shape.num_rows)
            sampled_rows = shape.num_sampled * shape.num_rows / shape.batch_size
            verify_ms += self.noise_ms_per_row * sampled_rows
        verify_ms += self.prefill_ms_per_token * shape.num_prefill_tokens
        for step, rows in enumerate(shape.drafting, start=1):
            draft_ms += self._step(rows * shape.draft.topk, step)
        return StepTimes(draft_ms, verify_ms, draft_ms + verify_ms)

    @cache  # noqa: B019 - kept as long as the table, which is a constant
    def _verify(self, batch_size, num_rows):
        return self._at(self.verify_ms, batch_size, num_rows / batch_size - 1)

    @cache  # noqa: B019
    def _step(self, num_rows, step):
        upto = self._at(self.draft_ms, num_rows, step)
        return upto - self._at(self.draft_ms, num_rows, step - 1)

    def _at(self, lines, batch_size, steps):
        column = [interpolate(self.num_steps, line, steps) for line in lines]
        return interpolate(self.batch_sizes, column, batch_size)


@dataclass(frozen=True)
class RowCosts:
    """A target whose time depends on its rows alone, and draft steps that are a line in theirs."""

    num_rows: tuple[int, ...]
    verify_ms: tuple[float, ...]
    draft_step_ms: float
    draft_row_ms: float
    draft_entry_ms: float = 0.0
    """A missing draft KV entry."""
    prefill_ms_per_token: float = 0.0

    def __call__(self, shape):
        """Milliseconds of a round."""
        if shape.batch_size:
            verify_ms = self._verify(shape.num_rows + shape.num_prefill_tokens)
        else:
            verify_ms = self.prefill_ms_per_token * shape.num_prefill_tokens
        draft_ms = self.draft_entry_ms * shape.num_extend_tokens + sum(
            self.draft_step_ms + self.draft_row_ms * n * shape.draft.topk for n in shape.drafting
        )
        return StepTimes(draft_ms, verify_ms, draft_ms + verify_ms)

    @cache  # noqa: B019
    def _verify(self, num_rows):
        return interpolate(self.num_rows, self.verify_ms, num_rows)


def noisy(costs, spread, seed=0):
    """`costs` with every time off by a random factor, median 1, of log-normal `spread`.

    The factors are a function of `seed` and of the number of rounds so far.
    """
    rng = random.Random(seed)

    def measured(shape):
        times = costs(shape)
        draft_ms = times.draft_ms * math.exp(rng.gauss(0, spread))
        verify_ms = times.verify_ms * math.exp(rng.gauss(0, spread))
        return StepTimes(draft_ms, verify_ms, draft_ms + verify_ms)

    return measured


def recorded_table(
    costs, batch_sizes=(1, 2, 4, 8, 16, 32, 64), num_steps=(0, 1, 2, 3, 5, 7), trees=()
):
    """The table that a profile would write on a machine where rounds cost `costs`."""

    def branched(tree, size):
        return costs(RoundShape(size, (size,) * tree.depth, size * 128, 0, 0, 0, tree))

    times = [
        [costs(RoundShape(size, (size,) * steps, size * 128, 0, 0, 0)) for steps in num_steps]
        for size in batch_sizes
    ]
    tokens, verify_ms = token_curve(
        (size * (steps + 1), cell.verify_ms)
        for size, row in zip(batch_sizes, times, strict=True)
        for steps, cell in zip(num_steps, row, strict=True)
    )
    return CostTable(
        version=FORMAT_VERSION,
        key=KEY.model_copy(update={"topk": max([1, *(tree.topk for tree in trees)])}),
        context=128,
        batch_sizes=tuple(batch_sizes),
        num_steps=tuple(num_steps[1:]),
        draft_ms=tuple(tuple(cell.draft_ms for cell in row[1:]) for row in times),
        draft_context_ms=0.0,
        num_tokens=tuple(tokens),
        verify_ms=tuple(verify_ms),
        verify_context_ms=0.0,
        sampled_token_ms=getattr(costs, "noise_ms_per_row", 0.0),
        extrapolated=(),
        measured_s=0.0,
        trees=tuple(
            TreeCosts(
                num_steps=tree.depth,
                num_draft_tokens=tree.size,
                draft_ms=tuple(branched(tree, size).draft_ms for size in batch_sizes),
            )
            for tree in sorted(trees)
        ),
    )


def interpolate(xs, ys, x):
    """The piecewise line through (xs, ys), its outer pieces going on; xs ascending, two or more."""
    i = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + slope * (x - xs[i - 1])


TWO_CPU_CORES = GridCosts(
    batch_sizes=(1, 4, 8, 16, 32, 64),
    num_steps=(0, 1, 3, 7),
    verify_ms=(
        (7.5, 8.0, 8.0, 8.3),
        (7.1, 8.2, 10.2, 17.3),
        (9.1, 11.7, 18.2, 31.1),
        (12.1, 17.9, 33.0, 54.8),
        (20.0, 33.6, 59.9, 110.0),
        (33.3, 62.8, 111.0, 205.0),
    ),
    draft_ms=(
        (0.0, 1.6, 3.0, 5.9),
        (0.0, 1.6, 3.7, 7.5),
        (0.0, 2.1, 5.2, 9.9),
        (0.0, 2.9, 7.6, 13.5),
        (0.0, 4.5, 14.0, 24.6),
        (0.0, 7.8, 21.6, 45.0),
    ),
    noise_ms_per_row=0.06,
    draft_entry_ms=0.05,
    prefill_ms_per_token=0.4,
)
"""The shipped pair on two CPU cores, greedy, context 128: arithmetic bounds every round."""

GPU_8B = RowCosts(
    num_rows=(1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512),
    verify_ms=(
        *(4.73, 4.89, 4.94, 5.05, 5.21, 5.34, 5.45),
        *(5.48, 5.78, 6.04, 7.31, 8.74, 11.8, 14.8),
    ),
    draft_step_ms=0.17,
    draft_row_ms=0.0012,
    draft_entry_ms=0.001,
    prefill_ms_per_token=0.029,
)
"""The measured steps of an 8B target on one large GPU: flat until its rows fill it."""

H200_8B = GridCosts(
    batch_sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    num_steps=tuple(range(8)),
    verify_ms=(
        (4.35, 4.40, 4.38, 4.38, 4.46, 4.48, 4.49, 4.49),
        (4.39, 4.51, 4.52, 4.51, 4.63, 4.62, 4.65, 4.66),
        (4.44, 4.83, 4.79, 4.78, 4.79, 4.80, 4.91, 4.92),
        (4.44, 4.47, 4.90, 4.58, 5.35, 5.36, 4.96, 4.97),
        (4.52, 4.64, 4.87, 5.03, 5.35, 5.51, 5.66, 5.65),
        (4.67, 4.95, 5.36, 5.42, 6.05, 6.78, 7.49, 7.52),
        (5.03, 5.39, 6.65, 7.31, 9.13, 10.14, 11.97, 12.08),
        (5.72, 7.73, 10.14, 12.02, 15.56, 18.16, 21.92, 23.35),
        (8.52, 12.78, 18.15, 23.02, 29.26, 34.16, 41.35, 46.46),
    ),
    draft_ms=(
        (0.00, 0.24, 0.40, 0.57, 0.74, 0.90, 1.07, 1.24),
        (0.00, 0.25, 0.42, 0.59, 0.76, 0.92, 1.10, 1.26),
        (0.00, 0.26, 0.43, 0.62, 0.82, 0.96, 1.17, 1.34),
        (0.00, 0.27, 0.45, 0.66, 0.84, 1.02, 1.21, 1.39),
        (0.00, 0.31, 0.50, 0.71, 0.94, 1.10, 1.33, 1.53),
        (0.00, 0.32, 0.54, 0.79, 1.03, 1.24, 1.53, 1.75),
        (0.00, 0.38, 0.61, 0.93, 1.22, 1.40, 1.91, 2.08),
        (0.00, 0.50, 0.80, 1.28, 1.70, 1.90, 2.61, 3.01),
        (0.00, 0.77, 1.18, 2.02, 2.73, 2.91, 4.18, 4.83),
    ),
    draft_entry_ms=0.001,
    prefill_ms_per_token=0.029,
)
"""The same target on an H200 as batches and depths measured it, context 128: kernels differ by the
tokens of a request, so that equal numbers of tokens differ by up to 14 %."""


def _distinct_experts(num_tokens, num_experts=128, top_k=8):
    """Expected number of experts that so many tokens wake, each of them `top_k`."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** num_tokens)


_ROWS = tuple(1 << i for i in range(10))
MIXTURE = RowCosts(
    num_rows=_ROWS,
    verify_ms=tuple(1.0 + 0.2 * _distinct_experts(n) + 0.004 * n for n in _ROWS),
    draft_step_ms=0.17,
    draft_row_ms=0.0012,
)
"""A mixture of 128 experts, of which a token wakes 8, and whose weights a step has to read."""
