"""What is known of drafts: acceptance probabilities, rates by position, recent survivals.

A probability of acceptance comes from the log probability that a draft was drawn with:

    probability = sigmoid(weight · logit(p) + bias)      weight, bias by kind and position
    survival = probability · survival of the draft before    1 for the root

The pairs start at (1, 0), which keeps p, and are fitted online: a Newton step of a logistic
regression for every plan, on a discounted Hessian, with a pull to (1, 0). Only drafts that were
verified and reached count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from serve_spec.adaptive.curves import Floats
from serve_spec.adaptive.state import State, array, number, section
from serve_spec.core.draft import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import AS_DRAWN, FROM_NGRAM, GREEDY, SAMPLED, Calibration

Flags: TypeAlias = NDArray[np.bool_]
Indices: TypeAlias = NDArray[np.intp]

TREE_ODDS = (1.9, 0.9, 0.67, 0.45)
"""Odds that a level of a tree is accepted over those of a chain's draft there, for each square root
of the tree's drafts per level. Deeper levels have the last."""
KINDS = GREEDY, SAMPLED
# Newest requests of a plan's rounds that are learned from, and whose survivals are kept.
_MOST_REQUESTS = 256


class DraftKnowledge:
    """Learns how many drafts of chains, trees, n-grams and grammars are accepted.

    Greedy and sampled requests are apart: of the same text, fewer drafts of the latter survive.

    accept_rates: expected by position; None: a default.
    """

    def __init__(self, max_steps: int, accept_rates: Sequence[float] | None) -> None:
        self.max_steps = max_steps
        self.calibration = DraftCalibration(max_steps)
        self.ngrams = PositionRates(max_steps)
        self.grammars = PositionRates(max_steps, [_GRAMMAR_RATE] * max_steps)
        self._recent = [RecentDrafts(max_steps, accept_rates) for _ in KINDS]
        self._has_prior = accept_rates is not None
        self.has_logprobs = False  # whether drafts have scores
        self.pairs = AS_DRAWN
        self.tree_gain = 1.0  # exponent of the odds of trees, learned

    @property
    def chains(self) -> PositionRates:
        """Return the rates of chains of all requests."""
        return PositionRates.pooled([recent.chains for recent in self._recent])

    def learn(self, records: Sequence[StepRecord]) -> None:
        """Learn from rounds, the newest last."""
        num_requests, newest = 0, []
        for record in reversed(records):
            drafted = record.drafted_per_req or record.steps_per_req
            if num_requests < _MOST_REQUESTS and any(drafted):
                newest.append(record)
                num_requests += sum(map(bool, drafted))
        chains = [r for r in newest if r.shape.is_chain]
        self._learn_logprobs([r for r in chains if r.draft_logprobs is not None])
        without_logprobs = [r for r in chains if r.draft_logprobs is None]
        trees = {r.shape for r in newest if not r.shape.is_chain}
        for kind, recent in zip(KINDS, self._recent, strict=True):
            if without_logprobs:
                recent.learn(*self._tallied(without_logprobs, kind))
            for tree in trees:
                # A trunk of grammar drafts makes another tree of it.
                whole = [r for r in newest if r.shape == tree and not any(r.first_per_req)]
                counts = self._tallied(whole, kind)
                self.tree_gain = recent.learn_tree(tree, *counts, self.tree_gain)
        if from_ngrams := [r for r in newest if any(r.is_ngram)]:
            self.ngrams.learn(*tallied(*_columns(from_ngrams, is_ngram=True), self.max_steps))
        by_grammar = [counts for r in records for counts in r.grammar_drafts]
        if by_grammar:
            verified, correct = np.array(by_grammar[-_MOST_REQUESTS:]).T
            self.grammars.learn(*tallied(verified, correct, 0 * correct, self.max_steps))
        if newest or by_grammar:
            self.pairs = self._pairs()

    def _pairs(self) -> Calibration:
        return self.calibration.pairs(self.ngrams.rates, self.grammars.rates)

    def _tallied(self, records: Sequence[StepRecord], kind: int) -> tuple[list[float], list[float]]:
        """Return trials and accepted model drafts by position of one kind of requests."""
        if not records:
            return [0.0] * self.max_steps, [0.0] * self.max_steps
        is_kind = np.concatenate([_kinds_of(r) for r in records]) == kind
        verified, correct, first = _columns(records)
        return tallied(verified[is_kind], correct[is_kind], first[is_kind], self.max_steps)

    def tree_rates(self, tree: DraftShape, batch_size: int, sampled: float) -> Floats:
        """Return the probability that a level of a tree is accepted once reached, by level."""
        survivals = self.survivals(batch_size, sampled)
        return _tree_rates(tree, _chain_odds(survivals), self.tree_gain)

    def _learn_logprobs(self, records: Sequence[StepRecord]) -> None:
        width, num_rows = self.max_steps, sum(len(r.steps_per_req) for r in records)
        logprobs = np.full((num_rows, width), np.nan)
        verified, correct, first, drafted, kinds = np.zeros((5, num_rows), dtype=np.intp)
        end = 0
        for r in records:
            rows = slice(end, end := end + len(r.steps_per_req))
            assert r.draft_logprobs is not None
            given = r.draft_logprobs[:, :width]
            logprobs[rows, : given.shape[1]] = given
            verified[rows], correct[rows], first[rows] = _columns([r])
            drafted[rows] = r.drafted_per_req or r.steps_per_req
            kinds[rows] = _kinds_of(r)
            if any(r.is_ngram):
                drafted[rows] *= ~np.asarray(r.is_ngram, bool)
        used = drafted > 0
        if not used.any():
            return
        logprobs, kinds, drafted = logprobs[used], kinds[used], drafted[used]
        verified, correct, first = verified[used], correct[used], first[used]
        place = np.arange(width) - first[:, None]
        exists = (place >= 0) & (place < drafted[:, None])
        logprobs[~exists] = np.nan
        self.has_logprobs = True
        self.calibration.learn(logprobs, kinds, verified, correct, first)
        probabilities = self.calibration.probabilities(logprobs, kinds)
        # Of grammar drafts nothing is learned here: those before others count as certain.
        survivals = np.cumprod(np.where(exists, probabilities, place < 0), axis=1)
        before = np.concatenate([np.ones((len(survivals), 1)), survivals[:, :-1]], axis=1)
        all_verified = all(r.budget is None for r in records)
        for kind, recent in zip(KINDS, self._recent, strict=True):
            if not (mine := kinds == kind).any():
                continue
            if all_verified:
                counts = tallied(verified[mine], correct[mine], first[mine], width)
            else:  # what was admitted is no fair sample of what was drafted
                reached, kept = (before * exists)[mine], (survivals * exists)[mine]
                counts = reached.sum(0).tolist(), kept.sum(0).tolist()
            recent.learn(*counts, np.where(exists, survivals, -1.0)[mine & (first == 0)])

    def survivals(self, batch_size: int, sampled: float) -> Floats:
        """Return survivals [R, K] for a batch of which a fraction of the requests samples."""
        # The newest 32 requests stand for a batch, of a larger one as many.
        num = max(32, batch_size)
        num_sampled = math.ceil(num * sampled)
        parts = zip(self._recent, (num - num_sampled, num_sampled), strict=True)
        return np.concatenate([recent.survivals(n) for recent, n in parts if n])

    def state(self) -> State:
        """Return what outlives a restart."""
        return {
            "calibration": self.calibration.state(),
            "ngrams": self.ngrams.state(),
            "grammars": self.grammars.state(),
            "has_logprobs": self.has_logprobs,
            "tree_gain": self.tree_gain,
            "recent": {str(kind): self._recent[kind].state() for kind in KINDS},
        }

    def restore(self, state: State) -> None:
        """Continue from a state; raise ValueError if it is none.

        Rates that were expected at the start, and with them recent survivals, stay.
        """
        self.calibration.restore(section(state, "calibration"))
        self.ngrams.restore(section(state, "ngrams"))
        self.grammars.restore(section(state, "grammars"))
        self.has_logprobs = bool(number(state, "has_logprobs", 0.0, 1.0))
        self.tree_gain = number(state, "tree_gain", -2.0, 2.0)
        if not self._has_prior:
            for kind in KINDS:
                self._recent[kind].restore(section(section(state, "recent"), str(kind)))
        self.pairs = self._pairs()

    def snapshot(self) -> dict[str, object]:
        """Return rates and calibration, JSON-able."""
        return {
            "acceptance": {"positions": self.chains.snapshot()},
            "text_acceptance": self.ngrams.snapshot() if any(self.ngrams.trials) else None,
            "grammar_acceptance": self.grammars.snapshot() if any(self.grammars.trials) else None,
            "calibration": self.calibration.snapshot(),
        }


def _columns(
    records: Sequence[StepRecord], *, is_ngram: bool = False
) -> tuple[Indices, Indices, Indices]:
    """Return the drafts verified of each request, those accepted, and the place of the first."""
    drafts = [r.ngram_drafts if is_ngram else r.model_drafts for r in records]
    firsts = (each.first_per_req or [0] * len(each.steps_per_req) for each in drafts)
    verified, correct, first = (
        np.concatenate([np.asarray(column, np.intp) for column in columns])
        for columns in (
            [each.steps_per_req for each in drafts],
            [each.correct_per_req for each in drafts],
            [*firsts],
        )
    )
    return verified, correct, first


def _kinds_of(record: StepRecord) -> Indices:
    """Return the kind of each request of a round."""
    unknown = [False] * len(record.steps_per_req)
    return np.asarray(record.is_sampled or unknown).astype(np.intp)


FIRST_RATE = 0.7
"""Fraction of reached drafts that are accepted, of a drafter of which nothing is known."""
# The same of grammar drafts: a text may have other tokens or white space than expected.
_GRAMMAR_RATE = 0.95
# Trials that the prior of a position counts as.
_PRIOR_TRIALS = 8.0
_LEAST = 1e-3


class PositionRates:
    """Discounted trials and accepted drafts by position.

    Serves depths that do not run, and drafts without scores. A position with few trials takes the
    rate of the one before.
    """

    def __init__(self, max_steps: int, prior: Sequence[float] | None = None) -> None:
        self.max_steps = max_steps
        self.trials, self._hits = ([0.0] * max_steps for _ in range(2))
        if prior is not None and (len(prior) < max_steps or not all(0 < p < 1 for p in prior)):
            fix = f"give {max_steps} rates between 0 and 1"
            raise ValueError(f"prior_rates={list(prior)!r}: {fix}")
        self._prior = list(prior or [FIRST_RATE] * max_steps)[:max_steps]
        self.rates: list[float] = []  # probability that a draft is accepted once reached
        self._update()

    @staticmethod
    def pooled(parts: Sequence[PositionRates]) -> PositionRates:
        """Return the rates of all trials together."""
        found = PositionRates(parts[0].max_steps, parts[0]._prior)
        found.trials = [sum(column) for column in zip(*(x.trials for x in parts), strict=True)]
        found._hits = [sum(column) for column in zip(*(x._hits for x in parts), strict=True)]
        found._update()
        return found

    def learn(self, trials: Sequence[float], hits: Sequence[float]) -> None:
        """Take in the trials of some rounds, by position, and how many of them were accepted."""
        fade = math.exp(-trials[0] / 128.0)  # trials of the first position
        self.trials = [n * fade + new for n, new in zip(self.trials, trials, strict=True)]
        self._hits = [h * fade + new for h, new in zip(self._hits, hits, strict=True)]
        self._update()

    def _update(self) -> None:
        """Shrink each position to its prior, moved as far as the position before."""
        rates, moved = [], 1.0
        for prior, hits, trials in zip(self._prior, self._hits, self.trials, strict=True):
            rate = (hits + _PRIOR_TRIALS * min(prior * moved, 1.0)) / (trials + _PRIOR_TRIALS)
            rates.append(min(max(rate, _LEAST), 1.0 - _LEAST))
            moved = rates[-1] / prior
        self.rates = rates

    def state(self) -> State:
        """Return what outlives a restart."""
        return {"trials": [*self.trials], "hits": [*self._hits]}

    def restore(self, state: State) -> None:
        """Continue from a state; raise ValueError if it is none."""
        trials = array(state, "trials", (self.max_steps,), 0.0)
        self._hits = array(state, "hits", trials.shape, 0.0, 1.001 * trials).tolist()
        self.trials = trials.tolist()
        self._update()

    def snapshot(self) -> list[dict[str, object]]:
        """Return the rates and trials by position, as a fleet merges them."""
        columns = zip(self.rates, self.trials, strict=True)
        return [
            {"position": position, "accept_rate": round(rate, 4), "trials": round(trials, 1)}
            for position, (rate, trials) in enumerate(columns, start=1)
        ]


class RecentDrafts:
    """Chains of one kind of requests: rates by position, and survivals of the newest requests."""

    def __init__(self, max_steps: int, accept_rates: Sequence[float] | None) -> None:
        self.chains = PositionRates(max_steps, accept_rates)
        self._trials = 0.0  # of chains since the last tree
        self._sample: Floats = np.empty((0, max_steps))  # the newest first; -1: not drafted

    def learn(
        self, trials: Sequence[float], hits: Sequence[float], survivals: Floats | None = None
    ) -> None:
        """Learn from chains: trials and accepted drafts by position, and survivals if known."""
        self.chains.learn(trials, hits)
        self._trials += trials[0]
        if survivals is not None:
            self._sample = np.concatenate([survivals, self._sample])[:_MOST_REQUESTS]

    def learn_tree(
        self, tree: DraftShape, trials: Sequence[float], hits: Sequence[float], gain: float
    ) -> float:
        """Learn what chains would have done; return the gain of trees, learned after chains."""
        if not trials[0]:
            return gain
        tried, kept, odds = np.asarray(trials), np.asarray(hits), _chain_odds(self.survivals(32))
        if num := min(self._trials, trials[0]):
            known = 64.0  # drafts that the present gain counts as
            seen = num * kept / tried.clip(1.0) + known * _tree_rates(tree, odds, gain)
            gained = np.log(_odds(seen / (num + known)) / odds)
            gain = float((gained[0] / np.log(_tree_odds(tree, 1)[0])).clip(-2.0, 2.0))
            self._trials = 0.0
        rates = kept + _PRIOR_TRIALS * _tree_rates(tree, odds, gain)
        rates /= tried + _PRIOR_TRIALS
        odds = _odds(rates) / _tree_odds(tree, len(tried)) ** gain
        self.chains.learn(trials, (tried * odds / (1.0 + odds)).tolist())
        self._sample = self._sample[:0]
        return gain

    def survivals(self, num: int) -> Floats:
        """Return survivals [num, K] of the newest requests, beyond those drafted as usual."""
        rates = np.asarray(self.chains.rates)
        if not len(self._sample):
            return np.tile(np.cumprod(rates), (num, 1))
        found = self._sample[:num].copy()
        for j in range(len(rates)):
            before = found[:, j - 1] if j else 1.0
            found[:, j] = np.where(found[:, j] < 0.0, before * rates[j], found[:, j])
        return found if len(found) == num else np.resize(found, (num, len(rates)))

    def state(self) -> State:
        """Return what outlives a restart."""
        sample = self._sample.tolist()
        return {"chains": self.chains.state(), "trials": self._trials, "survivals": sample}

    def restore(self, state: State) -> None:
        """Continue from a state; raise ValueError if it is none."""
        self.chains.restore(section(state, "chains"))
        self._trials = number(state, "trials", 0.0)
        shape = (-1, self._sample.shape[1])
        self._sample = array(state, "survivals", shape, -1.0, 1.0)[:_MOST_REQUESTS]


def _chain_odds(survivals: Floats) -> Floats:
    """Return the odds that a draft of a chain is accepted once reached, by position."""
    mean = survivals.mean(axis=0)
    return _odds((mean / np.append(1.0, mean[:-1])).clip(0.001, 0.999))


def _tree_rates(tree: DraftShape, chain_odds: Floats, gain: float) -> Floats:
    return 1.0 - 1.0 / (1.0 + chain_odds * _tree_odds(tree, len(chain_odds)) ** gain)


def _tree_odds(tree: DraftShape, num_levels: int) -> Floats:
    odds = np.array([*TREE_ODDS, *TREE_ODDS[-1:] * num_levels][:num_levels])
    return odds * math.sqrt(tree.size / tree.depth)


def _odds(rates: Floats) -> Floats:
    return np.asarray(rates / (1.0 - rates))


def tallied(
    verified: Indices, correct: Indices, first: Indices, max_steps: int
) -> tuple[list[float], list[float]]:
    """Return trials and accepted drafts by position. first: the position of each one's first."""
    tried, kept = _outcomes(verified, correct, first, max_steps)
    return tried.sum(0, dtype=float).tolist(), (tried & kept).sum(0, dtype=float).tolist()


def _outcomes(
    verified: Indices, correct: Indices, first: Indices | int, max_steps: int
) -> tuple[Flags, Flags]:
    """Return which drafts were verified and reached, and which accepted, [R, max_steps]."""
    place = np.arange(max_steps) - np.reshape(first, (-1, 1))
    is_reached = (place >= 0) & (place < verified[:, None]) & (place <= correct[:, None])
    return is_reached, place < correct[:, None]


# Drafts of a position after which an older one weighs 1/e.
_MEMORY_TRIALS = 2048.0
_LARGEST_LOGIT = 15.0  # as in `ops.admission`
_LEAST_PAIR, _MOST_PAIR = (0.0, -6.0), (3.0, 6.0)
_BINS = 10


class DraftCalibration:
    """Fit the probabilities of model drafts by kind and position; compare them with outcomes."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self._pairs: Floats = np.tile([1.0, 0.0], (FROM_NGRAM, max_steps, 1))
        # The initial pair counts as 128 drafts, whose p (1 - p) is about an eighth.
        self._pull: Floats = 128.0 / 8.0 * np.eye(2)
        self._hessians: Floats = np.tile(self._pull, (FROM_NGRAM, max_steps, 1, 1))
        self._bins: Floats = np.zeros((3, max_steps, _BINS))

    def probabilities(self, logprobs: Floats, kinds: Indices) -> Floats:
        """Return the probability [R, n] of every draft; 0 where `logprobs` is NaN or -inf.

        logprobs: [R, n], logarithms. kinds: [R].
        """
        pairs = self._pairs[kinds, : logprobs.shape[1]]
        probabilities = 1.0 / (1.0 + np.exp(-pairs[..., 0] * logits(logprobs) - pairs[..., 1]))
        return np.where(logprobs > -np.inf, probabilities, 0.0)

    def learn(
        self,
        logprobs: Floats,
        kinds: Indices,
        verified: Indices,
        correct: Indices,
        first: Indices | int = 0,
    ) -> None:
        """Fit to the outcome of some requests.

        logprobs: [R, max_steps]. verified, correct: [R], drafts of each that the target verified,
        and that it accepted. first: [R], position of the first.
        """
        counts, accepted = _outcomes(verified, correct, first, self.max_steps)
        counts, logit = counts & (logprobs > -np.inf), logits(logprobs)
        probabilities = self.probabilities(logprobs, kinds)
        self._compare(probabilities, accepted, counts)
        error = np.where(counts, accepted - probabilities, 0.0)
        spread = np.where(counts, probabilities * (1.0 - probabilities), 0.0)
        columns = [error * logit, error, spread * logit * logit, spread * logit, spread, counts]
        is_kind = np.arange(FROM_NGRAM)[:, None] == kinds
        sums = is_kind.astype(np.float64) @ np.concatenate(columns, axis=1)
        slope, offset, xx, x, one, trials = np.split(sums, 6, axis=1)
        fade = np.exp(-trials / _MEMORY_TRIALS)[..., None]
        # Older drafts fade; the pull to the start does not.
        self._hessians -= (1.0 - fade)[..., None] * (self._hessians - self._pull)
        self._hessians += np.stack([np.stack([xx, x], -1), np.stack([x, one], -1)], -2)
        gradient = np.stack([slope, offset], -1)
        gradient += (1.0 - fade) * (([1.0, 0.0] - self._pairs) @ self._pull)
        step = np.linalg.solve(self._hessians, gradient[..., None])[..., 0]
        self._pairs = (self._pairs + np.nan_to_num(step)).clip(_LEAST_PAIR, _MOST_PAIR)

    def _compare(self, probabilities: Floats, accepted: Flags, counts: Flags) -> None:
        """Count drafts, expected and accepted ones by position and bin of their probability."""
        row, place = np.nonzero(counts)
        known = probabilities[row, place]
        bins = place * _BINS + np.minimum(known * _BINS, _BINS - 1).astype(np.intp)
        self._bins *= math.exp(-len(row) / (_MEMORY_TRIALS * self.max_steps))
        for sums, weights in zip(self._bins, (None, known, accepted[row, place]), strict=True):
            sums += np.bincount(bins, weights, sums.size).reshape(sums.shape)

    def pairs(self, *rates: Sequence[float]) -> Calibration:
        """Return what the device is given. Drafts of the host have no scores: their rates decide.

        rates: of n-gram drafts, then of grammar drafts: probability that one is accepted once
        reached, by position.
        """
        model = [tuple([(w, b) for w, b in kind]) for kind in self._pairs.round(4).tolist()]
        given = [tuple([(0.0, round(math.log(p / (1.0 - p)), 4)) for p in kind]) for kind in rates]
        return (*model, *given)

    def state(self) -> State:
        """Return what outlives a restart."""
        return {"pairs": self._pairs.tolist(), "hessians": self._hessians.tolist()}

    def restore(self, state: State) -> None:
        """Continue from a state; raise ValueError if it is none."""
        limits = np.asarray(_LEAST_PAIR), np.asarray(_MOST_PAIR)
        pairs = array(state, "pairs", self._pairs.shape, *limits)
        hessians = array(state, "hessians", self._hessians.shape)
        if (hessians != np.swapaxes(hessians, -1, -2)).any():
            raise ValueError("hessians: not symmetric")
        # Drafts only add to the pull. The limit keeps NaN out as well.
        if not np.linalg.eigvalsh(hessians - self._pull).min() > -1.0:
            raise ValueError("hessians: less than the pull to the start")
        self._pairs, self._hessians = pairs, hessians

    def snapshot(self) -> list[dict[str, object]]:
        """Return expected and observed acceptance by position; the error is that of ten bins."""
        shown: list[dict[str, object]] = []
        columns = zip(*self._bins.copy(), strict=True)
        for position, (trials, expected, observed) in enumerate(columns, start=1):
            if (total := trials.sum()) >= 1.0:
                figures = {
                    "trials": total,
                    "expected": expected.sum() / total,
                    "observed": observed.sum() / total,
                    "error": np.abs(expected - observed).sum() / total,
                }
                rounded = {name: round(float(x), 4) for name, x in figures.items()}
                shown.append({"position": position, **rounded})
        return shown


def logits(logprobs: Floats) -> Floats:
    """Return logit(p) of logarithms of logprobs, cut at ±15; NaN counts as -inf."""
    known = np.where(logprobs > -_LARGEST_LOGIT, np.minimum(logprobs, -1e-7), -_LARGEST_LOGIT)
    cut: Floats = (known - np.log(-np.expm1(known))).clip(-_LARGEST_LOGIT, _LARGEST_LOGIT)
    return cut
