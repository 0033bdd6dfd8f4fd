"""What was drafted, reached and accepted, by position; and accepted drafts by batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from operator import eq, le

from serve_spec.config.adaptive_file import SlotConfig


class PositionCounters:
    """Sums over verified rows. A draft is *reached* when every draft before it was accepted."""

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        # Rows by drafts, by accepted drafts, and by drafts if all were accepted. Replaced, never
        # changed: another thread may read them.
        self._rows = [[0] * (max_steps + 1)] * 3

    def observe(self, num_correct_drafts: Sequence[int], row_steps: Sequence[int]) -> None:
        """Count the rows of one round; raise ValueError if one cannot be."""
        most = self._max_steps
        try:  # as bytes: numpy's first call after a model's forward takes 80 µs on a CPU
            steps, correct = bytes(row_steps), bytes(num_correct_drafts)
            is_possible = max(steps, default=0) <= most and all(map(le, correct, steps))
        except (TypeError, ValueError):
            is_possible = False
        if not is_possible or len(steps) != len(correct):
            shown = f"row_steps={row_steps}, num_correct_drafts={num_correct_drafts}"
            raise ValueError(f"{shown}: give integers, 0 ≤ accepted ≤ drafts ≤ {most} in every row")
        columns = steps, correct, bytes(compress(steps, map(eq, steps, correct)))
        self._rows = [
            [n + column.count(k) for k, n in enumerate(rows)]
            for rows, column in zip(self._rows, columns, strict=True)
        ]

    @property
    def num_rows(self) -> int:
        """Rows that drafted; one without drafts says nothing about drafts."""
        return sum(self._rows[0][1:])

    def totals(self) -> dict[str, object]:
        """Return the drafts of all rows, and the tokens of a row and round: 1.0 before any."""
        rows, by_correct, _ = self._rows
        drafted, correct = (sum(k * n for k, n in enumerate(each)) for each in (rows, by_correct))
        return {
            "learned_draft_tokens": drafted,
            "learned_correct_drafts": correct,
            "learned_accept_length": round(1.0 + correct / max(1, sum(rows[1:])), 4),
            "accept_rate": round(correct / drafted, 4) if drafted else None,
        }

    def snapshot(self) -> list[dict[str, object]]:
        """Return one entry per position that was ever drafted, first position 1."""
        rows, by_correct, whole = self._rows
        entries: list[dict[str, object]] = []
        for j in range(self._max_steps):
            drafted, accepted = sum(rows[j + 1 :]), sum(by_correct[j + 1 :])
            reached = accepted + by_correct[j] - whole[j]
            rate = round(accepted / reached, 4) if reached else None
            counts = {"drafted": drafted, "reached": reached, "accepted": accepted}
            entries += [{"position": j + 1, **counts, "accept_rate": rate}] if drafted else []
        return entries


class SlotAverages:
    """Moving averages of accepted drafts by the slots of strategy `ema`, under every strategy."""

    def __init__(self, slots: Mapping[int, SlotConfig]) -> None:
        self._alphas = {key: slot.ema_alpha for key, slot in slots.items()}
        self._averages: dict[int, float] = {}

    def observe(self, batch_size: int, correct_drafts: Sequence[int], steps: Sequence[int]) -> None:
        """Count a step: accepted drafts of each request, and its levels (0: it did not draft)."""
        if accepted := list(compress(correct_drafts, steps)):
            key = max([k for k in self._alphas if k <= batch_size], default=min(self._alphas))
            mean = sum(accepted) / len(accepted)
            before = self._averages.get(key, mean)
            self._averages[key] = before + self._alphas[key] * (mean - before)

    def snapshot(self) -> dict[str, dict[str, object]]:
        """Return the averages by slot, of slots that have drafted."""
        averages = sorted(self._averages.copy().items())
        return {str(key): {"ema_accept_len": round(each, 4)} for key, each in averages}
