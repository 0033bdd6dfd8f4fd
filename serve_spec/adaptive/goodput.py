"""Strategy `goodput`: draft and verify what pays, in tokens per millisecond.

What drafts are worth comes from `drafts`, what rounds take from `costs`; `planner` picks a depth
and a budget. A plan holds for some rounds. A depth that does not run is tried again because what is
known of it is forgotten; plain rounds, and drafts while speculation is off, are tried for a budget
of time. `speed_guard` turns speculation off where it was measured to lose.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from serve_spec.adaptive.calibration import Floats
from serve_spec.adaptive.costs import Costs, bucket
from serve_spec.adaptive.drafts import DraftKnowledge
from serve_spec.adaptive.planner import Candidate, Load, Planner
from serve_spec.adaptive.policy import BadMeasurement, Reason
from serve_spec.adaptive.speed_guard import SpeedGuard
from serve_spec.config.cost_table import CostTable
from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, RoundNotes, RoundSteps

DEFAULT_MAX_STEPS = 7
PLAN_ROUNDS = 8
"""Fewest rounds that follow one plan."""
PLAN_MS = 32.0
"""Plain rounds of so many milliseconds follow one plan, if they are more."""
MOVE_GAIN = 1.015
"""Predicted gain that changes the depth."""
EXPLORED_SHARE = 0.005
"""Share of the time that exploration may cost,"""
BUDGET_MS = 60_000.0
"""of which older time weighs 1/e."""
TRIAL_ROUNDS = 4
"""Rounds of one trial."""
TRIED_REQUESTS = 8
"""Requests that draft in a trial while speculation is off."""
TRY_AFTER = 128
"""Rounds off before a trial that the budget pays; one that it does not pay comes 8 times later."""
PLAIN_EVERY = 256
"""Rounds that draft before a plain one measures what they are compared with."""
_MAX_BAD_TIMES = 8

_T = TypeVar("_T")


class GoodputPolicy:
    """Picks the depth and the budget of drafts that maximise expected goodput.

    bounds: most steps by the lower bound of a batch-size slot; none: `max_steps` everywhere.
    trees: the shapes a batch may draft instead of chains, by the same slots.
    per_sequence: whether rounds may have budgets, so that requests verify different numbers.
    accept_rates: expected by position; None: a default.
    token_counts: tokens that captured graphs verify; empty: any number costs its own.
    """

    def __init__(
        self,
        costs: CostTable,
        *,
        max_steps: int = DEFAULT_MAX_STEPS,
        bounds: Mapping[int, int] | None = None,
        trees: Mapping[int, Sequence[DraftShape]] | None = None,
        per_sequence: bool = True,
        min_dwell_rounds: int = 0,
        initial_steps: int = 3,
        accept_rates: Sequence[float] | None = None,
        token_counts: Sequence[int] = (),
    ) -> None:
        self.costs = Costs(costs)
        self.max_steps = max_steps
        self.per_sequence = per_sequence
        self.min_dwell_rounds = min_dwell_rounds
        self._planner = Planner(self.costs, token_counts)
        self._bounds = dict(sorted((bounds or {}).items()))
        self._trees = {slot: tuple(shapes) for slot, shapes in sorted((trees or {}).items())}
        branched = sorted({tree for shapes in self._trees.values() for tree in shapes})
        self.shapes = (*map(DraftShape.chain, range(max_steps + 1)), *branched)
        deepest = max(shape.depth for shape in self.shapes)
        self.drafts = DraftKnowledge(max_steps, deepest, accept_rates)
        self.last_reason = Reason.WARM_UP
        self._guards: dict[int, SpeedGuard] = {}
        self._at: int | None = None
        self._shape = DraftShape.chain(min(initial_steps, max_steps))
        self._candidates: dict[DraftShape, Candidate] = {}
        self._chosen: Candidate | None = None
        self._answer = RoundSteps(self._shape)
        self._trial: frozenset[str] | None = None
        self._text_steps = 0
        self._rounds_left = self._rounds_at_shape = 0
        self._rounds_off = self._rounds_drafting = self._rounds_without_text = 0
        self._to_learn: list[StepRecord] = []
        self._total_ms = self._explored_ms = 0.0
        self._prompt_chunk = 0.0  # prompt tokens of a mixed step
        self._ended = [0.0, 0.0]  # prompt tokens and emitted tokens of requests that ended
        self._before: DraftShape | None = None
        self._num_bad_times = 0
        self._load = Load(1, 0.0)

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return the plan's shape and budget; plan anew when the plan has run out."""
        if not any(batch.max_steps):
            return RoundSteps(PLAIN)
        at = bucket(batch.size)
        if self._rounds_left <= 0 or at != self._at:
            self._learn()
            self._plan(batch, at)
        self._rounds_left -= 1
        self._rounds_at_shape += 1
        return self._fitted(batch)

    def _fitted(self, batch: DecodeBatch) -> RoundSteps:
        """Return the plan's answer for the batch of now, which may be of another size."""
        answer, most = self._answer, batch.max_draft_tokens
        if answer.budget is not None:
            budget = answer.budget
            if batch.size != self._load.size:
                budget = self._planner.scaled(budget, self._load.size, batch.size)
            answer = replace(answer, budget=min(budget, most))
        elif answer.shape.size * batch.size > most and (
            most < batch.size or not answer.shape.is_chain
        ):
            self.last_reason = Reason.KV
            return RoundSteps(PLAIN, notes=answer.notes)
        if self._trial is not None:
            steps = [answer.shape.depth if i in self._trial else 0 for i in batch.request_ids]
            answer = replace(answer, row_steps=steps)
        if batch.text_steps:
            answer = replace(answer, text_steps=self._of_texts(batch))
        return answer

    def _of_texts(self, batch: DecodeBatch) -> list[int]:
        """Return how many n-gram drafts each request verifies; sometimes two of one, to learn."""
        steps = [min(found, self._text_steps) for found in batch.text_steps]
        self._rounds_without_text = 0 if any(steps) else self._rounds_without_text + 1
        if self._rounds_without_text > TRY_AFTER and any(batch.text_steps):
            row = max(range(batch.size), key=batch.text_steps.__getitem__)
            steps[row] = min(batch.text_steps[row], 2)
        return steps

    def observe(self, record: StepRecord) -> None:
        """Keep a round until the next plan.

        Raises:
            BadMeasurement: too many times in a row cannot be those of a round.
        """
        if record.shape not in self.shapes:
            return  # an earlier policy asked for it
        self._to_learn.append(record)
        if record.times is None or not record.batch_size:
            return
        is_bad = not 0.0 < record.times.step_ms < math.inf
        self._num_bad_times = self._num_bad_times + 1 if is_bad else 0
        if self._num_bad_times >= _MAX_BAD_TIMES:
            self._num_bad_times = 0
            raise BadMeasurement(
                f"{_MAX_BAD_TIMES} times in a row are not those of a round: {record.times}"
            )

    def forget(self, request_id: str) -> None:
        """Know no request."""

    def _learn(self) -> None:
        records, self._to_learn = self._to_learn, []
        if not records:
            return
        self.drafts.learn(records)
        self.costs.age(records[-1].num_planned_seqs or 1, len(records))
        for record in records:
            self._observe_traffic(record)
            self._learn_times(record)

    def _observe_traffic(self, record: StepRecord) -> None:
        """Take in how many prompt tokens share a round, and how long requests are."""
        if (prompts := record.num_prefill_tokens) and record.num_output_tokens:
            self._prompt_chunk += 0.1 * (prompts - self._prompt_chunk)
        if record.num_ended:
            kept = max(0.0, 1.0 - record.num_ended / 64.0)
            new = record.num_ended_prompt_rows, record.num_ended_tokens
            self._ended = [kept * x + y for x, y in zip(self._ended, new, strict=True)]

    def _learn_times(self, record: StepRecord) -> None:
        size, times = record.num_planned_seqs, record.times
        is_first, self._before = record.follows and record.shape != self._before, record.shape
        if times is None or not size or not 0.0 < times.step_ms < math.inf:
            return
        ms, context = times.step_ms, record.num_tokens / size
        guard = self._guards.setdefault(bucket(size), SpeedGuard())
        guard.rounds_left = max(0, guard.rounds_left - 1)
        self._count_exploration(record, ms)
        if is_first:
            return  # launched ahead, it may have taken the host's time for the round before
        drafts, sampled = record.num_planned_drafts, record.num_sampled / size
        shape = record.shape if drafts or record.num_drafting else PLAIN
        if shape.is_chain and drafts:
            shape = DraftShape.chain(min(record.deepest or shape.depth, self.max_steps))
        if shape != PLAIN and record.num_drafting < 0.9 * size:
            return
        prompts = record.num_prefill_tokens
        if record.num_catch_up > record.num_drafting * (self.max_steps + 1):
            self.costs.learn_entries(size, shape, drafts, context, prompts, record.num_catch_up, ms)
        elif prompts:
            ms -= self.costs.entry_ms * record.num_catch_up
            self.costs.learn_prompt(size, shape, drafts, context, prompts, ms)
        else:
            self.costs.learn(size, shape, drafts, context, sampled, ms)
            unit = self.costs.table_ms(size, PLAIN, 0, context, sampled)
            if record.is_plain:
                guard.observe_plain(ms / unit)
            elif record.batch_size:
                guard.observe(record.num_output_tokens / record.batch_size, ms / unit)

    def _count_exploration(self, record: StepRecord, ms: float) -> None:
        fade = math.exp(-ms / BUDGET_MS)
        self._total_ms = self._total_ms * fade + ms
        self._explored_ms *= fade
        if record.notes.is_probe and self._chosen is not None:
            # What the plan's own choice would have taken for as many tokens is no loss.
            lost = ms - record.num_output_tokens / self._chosen.tokens_per_ms
            self._explored_ms = max(0.0, self._explored_ms + lost)

    def _plan(self, batch: DecodeBatch, at: int) -> None:
        moved, self._at = at != self._at, at
        size = batch.size
        self._load = load = Load(
            size,
            batch.context,
            batch.num_sampled / size,
            prompts=self._ended[0] / max(self._ended[1], 1.0),
            chunk=self._prompt_chunk,
        )
        found = self._weighed(batch, load)
        self._candidates = {each.shape: each for each in found}
        self._rounds_left = max(PLAN_ROUNDS, round(PLAN_MS / found[0].ms))
        guard = self._guards.setdefault(at, SpeedGuard())
        self._chosen = chosen = self._decide(found, guard, moved=moved)
        if chosen.shape != self._shape:
            self._shape, self._rounds_at_shape = chosen.shape, 0
        self._text_steps = self._best_text_steps(load, chosen)
        self._trial = None
        if not guard.rounds_left:
            chosen = self._explore(batch, chosen, found, guard)
        is_probe = chosen is not self._chosen or self._trial is not None
        notes = RoundNotes(
            is_probe=is_probe, predicted_ms=chosen.ms, expected_drafts=round(chosen.expected, 2)
        )
        self._answer = RoundSteps(
            chosen.shape, notes=notes, budget=chosen.budget, calibration=self.drafts.pairs
        )

    def _weighed(self, batch: DecodeBatch, load: Load) -> list[Candidate]:
        """Return every shape with its best budget, plain rounds first."""
        size, most = batch.size, batch.max_draft_tokens
        bound = min(self._bound(size), max(batch.max_steps))
        survivals = self.drafts.survivals(size)[:, : max(bound, 1)]
        weights = np.full(survivals.shape[1], size / len(survivals))
        if min(batch.max_steps) < bound:
            caps = np.asarray(batch.max_steps)
            weights *= (caps[:, None] > np.arange(len(weights))).mean(axis=0)
        found = self._planner.chains(
            load,
            survivals,
            np.maximum(weights, 1e-9),
            most if bound else 0,
            may_admit=self.drafts.has_shares and self.per_sequence,
        )
        for tree in _at_slot(self._trees, size, ()):
            if tree.depth <= bound and tree.size * size <= most:
                found.append(self._planner.tree(load, tree, self.drafts.trees.rates))
        return found

    def _decide(self, found: Sequence[Candidate], guard: SpeedGuard, *, moved: bool) -> Candidate:
        """Return the best candidate, or the present one if that is hardly better."""
        best = max(found, key=lambda each: each.tokens_per_ms)
        present = self._candidates.get(self._shape)
        if guard.rounds_left:
            self.last_reason = Reason.GUARD
            return found[0]
        if present is not None and not moved and best is not present:
            dwells = self._rounds_at_shape < self.min_dwell_rounds
            if dwells or best.tokens_per_ms < MOVE_GAIN * present.tokens_per_ms:
                self.last_reason = Reason.DWELL if dwells else Reason.STEADY
                return present
        gained = Reason.GAIN if best.shape.size > self._shape.size else Reason.LOSS
        self.last_reason = Reason.STEADY if best is present else Reason.RANGE if moved else gained
        return best

    def _explore(
        self, batch: DecodeBatch, chosen: Candidate, found: Sequence[Candidate], guard: SpeedGuard
    ) -> Candidate:
        """Return what runs for a few rounds because it teaches something, if the budget pays."""
        plain = found[0]
        if not chosen.shape.depth:
            self._rounds_off += self._rounds_left
            is_due = self._rounds_off >= TRY_AFTER and self._can_spend(0.0)
            if len(found) < 2 or not (is_due or self._rounds_off >= 8 * TRY_AFTER):
                return chosen
            # Whatever is believed, some requests draft now and then: nothing else would tell.
            self._rounds_off = 0
            num = min(batch.size, TRIED_REQUESTS)
            lacks = batch.backlogs or [0] * batch.size
            rows = sorted(range(batch.size), key=lacks.__getitem__)[:num]
            self._trial = frozenset([batch.request_ids[row] for row in rows])
            tried = max(found[1:3], key=lambda each: each.tokens_per_ms)
            expected = tried.expected * num / batch.size
            self._begin(Reason.PROBE, TRIAL_ROUNDS)
            return replace(tried, budget=None, expected=expected)
        self._rounds_off = 0
        self._rounds_drafting += self._rounds_left
        lost = 2.0 * plain.ms * max(0.0, 1.0 - plain.tokens_per_ms / chosen.tokens_per_ms)
        is_due = guard.plain is None or self._rounds_drafting >= PLAIN_EVERY
        if is_due and self._can_spend(lost):
            self._rounds_drafting = 0
            self._begin(Reason.BASELINE, 2)
            return plain
        return chosen

    def _can_spend(self, ms: float) -> bool:
        return self._explored_ms + ms <= EXPLORED_SHARE * self._total_ms

    def _begin(self, reason: Reason, num_rounds: int) -> None:
        self._rounds_left, self.last_reason = num_rounds, reason

    def _best_text_steps(self, load: Load, chosen: Candidate) -> int:
        """Return how many n-gram drafts a request verifies that has some."""
        tokens = load.size * np.cumsum(np.cumprod([1.0, *self.drafts.texts.rates]))
        drafts = load.size * np.arange(len(tokens), dtype=float)
        speeds = tokens / self.costs.chains_ms(load.size, drafts, load.context, load.sampled)[0]
        best = int(speeds.argmax())
        return best if speeds[best] >= (load.size + chosen.expected) / chosen.ms else 0

    def _bound(self, batch_size: int) -> int:
        return min(self.max_steps, _at_slot(self._bounds, batch_size, self.max_steps))

    def snapshot(self) -> dict[str, object]:
        """Return predicted goodput of every candidate, costs, guards and exploration."""
        chosen, depths, size = self._chosen, list(range(self.max_steps + 1)), self._load.size
        ms, speeds = self._chain_speeds(size)
        return {
            "strategy": "goodput",
            "per_sequence": self.per_sequence,
            "slot": None if self._at is None else str(1 << self._at),
            "slots": {
                str(1 << at): {"candidate_steps": depths, **guard.snapshot()}
                for at, guard in sorted(self._guards.copy().items())
            },
            "budget": self._answer.budget,
            "predicted_goodput": {
                str(shape): round(each.tokens_per_ms, 5) for shape, each in self._candidates.items()
            },
            "predicted_ms": None if chosen is None else round(chosen.ms, 4),
            "predicted_tokens": None if chosen is None else round(size + chosen.expected, 4),
            "explored_share": round(self._explored_ms / max(self._total_ms, 1e-9), 6),
            **self.drafts.snapshot(),
            "costs": self.costs.snapshot(),
            "marginal_ms_by_rows": self._marginal_ms_by_rows(),
            "break_even": {
                "batch_size": size,
                "round_ms": {str(k): round(x, 5) for k, x in enumerate(ms.tolist())},
                "tokens_per_ms": {str(k): round(x, 5) for k, x in enumerate(speeds.tolist())},
            },
        }

    def _chain_speeds(self, size: int) -> tuple[Floats, Floats]:
        """Return ms and tokens per ms of a batch by depth, all requests alike."""
        rates, load = self.drafts.chains.rates[: self._bound(size)], self._load
        tokens = size * np.cumsum(np.cumprod([1.0, *rates]))
        drafts = size * np.arange(len(tokens), dtype=float)
        ms = np.diagonal(self.costs.chains_ms(size, drafts, load.context, load.sampled))
        return ms, tokens / ms

    def _marginal_ms_by_rows(self) -> dict[str, float]:
        """Return the ms per token of one more request, by requests there are: 0, 1, 2, 4, ..

        Taken over doublings, because one request more is free between two captured sizes; never
        less than in a smaller batch, where a table that says so is noise.
        """
        sizes = [0, 1]
        while 2 * sizes[-1] <= self.costs.table.batch_sizes[-1]:
            sizes.append(2 * sizes[-1])
        speeds = [0.0, *(float(self._chain_speeds(size)[1].max()) for size in sizes[1:])]
        found, least = {}, 0.0
        for i, size in enumerate(sizes[:-1]):
            gain = max(1e-6, speeds[i + 1] - speeds[i])
            least = max(least, (sizes[i + 1] - size) / gain)
            found[str(size)] = round(least, 4)
        return found


def _at_slot(slots: Mapping[int, _T], batch_size: int, default: _T) -> _T:
    """Return the entry of the slot that a batch size falls into; the first below all slots."""
    keys = list(slots)
    return slots[keys[max(0, bisect_right(keys, batch_size) - 1)]] if keys else default
