"""What was drafted, reached and accepted, by position in the chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from serve_spec.adaptive.observations import Indices, Observations
from serve_spec.config.adaptive_file import SlotConfig

_MANY_ROWS = 32


class PositionCounters:
    """Sums over verified rows. A draft is *reached* when every draft before it was accepted.

    accepted / reached is the chance that a draft is kept where it matters; dividing by rounds
    instead would blame deep positions for the rejections before them.
    """

    def __init__(self, max_steps: int) -> None:
        self._observations = Observations(max_steps)
        # By code, so that whatever another thread reads while a round is counted is true of rows.
        self._rows = [0] * self._observations.num_codes

    def observe(self, num_correct_drafts: Sequence[int], row_steps: Sequence[int]) -> None:
        """Counts the rows of one round: drafts kept and drafts verified, per row.

        Raises:
            ValueError: a row kept more than it had, or had more than `max_steps`.
        """
        if not any(row_steps) and not any(num_correct_drafts):
            return
        if len(row_steps) > _MANY_ROWS:
            codes = self._observations.codes(row_steps, num_correct_drafts)
            counted = np.bincount(codes, minlength=len(self._rows))
            self._rows = (counted + self._rows).tolist()
            return
        # Not by arrays, as this comes with every round: the first use of numpy after a model's
        # forward takes 80 µs on a CPU, which pays for many rows only.
        shown = list(zip(row_steps, num_correct_drafts, strict=True))
        counts = {row: shown.count(row) for row in shown}
        for code, count in zip(self._observations.codes_of(counts), counts.values(), strict=True):
            self._rows[code] += count

    @property
    def drafted(self) -> list[int]:
        """Drafts verified at each position."""
        return self._sums(self._observations.drafted)

    @property
    def reached(self) -> list[int]:
        """Of these, drafts that every draft before them was accepted of."""
        return self._sums(self._observations.reached)

    @property
    def accepted(self) -> list[int]:
        """Of these, drafts that were kept."""
        return self._sums(self._observations.accepted)

    @property
    def num_rows(self) -> int:
        """Rows that drafted; one without drafts says nothing about drafts."""
        return sum(self.drafted[:1])

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that were verified."""
        return sum(self.drafted)

    @property
    def num_correct_drafts(self) -> int:
        """Drafts that were kept."""
        return sum(self.accepted)

    @property
    def accept_rate(self) -> float | None:
        """Kept drafts per draft verified, at whatever tier; None before the first."""
        return self.num_correct_drafts / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def accept_length(self) -> float:
        """Tokens per drafting row and round: correct drafts and the final token; 1.0 before any."""
        return 1.0 + self.num_correct_drafts / self.num_rows if self.num_rows else 1.0

    def snapshot(self) -> list[dict[str, object]]:
        """One entry per position that was ever drafted, first position 1."""
        columns = zip(self.drafted, self.reached, self.accepted, strict=True)
        return [
            {
                "position": position,
                "drafted": drafted,
                "reached": reached,
                "accepted": accepted,
                "accept_rate": round(accepted / reached, 4) if reached else None,
            }
            for position, (drafted, reached, accepted) in enumerate(columns, start=1)
            if drafted
        ]

    def _sums(self, shown: Indices) -> list[int]:
        sums: list[int] = (np.array(self._rows) @ shown).tolist()
        return sums


class SlotAverages:
    """Moving averages of accepted drafts per request, by the batch-size slots of strategy `ema`.

    Observed under every strategy, so that replicas compare; `ema` alone decides by its own.
    """

    def __init__(self, slots: Mapping[int, SlotConfig]) -> None:
        self._alphas = {key: slot.ema_alpha for key, slot in sorted(slots.items())}
        self._averages: dict[int, float] = {}

    def observe(self, batch_size: int, correct_drafts: Sequence[int], steps: Sequence[int]) -> None:
        """Count a step: accepted drafts of each request, and its levels (0: it did not draft)."""
        accepted = [kept for kept, drafted in zip(correct_drafts, steps, strict=True) if drafted]
        if accepted:
            key = max([k for k in self._alphas if k <= batch_size], default=min(self._alphas))
            mean = sum(accepted) / len(accepted)
            before = self._averages.get(key, mean)
            self._averages[key] = before + self._alphas[key] * (mean - before)

    def snapshot(self) -> dict[str, dict[str, object]]:
        """Return the averages by slot, of slots that have drafted."""
        return {
            str(key): {"ema_accept_len": round(average, 4)}
            for key, average in sorted(self._averages.copy().items())
        }
