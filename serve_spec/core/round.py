"""What a policy is asked before a round, and its answer. Columns: one entry per decode row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from serve_spec.core.draft_shape import DraftShape

DRAFT_SHARPNESS = 0.85
"""Temperature of sampled drafts over their request's, where nobody knows better: on trained pairs
more are kept than at 1."""


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The decode rows of the next round; prefill rows are not among them.

    Columns instead of row objects: a policy looks at hundreds of rows in a few microseconds.
    """

    request_ids: Sequence[str]
    max_steps: Sequence[int]
    """Most drafts each row can use: the request's own limit, and one less than its tokens to go."""
    num_tokens: int
    """Tokens of all rows together; over `size`, the mean context."""
    num_sampled: int
    """Rows that sample (temperature > 0): each of their drawn tokens costs noise."""
    max_draft_tokens: int
    """Drafts the whole round can afford: its token budget and the free pages."""
    backlogs: Sequence[int] = ()
    """Draft entries each row lacks, and gets before its first draft: of a row that drafts, those
    of a round; of others all since their prompt began. None at all where nobody knows."""
    num_remaining: Sequence[int] = ()
    """Most tokens each row may still emit, where `backlogs` are known."""
    num_prompts: int = 0
    """Sequences whose prompts are not done: the batch will soon be larger by so many."""
    num_prompt_rows: int = 0
    """Rows of prompts that share the round, if it drafts little; drafts may take their place."""
    text_steps: Sequence[int] = ()
    """Drafts found in each row's text, which a row may verify instead of a model's; none at all
    where only one of both drafts."""

    @property
    def size(self) -> int:
        """Decode rows: the batch size."""
        return len(self.request_ids)

    @property
    def context(self) -> float:
        """Mean tokens per row."""
        return self.num_tokens / len(self.request_ids) if self.request_ids else 0.0


@dataclass(frozen=True, slots=True)
class RoundNotes:
    """What a policy thinks of its answer. For metrics: nothing decides by it."""

    is_probe: bool = False
    """Taken to learn something, not because it pays."""
    predicted_ms: float | None = None
    """What the round should take; None without costs."""
    slot: str | None = None
    """Batch-size slot of a policy that keeps an average per slot."""
    ema_accept_length: float | None = None
    """That average when the round was chosen: correct drafts per row."""


NO_NOTES = RoundNotes()


@dataclass(frozen=True, slots=True)
class RoundSteps:
    """A policy's answer: the shape, and how many levels of it each request drafts (None: all).

    A request never drafts deeper than its `max_steps`, whatever is asked.

    Requests with drafts from their text (`DecodeBatch.text_steps`) verify those, `text_steps` of
    them, whatever the shape; with an entry of 0 they draft like all others. None: as many as they
    would draft otherwise.
    """

    shape: DraftShape
    row_steps: Sequence[int] | None = None
    notes: RoundNotes = field(default=NO_NOTES, compare=False)
    draft_sharpness: float = field(default=DRAFT_SHARPNESS, compare=False)
    """At which temperature sampled rows draft, over their own."""
    text_steps: Sequence[int] | None = None
