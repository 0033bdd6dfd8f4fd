"""Everything that crosses from the scheduler to a worker and back. Plain data, picklable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol

from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.logprobs import TokenLogprob
from serve_spec.core.request import SamplingParams
from serve_spec.core.round import DRAFT_SHARPNESS


@dataclass(frozen=True)
class EditedText:
    """What the score edits of a row's request need to know of its text.

    `token_ids` are the committed ones, the `num_prompt_tokens` of the prompt first; none where no
    penalty counts them. `held_ids` may not be drawn before `min_tokens` are generated.
    """

    num_prompt_tokens: int
    token_ids: tuple[int, ...] = ()
    held_ids: tuple[int, ...] = ()


class RowPlan(NamedTuple):
    """One sequence's share of a round. A tuple: hundreds are made in every round.

    The target computes `token_ids` (committed tokens, positions `start ..`) and, when the row
    `samples`, the drafts of its `shape` after them; it then draws one token per verified row.
    `catch_up_ids` are the tokens of the draft entries still missing, `draft_start ..` (entry j
    carries token j+1); a row that does not draft may leave them out. A row that `catches_up` has
    none missing before the root after the round, whether or not it drafts; `backlog` bounds what it
    lacks when the round starts.
    `lane` is the sequence's place in tensors that hold one row per running sequence.
    `scored_ids` are the prompt tokens at positions `scored_start ..` whose log-probabilities the
    row is to tell; each is decided by the row of the position before it.
    `draft_ids` are the drafts that the host found in the text; no draft model is asked. Those of a
    tree follow their `draft_parents`: the draft before each, counted from 1; 0 is the root.
    `edited` is there for rows that draw and whose request edits scores, unless the row follows one
    that is under way: then the tokens before it are known to the device alone.
    `generated_ids` are the committed tokens after the prompt, of rows that draw by a grammar; no
    such row follows one that is under way.
    """

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    samples: bool
    page_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    is_decode: bool = False
    shape: DraftShape = PLAIN
    draft_start: int = 0
    catch_up_ids: tuple[int, ...] = ()
    catches_up: bool = False
    backlog: int = 0
    lane: int = 0
    scored_start: int = 0
    scored_ids: tuple[int, ...] = ()
    draft_ids: tuple[int, ...] = ()
    draft_parents: tuple[int, ...] = ()
    edited: EditedText | None = None
    generated_ids: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Committed tokens after this row: the position its first draw decides."""
        return self.start + len(self.token_ids)

    @property
    def num_steps(self) -> int:
        """Levels of its drafts: of a chain, all of them."""
        return self.shape.depth

    @property
    def tree_drafts(self) -> int:
        """Drafts of a tree; 0 for a chain."""
        return self.shape.tree_size

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that are verified."""
        return self.shape.size

    @property
    def query_len(self) -> int:
        """Rows of the target forward: committed tokens and drafts."""
        return len(self.token_ids) + self.num_draft_tokens

    @property
    def model_steps(self) -> int:
        """Drafts that a model is asked for: none where the text has them."""
        return 0 if self.draft_ids else self.num_steps


@dataclass(frozen=True)
class WorkerLimits:
    """What a plan may ask of a worker.

    max_backlog: missing draft KV entries that it makes for any decoding request, drafting or not,
    in a step in which some request drafts. Entries of tokens the host knows do not count.
    async_scheduling: whether it takes a plan that `follows`.
    """

    max_backlog: int
    async_scheduling: bool = False


@dataclass(frozen=True)
class StepPlan:
    """One round: what every row computes, and the largest shape that a request drafts.

    Decode rows come first. `batch_size` counts them: the number the policy is asked about.

    A plan that `follows` was made while its predecessor ran, so its decode rows know nothing of the
    tokens that one commits: `token_ids`, `start`, `draft_start` and `catch_up_ids` are those of
    before. A worker that runs ahead knows where they really are. `max_backlog` bounds the draft
    entries any row that catches up has to make.
    """

    rows: tuple[RowPlan, ...]
    shape: DraftShape
    batch_size: int
    follows: bool = False
    was_postponed: bool = False
    """It could have been launched while its predecessor ran, but for its drafts, which that one's
    outcome decides: the device waited."""
    max_backlog: int = 0
    draft_sharpness: float = DRAFT_SHARPNESS
    """At which temperature sampled rows draft, over their own."""

    @cached_property
    def decode_rows(self) -> tuple[RowPlan, ...]:
        """The rows that decode, which come first."""
        return tuple([row for row in self.rows if row.is_decode])

    @property
    def prompt_rows(self) -> tuple[RowPlan, ...]:
        """The rows that compute prompts, after them."""
        return self.rows[len(self.decode_rows) :]

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts that it computes."""
        return sum(len(row.token_ids) for row in self.prompt_rows)

    @cached_property
    def sampling_rows(self) -> tuple[RowPlan, ...]:
        """The rows that draw a token this round, in order."""
        return tuple([row for row in self.rows if row.samples])

    @cached_property
    def num_rows(self) -> int:
        """Rows of the target's forward."""
        return sum([row.query_len for row in self.rows])

    @property
    def has_grammars(self) -> bool:
        """Whether what some row draws is ruled by a grammar."""
        return any(row.params.grammar is not None for row in self.sampling_rows)

    def cut(self, num_steps: Sequence[int]) -> StepPlan:
        """The same round with shorter chains verified: of so many drafts of each sampling row."""
        left = map(DraftShape.chain, num_steps)
        rows = (row._replace(shape=next(left)) if row.samples else row for row in self.rows)
        return replace(self, rows=tuple(rows))

    @property
    def wants_logprobs(self) -> bool:
        """Whether any row asks for log-probabilities of what it draws."""
        return any(row.params.logprobs is not None for row in self.sampling_rows)


@dataclass(frozen=True)
class StepResult:
    """What a worker gives back: the tokens each sampling row emits, and where the time went.

    `broken_drafts` are the sampling rows (by number) whose draft gave no usable token: NaN, or
    none of the vocabulary. Their text is none the worse. `idle_ms` passed on the device between
    the end of the round before and the start of this one, where that is known.

    `logprobs`: by request id, of rows that ask for them and sample, aligned with their tokens.
    `prompt_logprobs`: by request id, aligned with the rows' `scored_ids`.
    """

    token_ids: list[list[int]]
    draft_ms: float
    verify_ms: float
    broken_drafts: tuple[int, ...] = ()
    idle_ms: float = 0.0
    logprobs: Mapping[str, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, tuple[TokenLogprob, ...]] = field(default_factory=dict)


class PendingRound(Protocol):
    """A round under way."""

    def result(self) -> StepResult:
        """Waits for its end. To be asked once."""
        ...
