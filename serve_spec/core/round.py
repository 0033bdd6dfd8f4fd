"""What a policy is asked before a round and told after it. Columns: one entry per decode row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
    may_draft: bool = True
    """False: prompts share the round, and beside them this engine drafts nothing."""
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


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Milliseconds of one round: its stages, and the whole of it with the host's share."""

    draft_ms: float
    verify_ms: float
    round_ms: float


@dataclass(frozen=True, slots=True)
class VerifiedRound:
    """What became of a round.

    The columns hold the live rows: those that go on. Rows that finished are left out, for
    what is drafted past a stop says nothing about the text. The sums are over all decode rows.
    """

    shape: DraftShape
    """What was drafted, which need not be the active shape any more."""
    batch_size: int
    num_tokens: int
    """Context tokens of all decode rows, as asked."""
    num_sampled: int
    request_ids: Sequence[str]
    row_steps: Sequence[int]
    """Drafts really verified; of trees, levels."""
    num_correct_drafts: Sequence[int]
    """As the target judged them, before any stop."""
    num_drafting: int
    """Rows for which a model drafted, or, without a model, rows that drafted."""
    deepest: int
    """Drafts of that of these rows which drafted most."""
    num_draft_tokens: int
    """All that were verified, those from texts, too."""
    num_output_tokens: int
    num_catch_up: int
    """Draft entries made up before drafting: a few per row, or all of a prompt."""
    times: RoundTimes | None
    """None where nobody measured."""
    draft_sharpness: float = DRAFT_SHARPNESS
    """At which the round drafted."""
    is_sampled: Sequence[bool] = ()
    """A column: which of the live rows draw with noise; none where nobody says."""
    is_from_text: Sequence[bool] = ()
    """Of live rows, whether their drafts were found in the text; none at all: as one drafts."""
    num_text_drafts: int = 0
    """Drafts from texts, of all decode rows, beside a model."""
    num_prompt_rows: int = 0
    """Of prompts that shared the round: its time says nothing about decoding alone."""
    num_ended: int = 0
    """Requests that ended in this round,"""
    num_ended_prompt_rows: int = 0
    """the rows that were computed of their prompts,"""
    num_ended_tokens: int = 0
    """and the tokens they emitted."""
    follows: bool = False
    """It was launched while the round before it ran, so that its time may be what the host took
    for that one."""
    was_postponed: bool = False
    """It was not, for the outcome of that one decides what there is to draft: what the device
    waited is the price of drafts, whether or not there are any."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing was drafted, nor waited for."""
        return not (self.num_draft_tokens or self.was_postponed)

    @property
    def model_rows(self) -> VerifiedRound:
        """The same round; rows that drafted from their text are taken for rows without drafts."""
        if not any(self.is_from_text):
            return self
        counts = zip(self.row_steps, self.num_correct_drafts, self.is_from_text, strict=True)
        rows = [(0, 0) if is_from_text else (k, m) for k, m, is_from_text in counts]
        return replace(
            self, row_steps=[k for k, _ in rows], num_correct_drafts=[m for _, m in rows]
        )
