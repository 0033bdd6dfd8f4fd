"""Prompts in a round: pieces of what is not computed yet, and the room they take."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from serve_spec.core.plan import ScheduledRequest
from serve_spec.core.sequence import Sequence
from serve_spec.scheduler.rows import prompt_row


@dataclass(frozen=True)
class Prompt:
    """A sequence whose text is not computed yet from position `start` on."""

    seq: Sequence
    start: int

    @property
    def num_pending(self) -> int:
        """Tokens the target has not seen."""
        return len(self.seq) - self.start


def prompt_rows(
    prompts: SequenceOf[Prompt], budget: int, *, chunked: bool
) -> list[ScheduledRequest]:
    """Pieces of those that still have pages, the oldest first; of `budget` tokens in all.

    One prompt a round may overrun the budget, by a token or, without chunks, whole: decode rows
    could otherwise keep it waiting for ever.
    """
    rows: list[ScheduledRequest] = []
    for prompt in prompts:
        seq, start, count = prompt.seq, prompt.start, prompt.num_pending
        is_first = not rows
        if chunked:
            count = min(count, max(budget, 1 if is_first else 0))
        elif count > budget and not is_first:
            count = 0
        if count > 0 and seq.page_ids:
            rows.append(prompt_row(seq, start, count, samples=count == prompt.num_pending))
            budget -= count
    return rows
