"""Strategy `goodput`: speculate as far as it pays, in tokens per millisecond, here and now.

Three things are kept apart: what drafts are worth (`survival`), what rounds cost (`cost_model`),
and what follows from both (`objective`). Around them stand dwell and hysteresis, a budget for
exploration, and a guard that compares measured speed with measured plain decoding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count, takewhile

import numpy as np
from numpy.typing import NDArray

from serve_spec.adaptive.baseline import SpeedGuard
from serve_spec.adaptive.cost_model import CostModel
from serve_spec.adaptive.exploration import (
    BASELINE_EVERY_ROUNDS,
    DEEPER_EVERY_ROUNDS,
    FIRST_OFF_PROBE_ROUNDS,
    LAST_OFF_PROBE_ROUNDS,
    OFF_PROBE_STEPS,
    PROBED_ROWS_SHARE,
    BackOff,
    ExplorationBudget,
)
from serve_spec.adaptive.objective import (
    Choice,
    Floats,
    RoundCosts,
    best_per_sequence,
    best_uniform,
    plain,
    speeds,
    usable,
)
from serve_spec.adaptive.policy import BadMeasurement, Reason
from serve_spec.adaptive.survival import SurvivalEstimator
from serve_spec.core.round import DecodeBatch, RoundNotes, RoundSteps, VerifiedRound

DEFAULT_MAX_STEPS = 7
LEAVE_OFF_GAIN = 1.02
"""Predicted gain that makes the policy leave 0: below, the noise of the costs decides."""
MOVE_GAIN = 1.01
"""Predicted gain that makes it move between tiers."""


@dataclass
class _SizeRange:
    """What is remembered of batches of one size range, 2^i .. 2^(i+1)-1 rows."""

    guard: SpeedGuard = field(default_factory=SpeedGuard)
    rounds_since_baseline: int = 0
    rounds_since_deeper: int = 0
    rounds_off: int = 0
    off_probe: BackOff = field(
        default_factory=lambda: BackOff(FIRST_OFF_PROBE_ROUNDS, LAST_OFF_PROBE_ROUNDS)
    )


class GoodputPolicy:
    """Picks the tier, and within it each row's drafts, that maximise expected goodput.

    bounds: most steps by the lower bound of a batch-size slot; none: `max_steps` everywhere. The
    user's slots bound the depth; they do not decide it, and 0 is always allowed.
    """

    def __init__(
        self,
        costs: CostModel,
        *,
        max_steps: int = DEFAULT_MAX_STEPS,
        bounds: Mapping[int, int] | None = None,
        per_sequence: bool = True,
        min_dwell_rounds: int,
        initial_steps: int,
        survival: SurvivalEstimator | None = None,
    ) -> None:
        self.costs = costs
        self.max_steps = max_steps
        self.candidate_steps = tuple(range(max_steps + 1))
        self.per_sequence = per_sequence
        self.min_dwell_rounds = min_dwell_rounds
        self.survival = survival or SurvivalEstimator(max_steps)
        self.budget = ExplorationBudget()
        self.last_reason = Reason.WARM_UP
        self._bounds = dict(sorted((bounds or {}).items()))
        self._bound_keys = list(self._bounds)
        self._ranges: dict[int, _SizeRange] = {}
        self._range_key: int | None = None
        self._tier = min(initial_steps, max_steps)
        self._rounds_at_tier = 0
        self._predicted: dict[int, float] = {}
        self._last_choice: Choice | None = None
        self._rotation = 0

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """The best tier for this batch, held for the dwell; drafts per row anew every round."""
        key = batch.size.bit_length() - 1
        here = self._ranges.setdefault(key, _SizeRange())
        moved, self._range_key = key != self._range_key, key
        bound = self._bound(batch.size)
        if here.guard.is_closed or bound == 0:
            return self._stay_off(Reason.GUARD if bound else Reason.RANGE)
        if batch.max_draft_tokens == 0:
            return self._stay_off(Reason.KV)
        worth = usable(
            self.survival.survival(batch.request_ids)[:, :bound], np.asarray(batch.max_steps)
        )
        costs = self._round_costs(batch, bound)
        if moved or self._rounds_at_tier >= self.min_dwell_rounds or self._tier > bound:
            self._decide(batch, worth, costs, Reason.RANGE if moved else None)
        self._rounds_at_tier += 1
        choice = self._best(self._tier, batch, worth, costs)
        self._last_choice = choice
        return self._explore(batch, here, choice, worth, costs)

    def observe(self, verified: VerifiedRound) -> None:
        """Learns acceptance from every live row; costs and speed from rounds without prompts.

        Raises:
            BadMeasurement: the times can not be those of a round; nothing was learned from them.
        """
        self.survival.observe(verified.request_ids, verified.row_steps, verified.num_correct_drafts)
        times = verified.times
        if times is None:
            return
        self._learn_costs(verified)
        self.budget.pass_time(times.round_ms)
        key = verified.batch_size.bit_length() - 1
        here = self._ranges.setdefault(key, _SizeRange())
        context = verified.num_tokens / verified.batch_size
        unit_ms = self.costs.table_off_ms(verified.batch_size, context, verified.num_sampled)
        if verified.num_draft_tokens:
            here.guard.observe(
                verified.num_output_tokens, verified.batch_size, times.round_ms, unit_ms
            )
        else:
            here.guard.observe_off(times.round_ms, unit_ms)

    def forget(self, request_id: str) -> None:
        """Drops a request's acceptance."""
        self.survival.forget(request_id)

    def snapshot(self) -> dict[str, object]:
        """Predicted goodput of every tier, costs, guards and exploration."""
        choice = self._last_choice
        return {
            "strategy": "goodput",
            "per_sequence": self.per_sequence,
            "slot": None if self._range_key is None else str(1 << self._range_key),
            "slots": {
                str(1 << key): {"candidate_steps": list(self.candidate_steps), **r.guard.snapshot()}
                for key, r in sorted(self._ranges.items())
            },
            "predicted_goodput": {str(k): round(v, 5) for k, v in self._predicted.items()},
            "predicted_ms": None if choice is None else round(choice.ms, 4),
            "predicted_tokens": None if choice is None else round(choice.tokens, 4),
            "explored_share": round(self.budget.spent_share, 6),
            "acceptance": self.survival.snapshot(),
            "costs": self.costs.snapshot(),
        }

    def _bound(self, batch_size: int) -> int:
        if not self._bound_keys:
            return self.max_steps
        slot = max(0, bisect_right(self._bound_keys, batch_size) - 1)
        return min(self.max_steps, self._bounds[self._bound_keys[slot]])

    def _stay_off(self, reason: Reason) -> RoundSteps:
        """No drafts, at once: dwell is for choices, not for walls."""
        if self._tier:
            self._tier, self._rounds_at_tier = 0, 0
        self.last_reason = reason
        return RoundSteps(0)

    def _round_costs(self, batch: DecodeBatch, bound: int) -> RoundCosts:
        size, context = batch.size, batch.context
        return RoundCosts(
            draft=draft_matrix(self.costs, size, context)[:, : bound + 1],
            verify=self.costs.verify_curve(size, context, batch.num_sampled),
            host=self.costs.host_ms(size),
        )

    def _best(self, num_steps: int, batch: DecodeBatch, worth: Floats, costs: RoundCosts) -> Choice:
        if num_steps == 0:
            return plain(batch.size, costs)
        best = best_per_sequence if self.per_sequence else best_uniform
        weights = speeds(worth, self._tier)
        return best(worth, weights, num_steps, costs, batch.max_draft_tokens)

    def _decide(
        self, batch: DecodeBatch, worth: Floats, costs: RoundCosts, moved: Reason | None
    ) -> None:
        """The global argmax over tiers: costs are staircases, so a climb could stop half way."""
        bound = worth.shape[1]
        self._predicted = {
            steps: self._best(steps, batch, worth, costs).goodput for steps in range(bound + 1)
        }
        best = max(self._predicted, key=self._predicted.__getitem__)
        here = min(self._tier, bound)
        needed = LEAVE_OFF_GAIN if here == 0 else MOVE_GAIN
        worthwhile = self._predicted[best] >= needed * self._predicted[here]
        wanted = best if worthwhile else here
        if wanted == self._tier:
            self.last_reason = Reason.STEADY
            return
        if self._tier == 0:
            self._ranges[batch.size.bit_length() - 1].off_probe.succeed()
        self.last_reason = moved or (Reason.GAIN if wanted > self._tier else Reason.LOSS)
        self._tier, self._rounds_at_tier = wanted, 0

    def _explore(
        self, batch: DecodeBatch, here: _SizeRange, choice: Choice, worth: Floats, costs: RoundCosts
    ) -> RoundSteps:
        """The choice, or once in a while a round that teaches something the choice would not."""
        if not choice.row_steps.any():
            return self._probe_while_off(batch, here, choice, worth, costs)
        here.rounds_since_baseline += 1
        here.rounds_since_deeper += 1
        if here.rounds_since_baseline >= BASELINE_EVERY_ROUNDS:
            lost_ms = costs.off - batch.size / choice.goodput
            if self.budget.spend(max(0.0, lost_ms)):
                here.rounds_since_baseline = 0
                self.last_reason = Reason.BASELINE
                return RoundSteps(0, notes=RoundNotes(is_probe=True, predicted_ms=costs.off))
        if here.rounds_since_deeper >= DEEPER_EVERY_ROUNDS:
            deeper = self._deepen(choice.row_steps, worth, 1)
            if self.budget.spend(costs.round_ms(deeper) - choice.ms):
                here.rounds_since_deeper = 0
                return self._probe(deeper, costs)
        return _answer(choice.num_steps, choice.row_steps, choice.ms)

    def _probe_while_off(
        self, batch: DecodeBatch, here: _SizeRange, choice: Choice, worth: Floats, costs: RoundCosts
    ) -> RoundSteps:
        """Nothing pays now. A few rows draft now and then, or the policy would never hear of it."""
        here.rounds_off += 1
        if here.rounds_off >= here.off_probe.rounds:
            probing = self._deepen(choice.row_steps, worth, OFF_PROBE_STEPS)
            if self.budget.spend(costs.round_ms(probing) - choice.ms):
                here.rounds_off = 0
                here.off_probe.fail()  # until the policy leaves 0
                return self._probe(probing, costs)
        return _answer(choice.num_steps, choice.row_steps, choice.ms)

    def _deepen(self, row_steps: NDArray[np.int64], worth: Floats, more: int) -> NDArray[np.int64]:
        """`row_steps` with up to `more` further drafts on one row in sixteen, in rotation."""
        usable_steps = (worth > 0).sum(axis=1)
        open_rows = np.flatnonzero(usable_steps > row_steps)
        count = min(len(open_rows), max(1, len(row_steps) // PROBED_ROWS_SHARE))
        rows = open_rows[(self._rotation + np.arange(count)) % max(1, len(open_rows))]
        self._rotation += count
        deeper = row_steps.copy()
        deeper[rows] = np.minimum(row_steps[rows] + more, usable_steps[rows])
        return deeper

    def _probe(self, row_steps: NDArray[np.int64], costs: RoundCosts) -> RoundSteps:
        self.last_reason = Reason.PROBE
        num_steps = max(self._tier, int(row_steps.max()))
        return _answer(num_steps, row_steps, costs.round_ms(row_steps), is_probe=True)

    def _learn_costs(self, verified: VerifiedRound) -> None:
        times = verified.times
        assert times is not None
        usual = verified.num_drafting * (self.max_steps + 1)
        if verified.num_catch_up > usual:
            return  # a prompt was made up for: dear, but no figure for the rounds to come
        if not self.costs.observe(
            batch_size=verified.batch_size,
            num_steps=verified.deepest,
            num_rows=verified.batch_size + verified.num_draft_tokens,
            num_drafting=verified.num_drafting,
            context=verified.num_tokens / verified.batch_size,
            num_sampled=verified.num_sampled,
            draft_ms=times.draft_ms,
            verify_ms=times.verify_ms,
            round_ms=times.round_ms,
        ):
            raise BadMeasurement(f"times={times}: not the times of a round")


def _answer(
    num_steps: int, row_steps: NDArray[np.int64], ms: float, *, is_probe: bool = False
) -> RoundSteps:
    return RoundSteps(num_steps, row_steps.tolist(), RoundNotes(is_probe, predicted_ms=ms))


def draft_matrix(costs: CostModel, batch_size: int, context: float) -> Floats:
    """Draft ms of n rows and k steps, [batch_size + 1, max_steps + 1]; 0 without rows."""
    knots = [0, *takewhile(lambda n: n < batch_size, (1 << i for i in count())), batch_size]
    curves = [np.zeros(costs.max_steps + 1)]
    curves += [costs.draft_curve(n, context) for n in knots[1:]]
    rows = np.arange(batch_size + 1)
    return np.stack([np.interp(rows, knots, column) for column in np.stack(curves).T], axis=1)
