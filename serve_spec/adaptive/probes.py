"""Rounds that strategy `goodput` runs to learn something: when one is due, and what it asks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from serve_spec.adaptive.baseline import DOUBTED_EVERY_ROUNDS
from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.exploration import (
    BASELINE_EVERY_ROUNDS,
    CLEAR_LEAD,
    DEEPER_EVERY_ROUNDS,
    FIRST_BASELINE_ROUNDS,
    FIRST_WAIT_ROUNDS,
    LAST_WAIT_ROUNDS,
    NUM_FIRST_BASELINES,
    OTHER_EVERY_ROUNDS,
    PROBED_ROWS_SHARE,
    PROMISING_GAIN,
    RETRY_ROUNDS,
    TRIAL_ROUNDS,
    TRIAL_ROWS_SHARE,
    TRIAL_STEPS,
    BackOff,
    ExplorationBudget,
)
from serve_spec.adaptive.objective import RoundCosts
from serve_spec.adaptive.policy import Reason
from serve_spec.adaptive.round_plan import RoundPlan
from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.round import DecodeBatch, RoundNotes, RoundSteps

Probe: TypeAlias = tuple[Reason, RoundSteps]


@dataclass
class ProbeClock:
    """Rounds since each kind of probe, at batches of about the same size."""

    num_unasked: int = 0
    """Rounds since `Probes.due` was asked, that the counts below are still to hear of."""
    since_baseline: int = 0
    num_baselines: int = 0
    baseline_rounds: int = 1
    """Plain rounds in a row of which the last says what one takes."""
    baseline_rounds_left: int = 0
    since_deeper: int = 0
    since_other: int = 0
    off: int = 0
    wait: BackOff = field(default_factory=lambda: BackOff(FIRST_WAIT_ROUNDS, LAST_WAIT_ROUNDS))
    has_tried: bool = False
    _hope: float = 0.0

    def baseline_every(self, lead: Callable[[], float], *, in_doubt: bool) -> int:
        """Rounds between plain ones. The first come soon, unless drafting is clearly ahead: without
        any, a table is all that is known of what it is weighed against.

        lead: speed over that of plain rounds, as predicted; asked only where it decides.
        """
        if in_doubt:
            return DOUBTED_EVERY_ROUNDS
        is_first = self.since_baseline >= self._first_baseline
        return self._first_baseline if is_first and lead() <= CLEAR_LEAD else BASELINE_EVERY_ROUNDS

    def quiet_rounds(self, *, drafts_chains: bool, in_doubt: bool) -> int:
        """Rounds of drafts for which nothing will be due, as things are."""
        baseline = DOUBTED_EVERY_ROUNDS if in_doubt else self._first_baseline
        if self.since_baseline >= baseline:  # it was asked, and drafting is clearly ahead
            baseline = BASELINE_EVERY_ROUNDS
        waits = [baseline - self.since_baseline, OTHER_EVERY_ROUNDS - self.since_other]
        if drafts_chains:
            waits.append(DEEPER_EVERY_ROUNDS - self.since_deeper)
        return min(waits) - 1

    @property
    def _first_baseline(self) -> int:
        """Rounds before the next plain one where little is known."""
        if self.num_baselines < NUM_FIRST_BASELINES:
            return FIRST_BASELINE_ROUNDS << self.num_baselines
        return BASELINE_EVERY_ROUNDS

    def hear(self, hope: float) -> None:
        """What drafting would gain over off, by all that is known now: after a trial that raised
        it, the next one does not wait."""
        if self.has_tried and hope > PROMISING_GAIN * self._hope:
            self.wait.succeed()
        self.has_tried, self._hope = False, hope


@dataclass
class _Trial:
    """Rows that draft for some rounds while the others do not."""

    request_ids: frozenset[str]
    rounds_left: int = TRIAL_ROUNDS


class Probes:
    """Asks for probes that are due and that the budget affords; one that is not is tried again
    soon."""

    def __init__(self, costs: CostModel, budget: ExplorationBudget) -> None:
        self._costs = costs
        self._budget = budget
        self._rotation = 0
        self._other_rotation = 0
        self._trial: _Trial | None = None

    def due(
        self,
        clock: ProbeClock,
        batch: DecodeBatch,
        wanted: RoundSteps,
        plan: RoundPlan,
        bound: int,
        round_costs: Callable[[], RoundCosts],
        *,
        in_doubt: bool,
    ) -> Probe | None:
        """A round to run instead of the `wanted` one, and why.

        bound: most steps of any row. in_doubt: whether plain rounds seem to be the faster ones.
        """
        assert wanted.row_steps is not None, "a plan names every row's drafts"
        num_rounds, clock.num_unasked = 1 + clock.num_unasked, 0
        if not any(wanted.row_steps):
            # Nothing pays now. Without a few drafts the policy would never hear that it does.
            clock.off += num_rounds
            if self._trial is None and clock.off >= clock.wait.rounds:
                clock.off -= RETRY_ROUNDS
                self._trial = self._begun(batch, bound, round_costs)
                if self._trial is not None:
                    clock.off = 0
                    clock.wait.fail()  # until the policy leaves 0
            return self._tried(clock, batch, bound)
        self._trial = None
        clock.since_baseline += num_rounds
        clock.since_deeper += num_rounds
        clock.since_other += num_rounds
        answer = self._comparison(clock, batch, plan, in_doubt=in_doubt)
        if answer is not None:
            return answer
        if clock.since_deeper >= DEEPER_EVERY_ROUNDS and wanted.shape.is_chain:
            clock.since_deeper = DEEPER_EVERY_ROUNDS - RETRY_ROUNDS
            answer = self._deeper(batch, wanted, bound, round_costs)
            if answer is not None:
                clock.since_deeper = 0
                return answer
        if clock.since_other >= OTHER_EVERY_ROUNDS and not batch.num_prompt_rows:
            clock.since_other = OTHER_EVERY_ROUNDS - RETRY_ROUNDS
            answer = self._other(wanted, plan)
            if answer is not None:
                clock.since_other = 0
                return answer
        return None

    def quiet_rounds(self, clock: ProbeClock, wanted: RoundSteps, *, in_doubt: bool) -> int:
        """After a round that is not a probe: so many like it may follow before one is due."""
        if self._trial is not None:
            return 0
        if not any(wanted.row_steps or ()):
            return clock.wait.rounds - clock.off - 1
        return clock.quiet_rounds(drafts_chains=wanted.shape.is_chain, in_doubt=in_doubt)

    def _comparison(
        self, clock: ProbeClock, batch: DecodeBatch, plan: RoundPlan, *, in_doubt: bool
    ) -> Probe | None:
        """A plain round, to know what speculation is measured against, or the next of some."""
        if clock.baseline_rounds_left:
            clock.baseline_rounds_left -= 1
            return self._baseline(batch)
        every = clock.baseline_every(lambda: self._lead(plan), in_doubt=in_doubt)
        # Beside prompts it is told less: only where no round is without any.
        if clock.since_baseline < (2 * every if batch.num_prompt_rows else every):
            return None
        clock.since_baseline = every - min(every, RETRY_ROUNDS)
        # In doubt plain rounds seem to be the faster ones: nothing is lost by them.
        if not in_doubt and not self._affords_comparison(clock, batch, plan):
            return None
        clock.since_baseline = 0
        clock.num_baselines += 1
        clock.baseline_rounds_left = clock.baseline_rounds - 1
        return self._baseline(batch)

    def _affords_comparison(self, clock: ProbeClock, batch: DecodeBatch, plan: RoundPlan) -> bool:
        # A plain round emits tokens, too; lost is what the plan would have emitted beyond them.
        off_ms = self._off_ms(batch)
        lost_ms = clock.baseline_rounds * (off_ms - off_ms / self._lead(plan))
        if clock.num_baselines < NUM_FIRST_BASELINES:
            lost_ms *= 2  # as little is known of the plan's rounds, too
        return self._budget.spend(max(0.0, lost_ms))

    def _baseline(self, batch: DecodeBatch) -> Probe:
        notes = RoundNotes(is_probe=True, predicted_ms=self._off_ms(batch))
        return Reason.BASELINE, RoundSteps(PLAIN, notes=notes)

    def _off_ms(self, batch: DecodeBatch) -> float:
        """A plain round."""
        size = batch.size
        verify_ms = self._costs.verify_ms(size, 0, batch.context, batch.num_sampled)
        return verify_ms + self._costs.host_ms(size)

    def _lead(self, plan: RoundPlan) -> float:
        """Speed of the plan's rounds over that of plain ones, as predicted for its batch."""
        choice = plan.choice
        return self._off_ms(plan.batch) * choice.tokens / (plan.batch.size * choice.ms)

    def _begun(
        self, batch: DecodeBatch, bound: int, round_costs: Callable[[], RoundCosts]
    ) -> _Trial | None:
        """A trial of the rows that have least to make up, paid for in advance.

        So many rows that they add twice of what a trial takes however few there are: with more of
        them hits and misses are hardly cheaper, and the budget has to be saved up for longer.
        """
        costs, steps = round_costs(), np.minimum(np.asarray(batch.max_steps), bound)
        backlogs = np.asarray(batch.backlogs or [0] * batch.size)
        able = np.flatnonzero(steps)
        able = able[np.argsort(backlogs[able], kind="stable")]
        able = able[: max(TRIAL_ROWS_SHARE, batch.size // TRIAL_ROWS_SHARE)]
        if not len(able):
            return None

        def ms(num_rows: int) -> float:
            rows, row_steps = able[:num_rows], np.zeros_like(steps)
            row_steps[rows] = np.minimum(steps[rows], TRIAL_STEPS)
            begin_ms = self._costs.entry_ms * float(backlogs[rows].sum())
            return begin_ms + TRIAL_ROUNDS * (costs.round_ms(row_steps) - costs.off)

        fixed_ms = 2 * ms(1) - ms(2)
        num_rows = max(1, bisect_right(range(1, len(able) + 1), 3 * fixed_ms, key=ms))
        if not self._budget.spend(ms(num_rows)):
            return None
        return _Trial(frozenset(batch.request_ids[row] for row in able[:num_rows].tolist()))

    def _tried(self, clock: ProbeClock, batch: DecodeBatch, bound: int) -> Probe | None:
        """The trial's next round, if one is under way."""
        trial = self._trial
        if trial is None:
            return None
        clock.has_tried = True
        trial.rounds_left -= 1
        if not trial.rounds_left:
            self._trial = None
        each = min(bound, TRIAL_STEPS)
        rows = zip(batch.request_ids, batch.max_steps, strict=True)
        row_steps = [min(each, most) if name in trial.request_ids else 0 for name, most in rows]
        if not 0 < sum(row_steps) <= batch.max_draft_tokens:
            return None
        shape = DraftShape.chain(max(row_steps))
        return Reason.PROBE, RoundSteps(shape, row_steps, RoundNotes(is_probe=True))

    def _deeper(
        self,
        batch: DecodeBatch,
        wanted: RoundSteps,
        bound: int,
        round_costs: Callable[[], RoundCosts],
    ) -> Probe | None:
        """One further draft on one row in sixteen, in rotation."""
        usable_steps = np.minimum(np.asarray(batch.max_steps), bound)
        present = np.minimum(np.asarray(wanted.row_steps), usable_steps)
        open_rows = np.flatnonzero(usable_steps > present)
        if not len(open_rows):
            return None
        num_rows = min(len(open_rows), max(1, batch.size // PROBED_ROWS_SHARE))
        rows = open_rows[(self._rotation + np.arange(num_rows)) % len(open_rows)]
        deeper = present.copy()
        deeper[rows] += 1
        costs = round_costs()
        ms = costs.round_ms(deeper)
        affordable = deeper.sum() <= batch.max_draft_tokens
        begin_ms = self._costs.entry_ms * sum(batch.backlogs[row] for row in rows if batch.backlogs)
        if not affordable or not self._budget.spend(ms + begin_ms - costs.round_ms(present)):
            return None
        self._rotation += num_rows
        shape = DraftShape.chain(max(wanted.shape.depth, int(deeper.max())))
        notes = RoundNotes(is_probe=True, predicted_ms=ms)
        return Reason.PROBE, RoundSteps(shape, deeper.tolist(), notes)

    def _other(self, wanted: RoundSteps, plan: RoundPlan) -> Probe | None:
        """A round of a shape that was not chosen, in rotation among those that could be better."""
        present = plan.choice
        if wanted.shape.is_chain != present.shape.is_chain:
            return None  # chains stand in for trees: there is no room for any
        speed = present.tokens / present.ms
        able = [other for other in plan.others if other.most_tokens > speed * other.ms]
        if not able:
            return None
        other = able[self._other_rotation % len(able)]
        if not self._budget.spend(max(0.0, other.ms - other.tokens / speed)):
            return None
        self._other_rotation += 1
        assert wanted.row_steps is not None, "a plan names every row's drafts"
        row_steps = [other.shape.depth if steps else 0 for steps in wanted.row_steps]
        notes = RoundNotes(is_probe=True, predicted_ms=other.ms)
        return Reason.PROBE, RoundSteps(other.shape, row_steps, notes)
