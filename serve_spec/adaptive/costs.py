"""Milliseconds of rounds: two measured curves, corrected by what rounds really took.

    round ms = (draft ms + verify ms) · (1 + residual)

There is a residual for every shape in every bucket of batch sizes: what all shapes have in common,
a part that grows with the depth, and its own. What ran tells of these parts by Gaussian regression,
first of all buckets together, then of the bucket. It fades with age: one spike does not make a
shape unattractive for ever. What prompts add is learned apart, see `prompt_costs`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from serve_spec.adaptive.curves import Floats, StepCurves
from serve_spec.adaptive.prompt_costs import PromptCosts
from serve_spec.adaptive.state import State, array, number, section
from serve_spec.config.cost_table import CostTable
from serve_spec.core.draft import PLAIN, DraftShape

# Standard deviations of residuals: in common, by depth, of one shape; and of one round.
_COMMON, _BY_DEPTH, _OWN, _NOISE = 0.1, 0.03, 0.05, 0.1
_LEAST_ERROR, _MOST_ERROR = -0.5, 1.0
_ROUND_FADE = 1.0 - 1.0 / 50.0  # a round weighs 1/e after 50 of its shape
NUM_BUCKETS = 24


def bucket(batch_size: int) -> int:
    """Return the exponent of the power of two nearest to a batch size."""
    return min((batch_size * batch_size).bit_length() // 2, NUM_BUCKETS - 1)


def _weights(num: int) -> tuple[float, float]:
    """Return by what so many new rounds fade the older ones, and what they weigh themselves."""
    fade = _ROUND_FADE**num
    return fade, (1.0 - fade) / (1.0 - _ROUND_FADE)


def _error(ms: float, predicted_ms: float) -> float:
    return min(max(ms / predicted_ms - 1.0, _LEAST_ERROR), _MOST_ERROR)


class Work(NamedTuple):
    """What a round computes."""

    size: int  # requests that decode
    context: float  # tokens of each
    sampled: float = 0.0  # fraction of them that sample
    shape: DraftShape = PLAIN  # what most of them draft
    drafts: float = 0.0  # that are verified
    prompts: int = 0  # prompt tokens
    pairs: int = 0  # of attention, for them
    entries: int = 0  # missing draft KV entries


class Costs:
    """Predicts and learns the time of rounds."""

    def __init__(self, table: CostTable) -> None:
        self.table, self._curves = table, StepCurves(table)
        self.max_steps = self._curves.max_steps
        trees = [float(tree.num_steps) for tree in table.trees]
        depths = np.array([*range(self.max_steps + 1), *trees])
        self._covariance: Floats = _COMMON**2 + _BY_DEPTH**2 * np.outer(depths, depths)
        self._covariance += _OWN**2 * np.eye(len(depths))
        self._rounds, self._errors = (np.zeros((NUM_BUCKETS, len(depths))) for _ in range(2))
        self.prompts = PromptCosts(self._more_ms)

    def chains_ms(self, work: Work, drafts: Floats) -> Floats:
        """Return the ms of rounds that verify `drafts` [M] drafts of chains: [max_steps + 1, M].

        work: its shape and drafts are not read.
        """
        chains = slice(self.max_steps + 1)
        draft = self._curves.draft_ms(work.size, work.context)[:, None]
        ms: Floats = draft + self._verify_ms(work, drafts)
        return ms * (1.0 + self._residuals(work.size)[chains, None])

    def ms(self, work: Work) -> float:
        """Return the ms of a round without its prompts and missing draft KV."""
        residual = self._residuals(work.size)[self._column(work.shape)]
        return float(self.table_ms(work) * (1.0 + residual))

    def table_ms(self, work: Work) -> float:
        """Return the same by the table alone."""
        size, shape, context = work.size, work.shape, work.context
        if shape.is_chain:
            draft = self._curves.draft_ms(size, context)[shape.depth]
        else:
            draft = self._curves.tree_draft_ms(shape, size, context)
        return float(draft + self._verify_ms(work, np.array([work.drafts]))[0])

    def prompts_ms(
        self, size: int, drafts: Floats, ms: Floats, prompts: Floats, pairs: float
    ) -> Floats:
        """Return the ms that `prompts` tokens add to rounds that take `ms` and verify `drafts`.

        They lie on the curve of verified tokens. pairs: of attention, by prompt token.
        """
        more = self._more_ms(size, drafts, prompts)
        return self.prompts.more_ms(ms, more, prompts * pairs)

    def _more_ms(self, size: float, drafts: Floats | float, prompts: Floats | float) -> Floats:
        """Return the ms of so many more tokens in a target forward, by the table."""
        tokens, verify = size + drafts, self._curves.verify_ms
        return verify(0, 0.0, tokens + prompts) - verify(0, 0.0, tokens)

    def draft_ms(self, work: Work) -> float:
        """Return the ms of one draft step by the table."""
        return float(self._curves.draft_ms(work.size, work.context)[1])

    def _verify_ms(self, work: Work, drafts: Floats) -> Floats:
        tokens = work.size + drafts
        verify = self._curves.verify_ms(work.size, work.context, tokens)
        return verify + self.table.sampled_token_ms * work.sampled * tokens

    def _column(self, shape: DraftShape) -> int:
        if shape.is_chain:
            return shape.depth
        return self.max_steps + 1 + self._curves.trees.index((shape.depth, shape.size))

    def _residuals(self, size: int) -> Floats:
        """Return the residual of every shape."""
        rounds, errors = self._rounds[bucket(size)], self._errors[bucket(size)]
        usual = self._expected(self._rounds.sum(axis=0), self._errors.sum(axis=0))
        found = usual + self._expected(rounds, errors - rounds * usual)
        return np.asarray(found.clip(_LEAST_ERROR, _MOST_ERROR))

    def _expected(self, rounds: Floats, errors: Floats) -> Floats:
        """Return the expected residual of every shape, from the rounds of each and their sums."""
        given = rounds[:, None] * self._covariance + _NOISE**2 * np.eye(len(rounds))
        found: Floats = self._covariance @ np.linalg.solve(given, errors)
        return found

    def is_usual(self, work: Work) -> bool:
        """Return whether a round has no prompts and makes as little draft KV as most do."""
        return not work.prompts and work.entries <= work.size * (self.max_steps + 1)

    def learn(self, work: Work, ms: float, num: int = 1) -> None:
        """Learn from so many usual rounds of this time."""
        at = bucket(work.size), self._column(work.shape)
        fade, rounds = _weights(num)
        self._rounds[at] = fade * self._rounds[at] + rounds
        error = _error(ms, self.table_ms(work))
        self._errors[at] = fade * self._errors[at] + rounds * error

    def learn_prompts(self, work: Work, ms: float) -> None:
        """Learn from a round that computes prompts, or makes much missing draft KV."""
        given = work.size, work.drafts, work.prompts, work.pairs, work.entries
        self.prompts.learn(given, self.ms(work), ms)

    def age(self, size: int, num_rounds: int) -> None:
        """Let what is known of a batch size fade by some rounds."""
        fade = math.exp(-num_rounds / 1024.0)
        for sums in (self._rounds, self._errors):
            sums[bucket(size)] *= fade

    def state(self) -> State:
        """Return what outlives a restart."""
        return {
            "measured_s": self.table.measured_s,
            "rounds": self._rounds.tolist(),
            "errors": self._errors.tolist(),
            "prompts": self.prompts.state(),
        }

    def restore(self, state: State) -> bool:
        """Continue from a state; return whether its corrections are of this table.

        Raises ValueError: it is none.
        """
        most = 1.001 / (1.0 - _ROUND_FADE)
        rounds = array(state, "rounds", self._rounds.shape, 0.0, most)
        errors = array(state, "errors", rounds.shape, -0.501 * rounds, 1.001 * rounds)
        prompts = PromptCosts()
        prompts.restore(section(state, "prompts"))
        if number(state, "measured_s") != self.table.measured_s:
            return False
        self._rounds, self._errors = rounds, errors
        self.prompts.restore(section(state, "prompts"))
        return True

    def snapshot(self) -> dict[str, object]:
        """Return the corrections, JSON-able."""
        return {
            "entry_ms": round(self.prompts.entry_ms, 6),
            "prompt_weights": self.prompts.weights.round(6).tolist(),
            "factors": {
                str(1 << at): (1.0 + self._residuals(1 << at)).round(4).tolist()
                for at in range(NUM_BUCKETS)
                if self._rounds[at].sum() >= 1.0
            },
        }
