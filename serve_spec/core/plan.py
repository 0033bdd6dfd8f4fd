"""Data that the scheduler and a worker exchange. Plain and picklable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from serve_spec.core.draft import PLAIN, DraftShape, NgramDrafts
from serve_spec.core.request import SamplingParams, TokenLogprob
from serve_spec.core.round import (
    AS_DRAWN,
    FROM_GRAMMAR,
    FROM_NGRAM,
    GREEDY,
    SAMPLED,
    Calibration,
    PendingPrompt,
)


@dataclass(frozen=True)
class EditedText:
    """Tokens that the score edits of a request depend on.

    `token_ids`: the committed tokens, of which `num_prompt_tokens` are the prompt's; empty without
    penalties. `held_ids` may not be drawn before `min_tokens` are generated.
    """

    num_prompt_tokens: int
    token_ids: tuple[int, ...] = ()
    held_ids: tuple[int, ...] = ()


class ScheduledRequest(NamedTuple):
    """A request in a step. A tuple, because hundreds are made in every step.

    The target computes `token_ids` (committed tokens, positions `start ..`) and, if the request
    `samples`, the drafts of its `shape` after them; it then draws one token at each of them.

    `extend_ids` are the tokens of the missing draft KV entries, `draft_start ..` (entry j is made
    from token j+1); a request that does not draft may leave them out. After the step, a request
    that `extends` has all entries before the root. `num_missing` bounds what it lacks at its start.

    `request_slot` is its index in the device's tensors of running requests.
    `scored_ids` are the prompt tokens at positions `scored_start ..` whose log-probabilities are
    wanted.
    `draft_ids` are drafts that the host gives: first `num_grammar_drafts` grammar drafts, then
    n-gram drafts, used instead of a draft model's; a match of `draft_match` tokens gave them.
    Without n-gram drafts a model drafts the rest of the shape. `draft_parents` are those of a tree:
    the draft before each, counted from 1, 0 for the root.
    The last `room` drafts of a chain are left for text that a grammar forces behind the model's.
    `edited` is set if the request draws with score edits, unless a step in flight adds tokens that
    only the device knows.
    `generated_ids` are the committed tokens after the prompt, if they decide which tokens may be
    drawn (`SamplingParams.masks_text`); such a request never follows a step in flight.
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
    draft_match: int = 0
    num_grammar_drafts: int = 0
    room: int = 0
    edited: EditedText | None = None
    generated_ids: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Committed tokens, including `token_ids`: the position of the first drawn token."""
        return self.start + len(self.token_ids)

    @property
    def num_steps(self) -> int:
        """Levels of its drafts; of a chain, their number."""
        return self.shape.depth

    @property
    def num_draft_tokens(self) -> int:
        """Drafts that are verified."""
        return self.shape.size

    @property
    def num_guesses(self) -> int:
        """Drafts that are verified, without grammar drafts."""
        return self.num_draft_tokens - self.num_grammar_drafts - self.room

    @property
    def guessed_steps(self) -> int:
        """Levels of its drafts, without grammar drafts."""
        return self.num_steps - self.num_grammar_drafts - self.room

    @property
    def num_ngram_drafts(self) -> int:
        """N-gram drafts that were found, also those that are not verified."""
        return len(self.draft_ids) - self.num_grammar_drafts

    @property
    def query_len(self) -> int:
        """Tokens of the target forward: committed ones and drafts."""
        return len(self.token_ids) + self.num_draft_tokens

    @property
    def given_drafts(self) -> NgramDrafts:
        """Grammar and n-gram drafts, which are part of the plan."""
        return NgramDrafts(self.draft_ids, self.draft_parents, self.draft_match)

    @property
    def draft_kind(self) -> int:
        """See `Calibration`. Grammar drafts before others seem certain under theirs, too."""
        if self.num_ngram_drafts:
            return FROM_NGRAM
        if self.num_grammar_drafts and not self.guessed_steps:
            return FROM_GRAMMAR
        return GREEDY if self.params.is_greedy else SAMPLED

    @property
    def model_steps(self) -> int:
        """Levels that a draft model drafts, after grammar drafts from their number on.

        0 if there is nothing left to draft, or with n-gram drafts.
        """
        is_model = self.guessed_steps > 0 and not self.num_ngram_drafts
        return self.num_steps - self.room if is_model else 0


@dataclass(frozen=True)
class ScheduledBatch:
    """The plan of a step: decoding requests first, `batch_size` of them.

    `shape` is the largest that a request drafts, beside grammar drafts. A plan that `follows` was
    made while the step before it ran: `token_ids`, `start`, `draft_start` and `extend_ids` of its
    decoding requests are those before that step; the worker's request slots hold the current ones.
    `max_missing` bounds the draft KV entries that any request extends by.
    """

    requests: tuple[ScheduledRequest, ...]
    shape: DraftShape
    batch_size: int
    follows: bool = False
    was_postponed: bool = False
    """It was not launched ahead, because its drafts depend on the result of the step before."""
    max_missing: int = 0
    budget: int | None = None
    """Most drafts that are verified, see `RoundSteps`; fewer than there are. None: all of them."""
    calibration: Calibration = AS_DRAWN

    @cached_property
    def decode_requests(self) -> tuple[ScheduledRequest, ...]:
        """The requests that decode."""
        return tuple([req for req in self.requests if req.is_decode])

    @property
    def prefill_requests(self) -> tuple[ScheduledRequest, ...]:
        """The prefill chunks."""
        return self.requests[len(self.decode_requests) :]

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens that the step computes."""
        return sum(len(req.token_ids) for req in self.prefill_requests)

    @property
    def num_prefill_pairs(self) -> int:
        """Pairs of query and key that attention computes for them."""
        chunks = (PendingPrompt(req.start, len(req.token_ids)) for req in self.prefill_requests)
        return sum(chunk.pairs for chunk in chunks)

    @cached_property
    def sampling_requests(self) -> tuple[ScheduledRequest, ...]:
        """The requests that draw a token, in order."""
        return tuple([req for req in self.requests if req.samples])

    @cached_property
    def num_drafts(self) -> int:
        """Drafts that may be verified, without a budget."""
        return sum([req.num_draft_tokens for req in self.requests])

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the target's forward."""
        num_tokens = sum([req.query_len for req in self.requests])
        return num_tokens if self.budget is None else num_tokens - self.num_drafts + self.budget

    @property
    def has_masks(self) -> bool:
        """Return whether a grammar or bad words may mask any draw."""
        return any(req.params.masks_text for req in self.sampling_requests)

    def verified_drafts(self, result: BatchResult) -> Sequence[int]:
        """Return how many drafts of each sampling request were verified."""
        return result.num_drafts or [req.num_draft_tokens for req in self.sampling_requests]

    def cut(self, num_steps: Sequence[int]) -> ScheduledBatch:
        """Return the plan with shorter chains: `num_steps` drafts of each sampling request."""
        left = map(DraftShape.chain, num_steps)
        requests = (req._replace(shape=next(left)) if req.samples else req for req in self.requests)
        plan = replace(self, requests=tuple(requests))
        if plan.budget is None or plan.budget < plan.num_drafts:
            return plan
        return replace(plan, budget=None)

    @property
    def wants_logprobs(self) -> bool:
        """Return whether any request asks for log-probabilities of generated tokens."""
        return any(req.params.logprobs is not None for req in self.sampling_requests)


@dataclass(frozen=True)
class BatchResult:
    """Results of a step: the tokens each sampling request emits, and times.

    `broken_drafts`: indices of sampling requests whose draft gave NaN or an unknown token; their
    text is still correct. `broken_logits`: indices of those whose target gave NaN, so that not all
    their tokens could be drawn. `late_masks`: indices of those that drew without their masks: all
    their tokens are void. `idle_ms`: time the device was idle before the step, 0 if unknown.

    `num_drafts`: drafts verified of each sampling request; empty: all that were planned.
    `grammar_starts`: by index, the number of drafts of a request before grammar drafts behind them.
    `draft_logprobs` float32 [B, N]: how likely each draft of the sampling requests seemed, see
    `StepBuffers.draft_logprobs`; None if nothing drafts.

    `logprobs`: by request id, aligned with the emitted tokens. `prompt_logprobs`: by request id,
    aligned with `scored_ids`. Both only for requests that ask for them.
    """

    token_ids: list[list[int]]
    draft_ms: float
    verify_ms: float
    broken_drafts: tuple[int, ...] = ()
    broken_logits: tuple[int, ...] = ()
    late_masks: tuple[int, ...] = ()
    idle_ms: float = 0.0
    num_drafts: Sequence[int] = ()
    grammar_starts: Mapping[int, int] = field(default_factory=dict)
    draft_logprobs: NDArray[np.float32] | None = None
    logprobs: Mapping[str, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    prompt_logprobs: Mapping[str, tuple[TokenLogprob, ...]] = field(default_factory=dict)

    def result(self) -> Self:
        """Return itself: see `PendingBatch`."""
        return self


class PendingBatch(Protocol):
    """A step in flight."""

    def result(self) -> BatchResult:
        """Wait for the step to end. Call it once."""
