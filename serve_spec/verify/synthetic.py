"""Forced acceptance: as many drafts kept as asked for, whatever the target says. Load tests only.

It measures speed at a given acceptance, as SGLang's SGLANG_SIMULATE_ACC_LEN does. The round is
executed in full, its draws included; only the walk gives way to a draw of the number of correct
drafts. A row emits that many of its drafts and then the target's draw after them. Such a text is
nobody's: with a good draft it may read well and still not be the target's, so whatever shows it
has to say so.

What can be asked for (`synthetic_acceptance`):

    2.5              accept length: tokens per row and round, the final token included, on average
    [0.8, 0.6]       chance of each position's draft to be kept, given that those before it were;
                     deeper positions have the last one

A length holds at *every* depth that can reach it, as in SGLang: the chance, the same at all
positions, is solved for each number of drafts k from p + p² + ... + p^k = L - 1, so that a tier of
3 forced to 2.5 measures 2.5, and one of 7 too. (Solved once, for the deepest tier, it would put
every shallower one below what was asked for.) A depth that can not reach it keeps every draft.
Then no tier emits more than another, which says nothing about how deep to draft: to load-test a
policy that chooses the depth, give a list, which is one and the same law at all depths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

import torch
from torch import Tensor

from serve_spec.core.draft import DraftChain, VerifyResult
from serve_spec.log import get_logger
from serve_spec.ops.noise import row_keys
from serve_spec.ops.sampling import SamplingRows, sample
from serve_spec.verify.rejection import RejectionVerdict
from serve_spec.verify.verifier import judge, read_verdicts

logger = get_logger(__name__)

Acceptance: TypeAlias = float | Sequence[float]
"""An accept length ≥ 1, or chances 0..1 by position."""

Verdict: TypeAlias = Callable[[Tensor, DraftChain, SamplingRows], VerifyResult]
"""What decides a round; see `judge`."""


def choose_verdict(
    synthetic_acceptance: Acceptance | None, rejection_sample_method: str = "coupled"
) -> Verdict:
    """The target's own verdict, on coupled or sampled drafts, or a forced one: the log says so."""
    if rejection_sample_method != "coupled":
        return RejectionVerdict(rejection_sample_method)
    if synthetic_acceptance is None:
        return judge
    logger.warning(
        "synthetic_acceptance=%s: acceptance is forced, for load tests; no text is the model's",
        synthetic_acceptance,
    )
    return SyntheticVerdict(synthetic_acceptance)


def forced_counts(
    verdict: Verdict, num_steps: Sequence[int], sampling: SamplingRows
) -> Tensor | None:
    """Drafts kept of trees of `num_steps` levels, int32 [B]; None where the target decides.

    sampling: num_steps + 1 rows of each sequence, by depth.
    """
    if not isinstance(verdict, SyntheticVerdict):
        return None
    roots = list(accumulate((steps + 1 for steps in num_steps[:-1]), initial=0))
    counts = verdict.num_correct_drafts(
        num_steps,
        seeds=[sampling.seeds[root] for root in roots],
        positions=[sampling.positions[root] for root in roots],
    )
    return torch.tensor(counts, dtype=torch.int32, device=sampling.inverse_temperature.device)


class SyntheticVerdict:
    """A `Verdict` that keeps drafts by chance.

    The number kept is a pure function of the row's seed, its length and its number of drafts: the
    same in any batch, on any device. A round in which no row drafts is decided by the target.
    """

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance = acceptance
        self._survival: dict[int, list[float]] = {}

    def __call__(self, logits: Tensor, drafts: DraftChain, sampling: SamplingRows) -> VerifyResult:
        """What every row emits; shapes as for `judge`, and as few read-backs."""
        if not any(drafts.num_steps):
            return judge(logits, drafts, sampling)
        roots = list(accumulate((steps + 1 for steps in drafts.num_steps[:-1]), initial=0))
        correct = self.num_correct_drafts(
            drafts.num_steps,
            seeds=[sampling.seeds[root] for root in roots],
            positions=[sampling.positions[root] for root in roots],
        )
        last = [root + count for root, count in zip(roots, correct, strict=True)]
        final = sample(logits, sampling)[torch.tensor(last, device=logits.device)]
        table = torch.cat([drafts.token_ids.clamp(min=0), final.unsqueeze(1)], dim=1).tolist()
        return read_verdicts(
            [[count, 0, *row[:count], row[-1]] for row, count in zip(table, correct, strict=True)]
        )

    def num_correct_drafts(
        self, num_steps: Sequence[int], *, seeds: list[int], positions: list[int]
    ) -> list[int]:
        """Drafts kept, 0..num_steps, of rows whose first draw decides `positions`."""
        uniform = row_keys(seeds, positions)[:, 1].double() / 2**32 + 0.5
        return [
            sum(value < chance for chance in self._survival_at(steps))
            for value, steps in zip(uniform.tolist(), num_steps, strict=True)
        ]

    def _survival_at(self, num_steps: int) -> list[float]:
        """Chance that the first 1, 2, ... num_steps drafts are all kept."""
        if num_steps not in self._survival:
            chances = draft_chances(self.acceptance, num_steps)
            self._survival[num_steps] = list(accumulate(chances, lambda a, b: a * b))
        return self._survival[num_steps]


def draft_chances(acceptance: Acceptance, num_steps: int) -> list[float]:
    """Chance of each of `num_steps` drafts to be kept, given that those before it were."""
    if isinstance(acceptance, int | float):
        return [_chance_for(acceptance, num_steps)] * num_steps
    return [acceptance[min(i, len(acceptance) - 1)] for i in range(num_steps)]


def _chance_for(accept_length: float, num_steps: int) -> float:
    """The p with 1 + p + ... + p^num_steps = accept_length; 1 where that is out of reach."""
    low, high = 0.0, 1.0
    for _ in range(60):  # halves the interval down to the last bits of a float
        middle = (low + high) / 2
        if sum(middle**i for i in range(num_steps + 1)) < accept_length:
            low = middle
        else:
            high = middle
    return high
