"""Strategy `goodput`: speculate as far as it pays, in tokens per millisecond, here and now.

Three things are kept apart: what drafts are worth (`survival`), what rounds cost (`cost_model`),
and what follows from both (`objective`). Around them stand dwell and hysteresis, a budget for
exploration, and a guard that compares measured speed with measured plain decoding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias, TypeVar

import numpy as np

from serve_spec.adaptive.baseline import SpeedGuard
from serve_spec.adaptive.cost_model import ABSURD_RATIO, CostModel
from serve_spec.adaptive.entries import Entries
from serve_spec.adaptive.exploration import LONG_BASELINE_ROUNDS, ExplorationBudget
from serve_spec.adaptive.marginal import marginal_ms_by_rows, tier_speeds
from serve_spec.adaptive.objective import (
    Floats,
    RoundCosts,
    depth_beside_prompts,
    usable,
)
from serve_spec.adaptive.options import Options, Worths
from serve_spec.adaptive.policy import BadMeasurement, Reason
from serve_spec.adaptive.probes import ProbeClock, Probes
from serve_spec.adaptive.prompt_load import PromptLoad
from serve_spec.adaptive.round_plan import RoundPlan, by_size, range_key
from serve_spec.adaptive.step_costs import step_costs
from serve_spec.adaptive.survival import SurvivalEstimator
from serve_spec.adaptive.text_first import TextFirst
from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.record import StepRecord, StepTimes
from serve_spec.core.round import DecodeBatch, RoundNotes, RoundSteps

DEFAULT_MAX_STEPS = 7
LEAVE_OFF_GAIN = 1.02
"""Predicted gain that makes the policy leave 0: below, the noise of the costs decides."""
MOVE_GAIN = 1.01
"""Predicted gain that makes it move between tiers."""
WORTH_TRYING = 0.9
"""Predicted share of the present speed that is worth a try of a tier that never ran,"""
TRY_AFTER_ROUNDS = 64
"""after so many rounds at the present one."""
PLAN_ROUNDS = 8
"""Rounds that follow one plan, and after which they are learned from, all at once.

Between two rounds of a model the host's caches are cold: arithmetic that takes 20 µs in a loop
takes 200 there, and the device waits for it.
"""
PLAN_MS = 32.0
"""A plan of short rounds has more of them, for about so long: to make it and to learn from it takes
the host a millisecond, several rounds of a small model."""
MOST_PLAN_ROUNDS = 64
"""While nothing is drafted a plan lasts twice as long as the one before, up to so many rounds: what
making it takes is what the policy is slower than off by."""
SETTLED_ROUNDS = 16
"""Rounds at a tier after which a plan that turns out as expected serves on: what it would be
replaced by is the same,"""
MOST_PROLONGED = 4
"""at most so many times its rounds,"""
PROLONGED_MS = 100.0
"""if they are short: beside longer ones its arithmetic is nothing."""
SURPRISE = 1.5
"""Standard errors by which drafts are kept more often, or less, than a plan expected of them, for
it to be replaced at once."""
PLAN_ROWS = 64
"""Rounds more for a plan, by the square of how often it has so many rows: it takes longer to make,
and each of its rounds says more."""
PROMPTS_EVERY_PLANS = 4
"""Plans for batches of about the same size that share what prompts take."""
APART_EVERY_PLANS = 4
"""While a few rows draft alike, one plan in so many asks whether they had better not;"""
APART_FROM_ROWS = 32
"""of so many rows, every plan: they have more to gain by it, and rounds that take longer."""
LEARNED_ROWS = 1024
"""Of a plan's rounds, the newest that hold so many rows are learned from; more say the same."""
LEARNED_DRAFTING_ROUNDS = MOST_PROLONGED * PLAN_ROUNDS
"""Of a plan's rounds that drafted, the newest so many are learned from."""
PRICED_ROUNDS = 8
"""Of a plan's plain rounds, and of those that drafted, the newest so many say what they cost: there
are many, all alike."""
WAITS_SHARE = 0.1
"""Of a round's time that neither model took: from there on the device waited for the host."""
MAX_BAD_TIMES = 8
"""Unusable times in a row after which the clock, or what reads it, is taken to be broken."""


_Timed: TypeAlias = tuple[StepRecord, StepTimes]
_Round = TypeVar("_Round", StepRecord, _Timed)


@dataclass
class _SizeRange:
    """What is remembered of batches of about the same size, see `range_key`."""

    guard: SpeedGuard = field(default_factory=SpeedGuard)
    clock: ProbeClock = field(default_factory=ProbeClock)
    rounds_of: Counter[DraftShape] = field(default_factory=Counter)
    """Rounds of every shape, those beside prompts aside."""


@dataclass
class _BesidePrompts:
    """What prompts do to a few plans in a row, found once for all of them when it is asked for."""

    key: tuple[int, int, int] = 0, 0, 0
    """The range of batch sizes, see `range_key`, and the numbers of depths and of trees."""
    num_plans: int = 0
    shares: Floats | None = None
    """Of a round's time that prompts take, by option."""
    depths: dict[int, dict[tuple[int, ...], int]] = field(default_factory=lambda: defaultdict(dict))
    """Drafts per row beside prompts, by those without, then by the numbers asked for: `by_size`."""


@dataclass(slots=True)
class _Standing:
    """An answer that is given again while its batch is as it was and no probe is due.

    Every round asks, and the device waits meanwhile.
    """

    steps: RoundSteps
    key: int
    """The range of batch sizes, see `range_key`."""
    request_ids: Sequence[str] | None
    """None: whoever is in the batch, or joins it, drafts nothing."""
    num_draft_tokens: int
    clock: ProbeClock
    rounds_left: int

    def answers(self, batch: DecodeBatch) -> bool:
        """Whether it holds for this round, too."""
        if self.rounds_left <= 0 or batch.text_steps:
            return False
        if self.request_ids is None:
            return range_key(batch.size) == self.key and batch.max_draft_tokens > 0
        return (
            batch.request_ids == self.request_ids
            and batch.max_draft_tokens >= self.num_draft_tokens
            and not (batch.num_prompts or batch.num_prompt_rows)
        )

    def again(self) -> RoundSteps:
        """Gives it once more."""
        self.rounds_left -= 1
        self.clock.num_unasked += 1
        return self.steps


class GoodputPolicy:
    """Picks the tier, and within it each row's drafts, that maximise expected goodput.

    bounds: most steps by the lower bound of a batch-size slot; none: `max_steps` everywhere. The
    user's slots bound the depth; they do not decide it, and 0 is always allowed.
    trees: the shapes a batch may draft instead of chains, by the same slots; one slot may stand for
    all sizes. `costs` and `survival` know them all.
    """

    def __init__(
        self,
        costs: CostModel,
        *,
        max_steps: int = DEFAULT_MAX_STEPS,
        bounds: Mapping[int, int] | None = None,
        trees: Mapping[int, Sequence[DraftShape]] | None = None,
        per_sequence: bool = True,
        min_dwell_rounds: int,
        initial_steps: int,
        survival: SurvivalEstimator | None = None,
    ) -> None:
        self.costs = costs
        self.max_steps = max_steps
        self.per_sequence = per_sequence
        self.min_dwell_rounds = min_dwell_rounds
        self._trees = {slot: tuple(shapes) for slot, shapes in sorted((trees or {}).items())}
        self._trees_of_size: dict[int, tuple[DraftShape, ...]] = {}
        branched = tuple(sorted({t for shapes in self._trees.values() for t in shapes}))
        self.shapes = (*map(DraftShape.chain, range(max_steps + 1)), *branched)
        self.survival = survival or SurvivalEstimator(max_steps, trees=branched)
        self.text = TextFirst(max_steps)
        self.budget = ExplorationBudget()
        self._probes = Probes(costs, self.budget)
        self.last_reason = Reason.WARM_UP
        self._tier_reason = Reason.WARM_UP
        self._bounds = dict(sorted((bounds or {}).items()))
        self._bound_keys = list(self._bounds)
        self._ranges: dict[int, _SizeRange] = {}
        self._range_key: int | None = None
        self._shape = DraftShape.chain(min(initial_steps, max_steps))
        self._rounds_at_tier = 0
        self.prompts = PromptLoad()
        self._beside = _BesidePrompts()
        self._num_alike = 0
        """Plans since one asked whether rows had better draft differently deep."""
        self._predicted: dict[DraftShape, float] = {}
        self._plan: RoundPlan | None = None
        self._standing: _Standing | None = None
        self._plan_rounds = self._fewest_rounds = PLAN_ROUNDS
        self._limits: tuple[int, tuple[DraftShape, ...]] | None = None
        """Of the plan, where it may draft trees."""
        self._was_plain = True
        """Whether the newest round was."""
        self._to_learn: list[StepRecord] = []
        self._num_expected = 0
        """Of these, the first so many turned out as their plan expected."""
        self._left: set[str] = set()
        self._num_bad_times = 0
        self._batch_size = 1
        self._context = 0.0

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """The best tier for this batch, held for the dwell, and each row's share of it."""
        if self._standing is not None and self._standing.answers(batch):
            self._rounds_at_tier += 1
            return self._standing.again()
        self._standing = None
        self._batch_size, self._context = batch.size, batch.context
        key, here = self._range(batch.size)
        moved, self._range_key = key != self._range_key, key
        bound = self._bound(batch.size)
        if here.guard.is_closed or bound == 0:
            return self._stay_off(Reason.GUARD if bound else Reason.RANGE)
        if batch.max_draft_tokens == 0:
            return self._stay_off(Reason.KV)
        plan, shapes = self._plan, self._trees_at(batch.size)
        limits = (bound, shapes) if shapes else None
        if plan is None or moved or self._shape.depth > bound or limits != self._limits:
            plan = self._plan = self._make_plan(batch, bound, here, moved=moved)
            self._limits = limits
        self._rounds_at_tier += 1
        wanted = self._wanted(plan, batch)
        probe = self._probe(batch, bound, here, wanted, plan)
        if probe is None:
            self._standing = self._stand(plan, wanted, batch, here)
        is_baseline = probe is not None and probe.shape == PLAIN
        if is_baseline or not batch.text_steps:
            return probe or wanted
        is_cut = wanted.shape.is_chain and wanted.shape.depth < plan.choice.shape.depth
        most = min(bound, wanted.shape.depth) if is_cut else bound
        row_ms = plan.choice.ms / batch.size  # a retry loses what the row would have made of it
        text_steps = self.text.steps(batch, most, lambda: self.budget.spend(row_ms))
        return replace(probe or wanted, text_steps=text_steps)

    def _probe(
        self,
        batch: DecodeBatch,
        bound: int,
        here: _SizeRange,
        wanted: RoundSteps,
        plan: RoundPlan,
    ) -> RoundSteps | None:
        """Once in a while, a round that teaches something that the wanted one would not."""
        answer = self._probes.due(
            here.clock,
            batch,
            wanted,
            plan,
            bound,
            lambda: self._round_costs(batch, bound),
            in_doubt=here.guard.is_in_doubt,
        )
        if answer is None:
            return None
        self.last_reason, steps = answer
        return steps

    def _stand(
        self, plan: RoundPlan, wanted: RoundSteps, batch: DecodeBatch, here: _SizeRange
    ) -> _Standing | None:
        """The answer for the rounds to come, if the plan was not cut for this one."""
        choice, num_drafts, request_ids = plan.choice, 0, None
        if choice.shape != PLAIN:
            if wanted.shape != choice.shape or batch.num_prompts or batch.num_prompt_rows:
                return None
            assert wanted.row_steps is not None, "a plan names every row's drafts"
            num_drafts, request_ids = sum(wanted.row_steps), batch.request_ids
            if not choice.shape.is_chain:
                num_drafts = choice.shape.size * sum(map(bool, wanted.row_steps))
        else:
            wanted = replace(wanted, row_steps=None)  # however many rows there will be
        key, clock = range_key(batch.size), here.clock
        num_rounds = self._probes.quiet_rounds(clock, wanted, in_doubt=here.guard.is_in_doubt)
        return _Standing(wanted, key, request_ids, num_drafts, clock, num_rounds)

    def _wanted(self, plan: RoundPlan, batch: DecodeBatch) -> RoundSteps:
        """What the plan asks of this round."""
        planned, plan = plan, plan.at(batch)
        row_steps, depth = plan.row_steps(batch), plan.depth(batch)
        if depth < plan.choice.shape.depth:
            self.last_reason = Reason.PROMPTS
            return RoundSteps(DraftShape.chain(depth), [min(steps, depth) for steps in row_steps])
        self.last_reason = self._tier_reason
        shape = self._shape
        if plan is not planned:
            shape = plan.choice.shape
            self.last_reason = Reason.PROMPTS if batch.num_prompts else Reason.KV
        notes = RoundNotes(predicted_ms=plan.choice.ms)
        if not any(row_steps):  # nobody whom it pays to begin: a plain round, whatever the tier
            return RoundSteps(PLAIN, row_steps, notes)
        return RoundSteps(shape, row_steps, notes)

    def observe(self, record: StepRecord) -> None:
        """Keeps the round, and learns from all kept ones when the plan is due to be made anew.

        Raises:
            BadMeasurement: too many times in a row can not be those of a round.
        """
        if not record.shape.is_chain and record.shape not in self.shapes:
            return  # the policy before this one asked for it
        self._to_learn.append(self._with_own_times(record))
        if record.num_planned_drafts:
            self._plan_rounds = self._fewest_rounds  # what a probe tells is not waited for
        due = self._plan_rounds + (record.num_planned_seqs // PLAN_ROWS) ** 2
        num_rounds = len(self._to_learn)
        if num_rounds - self._num_expected < due:
            return
        if num_rounds >= MOST_PROLONGED * due or self._is_surprised(record):
            self._learn()
        else:
            self._num_expected = num_rounds

    def _with_own_times(self, record: StepRecord) -> StepRecord:
        """The round, without its times where they say nothing of rounds of its kind.

        One that was launched ahead takes as long as the host takes for the one before it, if that
        is longer than what the device takes; and drafts give the host more to do.
        """
        is_plain, times = record.is_plain, record.times
        is_first, self._was_plain = is_plain != self._was_plain, is_plain
        if not (is_first and record.follows) or times is None:
            return record
        clock = self._range(record.num_planned_seqs)[1].clock
        if is_plain:
            clock.baseline_rounds = LONG_BASELINE_ROUNDS if _waits(times) else 1
        return record if clock.baseline_rounds == 1 else replace(record, times=None)

    def _is_surprised(self, newest: StepRecord) -> bool:
        """Whether the rounds of a plan are no longer, or never were, what it expected."""
        if self._plan is None or self._shape == PLAIN or self._rounds_at_tier < SETTLED_ROUNDS:
            return True
        if self._plan.choice.ms * self._plan_rounds > PROLONGED_MS:
            return True
        if any(map(_is_from_text, self._to_learn)):
            return True  # how long a text repeats itself is not in the plan
        # Measured, too: what the guard is not told cannot close it.
        speedup = self._range(newest.num_planned_seqs)[1].guard.speedup
        if speedup is None or speedup < LEAVE_OFF_GAIN:
            return True
        choice = self._plan.choice
        kept = [
            correct
            for record in self._to_learn
            if record.shape == choice.shape
            for correct in record.row_correct_drafts
        ]
        if not kept:
            return True
        mean = sum(kept) / len(kept)
        variance = sum(correct * correct for correct in kept) / len(kept) - mean * mean
        expected = choice.tokens / len(choice.row_steps) - 1.0
        return (mean - expected) ** 2 * len(kept) > SURPRISE**2 * variance

    def _learn(self) -> None:
        """Acceptance from live rows, costs from all rounds, speed from those without prompts."""
        rounds, left = self._to_learn, self._left
        self._to_learn, self._left = [], set()
        self._plan = self._standing = None
        self._num_expected = 0
        passed = _all_but_newest(rounds, LEARNED_DRAFTING_ROUNDS, _has_drafts)
        rounds = [each for place, each in enumerate(rounds) if place not in passed]
        newest = rounds[-max(1, LEARNED_ROWS // rounds[-1].num_planned_seqs) :]
        self.survival.observe_rounds([record.model_drafts for record in newest])
        of_texts = [record for record in newest if record.is_from_text]
        if of_texts:
            self.text.observe_rounds(of_texts)
        for request_id in left:  # some of these rounds were its own
            self.survival.forget(request_id)
            self.text.forget(request_id)
        for record in rounds:
            self.prompts.observe(record)
        self._learn_times([(each, each.times) for each in rounds if each.times is not None])

    def _learn_times(self, timed: Sequence[_Timed]) -> None:
        unpriced = _all_but_newest(timed, PRICED_ROUNDS, lambda each: _is_alone(each, drafts=False))
        unpriced |= _all_but_newest(timed, PRICED_ROUNDS, lambda each: _is_alone(each, drafts=True))
        priced = [each for place, each in enumerate(timed) if place not in unpriced]
        usable = iter(self._learn_costs(priced))
        for place, (record, times) in enumerate(timed):
            context = record.num_tokens / record.num_planned_seqs
            unit_ms = self.costs.table_off_ms(record.num_planned_seqs, context, record.num_sampled)
            is_near = 0.0 < times.step_ms <= ABSURD_RATIO * unit_ms
            if is_near if place in unpriced else next(usable):
                self._num_bad_times = 0
                self._learn_speed(record, times.step_ms, unit_ms)
                continue
            self._num_bad_times += 1
            if self._num_bad_times >= MAX_BAD_TIMES:
                raise BadMeasurement(
                    f"{MAX_BAD_TIMES} times in a row are not those of a round, the last: {times}"
                )

    def _learn_costs(self, timed: Sequence[_Timed]) -> list[bool]:
        """Those that are alike at once; False where the times can not be those of a round."""
        usable: list[bool] = []

        def kind(each: _Timed) -> tuple[int, dict[str, Any]]:
            return each[0].deepest, self._cost_shape(each[0])

        for (_, shape), alike in groupby(timed, kind):
            rounds, times = zip(*alike, strict=True)
            context = rounds[0].num_tokens / rounds[0].num_planned_seqs
            usable += self.costs.observe_alike(times, context=context, **shape)
        return usable

    def _cost_shape(self, record: StepRecord) -> dict[str, Any]:
        """What decides a round's costs, beside its context: see `CostModel.observe_alike`."""
        shape, usual = record.shape, record.num_drafting * (self.max_steps + 1)
        made_up_for_more = record.num_catch_up > usual  # a prompt, or a pause
        return {
            "batch_size": record.num_planned_seqs,
            "shape": DraftShape.chain(record.deepest) if shape.is_chain else shape,
            "num_rows": record.num_planned_seqs + record.num_planned_drafts,
            "num_drafting": record.num_drafting,
            "num_sampled": record.num_sampled,
            "num_entries": record.num_catch_up if made_up_for_more else 0,
            "num_text_drafts": record.num_text_drafts,
            "num_prompt_rows": record.num_prefill_tokens,
        }

    def _learn_speed(self, record: StepRecord, round_ms: float, unit_ms: float) -> None:
        self.budget.pass_time(round_ms)
        if record.num_prefill_tokens:
            return
        here = self._range(record.num_planned_seqs)[1]
        here.rounds_of[record.shape] += 1
        guard = here.guard
        if record.is_plain:
            guard.observe_off(round_ms, unit_ms)
        elif (
            self._shape != PLAIN or record.num_text_drafts
        ):  # of a trial it is known that it is slower
            guard.observe(record.num_output_tokens, record.num_planned_seqs, round_ms, unit_ms)

    def forget(self, request_id: str) -> None:
        """Drops a request's acceptance, also from rounds that are still to be learned from."""
        self.survival.forget(request_id)
        self.text.forget(request_id)
        self._left.add(request_id)

    def snapshot(self) -> dict[str, object]:
        """Predicted goodput of every tier, costs, guards and exploration."""
        choice = None if self._plan is None else self._plan.choice
        depths = list(range(self.max_steps + 1))
        return {
            "strategy": "goodput",
            "per_sequence": self.per_sequence,
            "slot": None if self._range_key is None else str(1 << self._range_key),
            "slots": {
                str(1 << key): {"candidate_steps": depths, **r.guard.snapshot()}
                for key, r in sorted(self._ranges.items())
            },
            "predicted_goodput": {str(k): round(v, 5) for k, v in self._predicted.items()},
            "predicted_ms": None if choice is None else round(choice.ms, 4),
            "predicted_tokens": None if choice is None else round(choice.tokens, 4),
            "explored_share": round(self.budget.spent_share, 6),
            "acceptance": self.survival.snapshot(),
            "text_acceptance": self.text.snapshot(),
            "costs": self.costs.snapshot(),
            "marginal_ms_by_rows": self._marginal_ms_by_rows(),
            "break_even": self._break_even(),
        }

    def _marginal_ms_by_rows(self) -> dict[str, float]:
        """What one more request would cost here, in ms per token; see `marginal`."""
        rates = self.survival.pooled_rates
        found = marginal_ms_by_rows(
            self.costs, rates, context=self._context, bound=self._bound, trees=self._tree_rates
        )
        return {str(rows): round(ms, 4) for rows, ms in found.items()}

    def _break_even(self) -> dict[str, object]:
        """What every tier of chains takes and brings at the batch of now, for rows like the
        traffic."""
        size, rates = self._batch_size, self.survival.pooled_rates
        tiers = tier_speeds(self.costs, rates, batch_size=size, context=self._context)
        return {
            "batch_size": size,
            "round_ms": _by_tier(tiers.round_ms),
            "tokens_per_ms": _by_tier(tiers.tokens_per_ms),
        }

    def _range(self, batch_size: int) -> tuple[int, _SizeRange]:
        """The size range of a batch, by its key."""
        key = range_key(batch_size)
        if key not in self._ranges:
            self._ranges[key] = _SizeRange()
        return key, self._ranges[key]

    def _bound(self, batch_size: int) -> int:
        if not self._bound_keys:
            return self.max_steps
        slot = max(0, bisect_right(self._bound_keys, batch_size) - 1)
        return min(self.max_steps, self._bounds[self._bound_keys[slot]])

    def _stay_off(self, reason: Reason) -> RoundSteps:
        """No drafts, at once: dwell is for choices, not for walls."""
        if self._shape != PLAIN:
            self._shape, self._rounds_at_tier = PLAIN, 0
        self._plan = None
        self.last_reason = reason
        return RoundSteps(PLAIN)

    def _trees_at(self, batch_size: int) -> tuple[DraftShape, ...]:
        """The shapes a batch of this size may draft, chains aside; worked out once."""
        found = self._trees_of_size.get(batch_size)
        if found is None:
            slots, bound = list(self._trees), self._bound(batch_size)
            at = max(0, bisect_right(slots, batch_size) - 1)
            shapes = self._trees[slots[at]] if slots else ()
            found = tuple(shape for shape in shapes if shape.depth <= bound)
            self._trees_of_size[batch_size] = found
        return found

    def _tree_rates(self, batch_size: int) -> dict[DraftShape, Floats]:
        """The same shapes, with what is kept of each level over all traffic."""
        return {tree: self.survival.rates(tree) for tree in self._trees_at(batch_size)}

    def _worths(self, batch: DecodeBatch, bound: int) -> Worths:
        """Of chains by position, of trees by level; 0 where a row can not use it."""
        shapes = self._trees_at(batch.size)
        all_shapes = [DraftShape.chain(bound), *shapes]
        worths = self.survival.survivals(batch.request_ids, all_shapes)
        if min(batch.max_steps) < bound:  # as a rule it is not
            most = np.asarray(batch.max_steps)
            worths = [usable(worth, most) for worth in worths]
        return Worths(worths[0], dict(zip(shapes, worths[1:], strict=True)))

    def _round_costs(self, batch: DecodeBatch, bound: int) -> RoundCosts:
        size, context = batch.size, batch.context
        return RoundCosts(
            batch_size=size,
            step=step_costs(self.costs, size, context)[:, :bound],
            verify=self.costs.verify_knots(size, context, batch.num_sampled),
            factors=self.costs.verify_factors(size),
            host=self.costs.host_ms(size),
        )

    def _make_plan(
        self, batch: DecodeBatch, bound: int, here: _SizeRange, *, moved: bool
    ) -> RoundPlan:
        worths = self._worths(batch, bound)
        costs = self._round_costs(batch, bound)
        if not self._shape.is_chain and self._shape not in worths.trees:
            self._shape = DraftShape.chain(self._shape.depth)
        entries = Entries.of(batch, worths.chains, costs, self.costs.entry_ms)
        costs = replace(costs, entry=entries.ms)
        now = self._options(batch, worths.each(entries.of_rows_that_pay), costs)
        beside = self._beside_prompts(batch, worths)
        soon = self._soon(batch, worths, entries, costs, now, beside)
        self._num_alike = 0 if now.are_apart else (self._num_alike + 1) % APART_EVERY_PLANS
        if moved or self._rounds_at_tier >= self.min_dwell_rounds or self._shape.depth > bound:
            self._choose_tier(soon, costs.off, here, moved=moved)
        if batch.text_steps:
            of_tree = None
            if not self._shape.is_chain:
                of_tree = now.worths.speeds(self._shape) / now.trees[self._shape][0].ms
            self.text.plan(batch.request_ids, now.worths.chains, costs, of_tree)
        chain = soon.chain(self._shape)
        context = batch.context

        def speeds_at(size: int) -> Floats:
            rates = self.survival.pooled_rates[: self._bound(size)]
            return tier_speeds(self.costs, rates, batch_size=size, context=context).tokens_per_ms

        def depth_at(size: int) -> int:
            return int(speeds_at(size).argmax())

        def depth_beside(num_prompt_rows: int, size_to_come: int) -> int:
            prompt_ms = partial(
                self.costs.prompt_ms, num_prompt_rows, context, batch_size=batch.size
            )
            least_ms = (MOVE_GAIN - 1.0) * chain.ms
            worth = 1.0
            if range_key(size_to_come) > range_key(batch.size):
                worth = min(1.0, float(speeds_at(batch.size).max() / speeds_at(size_to_come).max()))
            return depth_beside_prompts(
                chain, soon.worths.chains, costs, prompt_ms, least_ms, worth
            )

        beside_prompts = by_size(depth_beside, beside.depths[chain.shape.depth])
        others = [choice for tree, (choice, _) in now.trees.items() if tree != self._shape]
        present = now.chains.choice(chain.shape.depth)
        plan = RoundPlan(present, batch, entries, beside_prompts, depth_at, chain, others)
        if self._shape.is_chain:
            return plan
        others.append(present)
        (choice, _), (to_come, _) = now.trees[self._shape], soon.trees[self._shape]
        return RoundPlan(choice, batch, entries, beside_prompts, depth_at, to_come, others, plan)

    def _soon(
        self,
        batch: DecodeBatch,
        worths: Worths,
        entries: Entries,
        costs: RoundCosts,
        now: Options,
        beside: _BesidePrompts,
    ) -> Options:
        """The options of what the batch becomes, prompts and all; tiers are chosen by these."""
        if not self.prompts.is_known:
            return now
        soon = now
        if not entries.all_pay:
            soon = self._options(batch, worths.each(entries.of_rows_to_come), costs)
        if beside.shares is None:
            beside.shares = soon.shares_of_prompts(self.prompts, self.costs, batch.context)
        return soon.slowed(beside.shares)

    def _beside_prompts(self, batch: DecodeBatch, worths: Worths) -> _BesidePrompts:
        """What plans of now take prompts to do: it changes with the load, and not with the text."""
        key = range_key(batch.size), worths.chains.shape[1], len(worths.trees)
        beside = self._beside
        if beside.key != key or beside.num_plans >= PROMPTS_EVERY_PLANS:
            beside = self._beside = _BesidePrompts(key)
        beside.num_plans += 1
        return beside

    def _options(self, batch: DecodeBatch, worths: Worths, costs: RoundCosts) -> Options:
        weights = worths.speeds(self._shape)
        is_asked = batch.size >= APART_FROM_ROWS or not self._num_alike
        may_differ = self.per_sequence and is_asked
        return Options.of(batch, worths, weights, costs, self.costs, may_differ=may_differ)

    def _choose_tier(
        self, options: Options, off_ms: float, here: _SizeRange, *, moved: bool
    ) -> None:
        """And for how many rounds it is planned."""
        was_off = self._shape == PLAIN and not moved
        self._decide(options.goodput, here, moved=moved)
        self._try_shallower(options, here)
        twice = min(2 * self._plan_rounds, MOST_PLAN_ROUNDS)
        self._fewest_rounds = _fewest_rounds(off_ms)
        self._plan_rounds = twice if was_off and self._shape == PLAIN else self._fewest_rounds

    def _decide(self, goodput: dict[DraftShape, float], here: _SizeRange, *, moved: bool) -> None:
        """The global argmax over tiers: costs are staircases, so a climb could stop half way."""
        self._predicted = goodput
        present = self._shape
        if present.is_chain:
            present = min(present, max(shape for shape in goodput if shape.is_chain))
        best = max((shape for shape in goodput if shape != PLAIN), key=goodput.__getitem__)
        hope = goodput[best] / goodput[PLAIN]
        is_off = present == PLAIN
        if is_off:
            here.clock.hear(hope)
        # What trials could have by bad luck gives nothing up. If drafts really lose a little, the
        # guard will measure it; whoever is off hears next to nothing.
        if not is_off and hope < 1.0 / (MOVE_GAIN + self.survival.doubt):
            best = PLAIN
        needed = LEAVE_OFF_GAIN if is_off else MOVE_GAIN
        is_better = goodput[best] >= needed * goodput[present]
        wanted = best if is_better else present
        if wanted == self._shape:
            self._tier_reason = Reason.STEADY
            return
        if self._shape == PLAIN:
            here.clock.wait.succeed()
        gained = Reason.GAIN if wanted.size > present.size else Reason.LOSS
        self._tier_reason = Reason.RANGE if moved else gained
        self._shape, self._rounds_at_tier = wanted, 0

    def _try_shallower(self, options: Options, here: _SizeRange) -> None:
        """Spends a plan on one draft less than the tier has, if that may be better and never ran.

        Probes go deeper on a few rows. What fewer drafts of all rows cost is the table's word until
        they run, and where it is wrong nothing else would ever tell.
        """
        depth = self._shape.depth - 1
        if not self._shape.is_chain or depth <= 0:
            return
        shallower = DraftShape.chain(depth)
        is_open = here.rounds_of[shallower] < PLAN_ROUNDS
        if not is_open or here.guard.is_in_doubt or self._rounds_at_tier < TRY_AFTER_ROUNDS:
            return
        share = options.chains.goodput[depth] / options.chains.goodput[self._shape.depth]
        ms = PLAN_ROUNDS * float(options.chains.ms[depth])
        if share >= WORTH_TRYING and self.budget.spend(ms * max(0.0, 1.0 - share)):
            self._shape, self._tier_reason, self._rounds_at_tier = shallower, Reason.PROBE, 0


def _waits(times: StepTimes) -> bool:
    """Whether the device waited for the host."""
    idle_ms = times.step_ms - times.draft_ms - times.verify_ms
    return idle_ms > WAITS_SHARE * times.step_ms


def _is_from_text(record: StepRecord) -> bool:
    return any(record.is_from_text)


def _has_drafts(record: StepRecord) -> bool:
    return record.num_planned_drafts > 0


def _is_alone(timed: _Timed, *, drafts: bool) -> bool:
    """Whether a round says what one takes without prompts; those with some are few enough."""
    return not timed[0].num_prefill_tokens and _has_drafts(timed[0]) == drafts


def _all_but_newest(
    rounds: Sequence[_Round], most: int, is_of_kind: Callable[[_Round], bool]
) -> set[int]:
    """Places of the rounds of a kind, but for the newest `most` of them."""
    return {*[place for place, each in enumerate(rounds) if is_of_kind(each)][:-most]}


def _fewest_rounds(off_ms: float) -> int:
    """Of a plan, where a plain round takes so long."""
    fitting = PLAN_MS / off_ms if off_ms > 0.0 else MOST_PLAN_ROUNDS
    return min(max(PLAN_ROUNDS, round(fitting)), MOST_PLAN_ROUNDS)


def _by_tier(values: Floats) -> dict[str, float]:
    return {str(num_steps): round(value, 5) for num_steps, value in enumerate(values.tolist())}
