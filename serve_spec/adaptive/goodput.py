"""Strategy `goodput`: draft and verify what pays, in tokens per millisecond.

Chances of drafts come from their shares (`calibration`) or, without any, from rates by position
(`rates`), times of rounds from a table (`costs`); `planner` picks a depth and a budget. A plan
holds for some rounds. One budget of time pays for all exploration, and `speed_guard` turns
speculation off where it was measured to lose.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from serve_spec.adaptive.calibration import DraftCalibration, Floats, Indices
from serve_spec.adaptive.costs import STALE_ROUNDS, Costs, bucket
from serve_spec.adaptive.planner import Candidate, Load, Planner
from serve_spec.adaptive.policy import BadMeasurement, Reason
from serve_spec.adaptive.rates import PositionRates, tallied
from serve_spec.adaptive.speed_guard import SpeedGuard
from serve_spec.config.cost_table import CostTable
from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import AS_DRAWN, DecodeBatch, RoundNotes, RoundSteps

DEFAULT_MAX_STEPS = 7
PLAN_ROUNDS = 8
"""Rounds that follow one plan."""
PLAN_MS = 32.0
"""Milliseconds that a plan of short rounds lasts."""
MOST_PLAN_ROUNDS = 64
"""Most rounds of a plan."""
MOVE_GAIN = 1.015
"""Predicted gain that changes the depth."""
SAMPLE_REQUESTS = 256
"""Newest requests whose drafts' survivals stand for those of the batch."""
LEARNED_REQUESTS = 512
"""Newest requests of a plan's rounds that calibration and rates learn from."""
EXPLORED_SHARE = 0.005
"""Share of the time that exploration may cost."""
TRIAL_ROUNDS = 4
"""Rounds of one trial."""
TRIED_SHARE = 0.25
"""Share of the requests that draft in a trial while speculation is off."""
FIRST_WAIT, LAST_WAIT = 32, 256
"""Rounds off before the first trial, and before the later ones at most."""
PLAIN_EVERY = 256
"""Rounds that draft before a plain one measures what they are compared with."""
OPTIMISM = 0.1
"""What a depth that hardly ran may be better by than it is predicted, as a share."""
TEXT_RATE = 0.85
"""Share of n-gram drafts that are accepted once reached, before any was verified."""
TEXT_RETRY = 64
"""Rounds without n-gram drafts after which one request verifies its own all the same."""
_MAX_BAD_TIMES = 8
_TRIED_REQUESTS = 64.0


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
        self.calibration = DraftCalibration(max_steps)
        self.rates = PositionRates(max_steps, accept_rates)
        deepest = max(shape.depth for shape in self.shapes)
        self.tree_rates = PositionRates(deepest)
        self.text_rates = PositionRates(max_steps, [TEXT_RATE] * max_steps)
        self.last_reason = Reason.WARM_UP
        self._pairs = AS_DRAWN
        self._sample: Floats = np.empty((0, max_steps))
        self._has_shares = False
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
        self._wait = FIRST_WAIT
        self._to_learn: list[StepRecord] = []
        self._total_ms = self._explored_ms = 0.0
        self._mixed = 0.0
        self._prompts = [0.0, 0.0]  # prompt tokens and emitted tokens of mixed steps
        self._ended = [0.0, 0.0]  # prompt tokens, emitted tokens
        self._before: DraftShape | None = None
        self._num_bad_times = 0
        self._drafted: Counter[DraftShape] = Counter()
        self._load = Load(1, 0.0)

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return the plan's shape and budget; plan anew when the plan has run out."""
        at = bucket(batch.size)
        if self._rounds_left <= 0 or at != self._at:
            self._learn()
            self._plan(batch, at)
        self._rounds_left -= 1
        self._rounds_at_shape += 1
        answer = self._answer
        if not answer.shape.depth:
            return answer
        most = batch.max_draft_tokens
        if answer.shape.size * batch.size > most and answer.budget is None:
            if most < batch.size or not answer.shape.is_chain:
                self.last_reason = Reason.KV
                return RoundSteps(PLAIN, notes=answer.notes)
        elif answer.budget is not None:
            budget = answer.budget
            if batch.size != self._load.size:
                budget = self._planner.scaled(budget, self._load.size, batch.size)
            if (budget := min(budget, most)) != answer.budget:
                answer = replace(answer, budget=budget)
        if self._trial is not None:
            steps = [answer.shape.depth if i in self._trial else 0 for i in batch.request_ids]
            answer = replace(answer, row_steps=steps)
        if batch.text_steps:
            answer = replace(answer, text_steps=self._of_texts(batch))
        return answer

    def _of_texts(self, batch: DecodeBatch) -> list[int]:
        """Return how many n-gram drafts each request verifies."""
        steps = [min(found, self._text_steps) for found in batch.text_steps]
        self._rounds_without_text = 0 if any(steps) else self._rounds_without_text + 1
        if self._rounds_without_text > TEXT_RETRY and any(batch.text_steps):
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
        if 0.0 < record.times.step_ms < float("inf"):
            self._num_bad_times = 0
            return
        self._num_bad_times += 1
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
        num_requests, newest = 0, []
        for record in reversed(records):
            if num_requests < LEARNED_REQUESTS and any(record.row_steps or record.row_drafted):
                newest.append(record)
                num_requests += len(record.row_steps)
        self._learn_drafts([r for r in newest if r.shape.is_chain])
        if trees := [r for r in newest if not r.shape.is_chain]:
            drafts = [r.model_drafts for r in trees]
            verified = np.concatenate([d.row_steps for d in drafts])
            correct = np.concatenate([d.row_correct_drafts for d in drafts])
            counts = tallied(verified, correct, self.tree_rates.max_steps)
            self.tree_rates.learn(*counts, len(trees))
        if texts := [r.text_drafts for r in newest if any(r.is_from_text)]:
            verified = np.concatenate([d.row_steps for d in texts])
            correct = np.concatenate([d.row_correct_drafts for d in texts])
            self.text_rates.learn(*tallied(verified, correct, self.max_steps), len(texts))
        self.costs.age(records[-1].num_planned_seqs or 1, len(records))
        fade = math.exp(-len(records) / STALE_ROUNDS)
        self._drafted = Counter({shape: n * fade for shape, n in self._drafted.items()})
        for record in records:
            self._observe_traffic(record)
            self._learn_times(record)

    def _learn_drafts(self, records: Sequence[StepRecord]) -> None:
        """Learn from model drafts of chains; the newest record comes first."""
        width = self.max_steps
        for has_shares in (False, True):
            some = [r for r in records if (r.draft_shares is not None) == has_shares]
            if not some:
                continue
            verified = np.concatenate([np.asarray(r.model_drafts.row_steps) for r in some])
            correct = np.concatenate([np.asarray(r.model_drafts.row_correct_drafts) for r in some])
            if not has_shares:
                self.rates.learn(*tallied(verified, correct, width), len(some))
                continue
            shares = np.full((len(verified), width), np.nan)
            drafted, kinds, row = np.zeros(len(verified), int), np.zeros(len(verified), int), 0
            for r in some:
                rows = slice(row, row := row + len(r.row_steps))
                assert r.draft_shares is not None
                part = r.draft_shares[:, :width]
                shares[rows, : part.shape[1]] = part
                drafted[rows] = r.row_drafted or r.row_steps
                if r.is_sampled:
                    kinds[rows] = r.is_sampled
                if r.is_from_text:
                    drafted[rows] *= ~np.asarray(r.is_from_text, bool)
            if not (drafted > 0).all():
                used = drafted > 0
                shares, kinds, drafted = shares[used], kinds[used], drafted[used]
                verified, correct = verified[used], correct[used]
            if not len(drafted):
                continue
            shares[np.arange(width) >= drafted[:, None]] = np.nan
            self._has_shares = True
            self.calibration.learn(shares, kinds, verified, correct)
            self._take_sample(shares, kinds, drafted)
            if all(r.budget is None for r in some):
                counts = tallied(verified, correct, width)
            else:  # what was admitted is no fair sample of what was drafted
                drawn = self._drawn
                before = np.concatenate([np.ones((len(drawn), 1)), drawn[:, :-1]], axis=1)
                exists = np.arange(width) < drafted[:, None]
                counts = (before * exists).sum(0).tolist(), (drawn * exists).sum(0).tolist()
            self.rates.learn(*counts, len(some))
        self._pairs = self.calibration.pairs(self.text_rates.rates)

    def _take_sample(self, shares: Floats, kinds: Indices, drafted: Indices) -> None:
        """Put the survivals of these drafts in front of the sample."""
        chances = self.calibration.chances(shares, kinds)
        # Positions that were not drafted go on at the usual rate.
        exists = np.arange(self.max_steps) < drafted[:, None]
        self._drawn = np.cumprod(np.where(exists, chances, self.rates.rates), axis=1)
        unknown = np.where(exists, np.nan, 1.0)
        kept = [np.where(np.isnan(unknown), self._drawn, -1.0), self._sample]
        self._sample = np.concatenate(kept)[:SAMPLE_REQUESTS]

    def _survivals(self) -> Floats:
        """Return survivals [R, K] of the sample; positions not drafted go on at the usual rates."""
        rates = np.asarray(self.rates.rates)
        if not len(self._sample):
            return np.cumprod(rates)[None]
        found = self._sample.copy()
        for j in range(self.max_steps):
            before = found[:, j - 1] if j else 1.0
            found[:, j] = np.where(found[:, j] < 0.0, before * rates[j], found[:, j])
        return found

    def _observe_traffic(self, record: StepRecord) -> None:
        """Take in how many prompt tokens share rounds, and how long requests are."""
        if record.num_prefill_tokens and record.num_output_tokens:
            self._prompts[0] += record.num_prefill_tokens - 0.1 * self._prompts[0]
            self._prompts[1] += record.num_output_tokens - 0.1 * self._prompts[1]
        self._mixed += 0.05 * ((record.num_prefill_tokens > 0) - self._mixed)
        if record.num_ended:
            kept = max(0.0, 1.0 - record.num_ended / 64.0)
            self._ended[0] = kept * self._ended[0] + record.num_ended_prompt_rows
            self._ended[1] = kept * self._ended[1] + record.num_ended_tokens

    def _learn_times(self, record: StepRecord) -> None:
        size, times = record.num_planned_seqs, record.times
        is_first, self._before = record.follows and record.shape != self._before, record.shape
        if times is None or not size or not 0.0 < times.step_ms < float("inf"):
            return
        ms, context = times.step_ms, record.num_tokens / size
        self._total_ms += ms
        self._drafted[record.shape] += record.num_drafting
        if record.notes.is_probe and self._chosen is not None:
            # What the plan's own choice would have taken for as many tokens is no loss.
            lost = ms - record.num_output_tokens / self._chosen.tokens_per_ms
            self._explored_ms = max(0.0, self._explored_ms + lost)
        if is_first:
            return  # launched ahead, it may have taken the host's time for the round before
        drafts, sampled = record.num_planned_drafts, record.num_sampled / size
        shape = record.shape if drafts or record.num_drafting else PLAIN
        if shape.is_chain and drafts:
            shape = DraftShape.chain(min(record.deepest or shape.depth, self.max_steps))
        is_whole = shape == PLAIN or record.num_drafting >= 0.9 * size
        if record.num_prefill_tokens:
            if is_whole:
                ms -= self.costs.entry_ms * record.num_catch_up
                prompts = record.num_prefill_tokens
                self.costs.learn_prompt(size, shape, drafts, context, prompts, ms)
        elif record.num_catch_up > record.num_drafting * (self.max_steps + 1):
            if is_whole:
                expected = self.costs.ms(size, shape, np.array([float(drafts)]), context, sampled)
                self.costs.learn_entries(ms - float(expected[0]), record.num_catch_up, ms)
        elif is_whole and self.costs.learn(size, shape, drafts, context, sampled, ms):
            self._compare(record, ms, sampled)

    def _compare(self, record: StepRecord, ms: float, sampled: float) -> None:
        """Let the guard compare rounds that draft with plain ones."""
        size = record.num_planned_seqs
        context = record.num_tokens / size
        guard = self._guards.setdefault(bucket(size), SpeedGuard())
        unit = float(self.costs.table_ms(size, PLAIN, np.zeros(1), context, sampled)[0])
        if record.is_plain:
            guard.observe_plain(ms / unit)
        elif record.batch_size:
            guard.observe(record.num_output_tokens / record.batch_size, ms / unit)

    def _plan(self, batch: DecodeBatch, at: int) -> None:
        moved, self._at = at != self._at, at
        size = batch.size
        bound = min(self._bound(size), max(batch.max_steps, default=0))
        load = Load(
            size,
            batch.context,
            batch.num_sampled / size,
            prompts=self._prompts[0] / max(self._prompts[1], 1.0),
            mixed=self._mixed,
            begin_ms=self.costs.entry_ms * self._ended[0] / max(self._ended[1], 1.0),
        )
        self._load = load
        survivals = self._survivals()[:, : max(bound, 1)]
        weights = np.full(survivals.shape[1], size / len(survivals))
        if min(batch.max_steps) < bound:
            caps = np.asarray(batch.max_steps)
            weights *= (caps[:, None] > np.arange(len(weights))).mean(axis=0)
        found = [self._planner.plain(load)]
        if bound and batch.max_draft_tokens:
            found = self._planner.chains(
                load,
                survivals,
                np.maximum(weights, 1e-9),
                most_drafts=batch.max_draft_tokens,
                may_admit=self._has_shares and self.per_sequence,
            )
        for tree in self._trees_at(size):
            if tree.depth <= bound and tree.size * size <= batch.max_draft_tokens:
                found.append(self._planner.tree(load, tree, self.tree_rates.rates))
        self._candidates = {each.shape: each for each in found}
        self._rounds_left = min(max(PLAN_ROUNDS, round(PLAN_MS / found[0].ms)), MOST_PLAN_ROUNDS)
        guard = self._guards.setdefault(at, SpeedGuard())
        chosen = self._decide(found, guard, moved=moved)
        if chosen.shape != self._shape:
            self._shape, self._rounds_at_shape = chosen.shape, 0
        self._chosen = chosen
        self._plan_texts(load, chosen)
        self._trial = None
        if not guard.rounds_left:
            chosen = self._explore(batch, chosen, found, guard)
        self._set_answer(chosen, is_probe=chosen is not self._chosen or self._trial is not None)

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

    def _set_answer(self, chosen: Candidate, *, is_probe: bool) -> None:
        notes = RoundNotes(
            is_probe=is_probe, predicted_ms=chosen.ms, expected_drafts=round(chosen.expected, 2)
        )
        self._answer = RoundSteps(
            chosen.shape, notes=notes, budget=chosen.budget, calibration=self._pairs
        )

    def _explore(
        self, batch: DecodeBatch, chosen: Candidate, found: Sequence[Candidate], guard: SpeedGuard
    ) -> Candidate:
        """Return what runs for a few rounds because it teaches something, if the budget pays."""
        plain = found[0]
        if not chosen.shape.depth:
            self._rounds_off += self._rounds_left
            if self._rounds_off < self._wait or len(found) < 2:
                return chosen
            # Whatever is believed, some requests draft now and then: nothing else would tell.
            self._rounds_off, self._wait = 0, min(2 * self._wait, LAST_WAIT)
            num = min(batch.size, max(4, round(TRIED_SHARE * batch.size)))
            lacks = batch.backlogs or [0] * batch.size
            rows = sorted(range(batch.size), key=lacks.__getitem__)[:num]
            self._trial = frozenset([batch.request_ids[row] for row in rows])
            tried = max(found[1:3], key=lambda each: each.tokens_per_ms)
            return self._begin(replace(tried, budget=None), Reason.PROBE)
        self._rounds_off, self._wait = 0, FIRST_WAIT
        self._rounds_drafting += self._rounds_left
        lost = plain.ms * max(0.0, 1.0 - plain.tokens_per_ms / chosen.tokens_per_ms)
        is_due = guard.plain is None or self._rounds_drafting >= PLAIN_EVERY
        if is_due and self._can_spend(2.0 * lost):
            self._rounds_drafting = 0
            tried = self._begin(plain, Reason.BASELINE)
            self._rounds_left = 2
            return tried
        deeper = [
            each
            for each in found
            if each.shape.depth > chosen.shape.depth and self._is_new(each.shape)
        ]
        if deeper:
            tried = max(deeper, key=lambda each: each.tokens_per_ms)
            share = tried.tokens_per_ms / chosen.tokens_per_ms
            lost = TRIAL_ROUNDS * tried.ms * max(0.0, 1.0 - share)
            if share * (1.0 + OPTIMISM) > 1.0 and self._can_spend(lost):
                return self._begin(tried, Reason.PROBE)
        return chosen

    def _is_new(self, shape: DraftShape) -> bool:
        """Whether few requests drafted a shape lately, or a deeper chain."""
        drafted = [
            n
            for other, n in self._drafted.items()
            if other == shape or (shape.is_chain and other.is_chain and other.depth > shape.depth)
        ]
        return sum(drafted) < _TRIED_REQUESTS

    def _can_spend(self, ms: float) -> bool:
        return self._explored_ms + ms <= EXPLORED_SHARE * self._total_ms

    def _begin(self, tried: Candidate, reason: Reason) -> Candidate:
        self._rounds_left, self.last_reason = TRIAL_ROUNDS, reason
        return tried

    def _plan_texts(self, load: Load, chosen: Candidate) -> None:
        """Decide how many n-gram drafts a request verifies that has some."""
        tokens = np.cumsum(np.cumprod([1.0, *self.text_rates.rates]))
        drafts = load.size * np.arange(len(tokens), dtype=float)
        ms = self.costs.table_ms(load.size, PLAIN, drafts, load.context, load.sampled)
        speeds = load.size * tokens / ms
        best = int(speeds.argmax())
        self._text_steps = best if speeds[best] >= chosen.tokens_per_ms else 0

    def _bound(self, batch_size: int) -> int:
        keys = list(self._bounds)
        if not keys:
            return self.max_steps
        return min(self.max_steps, self._bounds[keys[max(0, bisect_right(keys, batch_size) - 1)]])

    def _trees_at(self, batch_size: int) -> tuple[DraftShape, ...]:
        slots = list(self._trees)
        return self._trees[slots[max(0, bisect_right(slots, batch_size) - 1)]] if slots else ()

    def snapshot(self) -> dict[str, object]:
        """Return predicted goodput of every candidate, costs, guards and exploration."""
        chosen, depths = self._chosen, list(range(self.max_steps + 1))
        predicted = {str(k): round(each.tokens_per_ms, 5) for k, each in self._candidates.items()}
        return {
            "strategy": "goodput",
            "per_sequence": self.per_sequence,
            "slot": None if self._at is None else str(1 << self._at),
            "slots": {
                str(1 << at): {"candidate_steps": depths, **guard.snapshot()}
                for at, guard in sorted(self._guards.copy().items())
            },
            "budget": self._answer.budget,
            "predicted_goodput": predicted,
            "predicted_ms": None if chosen is None else round(chosen.ms, 4),
            "predicted_tokens": (
                None if chosen is None else round(self._load.size + chosen.expected, 4)
            ),
            "explored_share": round(self._explored_ms / max(self._total_ms, 1e-9), 6),
            "acceptance": {"positions": self.rates.snapshot()},
            "tree_acceptance": self.tree_rates.snapshot() if self._trees else None,
            "text_acceptance": self.text_rates.snapshot() if any(self.text_rates.trials) else None,
            "calibration": self.calibration.snapshot(),
            "costs": self.costs.snapshot(),
            "marginal_ms_by_rows": self._marginal_ms_by_rows(),
            "break_even": self._break_even(),
        }

    def _chain_speeds(self, size: int) -> tuple[Floats, Floats]:
        """Return ms and tokens per ms of a batch by depth, all requests alike."""
        tokens = size * np.cumsum(np.cumprod([1.0, *self.rates.rates[: self._bound(size)]]))
        context, sampled = self._load.context, self._load.sampled
        shapes = map(DraftShape.chain, range(len(tokens)))
        ms = [
            self.costs.ms(size, each, np.array([float(size * each.size)]), context, sampled)[0]
            for each in shapes
        ]
        return np.array(ms), tokens / np.array(ms)

    def _break_even(self) -> dict[str, object]:
        """Return what every depth takes and brings at the present batch size."""
        ms, speeds = self._chain_speeds(self._load.size)
        return {
            "batch_size": self._load.size,
            "round_ms": {str(k): round(x, 5) for k, x in enumerate(ms.tolist())},
            "tokens_per_ms": {str(k): round(x, 5) for k, x in enumerate(speeds.tolist())},
        }

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
