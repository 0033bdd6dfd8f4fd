"""Everything that crosses from the scheduler to a worker and back. Plain data, picklable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

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


class ScheduledRequest(NamedTuple):
    """One request's share of a step. A tuple: hundreds are made in every step.

    The target computes `token_ids` (committed tokens, positions `start ..`) and, if the request
    `samples`, the drafts of its `shape` after them; it then draws one token at each of them.

    `extend_ids` are the tokens of the missing draft KV entries, `draft_start ..` (entry j carries
    token j+1); a request that does not draft may leave them out. One that `extends` has none
    missing before the root after the step, whether or not it drafts. `num_missing` bounds what it
    lacks when the step starts.

    `request_slot` is its row in the device's tensors of running requests.
    `scored_ids` are the prompt tokens at positions `scored_start ..` whose log-probabilities are
    wanted; each is decided by the position before it.
    `draft_ids` are drafts that the host found in the text; no draft model is asked. `draft_parents`
    are those of a tree: the draft before each, counted from 1, 0 for the root.
    `edited` is there for requests that draw and edit scores, unless a step in flight adds tokens:
    then the tokens before this one are known to the device alone.
    `generated_ids` are the committed tokens after the prompt, of requests that draw by a grammar;
    none of these follows a step in flight.
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
    extend_ids: tuple[int, ...] = ()
    extends: bool = False
    num_missing: int = 0
    request_slot: int = 0
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

    max_missing: missing draft KV entries that it makes for any decoding request, drafting or not,
    in a step in which some request drafts. Entries of tokens the host knows do not count.
    async_scheduling: whether it takes a plan that `follows`.
    """

    max_missing: int
    async_scheduling: bool = False


@dataclass(frozen=True)
class ScheduledBatch:
    """One round: what every row computes, and the largest shape that a request drafts.

    Decode rows come first. `batch_size` counts them: the number the policy is asked about.

    A plan that `follows` was made while its predecessor ran, so its decode rows know nothing of the
    tokens that one commits: `token_ids`, `start`, `draft_start` and `extend_ids` are those of
    before. A worker that runs ahead knows where they really are. `max_missing` bounds the draft
    entries any row that catches up has to make.
    """

    rows: tuple[ScheduledRequest, ...]
    shape: DraftShape
    batch_size: int
    follows: bool = False
    was_postponed: bool = False
    """It could have been launched while its predecessor ran, but for its drafts, which that one's
    outcome decides: the device waited."""
    max_missing: int = 0
    draft_sharpness: float = DRAFT_SHARPNESS
    """At which temperature sampled rows draft, over their own."""

    @cached_property
    def decode_rows(self) -> tuple[ScheduledRequest, ...]:
        """The rows that decode, which come first."""
        return tuple([row for row in self.rows if row.is_decode])

    @property
    def prompt_rows(self) -> tuple[ScheduledRequest, ...]:
        """The rows that compute prompts, after them."""
        return self.rows[len(self.decode_rows) :]

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prompts that it computes."""
        return sum(len(row.token_ids) for row in self.prompt_rows)

    @cached_property
    def sampling_rows(self) -> tuple[ScheduledRequest, ...]:
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

    def cut(self, num_steps: Sequence[int]) -> ScheduledBatch:
        """The same round with shorter chains verified: of so many drafts of each sampling row."""
        left = map(DraftShape.chain, num_steps)
        rows = (row._replace(shape=next(left)) if row.samples else row for row in self.rows)
        return replace(self, rows=tuple(rows))

    @property
    def wants_logprobs(self) -> bool:
        """Whether any row asks for log-probabilities of what it draws."""
        return any(row.params.logprobs is not None for row in self.sampling_rows)


@dataclass(frozen=True)
class BatchResult:
    """What a worker gives back: the tokens each sampling row emits, and where the time went.

    `broken_drafts` are the sampling rows (by number) whose draft gave no usable token: NaN, or
    none of the vocabulary. Their text is none the worse. `idle_ms` passed on the device between
    the end of the round before and the start of this one, where that is known.

    `draft_shares` float32 [rows, N]: how likely each draft of the sampling rows seemed to the draft
    model, see `StepBuffers.shares`; None without one.

    `logprobs`: by request id, of rows that ask for them and sample, aligned with their tokens.
    `prompt_logprobs`: by request id, aligned with the rows' `scored_ids`.
    """

    token_ids: list[list[int]]
    draft_ms: float
    verify_ms: float
    broken_drafts: tuple[int, ...] = ()
    idle_ms: float = 0.0
    draft_shares: np.ndarray | None = None
    logprobs: Mapping[str, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, tuple[TokenLogprob, ...]] = field(default_factory=dict)


class PendingBatch(Protocol):
    """A round under way."""

    def result(self) -> BatchResult:
        """Waits for its end. To be asked once."""
        ...
