"""What the prompts of requests that come and go take, and how far that depends on the drafts.

Whoever emits tokens faster is through with its request earlier, and the next one brings a prompt:
with every token a round emits, rows of prompts come to be computed. They take the longer the more
rows the round has without them, for the first rows of a round are nearly free and later ones are
not. So a plan pays for that, beside the drafts it would have there.

An end costs more than the prompt after it. What its last round drew beyond it is lost, and while
the prompt is computed its place drafts nothing: the deeper rounds go, the more of both, and where
texts are short it decides between two depths.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from serve_spec.adaptive.objective import Counts, Floats, Menu, from_zero
from serve_spec.core.record import StepRecord

_REMEMBERED = 64
"""Requests that the means are over, about."""
_FEWEST = 8
"""Requests before anything is said of them."""
_MOST_GROUPS = 4.0
"""Prompts of a round in the mean; more are taken to come in groups. Of many the number hardly
varies."""
_COUNTS = np.arange(1.0, 9.0)
_FACTORIALS = np.cumprod(_COUNTS)

PromptMs = Callable[[Floats, Counts], Floats]
"""What so many rows of prompts add to verifications of so many other rows, in ms."""


class PromptLoad:
    """Means over the requests that ended of late. It starts without any: prompts are free."""

    def __init__(self) -> None:
        self._num_ended = 0.0
        self._num_rows = 0.0
        self._num_tokens = 0.0

    def observe(self, record: StepRecord) -> None:
        """Counts the requests that ended in a round."""
        if record.num_ended:
            kept = max(0.0, 1.0 - record.num_ended / _REMEMBERED)
            self._num_ended = kept * self._num_ended + record.num_ended
            self._num_rows = kept * self._num_rows + record.num_ended_prompt_rows
            self._num_tokens = kept * self._num_tokens + record.num_ended_tokens

    @property
    def is_known(self) -> bool:
        """Whether enough requests ended, with prompts of their own: the first are short ones."""
        return self._num_ended >= _FEWEST and self._num_rows > 0

    @property
    def rows_per_token(self) -> float:
        """Rows of prompts for every token that is emitted."""
        return self._num_rows / self._num_tokens if self._num_tokens else 0.0

    @property
    def rows_per_prompt(self) -> float:
        """Rows that come together at least."""
        return self._num_rows / self._num_ended if self._num_ended else 0.0

    @property
    def tokens_per_request(self) -> float:
        """Tokens that a request emits."""
        return self._num_tokens / self._num_ended if self._num_ended else 0.0

    def idle_share(self, lost: Floats, ms: Floats, num_rows: Counts, prompt_ms: PromptMs) -> Floats:
        """What ends take of the speed of rounds of `ms` [N] that verify `num_rows` [N], [N].

        What is not verified meanwhile takes no time either: where a round is as long as it has
        rows, an idle place costs nothing.

        lost: tokens of an end, [N]; see `lost_at_an_end`.
        """
        each = self.rows_per_prompt
        row_ms = prompt_ms(np.array([each]), num_rows) / each
        fixed = np.maximum(0.0, 1.0 - row_ms * num_rows / ms)
        share: Floats = fixed * lost / self.tokens_per_request
        return share

    def added_ms(self, tokens: Floats, ms: Floats, menu: Menu, prompt_ms: PromptMs) -> Floats:
        """What rounds that emit `tokens` [N] in `ms` [N] take for prompts on top, in the mean [N].

        Requests end independently, so prompts come by chance, now none and now several; that
        counts, for rows get dearer the more there are. Beside them a round drafts what pays there:
        a tier of `menu`, or all it does.
        """
        each = self.rows_per_prompt
        groups = self.rows_per_token * tokens / each
        size = np.maximum(1.0, groups / _MOST_GROUPS)
        chances = _poisson(groups / size)
        num_rows = each * size[:, None] * _COUNTS
        known = np.isfinite(menu.ms)
        beside = prompt_ms(num_rows[:, :, None], menu.num_rows[known])
        # What is not drafted there saves time, and loses tokens that are worth theirs.
        kept = menu.tokens[known] / tokens[:, None]
        longer = np.maximum(0.0, menu.ms[known] - kept * ms[:, None])
        added: Floats = (chances * (beside + longer[:, None]).min(axis=2)).sum(axis=1)
        return added


def lost_at_an_end(speeds: Floats) -> Floats:
    """Tokens that a place loses when its request ends, by how far its rounds go, [K + 1].

    speeds: tokens that a row emits in a round in which it drafts 0 .. K, [K + 1], by the chance
        that each draft is kept; so their differences are those chances.
    """
    numbers = np.arange(1, len(speeds))
    # a of the tokens are drawn at once: of an end that may be any of them, a - 1 .. 0 are beyond.
    beyond = from_zero(numbers * np.diff(speeds)) / speeds
    lost: Floats = beyond + speeds - 1.0  # of its prompt's round comes one token
    return lost


def _poisson(means: Floats) -> Floats:
    """Chances of 1, 2, ... for every mean [N], [N, counts]; the last one stands for all beyond."""
    chances: Floats = np.exp(-means[:, None]) * np.power(means[:, None], _COUNTS) / _FACTORIALS
    chances[:, -1] += 1.0 - np.exp(-means) - chances.sum(axis=1)
    return chances
