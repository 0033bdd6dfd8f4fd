"""What each request drafts in a step, and its row in the plan."""

from __future__ import annotations

import sys
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from serve_spec.core.draft import (
    MAX_TREE_TOKENS,
    PLAIN,
    DraftShape,
    GrammarLimits,
    ModelDrafts,
    NgramDrafter,
    NgramDrafts,
)
from serve_spec.core.plan import EditedText, ScheduledRequest
from serve_spec.core.round import DecodeBatch, PendingPrompt, RoundSteps
from serve_spec.core.sequence import Sequence
from serve_spec.kvcache.manager import KVCacheManager

LEARNED_TOKENS = 1024
"""Most tokens of new texts that an n-gram drafter reads before a step; they take 1 to 3 ms."""


class NgramDraftCache:
    """Keeps what an n-gram drafter proposed for each sequence, so that it runs once a step.

    An id beyond the target's `vocab_size` becomes -1: the step counts it as a broken draft, and
    its sequence stops drafting.
    """

    def __init__(self, drafter: NgramDrafter, vocab_size: int) -> None:
        self.drafter = drafter
        self.vocab_size = vocab_size
        self._chains: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """What each follows, and what was found."""

    def find(
        self,
        sequences: SequenceOf[Sequence],
        most: SequenceOf[int],
        firsts: SequenceOf[tuple[int, ...]],
    ) -> list[int]:
        """Propose up to `most` drafts for each sequence. Return how many were found.

        A new text is read over several steps, the oldest sequence first. firsts: the grammar drafts
        of each, which the others follow.
        """
        room = LEARNED_TOKENS
        for seq, count, first in zip(sequences, most, firsts, strict=True):
            if count:
                # What a round adds is always read, or texts of a large batch would fall behind.
                most_new = max(room, MAX_TREE_TOKENS)
                room -= self.drafter.learn(seq.request_id, seq.token_ids, most_new)
            found = self.drafter.propose(seq.request_id, seq.token_ids, count, first)
            self._chains[seq.request_id] = first, self._known(found)
        return [len(self._chains[seq.request_id][1]) for seq in sequences]

    def drafts(self, seq: Sequence, wanted: RequestDrafts, first: tuple[int, ...]) -> NgramDrafts:
        """Return `first`, and the chain that was found behind it, or a tree if one is wanted."""
        shape, num = wanted.shape, len(first)
        if shape.is_chain:
            before, found = self._chains[seq.request_id]
            return NgramDrafts(
                (*first, *found) if before == first else first, match=self._match(seq)
            )
        shape = replace(shape, depth=shape.depth - num, size=shape.size - num)
        tree = self.drafter.propose_tree(seq.request_id, seq.token_ids, shape, first)
        tree = tree._replace(token_ids=self._known(tree.token_ids), match=self._match(seq))
        return tree.after(first)

    def _match(self, seq: Sequence) -> int:
        return self.drafter.match_length(seq.request_id)

    def forget(self, request_id: str) -> None:
        """Drop the state of a sequence that leaves the batch."""
        self.drafter.forget(request_id)
        self._chains.pop(request_id, None)

    def _known(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        if not token_ids or max(token_ids) < self.vocab_size:
            return token_ids
        return tuple(token if token < self.vocab_size else -1 for token in token_ids)

    def __len__(self) -> int:
        """Return the number of sequences with drafts."""
        return len(self._chains)


@dataclass(frozen=True)
class PostponedChoice:
    """The policy's answer for a batch whose requests may end before the step is planned."""

    steps: RoundSteps
    batch: DecodeBatch

    @property
    def has_drafts(self) -> bool:
        """Return whether the postponed step drafts."""
        return any(wanted_steps(self.steps, self.batch)) or any(self.steps.ngram_steps or ())

    def now(self, batch: DecodeBatch) -> RoundSteps:
        """Return the same answer for the requests that are left."""

        def of_batch(steps: SequenceOf[int]) -> list[int]:
            by_id = dict(zip(self.batch.request_ids, steps, strict=True))
            return [by_id.get(request_id, 0) for request_id in batch.request_ids]

        ngram_steps = self.steps.ngram_steps
        return replace(
            self.steps,
            steps_per_req=of_batch(wanted_steps(self.steps, self.batch)),
            ngram_steps=None if ngram_steps is None else of_batch(ngram_steps),
        )


SHORT_EXTEND = 32
"""Most missing draft KV entries whose tokens are sent for a request that does not draft."""


class RequestDrafts(NamedTuple):
    """What a request drafts: first `num_grammar` grammar drafts, then others.

    is_ngram: n-gram drafts instead of the draft model's. room: see `ScheduledRequest`.
    """

    shape: DraftShape
    num_grammar: int = 0
    is_ngram: bool = False
    room: int = 0

    @property
    def is_model(self) -> bool:
        """Return whether a draft model makes some of them, if there is one."""
        return self.shape.depth - self.room > self.num_grammar and not self.is_ngram

    def longer(self, room: int) -> RequestDrafts:
        """Return this chain with so much room behind it."""
        room = max(0, room)
        return self._replace(shape=DraftShape.chain(self.shape.depth + room), room=room)

    def cut_to(self, size: int) -> RequestDrafts:
        """Return at most `size` of these drafts."""
        shape = self.shape
        if size >= shape.size:
            return self
        cut = DraftShape.chain(size) if shape.is_chain or not size else replace(shape, size=size)
        return self._replace(shape=cut)

    def shortened(self) -> RequestDrafts:
        """Return the drafts to try if these do not fit: a chain one shorter, or none for a tree."""
        shape = DraftShape.chain(self.shape.depth - 1) if self.shape.is_chain else PLAIN
        return self._replace(shape=shape, room=max(0, self.room - 1))


_LONG_MATCH = 1_000_000
"""Grammar drafts seem as likely as n-gram drafts after a match of so many tokens: certain."""
_NONE_GIVEN = NgramDrafts(())


@dataclass(frozen=True)
class DraftSource:
    """Where drafts come from: n-grams in `ngrams`, a draft model, or one of them per request.

    Of requests with a grammar they may come from `grammars`, within `grammar_limits`.
    """

    ngrams: NgramDraftCache | None
    model: ModelDrafts | None
    grammars: Callable[[Sequence], tuple[int, ...]] = lambda seq: ()
    grammar_limits: GrammarLimits = field(default_factory=GrammarLimits)

    @property
    def has_model(self) -> bool:
        """Return whether drafts may come from elsewhere than from n-grams."""
        return self.model is not None or self.ngrams is None

    def slots_past(self, shape: DraftShape) -> int:
        """Return the KV slots past a request's length that its drafts take.

        A draft model drafts for every request of a step, also for those with n-gram drafts.
        """
        return shape.size if self.model is None else self.model.slots_past(shape)

    def is_ngram(self, drafts: RequestDrafts) -> bool:
        """Return whether these are n-gram drafts."""
        return drafts.is_ngram or (drafts.is_model and not self.has_model)

    def ngram_steps(
        self, decoding: SequenceOf[Sequence], most: SequenceOf[int], grammar_steps: SequenceOf[int]
    ) -> list[int]:
        """Find n-gram drafts, behind grammar drafts; return how many; empty without n-grams."""
        if self.ngrams is None:
            return []
        firsts: list[tuple[int, ...]] = [()] * len(decoding)
        if grammar_steps:
            pairs = zip(decoding, grammar_steps, strict=True)
            firsts = [self.grammars(seq)[:count] for seq, count in pairs]
            room = self.grammar_limits.steps
            most = [
                min(count, room) - len(first) if first else count
                for count, first in zip(most, firsts, strict=True)
            ]
        return self.ngrams.find(decoding, most, firsts)

    def grammar_steps(
        self, decoding: SequenceOf[Sequence], most: SequenceOf[int], *, has_prompts: bool
    ) -> list[int]:
        """Return how many grammar drafts each request can verify; empty if none has any.

        If the step has no room for all of them, the requests get equal numbers.
        """
        limits = self.grammar_limits
        least = limits.steps_with_prompts if has_prompts else limits.steps
        if not least:
            return []
        found = [
            min(len(self.grammars(seq)), count, least, seq.most_grammar_drafts)
            if count and seq.params.grammar
            else 0
            for seq, count in zip(decoding, most, strict=True)
        ]
        room = sys.maxsize if limits.tokens is None else limits.tokens - len(found)
        if (num := sum(map(bool, found))) and sum(found) > room:
            found = [min(count, max(0, room) // num) for count in found]
        return found if any(found) else []

    def wanted(
        self,
        decoding: SequenceOf[Sequence],
        steps: RoundSteps,
        batch: DecodeBatch,
        *,
        is_known: bool,
    ) -> list[RequestDrafts]:
        """Return the drafts of each request: those of `fair_drafts`.

        Behind a model's chains there is room for text that a grammar forces, if the step has room
        for all of it. is_known: whether the host knows all tokens.
        """
        drafts = fair_drafts(steps, batch)
        limits = self.grammar_limits
        most = limits.steps_with_prompts if batch.prompts else limits.steps
        caps = (most, steps.grammar_steps, steps.grammar_room)
        wanted = min(cap for cap in caps if cap is not None)
        if not (is_known and most and self.model):
            return drafts
        longer = [
            each.longer(min(wanted, seq.most_grammar_drafts, min(most, usable) - each.shape.depth))
            if seq.params.grammar and each.is_model and each.shape.is_chain
            else each
            for seq, each, usable in zip(decoding, drafts, batch.max_steps, strict=True)
        ]
        num_drafts = sum([each.shape.size for each in longer])
        return longer if num_drafts <= batch.max_draft_tokens else drafts

    def given(self, seq: Sequence, drafts: RequestDrafts) -> NgramDrafts:
        """Return the drafts of a request that no model makes; a tree has a trunk of the first."""
        first = self.grammars(seq)[: drafts.num_grammar] if drafts.num_grammar else ()
        if self.ngrams is not None and self.is_ngram(drafts):
            return self.ngrams.drafts(seq, drafts, first)
        if not first:
            return _NONE_GIVEN
        parents = () if drafts.shape.is_chain else tuple(range(len(first)))
        return NgramDrafts(first, parents, _LONG_MATCH)


def max_committed(req: ScheduledRequest | None) -> int:
    """Return the most tokens a request in flight commits."""
    return 0 if req is None else req.num_steps + 1


def missing_after(seq: Sequence, req: ScheduledRequest | None) -> int:
    """Return the most draft KV entries `seq` lacks once `req`, in flight, is committed."""
    if req is not None and req.extends:
        return max_committed(req)
    return len(seq) - 1 - seq.num_draft_computed + max_committed(req)


def usable_steps(seq: Sequence, num_in_flight: int) -> int:
    """Return the most drafts a sequence can use while `num_in_flight` tokens are computed."""
    options = seq.params.speculative
    if not options.enabled or seq.has_broken_draft or seq.has_slow_masks:
        return 0
    # The bonus token needs no draft: with r tokens to go, r-1 drafts can still be emitted.
    useful = max(0, seq.num_remaining - num_in_flight - 1)
    return useful if options.max_steps is None else min(useful, options.max_steps)


def decode_batch(
    decoding: list[Sequence],
    reqs_before: list[ScheduledRequest | None],
    prompts: list[PendingPrompt],
    max_prompt_tokens: int,
    room: int,
    cache: KVCacheManager,
    drafts: DraftSource,
) -> DecodeBatch:
    """Return the decoding requests of the next step, for the policy.

    reqs_before: the same requests in the step in flight. max_prompt_tokens: of `prompts`, if
    nothing is drafted. room: tokens that the step may compute beside one of each request.
    """
    # Prefill chunks get up to half of what the decoding requests leave.
    budget = room - min(max_prompt_tokens, room // 2)
    lengths = [len(seq) for seq in decoding]
    page_size = cache.page_size
    held = sum(len(seq.page_ids) for seq in decoding) * page_size - sum(lengths)
    held -= sum(map(max_committed, reqs_before))
    max_steps = [
        usable_steps(seq, 0 if req is None else 1)
        for seq, req in zip(decoding, reqs_before, strict=True)
    ]
    grammar_steps: list[int] = []
    if not any(reqs_before):  # a step in flight adds tokens that decide what a grammar forces
        grammar_steps = drafts.grammar_steps(decoding, max_steps, has_prompts=bool(prompts))
    ngram_steps = drafts.ngram_steps(decoding, max_steps, grammar_steps)
    firsts = grammar_steps or [0] * len(decoding)
    return DecodeBatch(
        request_ids=[seq.request_id for seq in decoding],
        max_steps=max_steps
        if drafts.has_model
        else [n and n + first for n, first in zip(ngram_steps, firsts, strict=True)],
        num_tokens=sum(lengths),
        num_sampled=sum(not seq.params.is_greedy for seq in decoding),
        max_draft_tokens=max(0, min(budget, held + cache.num_free_pages * page_size)),
        num_missing_entries=[len(seq) - 1 - seq.num_draft_computed for seq in decoding]
        if drafts.has_model
        else [],
        num_remaining=[seq.num_remaining for seq in decoding],
        prompts=prompts,
        max_prompt_tokens=max_prompt_tokens,
        ngram_steps=ngram_steps if drafts.has_model else [],
        grammar_steps=grammar_steps,
    )


def wanted_steps(steps: RoundSteps, batch: DecodeBatch) -> list[int]:
    """Return the drafts per request that the policy wants, without n-gram drafts."""
    return (
        [steps.shape.depth] * batch.size
        if steps.steps_per_req is None
        else list(steps.steps_per_req)
    )


def ngram_steps(steps: RoundSteps, batch: DecodeBatch) -> list[int]:
    """Return the number of n-gram drafts per request; 0 if it has none or a model drafts."""
    if not any(batch.ngram_steps):
        return [0] * batch.size
    wanted = wanted_steps(steps, batch) if steps.ngram_steps is None else steps.ngram_steps
    return [min(want, found) for want, found in zip(wanted, batch.ngram_steps, strict=True)]


def grammar_steps(steps: RoundSteps, batch: DecodeBatch) -> list[int]:
    """Return the number of grammar drafts per request that the policy wants."""
    most = steps.grammar_steps
    if most is not None:
        return [min(found, most) for found in batch.grammar_steps or [0] * batch.size]
    return list(batch.grammar_steps) or [0] * batch.size


def usable_budget(
    steps: RoundSteps, reqs: SequenceOf[ScheduledRequest], *, may_choose: bool
) -> int | None:
    """Return the policy's budget of drafts, with grammar drafts; None if all may be verified.

    may_choose: whether the device may choose which drafts are verified.
    """
    if steps.budget is None or not may_choose:
        return None
    budget = max(steps.budget, 0) + sum([req.num_grammar_drafts for req in reqs])
    return budget if budget < sum([req.num_draft_tokens for req in reqs]) else None


def _shared(num_drafts: list[int], batch: DecodeBatch) -> list[int]:
    """Return the number of drafts per request, cut to equal numbers if they do not all fit."""
    if sum(num_drafts) <= batch.max_draft_tokens:
        return num_drafts
    each = batch.max_draft_tokens // batch.size
    return [min(count, each) for count in num_drafts]


def fair_drafts(steps: RoundSteps, batch: DecodeBatch) -> list[RequestDrafts]:
    """Return the draft size of each request: the policy's shape within the request's own limits.

    If the room is too small for all drafts, it is shared evenly. Levels include grammar drafts: a
    tree has a trunk of them, and branches behind it.
    """
    shape, ngram_drafts = steps.shape, ngram_steps(steps, batch)
    firsts = grammar_steps(steps, batch)
    if not shape.is_chain:
        firsts = [min(first, shape.size) for first in firsts]
    wanted = zip(firsts, ngram_drafts, wanted_steps(steps, batch), batch.max_steps, strict=True)
    usable = [first + n if n else max(first, min(want, most)) for first, n, want, most in wanted]
    if shape.is_chain:
        shapes = [DraftShape.chain(depth) for depth in _shared(usable, batch)]
    else:
        sizes = [shape.size_at(levels, first) for first, levels in zip(firsts, usable, strict=True)]
        sizes = _shared(sizes, batch)
        shapes = [
            DraftShape(min(levels, size), size, shape.topk) if size else PLAIN
            for levels, size in zip(usable, sizes, strict=True)
        ]
    return [
        RequestDrafts(own, min(first, own.size), is_ngram=n > 0)
        for own, first, n in zip(shapes, firsts, ngram_drafts, strict=True)
    ]


def edited_text(seq: Sequence) -> EditedText | None:
    """See `ScheduledRequest.edited`."""
    params = seq.params
    if not params.edits_scores:
        return None
    counted = tuple(seq.token_ids) if params.counts_tokens else ()
    return EditedText(seq.num_prompt_tokens, counted, seq.held_token_ids)


def generated_ids(seq: Sequence) -> tuple[int, ...]:
    """See `ScheduledRequest.generated_ids`."""
    return tuple(seq.output_token_ids) if seq.params.masks_text else ()


def decode_request(
    seq: Sequence, drafts: RequestDrafts, num_missing: int, limit: int, *, in_flight: bool = False
) -> ScheduledRequest:
    """Return a request that verifies these drafts.

    num_missing: draft KV entries it lacks when the step starts. limit: most of them that it extends
    without model drafts.
    in_flight: a step in flight adds tokens that the host does not know.
    """
    last, shape = len(seq) - 1, drafts.shape
    # A request that does not draft sends a few missing tokens, too: the next step may need them.
    is_sent = shape.depth or last - seq.num_draft_computed <= SHORT_EXTEND
    return ScheduledRequest(
        request_id=seq.request_id,
        token_ids=(seq.token_ids[last],),
        start=last,
        samples=True,
        page_ids=tuple(seq.page_ids),
        params=seq.params,
        seed=seq.seed,
        is_decode=True,
        shape=shape,
        draft_start=seq.num_draft_computed if is_sent else min(0, seq.num_draft_computed),
        # Draft entry j carries token j+1; entries up to last-1 exist once these are added.
        extend_ids=tuple(seq.token_ids[seq.num_draft_computed + 1 :]) if is_sent else (),
        extends=shape.depth > 0 or 0 < num_missing <= limit,
        num_missing=num_missing,
        request_slot=seq.request_slot,
        edited=None if in_flight else edited_text(seq),
        generated_ids=generated_ids(seq),
    )


def given_request(
    seq: Sequence, drafts: RequestDrafts, found: NgramDrafts, num_missing: int, limit: int
) -> ScheduledRequest:
    """Return a request that verifies drafts which no model makes, first of all or alone.

    A draft model that makes none sees one without drafts.
    """
    if not (found.token_ids or drafts.room):
        return decode_request(seq, drafts, num_missing, limit)
    shape = drafts.shape
    drafted = drafts if shape.depth - drafts.room > len(found.token_ids) else RequestDrafts(PLAIN)
    return decode_request(seq, drafted, num_missing, limit)._replace(
        shape=shape,
        draft_ids=found.token_ids[: shape.size],
        draft_parents=found.parents[: shape.size],
        draft_match=found.match,
        num_grammar_drafts=min(drafts.num_grammar, shape.size),
        room=drafts.room,
    )
