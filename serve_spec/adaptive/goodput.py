"""Strategy `goodput`: draft and verify what pays, in tokens per millisecond.

`drafts` predicts accepted tokens, `costs` the time of rounds; `planner` picks a depth
and a budget for some rounds. Plain rounds, and drafts while speculation is off, are tried for a
fraction of the time. `SpeedGuard` turns speculation off where it was measured to lose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from serve_spec.adaptive.candidates import AllowedShapes, Candidates
from serve_spec.adaptive.costs import Costs, Work, bucket
from serve_spec.adaptive.drafts import DraftKnowledge
from serve_spec.adaptive.exploration import (
    EXPLORE_AFTER,
    PLAN_ROUNDS,
    Exploration,
    SpeedGuard,
    SpeedGuards,
)
from serve_spec.adaptive.planner import Candidate, Planner
from serve_spec.adaptive.policy import StepPolicy
from serve_spec.adaptive.prompts import (
    NO_LIMITS,
    Load,
    PromptLimits,
    PromptLoad,
    PromptSizer,
)
from serve_spec.adaptive.round_times import RoundTimes, work_of
from serve_spec.adaptive.state import Learner, State, section
from serve_spec.config.cost_table import CostTable
from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, Reason, RoundNotes, RoundSteps


class GoodputPolicy(StepPolicy):
    """Picks the depth and the budget of drafts that maximise expected goodput.

    allowed: shapes that it may choose.
    per_sequence: whether rounds may have budgets, so that requests verify different numbers.
    accept_rates: expected by position; None: a default.
    token_counts: tokens that captured graphs verify; empty: any number costs its own.
    prompts: limits of the prompt tokens of a round.
    """

    state_version = 4

    def __init__(
        self,
        costs: CostTable,
        allowed: AllowedShapes | None = None,
        *,
        per_sequence: bool = True,
        min_dwell_rounds: int = 0,
        initial_steps: int = 3,
        accept_rates: Sequence[float] | None = None,
        token_counts: Sequence[int] = (),
        prompts: PromptLimits = NO_LIMITS,
    ) -> None:
        self.costs = Costs(costs)
        self.allowed = allowed or AllowedShapes()
        self.max_steps = self.allowed.max_steps
        self.shapes = self.allowed.shapes
        self.per_sequence = per_sequence
        self.min_dwell_rounds = min_dwell_rounds
        self._planner = Planner(self.costs, token_counts)
        self.drafts = DraftKnowledge(self.max_steps, accept_rates)
        self.last_reason = Reason.WARM_UP
        self._guards = SpeedGuards()
        self._times = RoundTimes(self.costs, self._guards)
        self._at: int | None = None
        self._shape = DraftShape.chain(min(initial_steps, self.max_steps))
        self._candidates: dict[DraftShape, Candidate] = {}
        self._chosen: Candidate | None = None
        self._answer = RoundSteps(self._shape)
        self._sizer = PromptSizer(self.costs.prompts, prompts)
        self._weigher = Candidates(self.allowed, self._planner, self.drafts, per_sequence)
        self._explored = False
        self._trial: frozenset[str] | None = None
        self._ngram_steps = self._rounds_without_ngrams = 0
        self._grammar_steps = self._grammar_room = 0
        self._rounds_left = self._rounds_at_shape = 0
        self._to_learn: list[StepRecord] = []
        self._prompts = PromptLoad()
        self._exploration = Exploration()
        self._parts: dict[str, Learner] = {"drafts": self.drafts, "prompts": self._prompts}
        self._parts["trials"] = self._exploration
        self._load = Load(Work(1, 0.0))

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return the plan's shape and budget; plan anew when the plan has run out."""
        if not any(batch.max_steps):
            return RoundSteps(PLAIN)
        at = bucket(batch.size)
        shape = self._answer.shape
        fits = shape.is_chain or shape in self.allowed.trees_of(batch.size)
        plans = self._rounds_left <= 0 or at != self._at or not fits
        if plans:
            self._learn()
            self._plan(batch, at)
        self._rounds_left -= 1
        self._rounds_at_shape += 1
        steps = self._fitted(batch)
        return replace(steps, notes=replace(steps.notes, begins_plan=True)) if plans else steps

    def _fitted(self, batch: DecodeBatch) -> RoundSteps:
        """Return the plan's answer for the batch of now, which may be of another size."""
        answer, most = self._answer, batch.max_draft_tokens
        if answer.budget is not None:
            budget = answer.budget
            if batch.size != self._load.work.size:
                budget = self._planner.scaled(budget, self._load.work.size, batch.size)
            answer = replace(answer, budget=min(budget, most))
        elif answer.shape.size * batch.size > most and (
            most < batch.size or not answer.shape.is_chain
        ):
            self.last_reason = Reason.KV
            answer = RoundSteps(PLAIN, notes=answer.notes)
        if self._trial is not None and answer.shape.depth:
            steps = [answer.shape.depth if i in self._trial else 0 for i in batch.request_ids]
            answer = replace(answer, steps_per_req=steps)
        if batch.ngram_steps:
            answer = replace(answer, ngram_steps=self._ngram_steps_of(batch))
        if batch.grammar_steps:
            answer = replace(answer, grammar_steps=max(1, self._grammar_steps))  # one, to learn
        answer = replace(answer, grammar_room=self._grammar_room)
        if batch.max_prompt_tokens:
            drafts = answer.shape.size * batch.size if answer.budget is None else answer.budget
            ms = answer.notes.predicted_ms or 0.0
            answer = replace(answer, prompt_tokens=self._sizer.tokens(batch, drafts, ms))
        return answer

    def _ngram_steps_of(self, batch: DecodeBatch) -> list[int]:
        """Return how many n-gram drafts each request verifies; sometimes two of one, to learn."""
        steps = [min(found, self._ngram_steps) for found in batch.ngram_steps]
        self._rounds_without_ngrams = 0 if any(steps) else self._rounds_without_ngrams + 1
        if self._rounds_without_ngrams > EXPLORE_AFTER and any(batch.ngram_steps):
            most = max(range(batch.size), key=batch.ngram_steps.__getitem__)
            steps[most] = min(batch.ngram_steps[most], 2)
        return steps

    def observe(self, record: StepRecord) -> None:
        """Keep a round until the next plan, unless an earlier policy asked for it."""
        if record.shape in self.shapes:
            self._to_learn.append(record)
        if len(self._to_learn) >= 4 * PLAN_ROUNDS:  # while no request may draft, no plan comes
            self._learn()

    def _learn(self) -> None:
        records, self._to_learn = self._to_learn, []
        if not records:
            return
        self.drafts.learn(records)
        self.costs.age(records[-1].num_planned_seqs or 1, len(records))
        works = [work_of(record, self.max_steps) for record in records]
        for record, work in zip(records, works, strict=True):
            self._prompts.observe(record)
            if work is not None:
                self._exploration.observe(record.step_ms, self._lost_ms(record, work))
        self._times.learn(records, works)

    def _lost_ms(self, record: StepRecord, work: Work) -> float:
        """Return the time that a round cost more than the plan's choice for as many tokens."""
        plan = self._chosen
        if not record.notes.is_probe or plan is None:
            return 0.0
        # Neither prompts nor the entries that they lack count as lost.
        ms = record.step_ms
        if work.prompts:
            ms = self.costs.ms(work) + self.costs.prompts.entry_ms * work.entries
        tokens = record.num_drafted_tokens  # others are accepted whatever the plan
        return ms - tokens * plan.ms / (self._load.work.size + plan.expected)

    def _plan(self, batch: DecodeBatch, at: int) -> None:
        moved, self._at = at != self._at, at
        size = batch.size
        work = Work(size, batch.context, batch.num_sampled / size)
        self._load = load = self._prompts.load(work)
        found = self._weigher.weighed(batch, load, is_drafting=self._shape.depth > 0)
        if (most_ms := self._sizer.limits.config.max_inter_token_ms) is not None:
            found = [found[0], *(each for each in found[1:] if each.ms <= most_ms)]
        self._candidates = {each.shape: each for each in found}
        guard = self._guards.of(at)
        self._chosen = chosen = self._decide(found, guard, moved=moved)
        stays = chosen.shape == self._shape
        self._rounds_left = PLAN_ROUNDS * (2 if stays and not moved and not self._explored else 1)
        if not stays:
            self._shape, self._rounds_at_shape = chosen.shape, 0
        by_ngram, by_grammar = self.drafts.ngrams.rates, self.drafts.grammars.rates
        self._ngram_steps = (
            self._planner.ngram_steps(load, chosen, by_ngram) if batch.ngram_steps else 0
        )
        before = math.prod(self.drafts.chains.rates[: chosen.shape.depth])
        self._grammar_steps = self._planner.grammar_steps(load, by_grammar)
        self._grammar_room = self._planner.grammar_steps(load, by_grammar, before)
        trial = None
        if not guard.rounds_left:
            is_first = guard.plain is None
            trial = self._exploration.propose(batch, chosen, found, self._rounds_left, is_first)
        if trial is not None:
            chosen, self._rounds_left, self.last_reason = trial[:3]
        self._explored = trial is not None
        self._trial = None if trial is None else trial.request_ids
        self._answer = self._steps(chosen)
        self._sizer.plan(load, batch.num_prompts, chosen.ms, size + chosen.expected)

    def _steps(self, chosen: Candidate) -> RoundSteps:
        """Return the answer that asks for a candidate."""
        notes = RoundNotes(
            self._explored, predicted_ms=chosen.ms, expected_drafts=round(chosen.expected, 2)
        )
        calibration = self.drafts.pairs
        return RoundSteps(chosen.shape, notes=notes, budget=chosen.budget, calibration=calibration)

    def _decide(self, found: Sequence[Candidate], guard: SpeedGuard, *, moved: bool) -> Candidate:
        """Return the best candidate, or the present one if that is hardly better."""
        best = max(found, key=lambda each: each.tokens_per_ms)
        present = self._candidates.get(self._shape)
        if guard.rounds_left:
            self.last_reason = Reason.GUARD
            return found[0]
        if present is not None and not moved and best is not present:
            dwells = self._rounds_at_shape < self.min_dwell_rounds
            # Depths change for a gain above noise, and turn off for any.
            gain = 1.0 if best is found[0] else 1.015
            if dwells or best.tokens_per_ms < gain * present.tokens_per_ms:
                self.last_reason = Reason.DWELL if dwells else Reason.STEADY
                return present
        gained = Reason.GAIN if best.shape.size > self._shape.size else Reason.LOSS
        self.last_reason = Reason.STEADY if best is present else Reason.RANGE if moved else gained
        return best

    def state(self) -> State:
        """Return what is known of drafts, times and prompts, and the present shape."""
        self._learn()
        return {
            **{name: part.state() for name, part in self._parts.items()},
            "guards": self._guards.state(),
            "costs": self.costs.state(),
            "shape": str(self._shape),
        }

    def restore(self, state: State) -> None:
        """Continue from a state, without its times if they correct another table."""
        for name, part in self._parts.items():
            part.restore(section(state, name))
        if self.costs.restore(section(state, "costs")):
            self._guards.restore(section(state, "guards"))
        shapes = {str(shape): shape for shape in self.shapes}
        self._shape = shapes.get(str(state.get("shape")), self._shape)

    def snapshot(self) -> dict[str, Any]:
        """Return predicted goodput of every candidate, costs, guards and exploration."""
        chosen, found, size = self._chosen, self._candidates, self._load.work.size
        steps, guards = list(range(self.max_steps + 1)), self._guards.snapshot()
        return {
            "strategy": "goodput",
            "per_sequence": self.per_sequence,
            "slot": None if self._at is None else str(1 << self._at),
            "slots": {k: {"candidate_steps": steps, **x} for k, x in guards.items()},
            "budget": self._answer.budget,
            "predicted_goodput": {str(k): round(x.tokens_per_ms, 5) for k, x in found.items()},
            "predicted_ms": None if chosen is None else round(chosen.ms, 4),
            "predicted_tokens": None if chosen is None else round(size + chosen.expected, 4),
            "prompt_tokens": self._sizer.snapshot(),
            "explored_share": round(self._exploration.fraction, 6),
            **self.drafts.snapshot(),
            "costs": self.costs.snapshot(),
            "marginal_ms_by_batch_size": self._planner.marginal_ms(
                self._load.work, self.drafts.chains.rates, self.allowed.bound
            ),
            "break_even": self._planner.break_even(self._load, found),
        }
