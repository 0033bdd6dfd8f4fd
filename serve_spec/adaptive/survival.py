"""What drafts are worth: the chance that a request's draft at each position is kept.

Censored: a row that drafted k and kept m shows hits at positions 1..m and, if m < k, a miss at m+1.
What lies beyond was compared with nothing and counts neither way, so the estimate does not depend
on how deep the rounds were that taught it.

One formula serves twice. Hits and misses stand against those expected of the same trials, and the
ratio of the two odds says how much easier than expected it was:

- of a position, against the position before it. These steps, multiplied up, are the pooled rates.
  A position that nobody tried lately keeps its step and so follows the level of those before it.
- of a request, against the pooled rates of the positions it tried: its ease, one number that
  shifts every position. So its first positions, where it has most trials, inform the deep ones.
- of a level of a tree, against the same position of a chain: what branching gains. A tree that
  nobody tried lately follows the chains, and what trees show goes over to chains by the same ratio.
  A round of trees can not say whether the text or the gain has changed, so it moves either by half.
  A shape that is tried little follows, level by level, the shapes that are.

The constants were chosen by log-loss on texts of the shipped pair, at temperatures 0, 0.7 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, groupby, repeat
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from serve_spec.adaptive.observations import Indices, Observations
from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.record import DraftColumns

Floats: TypeAlias = NDArray[np.float64]
Numbers = TypeVar("Numbers", float, Floats)

DEFAULT_RATE = 0.7
"""Expected of a draft nobody has seen: worth a try, and soon corrected."""

POOLED_PSEUDO_TRIALS = 8.0
"""Weight of that expectation, and of a position's being like the one before it."""

# A round of n trials at a position fades what was known of it by exp(-min(n / TRIALS, 1 / ROUNDS)):
# the memory is the larger of so many trials and so many rounds.
POOLED_MEMORY_TRIALS = 400
"""A rate is then known to 0.02."""
POOLED_MEMORY_ROUNDS = 30
"""Without it a large batch would know its last two rounds only, and the few requests in them."""

PLAIN_MEMORY_ROUNDS = 32
"""While nothing is drafted the traffic may change unseen: what was known of it weighs less with
every plain round,"""
PLAIN_TRIALS = 96.0
"""down to so many trials, so that a few new ones count."""

UNTRIED_SPEED = 0.05
"""How fast a position fades that is not tried, relative to the first: its step is of the draft,
not of the text, but nothing is believed for ever."""

DEFAULT_TREE_GAIN = 3.0
"""Odds of a tree's level over those of a chain's position, expected before any trial: what the
first level of the shipped pair's trees has. Deeper ones have less, and trying them shows it."""
TREE_PSEUDO_TRIALS = 16.0
"""Weight of that expectation. With half of it one bad text at the start passes for bad trees."""
SHAPE_TRIALS = 32.0
"""What other shapes show at a level counts for a shape, too, as at most so many trials: on recorded
texts the gain of a level hardly depends on how many levels follow, or on how many drafts. Its own
trials outweigh them in the end."""
HALF = 0.5
"""Share of a tree's round that counts for chains; and trees remember so much longer."""

REQUEST_PSEUDO_TRIALS = 12.0
"""Log-loss on recorded traces is best at 4 and flat around it; what is decided by the estimate is
better with 12 (regret in the simulator), as a row's luck then moves its drafts less."""
"""Weight of a request's being like the rest of the traffic."""

REQUEST_MEMORY_TOKENS = 32
"""Text changes within a request: once it repeats itself, everything is accepted.

Tokens of rounds without drafts count, too: a request that was given up after a few bad rounds
drifts back to the pooled rates and is tried again.
"""

# Nothing is decided differently beyond these, and odds stay finite.
_LOWEST_RATE, _HIGHEST_RATE = 0.001, 0.999
_LOWEST_ODDS, _HIGHEST_ODDS = _LOWEST_RATE / _HIGHEST_RATE, _HIGHEST_RATE / _LOWEST_RATE
# Of one trial, at even odds, over the tokens of a round of one draft. Trials of a request are
# alike, so of all together the variance is about twice that of as many independent ones.
_TWO_ERRORS = 2 * math.sqrt(2 * 0.25) / 1.5
_EVEN_RATE = np.array([0.5])
_UNKNOWN = 0
"""The slot of every request that never drafted: no trials, ever."""


class SurvivalEstimator:
    """Learns acceptance from verified rounds; tells survival by request and position.

    Survival s[r, j] = c[r, 1] · … · c[r, j], c the chance that a draft is kept once all before it
    were. Every estimate lies strictly between 0 and 1. Of a tree, c is the chance that one of the
    drafts at a level is kept once one at the level before was; a branch that ends is a miss.
    """

    def __init__(
        self,
        max_steps: int,
        prior_rates: Sequence[float] | None = None,
        trees: Sequence[DraftShape] = (),
    ) -> None:
        """Starts from `prior_rates`, one per position: what another estimator's `prior` gave.

        trees: shapes that may be drafted beside chains.

        Raises:
            ValueError: no position, a tree with more levels than positions, or prior rates that are
                not `max_steps` numbers within (0, 1).
        """
        if max_steps < 1:
            raise ValueError(f"max_steps={max_steps}: use an integer ≥ 1")
        if any(tree.depth > max_steps for tree in trees):
            raise ValueError(f"trees={trees}: use at most max_steps={max_steps} levels")
        self.max_steps = max_steps
        self.trees = tuple(trees)
        self._observations = Observations(max_steps)
        hits = self._observations.accepted.astype(np.float64)
        trials = self._observations.reached.astype(np.float64)
        # Of the traffic, by position: hits, trials, and the hits expected from the one before.
        self._pooled = np.zeros((3, max_steps))
        prior = _checked(prior_rates, max_steps)
        self._pooled_prior = POOLED_PSEUDO_TRIALS * np.array(
            [prior, np.ones(max_steps), _rates_before(prior)]
        )
        # The same of each tree's levels, the hits expected from chains.
        self._branched = np.zeros((len(self.trees), 3, max_steps))
        gained = DEFAULT_TREE_GAIN / (1.0 + DEFAULT_TREE_GAIN)
        self._branched_prior = TREE_PSEUDO_TRIALS * np.array([[gained], [1.0], [0.5]])
        # Of a request: trials by position (of chains, then of each tree), trials and hits in all.
        self._num_columns = max_steps * (1 + len(self.trees)) + 2
        # What a row teaches: hits and trials by position, trials and hits in all. One code more
        # than there are is that of a request that is not in the round.
        self._absent = len(trials)
        self._lessons = np.zeros((len(trials) + 1, 2 * max_steps + 2))
        in_all = np.column_stack([trials.sum(axis=1), hits.sum(axis=1)])
        self._lessons[:-1] = np.hstack([hits, trials, in_all])
        self._request_age = np.append(1.0 + hits.sum(axis=1), 0.0) / REQUEST_MEMORY_TOKENS
        self._requests = np.zeros((64, self._num_columns))
        self._request_prior = np.zeros(self._num_columns)
        self._request_prior[[0, -2]] = REQUEST_PSEUDO_TRIALS
        self._slot_of: dict[str, int] = {}
        self._free = list(range(len(self._requests) - 1, _UNKNOWN, -1))
        self._last_ids: Sequence[str] = []
        self._last_slots: Indices = np.zeros(0, dtype=np.intp)
        self._update_rates(np.zeros(max_steps))

    @property
    def num_requests(self) -> int:
        """Requests that drafted and were not forgotten."""
        return len(self._slot_of)

    @property
    def pooled_rates(self) -> Floats:
        """The chance over all traffic that a draft is kept once reached, [max_steps]."""
        return self._rates.copy()

    def rates(self, shape: DraftShape) -> Floats:
        """The same of a chain's positions, or of a tree's levels, [shape.depth]."""
        rates: Floats = self._every_rate[self._arm(shape), : shape.depth].copy()
        return rates

    @property
    def doubt(self) -> float:
        """Share of a round's tokens by which trials err: two standard errors of the first rate."""
        return _TWO_ERRORS / math.sqrt(self._pooled[1, 0] + POOLED_PSEUDO_TRIALS)

    @property
    def pooled_trials(self) -> Floats:
        """Trials of each position that are still remembered, [max_steps]."""
        trials: Floats = self._pooled[1].copy()
        return trials

    def observe(
        self,
        request_ids: Sequence[str],
        row_steps: Sequence[int],
        num_correct_drafts: Sequence[int],
        shape: DraftShape = PLAIN,
    ) -> None:
        """`observe_rounds` of one round, column by column."""
        self.observe_rounds([DraftColumns(request_ids, row_steps, num_correct_drafts, shape)])

    def observe_rounds(self, rounds: Sequence[DraftColumns]) -> None:
        """Learns verified rounds, the oldest first.

        A row of 0 steps teaches nothing; what is known of its request ages by one token. Rounds in
        a row that drafted the same shape are weighed by what was known before the first of them:
        arithmetic on many small arrays takes as long as on one of them all.

        Raises:
            ValueError: columns of different lengths, a request named twice in a round, a tree that
                is none of `trees`, steps outside 0..max_steps, or a count outside 0..its steps;
                nothing was learned.
        """
        for each in rounds:
            _refuse_uneven(each)
            self._arm(each.shape)
        steps = list(chain.from_iterable(each.row_steps for each in rounds))
        correct = list(chain.from_iterable(each.row_correct_drafts for each in rounds))
        codes = self._observations.codes(steps, correct)
        for (arm, has_drafts), run in groupby(rounds, self._kind):
            alike = list(run)
            num_rows = sum(len(each.request_ids) for each in alike)
            if has_drafts:
                self._learn_drafts(alike, codes[:num_rows], arm)
            else:  # of which there are many where nothing is drafted
                self._learn_plain(alike, codes[:num_rows])
            codes = codes[num_rows:]

    def _kind(self, shown: DraftColumns) -> tuple[int, bool]:
        """What a round drafted, if anything."""
        has_drafts = any(shown.row_steps)
        return self._arm(shown.shape) if has_drafts else 0, has_drafts

    def _learn_drafts(self, rounds: Sequence[DraftColumns], codes: Indices, arm: int) -> None:
        request_ids, shown = self._by_request(rounds, codes)
        slots = self._slots(request_ids)
        self._admit(request_ids, slots, shown)
        steps = self.max_steps
        lessons = self._lessons.take(shown, axis=0)
        by_position = self._counted(shown) @ self._lessons[:, : 2 * steps]
        evidence = self._requests.take(slots, axis=0)
        expected = None
        if arm:
            expected = self._expected_hits(evidence, lessons[:, :, steps : 2 * steps], arm)
        kept, weights = _fading(self._request_age.take(shown))
        evidence *= kept[:, None]
        learned = np.einsum("nrc,nr->rc", lessons[:, :, steps:], weights)
        evidence[:, arm * steps : (arm + 1) * steps] += learned[:, :steps]
        evidence[:, -2:] += learned[:, steps:]
        self._requests[slots] = evidence
        self._learn_pooled(by_position.reshape(-1, 2, steps), arm, expected)

    def _counted(self, shown: Indices) -> Floats:
        """How many rows of every round showed each code, [rounds, codes]."""
        num_rounds, num_codes = len(shown), len(self._lessons)
        of_round = num_codes * np.arange(num_rounds)[:, None]
        counts = np.bincount((shown + of_round).ravel(), minlength=num_rounds * num_codes)
        return counts.reshape(num_rounds, num_codes).astype(np.float64)

    def _learn_plain(self, rounds: Sequence[DraftColumns], codes: Indices) -> None:
        if self._slot_of:
            request_ids, shown = self._by_request(rounds, codes)
            slots = self._slots(request_ids)
            self._requests[slots] *= _fading(self._request_age.take(shown))[0][:, None]
        self._weigh_less(len(rounds))

    def _by_request(
        self, rounds: Sequence[DraftColumns], codes: Indices
    ) -> tuple[Sequence[str], Indices]:
        """Every request of some rounds, and its code in each, [rounds, requests]."""
        request_ids = rounds[0].request_ids
        if all(each.request_ids == request_ids for each in rounds):
            return request_ids, codes.reshape(len(rounds), len(request_ids))
        place_of: dict[str, int] = {}
        for each in rounds:
            for request_id in each.request_ids:
                place_of.setdefault(request_id, len(place_of))
        shown = np.full((len(rounds), len(place_of)), self._absent)
        places = [place_of[request_id] for each in rounds for request_id in each.request_ids]
        sizes = [len(each.request_ids) for each in rounds]
        shown[np.repeat(np.arange(len(rounds)), sizes), places] = codes
        return list(place_of), shown

    def _admit(self, request_ids: Sequence[str], slots: Indices, shown: Indices) -> None:
        """Gives a slot to every request without one that drafted in any of the rounds."""
        for row in np.flatnonzero(slots == _UNKNOWN).tolist():
            if any(code % self._absent for code in shown[:, row].tolist()):
                slots[row] = self._slot_of[request_ids[row]] = self._new_slot()

    def survival(self, request_ids: Sequence[str], shape: DraftShape | None = None) -> Floats:
        """The chance that a draft of each level is kept, by request, [len(request_ids), depth].

        Requests that never drafted get the pooled rates. shape: a chain, or one of `trees`; None:
        the chain of `max_steps`.

        Raises:
            ValueError: a request is named twice.
        """
        return self.survivals(request_ids, [shape or DraftShape.chain(self.max_steps)])[0]

    def survivals(self, request_ids: Sequence[str], shapes: Sequence[DraftShape]) -> list[Floats]:
        """`survival` of several shapes at once."""
        ease = self._ease(self._requests.take(self._slots(request_ids), axis=0))
        return [self._survival(ease, shape) for shape in shapes]

    def _survival(self, ease: Floats, shape: DraftShape) -> Floats:
        arm = self._arm(shape)
        pooled_odds = self._branched_odds[arm - 1] if arm else self._odds
        odds = np.multiply.outer(pooled_odds[: shape.depth], ease)
        rates = odds / (1.0 + odds)
        survival: Floats = np.multiply.accumulate(rates, axis=0).T
        return np.ascontiguousarray(survival)

    def forget(self, request_id: str) -> None:
        """Drops what is known of a request; harmless if that is nothing."""
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self._requests[slot] = 0.0
            self._free.append(slot)
            self._last_ids, self._last_slots = [], self._last_slots[:0]

    def prior(self) -> list[float]:
        """What a new estimator could start from: the pooled rates, JSON-able."""
        rates: list[float] = self.pooled_rates.tolist()
        return rates

    def snapshot(self) -> dict[str, object]:
        """What an operator should see, JSON-able: the pooled rates and what they rest on."""
        shown: dict[str, object] = {
            "num_requests": self.num_requests,
            "positions": _positions(self._rates, self._pooled[1]),
        }
        if self.trees:
            shown["trees"] = {
                str(tree): _positions(self.rates(tree), trials[: tree.depth])
                for tree, trials in zip(self.trees, self._branched[:, 1], strict=True)
            }
        return shown

    def _ease(self, evidence: Floats) -> Floats:
        """How much easier requests are than the traffic, as a ratio of odds, [rows]."""
        evidence = evidence + self._request_prior
        expected_hits = evidence[:, :-2] @ self._every_rate.ravel()
        return _odds_ratio(evidence[:, -1], evidence[:, -2], expected_hits)

    def _arm(self, shape: DraftShape) -> int:
        """0: chains; else a tree's number, from 1 on."""
        if shape.is_chain:
            return 0
        if shape not in self.trees:
            raise ValueError(f"shape={shape}: use a chain or one of {list(map(str, self.trees))}")
        return 1 + self.trees.index(shape)

    def _slots(self, request_ids: Sequence[str]) -> Indices:
        """Which row of `_requests` holds each request."""
        if request_ids == self._last_ids:  # as a rule: a batch hardly changes between plans
            return self._last_slots
        if len(set(request_ids)) < len(request_ids):
            raise ValueError(f"request_ids={list(request_ids)}: name each request once")
        slots = map(self._slot_of.get, request_ids, repeat(_UNKNOWN))
        self._last_slots = np.fromiter(slots, np.intp, len(request_ids))
        self._last_ids = request_ids[:]
        return self._last_slots

    def _new_slot(self) -> int:
        if not self._free:
            size = len(self._requests)
            self._requests = np.concatenate([self._requests, np.zeros_like(self._requests)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()

    def _learn_pooled(self, shown: Floats, arm: int, expected: Floats | None) -> None:
        """shown: hits and trials, [rounds, 2, max_steps]. arm: 0, chains, or a tree's number from 1
        on, with `expected`."""
        learned = np.concatenate([shown, shown[:, 1:]], axis=1)
        age = np.minimum(shown[:, 1] / POOLED_MEMORY_TRIALS, 1 / POOLED_MEMORY_ROUNDS)
        age = np.maximum(age, UNTRIED_SPEED * age[:, :1])
        if self.trees:
            learned, age = self._learn_branched(learned, age, arm, expected)
        known, added = _faded(self._pooled, age, learned)
        self._pooled = np.concatenate([(known + added)[:2], known[2:]])
        self._update_rates(added[2])

    def _weigh_less(self, num_rounds: int) -> None:
        """Of what the traffic showed, after so many plain rounds; the rates stay as they are."""
        num_trials = self._pooled[1, 0]
        if num_trials > PLAIN_TRIALS:
            kept = max(math.exp(-num_rounds / PLAIN_MEMORY_ROUNDS), PLAIN_TRIALS / num_trials)
            self._pooled *= kept
            self._pooled_prior = POOLED_PSEUDO_TRIALS * np.array(
                [self._rates, np.ones(self.max_steps), _rates_before(self._rates)]
            )

    def _expected_hits(self, evidence: Floats, reached: Floats, arm: int) -> Floats:
        """Hits of a tree's trials that chains would have had, and that are expected,
        [2, rounds, levels]; `reached` [rounds, rows, levels].

        By the ease of the very requests: a tree that was tried on hard ones is none the worse.
        """
        odds = np.stack([self._odds, self._branched_odds[arm - 1]])
        odds = odds[:, None] * self._ease(evidence)[:, None]
        hits: Floats = np.einsum("nrl,arl->anl", reached, odds / (1.0 + odds))
        return hits

    def _learn_branched(
        self, learned: Floats, age: Floats, arm: int, expected: Floats | None
    ) -> tuple[Floats, Floats]:
        """Fades what is known of trees and adds what one shows; what chains learn of the rounds."""
        kept = np.exp(-UNTRIED_SPEED * age[:, 0].sum())
        if expected is None:
            self._branched *= kept
            return learned, age
        hits, trials, _ = learned.swapaxes(0, 1)
        of_chains, of_tree = expected
        shown = np.stack([hits, trials, of_chains], axis=1)
        faded, added = _faded(self._branched[arm - 1], HALF * age, shown)
        self._branched *= kept
        self._branched[arm - 1] = faded + added
        as_chains = np.minimum(trials, hits * of_chains / np.maximum(of_tree, _LOWEST_RATE))
        return HALF * np.stack([as_chains, trials, trials], axis=1), HALF * age

    def _update_rates(self, reached: Floats) -> None:
        """reached: trials by position that are not in the hits expected yet, [max_steps].

        Those are counted here, position by position, as the one before has to be known first. On
        lists: that is the quickest for so few numbers, one after the other.
        """
        known = (self._pooled + self._pooled_prior).tolist()
        rate, odds = 0.5, 1.0
        every_odds, added = [], []
        for hits, trials, expected_hits, new in zip(*known, reached.tolist(), strict=True):
            added.append(new * rate)
            odds *= _odds_ratio(hits, trials, expected_hits + added[-1])
            every_odds.append(min(max(odds, _LOWEST_ODDS), _HIGHEST_ODDS))
            rate = every_odds[-1] / (1.0 + every_odds[-1])
        self._pooled[2] += added
        self._odds = np.array(every_odds)
        self._rates = self._odds / (1.0 + self._odds)
        self._every_rate = self._with_trees() if self.trees else self._rates[None]
        self._request_prior[-1] = REQUEST_PSEUDO_TRIALS * self._rates[0]

    def _with_trees(self) -> Floats:
        """The rates of chains, then of every tree, [1 + trees, max_steps]."""
        others = self._branched.sum(axis=0) - self._branched
        share = SHAPE_TRIALS / np.maximum(others[:, 1:2], SHAPE_TRIALS)
        known = self._branched + share * others + self._branched_prior
        hits, trials, expected_hits = known.swapaxes(0, 1)
        odds = self._odds * _odds_ratio(hits, trials, expected_hits)
        self._branched_odds = np.minimum(np.maximum(odds, _LOWEST_ODDS), _HIGHEST_ODDS)
        branched_rates = self._branched_odds / (1.0 + self._branched_odds)
        return np.concatenate([self._rates[None], branched_rates])


def _refuse_uneven(shown: DraftColumns) -> None:
    lengths = [len(shown.request_ids), len(shown.row_steps), len(shown.row_correct_drafts)]
    if min(lengths) < max(lengths):
        raise ValueError(f"lengths={lengths}: give every column one entry per row")
    if len(set(shown.request_ids)) < lengths[0]:
        raise ValueError(f"request_ids={list(shown.request_ids)}: name each request once")


def _fading(age: Floats) -> tuple[Floats, Floats]:
    """What is left after rounds that age by `age` [rounds, ...] of all before, and of each."""
    until = np.cumsum(age, axis=0)
    return np.exp(-until[-1]), np.exp(until - until[-1])


def _faded(known: Floats, age: Floats, learned: Floats) -> tuple[Floats, Floats]:
    """What is left of `known` and of `learned` after rounds that age all before them, [columns,
    positions] each.

    age: by round, [rounds, positions]. learned: of each round, [rounds, columns, positions].
    """
    kept, weights = _fading(age)
    return known * kept, (learned * weights[:, None]).sum(axis=0)


def _positions(rates: Floats, trials: Floats) -> list[dict[str, object]]:
    columns = zip(rates.tolist(), trials.tolist(), strict=True)
    return [
        {"position": position, "accept_rate": round(rate, 4), "trials": round(tried, 1)}
        for position, (rate, tried) in enumerate(columns, start=1)
    ]


def _odds_ratio(hits: Numbers, trials: Numbers, expected_hits: Numbers) -> Numbers:
    return hits * (trials - expected_hits) / ((trials - hits) * expected_hits)


def _rates_before(rates: Floats) -> Floats:
    """The rate of the position before each; even odds before the first, whose step is its odds."""
    return np.concatenate([_EVEN_RATE, rates[:-1]])


def _checked(prior_rates: Sequence[float] | None, max_steps: int) -> Floats:
    if prior_rates is None:
        return np.full(max_steps, DEFAULT_RATE)
    rates = list(prior_rates)
    if len(rates) != max_steps or not all(0.0 < rate < 1.0 for rate in rates):
        fix = f"give max_steps={max_steps} numbers between 0 and 1, both excluded"
        raise ValueError(f"prior_rates={rates!r}: {fix}")
    clipped: Floats = np.clip(np.array(rates), _LOWEST_RATE, _HIGHEST_RATE)
    return clipped
