"""What a round costs: the measured table, corrected by every round that runs.

A correction has two parts, kept as logarithms. The drift is shared by all buckets: when another
tenant slows the whole machine, tiers in use must not look dear beside tiers that are not in use.
The residual belongs to one bucket: there the table itself is off. A bucket that never ran takes the
mean of those that did, for the same reason. A round that took r times what was predicted moves its
factor by clip(r, 0.5, 2)^0.05, four parts of it through the drift: what is wrong with a table stays
wrong, so once a bucket is known, what is new is the machine. Its first rounds say which of the two
it is, and move both by more: the table, too, was measured in a few rounds, on a machine that
perhaps did other things at the time.

Time outside drafting and verification (host) is in no table; it is learned alone, and so is what
the draft takes to make up for prompts and pauses, by the token, and what prompts add to a round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from serve_spec.adaptive.cost_surface import CostSurface, Counts, Floats
from serve_spec.adaptive.objective import STAIRS_PER_DRAFT
from serve_spec.adaptive.prompt_costs import PromptExcess
from serve_spec.config.cost_table import CostTable, Grid
from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.record import StepTimes

GAIN = 0.05
"""Exponent of one round's ratio in its factor, once its bucket is known."""
LEAST_GAIN = 0.01
"""The share of that which goes to what a known bucket differs by; the rest is drift."""
TABLE_ROUNDS = 4
"""The table says as much of a bucket as so many rounds of it."""
CATCH_UP_GAIN = 0.1
"""Weight of one catch-up in what an entry takes; they are rarer than rounds, and vary more."""
TREE_SIZE_GAIN = 0.1
"""Weight of one round in what a row's trees of a shape hold. Texts are drafted in smaller ones."""
LARGEST_RATIO = 2.0
"""One round counts as at most this much dearer, or cheaper, than predicted."""
LARGEST_FACTOR = 8.0
ABSURD_RATIO = 20.0
"""Further from the prediction than this, a time is no measurement: the machine slept, or the
clock jumped."""

_DRIFT_SHARE = 0.5
_LARGEST_LOG = math.log(LARGEST_FACTOR)
_NUM_BUCKETS = 32
# Drafts that no model makes take next to nothing: there is nothing to correct in that.
_NEGLIGIBLE_MS = 0.05
# The stages run on the device's clock, the round on the host's.
_CLOCKS_DIFFER = 1.01
_CLOCKS_DIFFER_MS = 0.05


class CostModel:
    """Costs of rounds in ms, from a table and from what rounds really took.

    A round: `batch_size` decode rows of `context` tokens on average, `num_sampled` of them at a
    temperature above 0; the target verifies `num_rows` = batch_size + all drafts of the round.
    """

    def __init__(self, table: CostTable) -> None:
        self.max_steps = table.num_steps[-1]
        """Most drafts per row it can price."""
        self.max_batch_size = table.batch_sizes[-1]
        """Largest batch that was measured; beyond, costs go on in straight lines."""
        self.padded = table.padded
        """Whether every draft step runs all rows, however far each drafts."""
        self._sampled_row_ms = table.sampled_row_ms

        def surface(ms: Grid, num_steps: Sequence[int]) -> CostSurface:
            return CostSurface(
                ms, contexts=table.contexts, batch_sizes=table.batch_sizes, num_steps=num_steps
            )

        self._draft = surface(table.draft_ms, table.num_steps)
        self._verify = surface(table.verify_ms, table.num_steps)
        self._trees = {
            DraftShape(*tree.shape, table.key.topk): _TreeCosts(
                surface(_as_one_step(tree.draft_ms), [0]),
                surface(_as_one_step(tree.verify_ms), [0]),
            )
            for tree in table.trees
        }
        self._tree_drafts = {tree: float(tree.size) for tree in self._trees}
        # Of fixed size: another thread may read them for a snapshot.
        self._drift = 0.0
        self._num_rounds = 0
        self._draft_residuals = _Residuals(_NUM_BUCKETS)
        num_stairs = STAIRS_PER_DRAFT * self.max_steps + 1
        self._verify_residuals = [_Residuals(num_stairs) for _ in range(_NUM_BUCKETS)]
        self._host_ms = [0.0] * _NUM_BUCKETS
        self._host_rounds = [0] * _NUM_BUCKETS
        self._num_refused = 0
        self._prompt_excess = PromptExcess(_NUM_BUCKETS, TABLE_ROUNDS)
        self.entry_ms = 0.0
        """What the draft takes to make up for one token of a prompt or of a pause."""
        self._num_catch_ups = 0

    def draft_curve(self, batch_size: int, context: float) -> Floats:
        """ms [max_steps + 1] for `batch_size` rows that draft 0 .. max_steps each."""
        return self._draft.curve(batch_size, context) * self._draft_factor(batch_size)

    def table_off_ms(self, batch_size: int, context: float, num_sampled: int) -> float:
        """A plain round's verification by the table alone: a yardstick no round moves."""
        return float(self._verify.curve(batch_size, context)[0]) + (
            self._sampled_row_ms * num_sampled
        )

    def host_ms(self, batch_size: int) -> float:
        """Time of a round outside drafting and verification, from the nearest sizes that ran."""
        bucket = _bucket(batch_size)
        if not self._host_rounds[bucket]:
            known = [other for other, rounds in enumerate(self._host_rounds) if rounds]
            if not known:
                return 0.0
            bucket = min(known, key=lambda other: abs(other - bucket))
        return self._host_ms[bucket]

    def round_ms(
        self,
        batch_size: int,
        shape: DraftShape,
        num_rows: int,
        context: float,
        num_sampled: int,
        num_drafting: int | None = None,
    ) -> float:
        """The whole round.

        num_drafting: rows that draft at all; None: as many as there can be.

        Raises:
            ValueError: no such round.
            KeyError: the table does not know the tree.
        """
        num_drafts = num_rows - batch_size
        if num_drafting is None:
            num_drafting = min(batch_size, num_drafts)
        stages_ms = self.stages_ms(
            shape, batch_size, num_drafting, num_drafts, context, num_sampled
        )
        return sum(stages_ms) + self.host_ms(batch_size)

    def stages_ms(
        self,
        shape: DraftShape,
        batch_size: int,
        num_drafting: int,
        num_drafts: int,
        context: float,
        num_sampled: int,
        num_text_drafts: int = 0,
    ) -> tuple[float, float]:
        """ms of drafting and of verification of a round.

        Of `batch_size` rows `num_drafting` draft this shape, of chains at most so deep, and the
        others are plain; `num_drafts` drafts in all, `num_text_drafts` of them from texts.

        Raises:
            ValueError: no such round.
            KeyError: the table does not know the tree.
        """
        if shape.is_chain:
            depth, num_made = shape.depth, num_drafts - num_text_drafts
            self._refuse_impossible(batch_size, depth, batch_size + num_made, num_drafting)
            return (
                self._chain_ms(batch_size, num_drafting, depth, num_made, context),
                self.verify_ms(batch_size, num_drafts, context, num_sampled),
            )
        known = self._trees[shape]
        if not num_drafting:  # all of them from texts, if any
            return 0.0, self.verify_ms(batch_size, num_drafts, context, num_sampled)
        rows = batch_size if self.padded else num_drafting
        share = num_drafts / (batch_size * shape.size)
        plain_ms = float(self._verify.curve(batch_size, context)[0])
        whole_ms = max(plain_ms, float(known.verify.curve(batch_size, context)[0]))
        verify_ms = plain_ms + share * (whole_ms - plain_ms)
        verify_ms += self._sampled_row_ms * num_sampled * (1 + num_drafts / batch_size)
        usual_draft, usual_verify = self._usual_of_trees(rows, batch_size)
        draft_factor = self._factor(known.draft_residuals.of(_bucket(rows), usual_draft))
        verify_factor = self._factor(known.verify_residuals.of(_bucket(batch_size), usual_verify))
        draft_ms = float(known.draft.curve(rows, context)[0])
        return draft_ms * draft_factor, verify_ms * verify_factor

    def drafts_of_trees(self, tree: DraftShape, num_drafting: int) -> int:
        """Drafts of `num_drafting` trees of a shape, as many as they had of late.

        Raises:
            KeyError: the table does not know the shape.
        """
        return round(num_drafting * self._tree_drafts[tree])

    def observe(self, *, draft_ms: float, verify_ms: float, round_ms: float, **shape: Any) -> bool:
        """`observe_alike` of one round."""
        return self.observe_alike([StepTimes(draft_ms, verify_ms, round_ms)], **shape)[0]

    def observe_alike(
        self,
        times: Sequence[StepTimes],
        *,
        shape: DraftShape,
        batch_size: int,
        num_rows: int,
        num_drafting: int,
        context: float,
        num_sampled: int,
        num_entries: int = 0,
        num_text_drafts: int = 0,
        num_prompt_rows: int = 0,
    ) -> list[bool]:
        """Learns from rounds that were all the same; False for unusable times, which teach nothing.

        shape: what was drafted; of chains, that of the row that drafted most.
        num_text_drafts: drafts that were found in texts, beside those of the model's `num_drafting`
            rows: they are verified, too, and take next to nothing to make.
        num_entries: draft entries each made up for prompts or pauses; with any, what they take is
            all that it says.
        num_prompt_rows: of prompts that shared each round; with any, what they add is all that it
            says.

        Raises:
            ValueError: no such round.
            KeyError: the table does not know the tree.
        """
        num_drafts = num_rows - batch_size
        num_made = num_drafts - num_text_drafts
        if not (num_drafting or shape.is_chain):
            shape = PLAIN  # no request drafted such a tree: the round says nothing of it
        draft, verify = self.stages_ms(
            shape, batch_size, num_drafting, num_drafts, context, num_sampled, num_text_drafts
        )
        whole = draft + verify + self.host_ms(batch_size)
        bucket = _bucket(batch_size)
        if num_prompt_rows:
            table_ms = float(self._table_prompt_ms(num_prompt_rows, context, num_rows))
            usable = [0.0 < took.step_ms <= ABSURD_RATIO * (whole + table_ms) for took in times]
            for took in self._taken(times, usable):
                excess_ms = took.step_ms - whole - num_entries * self.entry_ms - table_ms
                # One round that a prompt of another kind shared says at most so much.
                excess_ms = min(max(excess_ms, -whole), whole)
                self._prompt_excess.learn(bucket, excess_ms, drafts=num_drafts > 0)
            return usable
        if num_entries:
            most_ms = draft + num_entries * verify  # or one entry would have taken a round
            usable = [_are_parts_of_a_round(took) and took.draft_ms <= most_ms for took in times]
            for took in self._taken(times, usable):
                self._learn_entry(max(0.0, (took.draft_ms - draft) / num_entries))
            return usable
        usable = [
            _are_parts_of_a_round(took)
            and (not num_made or _is_near(took.draft_ms, draft, _NEGLIGIBLE_MS))
            and _is_near(took.verify_ms, verify)
            and took.step_ms <= ABSURD_RATIO * whole
            for took in times
        ]
        taken = self._taken(times, usable)
        if not taken:
            return usable
        num_rounds = len(taken)
        self._num_rounds += num_rounds
        host_ms = sum(max(0.0, t.step_ms - t.draft_ms - t.verify_ms) for t in taken) / num_rounds
        self._learn_host(bucket, host_ms, num_rounds)
        if not shape.is_chain:
            change = num_made / num_drafting - self._tree_drafts[shape]
            self._tree_drafts[shape] += _repeated(TREE_SIZE_GAIN, num_rounds) * change
        drift_gain = max(
            _repeated(GAIN - LEAST_GAIN, num_rounds),
            _DRIFT_SHARE * _mean_gain(self._num_rounds, num_rounds),
        )
        is_made = num_made > 0 and draft > _NEGLIGIBLE_MS
        if is_made:
            rows = batch_size if self.padded else num_drafting
            log = _mean_log([took.draft_ms / draft for took in taken])
            self._learn_draft(shape, rows, log, num_rounds, drift_gain)
        log = _mean_log([took.verify_ms / verify for took in taken])
        stair = self._stair(num_drafts, batch_size)
        self._learn_verify(shape, batch_size, stair, log, num_rounds, drift_gain)
        # Not the glance that found nothing to draft, or the text that had it.
        ratios = [(is_made * t.draft_ms + t.verify_ms) / (draft + verify) for t in taken]
        self._drift = _clipped(self._drift + drift_gain * _mean_log(ratios))
        return usable

    def _taken(self, times: Sequence[StepTimes], usable: Sequence[bool]) -> list[StepTimes]:
        """Those that are usable; the others are counted."""
        taken = [took for took, is_usable in zip(times, usable, strict=True) if is_usable]
        self._num_refused += len(times) - len(taken)
        return taken

    def _learn_draft(
        self, shape: DraftShape, rows: int, log: float, num_rounds: int, drift_gain: float
    ) -> None:
        residuals, usual = self._draft_residuals, self._draft_residuals.mean
        if not shape.is_chain:
            residuals, usual = self._trees[shape].draft_residuals, self._usual_of_trees(rows, 1)[0]
        residuals.learn(_bucket(rows), log, num_rounds, drift_gain, usual)

    def _learn_verify(
        self,
        shape: DraftShape,
        batch_size: int,
        stair: int,
        log: float,
        num_rounds: int,
        drift_gain: float,
    ) -> None:
        bucket = _bucket(batch_size)
        usual = self._usual_residual(bucket)
        if shape.is_chain:
            self._verify_residuals[bucket].learn(stair, log, num_rounds, drift_gain, usual)
        else:
            self._trees[shape].verify_residuals.learn(bucket, log, num_rounds, drift_gain, usual)

    def _usual_of_trees(self, rows: int, batch_size: int) -> tuple[float, float]:
        """Residuals of drafting and verification where a tree never ran: those of chains."""
        draft = self._draft_residuals
        return draft.of(_bucket(rows), draft.mean), self._usual_residual(_bucket(batch_size))

    def snapshot(self) -> dict[str, object]:
        """What was learned, JSON-able; buckets by their largest batch size, then drafts per row."""
        draft: dict[str, float] = {}
        verify: dict[str, dict[str, float]] = {}
        host: dict[str, float] = {}
        for bucket in range(_NUM_BUCKETS):
            size = str(1 << bucket)
            if self._draft_residuals.has_run(bucket):
                draft[size] = round(self._draft_factor(1 << bucket), 4)
            has_run, factors = (
                self._verify_residuals[bucket].has_run,
                self.verify_factors(1 << bucket),
            )
            learned = {
                f"{stair / STAIRS_PER_DRAFT:g}": round(factor, 4)
                for stair, factor in enumerate(factors.tolist())
                if has_run(stair)
            }
            if learned:
                verify[size] = learned
            if self._host_rounds[bucket]:
                host[size] = round(self._host_ms[bucket], 4)
        shown: dict[str, object] = {
            "drift": round(self._factor(0.0), 4),
            "draft_factors": draft,
            "verify_factors": verify,
            "host_ms": host,
            "entry_ms": round(self.entry_ms, 5),
            "prompt_excess_ms": self._prompt_excess.snapshot(),
            "num_refused": self._num_refused,
        }
        if self._trees:
            shown["tree_verify_factors"] = {
                str(tree): self._learned_factors(known.verify_residuals)
                for tree, known in self._trees.items()
            }
        return shown

    def _learned_factors(self, residuals: _Residuals) -> dict[str, float]:
        """By the largest batch size of a bucket."""
        buckets = filter(residuals.has_run, range(_NUM_BUCKETS))
        return {str(1 << b): round(self._factor(residuals.of(b, 0.0)), 4) for b in buckets}

    def verify_knots(self, batch_size: int, context: float, num_sampled: int) -> Floats:
        """ms [max_steps + 1] of the target when every row drafts 0 .. max_steps, by the table."""
        knots = self._verify.curve(batch_size, context)
        if num_sampled:
            rows = np.arange(1, self.max_steps + 2)
            knots = knots + self._sampled_row_ms * num_sampled * rows
        return knots

    def verify_factors(self, batch_size: int) -> Floats:
        """What corrects them, by half drafts per row, rounded up: see `RoundCosts.factors`. So
        rounds in which a few rows draft say nothing of plain ones, which they are judged against,
        nor of those in which all do."""
        bucket = _bucket(batch_size)
        residuals, usual = self._verify_residuals[bucket], self._usual_residual(bucket)
        num_stairs = STAIRS_PER_DRAFT * self.max_steps + 1
        return np.array([self._factor(residuals.of(i, usual)) for i in range(num_stairs)])

    def verify_ms(
        self, batch_size: int, num_drafts: int, context: float, num_sampled: int
    ) -> float:
        """ms of the target for so many drafts in all.

        Straight lines between the rounds in which every row drafts the same, each corrected by what
        is known of its stretch.
        """
        at = num_drafts / batch_size
        i = min(int(at), self.max_steps - 1) if self.max_steps else 0
        # Lists: their single entries are much quicker to get at, and to count with.
        knots: list[float] = self._verify.curve(batch_size, context).tolist()
        low, high = knots[i], knots[min(i + 1, self.max_steps)]
        table_ms = low + (at - i) * (high - low) + self._sampled_row_ms * num_sampled * (at + 1)
        bucket = _bucket(batch_size)
        residuals, usual = self._verify_residuals[bucket], self._usual_residual(bucket)
        return table_ms * self._factor(residuals.of(self._stair(num_drafts, batch_size), usual))

    def prompt_ms(
        self, num_prompt_rows: int | Floats, context: float, num_rows: Counts, batch_size: int
    ) -> Floats:
        """What so many rows of prompts add to rounds of `num_rows` decode rows and drafts.

        By the table, which has no prompts: a row of theirs is taken for one of a deep draft. What
        corrects that was learned apart for plain rounds, of `batch_size` rows, and all others.
        """
        plain, drafting = self._prompt_excess.of(_bucket(batch_size))
        excess_ms = np.where(num_rows > batch_size, drafting, plain)
        table_ms = self._table_prompt_ms(num_prompt_rows, context, num_rows)
        ms: Floats = np.where(num_prompt_rows, np.maximum(0.0, table_ms + excess_ms), 0.0)
        return ms

    def _table_prompt_ms(
        self, num_prompt_rows: int | Floats, context: float, num_rows: int | Counts
    ) -> Floats:
        deepest = self._verify.deepest
        return deepest(num_rows + num_prompt_rows, context) - deepest(num_rows, context)

    def _chain_ms(
        self,
        batch_size: int,
        num_drafting: int,
        num_steps: int,
        num_drafts: int,
        context: float,
    ) -> float:
        """Drafting when rows leave the batch as they finish: at every step fewer take part.

        The first step has all rows, the last at least one. Where every step costs a straight line
        in its rows, the sum over steps depends on how many drafts there are in all and no more.
        Padded, no row leaves.
        """
        if not num_drafts:
            return 0.0
        if self.padded:
            return float(self.draft_curve(batch_size, context)[num_steps])
        # One row goes all the way, and every other drafts once at least.
        depth = min(num_steps, num_drafts - num_drafting + 1)
        every_row: list[float] = self._draft.curve(num_drafting, context).tolist()
        one_row: list[float] = self._draft.curve(1, context).tolist()
        most_rows, fewest_rows = every_row[depth] - every_row[1], one_row[depth] - one_row[1]
        optional = (num_drafting - 1) * (depth - 1)
        share = (num_drafts - num_drafting - (depth - 1)) / optional if optional else 1.0
        ms = every_row[1] + fewest_rows + share * (most_rows - fewest_rows)
        return ms * self._draft_factor(num_drafting)

    def _refuse_impossible(
        self, batch_size: int, num_steps: int, num_rows: int, num_drafting: int
    ) -> None:
        if not (0 <= num_steps <= self.max_steps and 0 <= num_drafting <= batch_size):
            raise ValueError(
                f"num_steps={num_steps!r}, num_drafting={num_drafting!r}: use at most "
                f"{self.max_steps} steps, the table's, and at most batch_size={batch_size} rows"
            )
        least, most = batch_size + num_drafting, batch_size + num_drafting * num_steps
        if not least <= num_rows <= most:
            raise ValueError(
                f"num_rows={num_rows!r}: batch_size={batch_size} rows, of which {num_drafting} "
                f"draft 1 to {num_steps}, make {least} to {most} verified rows"
            )

    def _stair(self, num_drafts: int, batch_size: int) -> int:
        """Half drafts per row, rounded up; trees of texts may hold more than any chain."""
        stair = -(-STAIRS_PER_DRAFT * num_drafts // batch_size)
        return min(stair, STAIRS_PER_DRAFT * self.max_steps)

    def _draft_factor(self, batch_size: int) -> float:
        residuals = self._draft_residuals
        return self._factor(residuals.of(_bucket(batch_size), residuals.mean))

    def _usual_residual(self, bucket: int) -> float:
        """Of verification at these batch sizes; of all where they never ran."""
        residuals = self._verify_residuals[bucket]
        if residuals.num_known:
            return residuals.mean
        means = [other.mean for other in self._verify_residuals if other.num_known]
        return sum(means) / len(means) if means else 0.0

    def _factor(self, residual: float) -> float:
        return math.exp(_clipped(self._drift + residual))

    def _learn_entry(self, entry_ms: float) -> None:
        self._num_catch_ups += 1
        weight = max(CATCH_UP_GAIN, 1 / self._num_catch_ups)
        self.entry_ms += weight * (entry_ms - self.entry_ms)

    def _learn_host(self, bucket: int, host_ms: float, num_rounds: int) -> None:
        # A plain mean at first, then a moving average of the same weight as the corrections.
        self._host_rounds[bucket] += num_rounds
        weight = max(_repeated(GAIN, num_rounds), num_rounds / self._host_rounds[bucket])
        self._host_ms[bucket] += weight * (host_ms - self._host_ms[bucket])


@dataclass(frozen=True)
class _TreeCosts:
    """Rounds in which every row drafts a tree of one shape."""

    draft: CostSurface
    verify: CostSurface
    draft_residuals: _Residuals = field(default_factory=lambda: _Residuals(_NUM_BUCKETS))
    verify_residuals: _Residuals = field(default_factory=lambda: _Residuals(_NUM_BUCKETS))


def _as_one_step(ms: Sequence[Sequence[float]]) -> Grid:
    """ms [contexts][batch sizes] as a grid of a single number of steps."""
    return tuple(tuple((cell,) for cell in cells) for cells in ms)


class _Residuals:
    """Logarithms of what buckets differ by from the table, beyond the drift."""

    def __init__(self, num_buckets: int) -> None:
        self.num_known = 0
        """Buckets that ran."""
        self._logs = [0.0] * num_buckets
        self._num_rounds = [0] * num_buckets
        self._sum = 0.0

    @property
    def mean(self) -> float:
        """Of the buckets that ran; 0 where none did."""
        return self._sum / self.num_known if self.num_known else 0.0

    def has_run(self, bucket: int) -> bool:
        """Whether anything is known of a bucket."""
        return self._num_rounds[bucket] > 0

    def of(self, bucket: int, otherwise: float) -> float:
        """A bucket's, or `otherwise` where it never ran."""
        return self._logs[bucket] if self._num_rounds[bucket] else otherwise

    def learn(
        self, bucket: int, log: float, num_rounds: int, drift_gain: float, before: float
    ) -> None:
        """Rounds took exp(`log`) times what was predicted; the drift moved by its share of that.

        before: what a bucket that never ran was taken to have.
        """
        old = self.of(bucket, before)
        self.num_known += not self._num_rounds[bucket]
        self._sum -= self._logs[bucket]
        self._num_rounds[bucket] += num_rounds
        of_mean = _mean_gain(self._num_rounds[bucket], num_rounds)
        gain = max(_repeated(LEAST_GAIN, num_rounds), of_mean - drift_gain)
        self._logs[bucket] = _clipped(old + gain * log)
        self._sum += self._logs[bucket]


def _mean_gain(num_rounds: int, newest: int) -> float:
    """Weight of the newest of so many rounds in a plain mean that begins with the table."""
    return newest / (TABLE_ROUNDS + num_rounds)


def _repeated(gain: float, num_rounds: int) -> float:
    """Weight of so many rounds alike, each of which has `gain`."""
    return gain if num_rounds == 1 else 1.0 - (1.0 - gain) ** num_rounds


def _bucket(batch_size: int) -> int:
    """Batch sizes up to the same power of two share a bucket: 1, 2, 3-4, 5-8, ..."""
    return min((batch_size - 1).bit_length(), _NUM_BUCKETS - 1)


def _mean_log(ratios: Sequence[float]) -> float:
    """Of measured times over predicted ones."""
    lowest, highest = 1 / LARGEST_RATIO, LARGEST_RATIO
    return sum(math.log(min(max(ratio, lowest), highest)) for ratio in ratios) / len(ratios)


def _clipped(log_factor: float) -> float:
    return min(max(log_factor, -_LARGEST_LOG), _LARGEST_LOG)


def _are_parts_of_a_round(times: StepTimes) -> bool:
    """Whether these are times at all, and the stages not longer than the whole."""
    stages = times.draft_ms, times.verify_ms
    if not all(math.isfinite(ms) and ms >= 0 for ms in (*stages, times.step_ms)):
        return False
    return sum(stages) <= times.step_ms * _CLOCKS_DIFFER + _CLOCKS_DIFFER_MS


def _is_near(measured: float, predicted: float, slack: float = 0.0) -> bool:
    low, high = predicted / ABSURD_RATIO - slack, predicted * ABSURD_RATIO + slack
    return low <= measured <= high
