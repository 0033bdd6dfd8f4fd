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

The constants were chosen by log-loss on texts of the shipped pair, at temperatures 0, 0.7 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from serve_spec.adaptive.observations import Indices, Observations

Floats: TypeAlias = NDArray[np.float64]

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

UNTRIED_SPEED = 0.05
"""How fast a position fades that is not tried, relative to the first: its step is of the draft,
not of the text, but nothing is believed for ever."""

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
_EVEN_RATE = np.array([0.5])
_UNKNOWN = 0
"""The slot of every request that never drafted: no trials, ever."""


class SurvivalEstimator:
    """Learns acceptance from verified rounds; tells survival by request and position.

    Survival s[r, j] = c[r, 1] · … · c[r, j], c the chance that a draft is kept once all before it
    were. Every estimate lies strictly between 0 and 1.
    """

    def __init__(self, max_steps: int, prior_rates: Sequence[float] | None = None) -> None:
        """Starts from `prior_rates`, one per position: what another estimator's `prior` gave.

        Raises:
            ValueError: no position, or prior rates that are not `max_steps` numbers within (0, 1).
        """
        if max_steps < 1:
            raise ValueError(f"max_steps={max_steps}: use an integer ≥ 1")
        self.max_steps = max_steps
        self._observations = Observations(max_steps)
        hits = self._observations.accepted.astype(np.float64)
        trials = self._observations.reached.astype(np.float64)
        # Of the traffic, by position: hits, trials, and the hits expected from the one before.
        self._pooled_lessons = np.concatenate([hits, trials, trials], axis=1)
        self._pooled = np.zeros((3, max_steps))
        prior = _checked(prior_rates, max_steps)
        self._pooled_prior = POOLED_PSEUDO_TRIALS * np.array(
            [prior, np.ones(max_steps), _rates_before(prior)]
        )
        # Of a request: trials by position, trials in all, hits in all.
        self._request_lessons = np.column_stack([trials, trials.sum(axis=1), hits.sum(axis=1)])
        num_tokens = 1.0 + self._request_lessons[:, -1:]
        self._request_keep = np.exp(-num_tokens / REQUEST_MEMORY_TOKENS)
        self._requests = np.zeros((64, max_steps + 2))
        self._request_prior = np.zeros(max_steps + 2)
        self._request_prior[[0, -2]] = REQUEST_PSEUDO_TRIALS
        self._slot_of: dict[str, int] = {}
        self._free = list(range(len(self._requests) - 1, _UNKNOWN, -1))
        self._last_ids: Sequence[str] = []
        self._last_slots: Indices = np.zeros(0, dtype=np.intp)
        self._update_rates()

    @property
    def num_requests(self) -> int:
        """Requests that drafted and were not forgotten."""
        return len(self._slot_of)

    @property
    def pooled_rates(self) -> Floats:
        """The chance over all traffic that a draft is kept once reached, [max_steps]."""
        return self._rates.copy()

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
    ) -> None:
        """Learns one verified round, an entry per row in every column.

        A row of 0 steps teaches nothing; what is known of its request ages by one token.

        Raises:
            ValueError: columns of different lengths, a request named twice, steps outside
                0..max_steps, or a count outside 0..its steps; nothing was learned.
        """
        if not len(request_ids) == len(row_steps) == len(num_correct_drafts):
            lengths = [len(request_ids), len(row_steps), len(num_correct_drafts)]
            raise ValueError(f"lengths={lengths}: give every column one entry per row")
        codes = self._observations.codes(row_steps, num_correct_drafts)
        slots = self._slots_of_drafted(request_ids, row_steps)
        evidence = self._requests.take(slots, axis=0)
        evidence *= self._request_keep.take(codes, axis=0)
        evidence += self._request_lessons.take(codes, axis=0)
        self._requests[slots] = evidence
        self._learn_pooled(self._observations.count(codes))

    def survival(self, request_ids: Sequence[str]) -> Floats:
        """The chance that each draft of each request is kept, [len(request_ids), max_steps].

        Requests that never drafted get the pooled rates.

        Raises:
            ValueError: a request is named twice.
        """
        evidence = self._requests.take(self._slots(request_ids), axis=0)
        evidence += self._request_prior
        expected_hits = evidence[:, : self.max_steps] @ self._rates
        ease = _odds_ratio(evidence[:, -1], evidence[:, -2], expected_hits)
        odds = np.multiply.outer(self._odds, ease)
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
        columns = zip(self._rates.tolist(), self._pooled[1].tolist(), strict=True)
        return {
            "num_requests": self.num_requests,
            "positions": [
                {"position": position, "accept_rate": round(rate, 4), "trials": round(trials, 1)}
                for position, (rate, trials) in enumerate(columns, start=1)
            ],
        }

    def _slots(self, request_ids: Sequence[str]) -> Indices:
        """Which row of `_requests` holds each request."""
        if request_ids == self._last_ids:  # as a rule: a batch hardly changes between rounds
            return self._last_slots
        if len(set(request_ids)) < len(request_ids):
            raise ValueError(f"request_ids={list(request_ids)}: name each request once")
        slots = map(self._slot_of.get, request_ids, repeat(_UNKNOWN))
        self._last_slots = np.fromiter(slots, np.intp, len(request_ids))
        self._last_ids = request_ids[:]
        return self._last_slots

    def _slots_of_drafted(self, request_ids: Sequence[str], row_steps: Sequence[int]) -> Indices:
        """As `_slots`, after giving one to each new request that drafted."""
        slots = self._slots(request_ids)
        for row in np.flatnonzero(slots == _UNKNOWN).tolist():
            if row_steps[row]:
                slots[row] = self._slot_of[request_ids[row]] = self._new_slot()
        return slots

    def _new_slot(self) -> int:
        if not self._free:
            size = len(self._requests)
            self._requests = np.concatenate([self._requests, np.zeros_like(self._requests)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        return self._free.pop()

    def _learn_pooled(self, num_rows: Indices) -> None:
        """num_rows: of each code."""
        learned = (num_rows @ self._pooled_lessons).reshape(3, self.max_steps)
        learned[2] *= _rates_before(self._rates)
        age = np.minimum(learned[1] / POOLED_MEMORY_TRIALS, 1 / POOLED_MEMORY_ROUNDS)
        age = np.maximum(age, UNTRIED_SPEED * age[0])
        self._pooled = self._pooled * np.exp(-age) + learned
        self._update_rates()

    def _update_rates(self) -> None:
        hits, trials, expected_hits = self._pooled + self._pooled_prior
        odds = np.multiply.accumulate(_odds_ratio(hits, trials, expected_hits))
        self._odds = np.minimum(np.maximum(odds, _LOWEST_ODDS), _HIGHEST_ODDS)
        self._rates = self._odds / (1.0 + self._odds)
        self._request_prior[-1] = REQUEST_PSEUDO_TRIALS * self._rates[0]


def _odds_ratio(hits: Floats, trials: Floats, expected_hits: Floats) -> Floats:
    ratio: Floats = hits * (trials - expected_hits) / ((trials - hits) * expected_hits)
    return ratio


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
