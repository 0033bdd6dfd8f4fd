"""Costs of rounds for the simulator: recorded figures, interpolated, with seeded noise."""

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache

from benchmarks.simulator import RoundShape
from serve_spec.config.cost_table import FORMAT_VERSION, CostTable, TreeCosts
from serve_spec.core.record import StepTimes
from tests.helpers.costs import KEY


@dataclass(frozen=True)
class GridCosts:
    """Rounds measured at some batch sizes and depths, all rows alike; linear between and beyond.

    verify_ms, draft_ms: one line per batch size, one entry per depth, in ms. A draft step that only
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
    draft = tuple(tuple(cell.draft_ms for cell in row) for row in times)
    verify = tuple(tuple(cell.verify_ms for cell in row) for row in times)
    return CostTable(
        version=FORMAT_VERSION,
        key=KEY.model_copy(update={"topk": max([1, *(tree.topk for tree in trees)])}),
        batch_sizes=tuple(batch_sizes),
        num_steps=tuple(num_steps),
        contexts=(128, 512),
        draft_ms=(draft, draft),
        verify_ms=(verify, verify),
        sampled_row_ms=getattr(costs, "noise_ms_per_row", 0.0),
        padded=False,
        extrapolated=(),
        measured_s=0.0,
        trees=tuple(
            TreeCosts(
                num_steps=tree.depth,
                num_draft_tokens=tree.size,
                draft_ms=(tuple(branched(tree, size).draft_ms for size in batch_sizes),) * 2,
                verify_ms=(tuple(branched(tree, size).verify_ms for size in batch_sizes),) * 2,
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
