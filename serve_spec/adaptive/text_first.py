"""Whose drafts a row verifies where both are at hand: those found in its text, or a model's.

Drafts from a text cost no drafting, so fewer of them need to be right; how many are, differs by
request far more than for a model. What is known of both is kept apart: a text that repeats itself
says nothing of the model, nor the model of it. Trees from texts are learned from as chains are:
after a long match few branch, and those that do keep little more (on texts of the shipped pair, of
trees of 15 drafts a fifth branched, and all together kept 2% more at temperature 0, 5% at 0.7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from serve_spec.adaptive.objective import Counts, Floats, RoundCosts
from serve_spec.adaptive.survival import SurvivalEstimator
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch

FIRST_RATE = 0.85
"""Expected of a draft from a text that nobody has verified one of: worth a try, also beside a
model's trees. After five tokens that match, texts of the shipped pair keep 0.91 of the drafts they
reach at temperature 0, 0.84 at 0.7 and 0.73 at 1."""
RETRY_FOUND = 64
"""Matches passed over after which some are verified all the same: texts change."""
RETRY_STEPS = 2


class TextFirst:
    """Learns what drafts from texts are worth; tells how many of them rows verify."""

    def __init__(self, max_steps: int) -> None:
        self.survival = SurvivalEstimator(max_steps, [FIRST_RATE] * max_steps)
        self._steps_of: dict[str, int] = {}
        self._steps_of_others = 0
        self._num_passed_over = 0

    def plan(
        self,
        request_ids: Sequence[str],
        model: Floats,
        costs: RoundCosts,
        of_tree: Floats | None = None,
    ) -> None:
        """Decides for these requests, and by the usual one of them for those that join.

        model: survival of the model's drafts in chains, [B, K]. costs: of a round of these rows.
        of_tree: where the model drafts trees, tokens per ms of each row, [B].
        """
        text = self.survival.survival(request_ids)[:, : model.shape[1]]
        steps = text_steps(text, model, costs, of_tree).tolist()
        self._steps_of = dict(zip(request_ids, steps, strict=True))
        self._steps_of_others = sorted(steps)[len(steps) // 2]

    def steps(self, batch: DecodeBatch, most: int, may_retry: Callable[[], bool]) -> list[int]:
        """Drafts from its text for each row, up to `most`; 0 where the model drafts instead.

        Now and then, a row whose drafts would be passed over verifies some to hear of them.
        may_retry: asked before that.
        """
        wanted = [
            min(most, self._steps_of.get(request_id, self._steps_of_others))
            for request_id in batch.request_ids
        ]
        rows = enumerate(zip(batch.text_steps, wanted, strict=True))
        passed_over = [row for row, (num_found, steps) in rows if num_found and not steps]
        self._num_passed_over += len(passed_over)
        if passed_over and self._num_passed_over >= RETRY_FOUND and may_retry():
            self._num_passed_over = 0
            wanted[passed_over[0]] = min(most, RETRY_STEPS)
        return wanted

    def observe_rounds(self, rounds: Sequence[StepRecord]) -> None:
        """Learns from the rows that drafted from their texts, the oldest round first."""
        self.survival.observe_rounds([record.text_drafts for record in rounds])

    def forget(self, request_id: str) -> None:
        """Drops a request."""
        self.survival.forget(request_id)

    def snapshot(self) -> dict[str, object] | None:
        """What is known of drafts from texts, JSON-able; None before the first."""
        return self.survival.snapshot() if self.survival.pooled_trials.any() else None


def text_steps(
    text: Floats, model: Floats, costs: RoundCosts, of_tree: Floats | None = None
) -> Counts:
    """Drafts from its text that serve each row best, [B]; 0 where the model's serve it better.

    Each row is weighed as if all of the batch were like it, in tokens per ms.

    text, model: the chance that each draft is kept, [B, K]; of the model's, 0 where it is to make
        none. costs: of a round of B rows. of_tree: see `TextFirst.plan`.
    """
    depths = text.shape[1] + 1
    plain_ms = costs.verify_ms(costs.batch_size * np.arange(depths)) + costs.host
    draft_ms = np.concatenate([[0.0], np.cumsum(costs.step[costs.batch_size])])
    text_speed = _tokens(text) / plain_ms
    model_speed = (_tokens(model) / (plain_ms + draft_ms)).max(axis=1)
    if of_tree is not None:
        model_speed = np.maximum(model_speed, of_tree)
    best: Counts = np.argmax(text_speed, axis=1)
    return np.where(text_speed.max(axis=1) >= model_speed, best, 0)


def _tokens(survival: Floats) -> Floats:
    """Expected of a round by the number of drafts, [B, K + 1]."""
    tokens: Floats = np.ones((survival.shape[0], survival.shape[1] + 1))
    tokens[:, 1:] += np.cumsum(survival, axis=1)
    return tokens
