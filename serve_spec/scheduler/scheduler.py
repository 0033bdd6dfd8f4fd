"""Continuous batching: plan a step, commit its result. Plain host code, no tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import isnan
from typing import NamedTuple

from serve_spec.config import SchedulerConfig
from serve_spec.core.draft import PLAIN, DraftShape, GrammarLimits, ModelDrafts, NgramDrafter
from serve_spec.core.plan import BatchResult, ScheduledBatch, ScheduledRequest
from serve_spec.core.request import FinishReason
from serve_spec.core.round import AS_DRAWN, DecodeBatch, RoundSteps
from serve_spec.core.sequence import Sequence
from serve_spec.kvcache.manager import KVCacheManager
from serve_spec.scheduler.prompts import (
    Prompt,
    max_prompt_tokens,
    pending_prompts,
    prefill_requests,
)
from serve_spec.scheduler.queue import RequestQueue
from serve_spec.scheduler.requests import (
    DraftSource,
    NgramDraftCache,
    PostponedChoice,
    RequestDrafts,
    decode_batch,
    decode_request,
    given_request,
    max_committed,
    missing_after,
    usable_budget,
)

ChooseSteps = Callable[[DecodeBatch], RoundSteps]
CutOutput = Callable[[Sequence, list[int]], tuple[int, FinishReason | None]]


class GrammarDrafts(NamedTuple):
    """A run of grammar drafts: those verified, accepted and emitted, and whether it was reached."""

    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    was_reached: bool = False

    @staticmethod
    def at(start: int, end: int, accepted: int, emitted: int) -> GrammarDrafts:
        """Return the run from `start` to `end` of a request's drafts.

        accepted, emitted: of all of them, from the first on.
        """
        kept, shown = (min(max(0, count - start), end - start) for count in (accepted, emitted))
        return GrammarDrafts(end - start, kept, shown, start < end and accepted >= start)


NO_GRAMMAR_DRAFTS: tuple[GrammarDrafts, ...] = (GrammarDrafts(),) * 2


def _runs(
    before: tuple[int, int], behind: tuple[int, int], accepted: int, emitted: int
) -> tuple[GrammarDrafts, ...]:
    """Return both runs of grammar drafts of a request, by their places; see `GrammarDrafts.at`."""
    if before[0] == before[1] and behind[0] == behind[1]:
        return NO_GRAMMAR_DRAFTS
    return tuple([GrammarDrafts.at(*run, accepted, emitted) for run in (before, behind)])


class CommittedRequest(NamedTuple):
    """A sequence after a step, how it was `scheduled`, and the tokens it gained.

    `number`: its index among the sampling requests. `num_drafts`: drafts that were verified.
    `num_steps`: most levels that were verified; of a chain, drafts. 0 of `reached_steps` if they
    are behind a grammar draft that was rejected.
    `num_correct_drafts` counts accepted drafts, also those past the end of the text.
    `grammar_drafts`: those before the others, then those behind, which do not count in the others.
    """

    seq: Sequence
    scheduled: ScheduledRequest
    token_ids: list[int]
    number: int
    num_drafts: int
    num_steps: int
    num_correct_drafts: int
    grammar_drafts: tuple[GrammarDrafts, ...] = NO_GRAMMAR_DRAFTS

    @property
    def num_verified(self) -> int:
        """Drafts that were verified, grammar drafts included."""
        return self.num_drafts + self.num_grammar_drafts

    @property
    def num_grammar_drafts(self) -> int:
        """Grammar drafts that were verified."""
        before, behind = self.grammar_drafts
        return before.verified + behind.verified

    @property
    def num_grammar_tokens(self) -> int:
        """Grammar drafts among the tokens it gained."""
        before, behind = self.grammar_drafts
        return before.emitted + behind.emitted

    @property
    def reached_steps(self) -> int:
        """`num_steps`, if the target accepted all grammar drafts before them."""
        first = self.grammar_drafts[0]
        return self.num_steps if first.accepted == first.verified else 0


class Scheduler:
    """Plans each step of the batch, and commits its result; `queue` holds the requests."""

    def __init__(
        self,
        limits: SchedulerConfig,
        cache: KVCacheManager,
        ngram_drafter: NgramDrafter | None = None,
        model_drafts: ModelDrafts | None = None,
        *,
        vocab_size: int = sys.maxsize,
        grammar_limits: GrammarLimits | None = None,
    ) -> None:
        """ngram_drafter: proposes n-gram drafts, if any; they are part of the plan.
        model_drafts: of the draft model, if any; with `ngram_drafter` it drafts for requests
        without n-gram drafts.
        vocab_size: of the target; n-gram drafts are checked against it.
        grammar_limits: grammar drafts that a step has room for.
        """
        self.limits = limits
        self.cache = cache
        self.drafts = DraftSource(
            None if ngram_drafter is None else NgramDraftCache(ngram_drafter, vocab_size),
            model_drafts,
            lambda seq: self.queue.grammar_drafts(seq),
            grammar_limits or GrammarLimits(),
        )
        self.vocab_size = vocab_size
        self.on_leave: Callable[[Sequence], None] = lambda seq: None
        """Called with every sequence that leaves the batch: finished, aborted or preempted."""
        first_entry = 0 if model_drafts is None else model_drafts.first_entry
        self.queue = RequestQueue(cache, limits.max_num_seqs, self._forget, first_entry)
        self._newest: ScheduledBatch | None = None
        self._postponed: PostponedChoice | None = None

    def plan(
        self, choose_steps: ChooseSteps, max_missing: int, before: ScheduledBatch | None = None
    ) -> ScheduledBatch | None:
        """Return the next step: every decoding request, then prefill within the token budget.

        choose_steps: called once, before drafting. max_missing: see `SpecWorker`. before: a step in
        flight. Lengths of its requests are then bounds, and nothing is preempted.

        None: there is nothing to do, or the result of `before` must be known first. N-gram drafts
        and grammar masks depend on it. N-gram drafts found in the committed text decide: if there
        are none now, one more step hardly adds any.
        """
        in_flight = {} if before is None else {req.request_id: req for req in before.requests}
        self.queue.admit(in_flight)
        unready = self.queue.without_masks() if before is None else ()
        decoding, prompts = self.queue.after_step(in_flight, unready)
        if before is not None and (
            not (decoding or prompts)
            or any(seq.params.masks_text for seq in (*decoding, *(each.seq for each in prompts)))
        ):
            return None
        reqs_before = [in_flight.get(seq.request_id) for seq in decoding]
        room = self.limits.max_num_batched_tokens - len(decoding)
        waiting = pending_prompts(prompts, self.limits, room, len(decoding))
        batch = decode_batch(decoding, reqs_before, *waiting, room, self.cache, self.drafts)
        was_postponed = self._postponed is not None and self._postponed.has_drafts
        steps = self._choose(choose_steps, batch) if decoding else RoundSteps(PLAIN)
        drafts = self.drafts.wanted(decoding, steps, batch, is_known=before is None)
        drafts_by_model = any(each.is_model for each in drafts)
        limit = max_missing if drafts_by_model else 0
        if before is None:
            reqs = self._decode_requests(decoding, drafts, limit)
        elif self._reserve_ahead(decoding, reqs_before, drafts):
            reqs = [
                decode_request(
                    seq, wanted, missing_after(seq, req), limit, in_flight=req is not None
                )
                for seq, req, wanted in zip(decoding, reqs_before, drafts, strict=True)
            ]
        else:
            self._postponed = PostponedChoice(steps, batch)
            return None
        draft_budget = usable_budget(steps, reqs, may_choose=_may_choose(reqs, prompts))
        num_drafts = sum(req.num_draft_tokens for req in reqs)
        num_tokens = len(reqs) + (num_drafts if draft_budget is None else draft_budget)
        room = self.limits.max_num_batched_tokens - num_tokens
        prompt_budget = max_prompt_tokens(self.limits, room, len(decoding), steps.prompt_tokens)
        reqs += prefill_requests(prompts, prompt_budget, self.limits)
        if not reqs:
            return None
        self._newest = _scheduled_batch(
            reqs,
            steps,
            draft_budget,
            batch,
            follows=before is not None,
            was_postponed=was_postponed and before is None,
        )
        self.queue.num_planned_prompt_tokens += self._newest.num_prefill_tokens
        return self._newest

    def _reserve_ahead(
        self,
        decoding: list[Sequence],
        reqs_before: list[ScheduledRequest | None],
        drafts: list[RequestDrafts],
    ) -> bool:
        """Reserve pages for whatever a step in flight may commit, and the drafts after it.

        Return False if there is no room, or if n-gram drafts need tokens that are not known yet.
        """
        ends = [
            len(seq) + max_committed(req) + self.drafts.slots_past(wanted.shape)
            for seq, req, wanted in zip(decoding, reqs_before, drafts, strict=True)
        ]
        has_room = self.cache.can_reserve_all(decoding, ends)
        if not has_room or any(map(self.drafts.is_ngram, drafts)):
            return False
        for seq, end in zip(decoding, ends, strict=True):
            self.cache.reserve(seq, end)
        return True

    def commit(
        self, plan: ScheduledBatch, result: BatchResult, cut: CutOutput
    ) -> list[CommittedRequest]:
        """Append emitted tokens, finish sequences that end, return unused pages.

        A sequence whose logits are NaN commits nothing: see `RequestQueue.drop_broken`.

        cut: returns how many of the tokens the text keeps, and why it ends (stop, length), if so.
        """
        by_id = {seq.request_id: seq for seq in self.queue.running}
        for number in result.broken_drafts:
            seq = by_id.get(plan.sampling_requests[number].request_id)
            if seq is not None:
                seq.has_broken_draft = True
        drawn = iter(zip(result.token_ids, plan.verified_drafts(result), strict=True))
        broken, late = set(result.broken_logits), set(result.late_masks)
        number = -1
        committed = []
        for req in plan.requests:
            tokens, num_drafts = next(drawn) if req.samples else (None, 0)
            number += req.samples
            seq = by_id.get(req.request_id)
            if seq is None:
                continue  # it ended while the step ran
            if req.samples and number in late:
                seq.has_slow_masks = True
                self.queue.move_back(seq)
                continue
            scores = result.prompt_logprobs[req.request_id] if req.scored_ids else ()
            if (req.samples and number in broken) or any(isnan(each.logprob) for each in scores):
                self.queue.drop_broken(seq)
                continue
            seq.prompt_logprobs += scores
            if tokens is None:
                seq.num_computed = req.length
                self.cache.publish(seq)
            else:
                drafts = number, num_drafts, result.grammar_starts.get(number, num_drafts)
                committed.append(self._commit_request(seq, req, tokens, drafts, cut))
        self._return_pages(plan, [each.seq for each in committed])
        return committed

    def _choose(self, choose_steps: ChooseSteps, batch: DecodeBatch) -> RoundSteps:
        """Return the policy's answer, asking it once a step."""
        choice, self._postponed = self._postponed, None
        return choose_steps(batch) if choice is None else choice.now(batch)

    def _decode_requests(
        self, decoding: list[Sequence], drafts: list[RequestDrafts], limit: int
    ) -> list[ScheduledRequest]:
        """Reserve pages for the drafts of each request, shortened or preempting if they do not fit.

        Only decoding requests preempt, and only those behind them in `running`, so no request that
        is planned already loses its pages.
        """
        planned = [
            self._plan_decode(seq, wanted, limit) if seq.page_ids else None
            for seq, wanted in zip(decoding, drafts, strict=True)
        ]
        return [req for req in planned if req is not None]

    def _plan_decode(
        self, seq: Sequence, drafts: RequestDrafts, limit: int
    ) -> ScheduledRequest | None:
        found = self.drafts.given(seq, drafts)
        if self.drafts.is_ngram(drafts):
            drafts = drafts.cut_to(len(found.token_ids))
        while not self.cache.can_reserve(seq, len(seq) + self.drafts.slots_past(drafts.shape)):
            if drafts.shape.depth:
                drafts = drafts.shortened()  # before any other request is preempted
                continue
            if not self.queue.preempt_less_urgent_than(seq):
                self.queue.preempt(seq)
                return None
        self.cache.reserve(seq, len(seq) + self.drafts.slots_past(drafts.shape))
        num_missing = len(seq) - 1 - seq.num_draft_computed
        return given_request(seq, drafts, found, num_missing, limit)

    def _commit_request(
        self,
        seq: Sequence,
        req: ScheduledRequest,
        tokens: list[int],
        drafts: tuple[int, int, int],
        cut: CutOutput,
    ) -> CommittedRequest:
        """Commit one request.

        drafts: its index among the sampling ones, drafts verified, those before a second run.
        """
        num_tokens, reason = cut(seq, tokens)
        kept, (number, num_drafts, end) = tokens[:num_tokens], drafts
        start, end = min(req.num_grammar_drafts, num_drafts), min(end, num_drafts)
        accepted, emitted = len(tokens) - 1, len(kept) - 1
        runs = _runs((0, start), (end, num_drafts), accepted, emitted)
        num_drafts, num_correct = end - start, min(max(0, accepted - start), end - start)
        num_steps = min(req.shape.depth, end) - start
        num_entries = seq.num_draft_computed
        if req.extends:
            # Draft extend made the entries before the root; those made while drafting are stale.
            seq.num_draft_computed = len(seq) - 1
        if req.is_decode:
            # The last token that is emitted counts as the bonus token, also if a stop cuts the run.
            forced = runs[0].emitted, runs[1].emitted
            seq.stats.observe(num_steps, emitted - sum(forced), num_drafts, grammar_tokens=forced)
        seq.token_ids += kept
        seq.num_computed = len(seq) - 1
        if reason is not None:
            self.queue.finish(seq, reason)
        elif not req.is_decode or num_entries < seq.num_prompt_tokens <= seq.num_draft_computed:
            # The prompt, or its draft KV, is complete. Generated pages are published at the end.
            self.cache.publish(seq)
        for run in [run for run in runs if run.was_reached]:
            seq.learn_grammar_drafts(run.verified, run.accepted)
        of_all = number, num_drafts, num_steps, num_correct, runs
        return CommittedRequest(seq, req, kept, *of_all)

    def _return_pages(self, plan: ScheduledBatch, sequences: list[Sequence]) -> None:
        """Return the pages of rejected drafts, except those that a step in flight writes to.

        A sequence that ended returns all: the next user of a page writes to it after that step.
        """
        ahead = self._newest
        reqs_ahead = () if ahead is None or ahead is plan else ahead.requests
        slots_ahead = {req.request_id: self.drafts.slots_past(req.shape) for req in reqs_ahead}
        for seq in sequences:
            if not seq.finished:
                self.cache.trim(seq, len(seq) + slots_ahead.get(seq.request_id, 0))

    def _forget(self, seq: Sequence) -> None:
        if self.drafts.ngrams is not None:
            self.drafts.ngrams.forget(seq.request_id)
        self.on_leave(seq)


def _scheduled_batch(
    reqs: list[ScheduledRequest],
    steps: RoundSteps,
    draft_budget: int | None,
    batch: DecodeBatch,
    *,
    follows: bool = False,
    was_postponed: bool = False,
) -> ScheduledBatch:
    if not any(req.model_steps for req in reqs):  # no draft model runs, so none extends
        reqs = [req._replace(extends=False) if req.extends else req for req in reqs]
    num_missing = max(req.num_missing if req.extends else 0 for req in reqs)
    shape = steps.shape
    if shape.is_chain:
        guessed = [DraftShape.chain(req.guessed_steps) for req in reqs if req.num_ngram_drafts]
        shape = max([shape, *guessed])
    return ScheduledBatch(
        tuple(reqs),
        shape,
        batch.size,
        follows,
        was_postponed,
        num_missing,
        budget=draft_budget,
        calibration=AS_DRAWN if draft_budget is None else steps.calibration,
    )


def _may_choose(reqs: list[ScheduledRequest], prompts: list[Prompt]) -> bool:
    """Return whether the device may choose which drafts are verified.

    Log-probabilities of prompts and the masks of trees are laid out by the host.
    """
    scores = any(each.seq.params.prompt_logprobs is not None for each in prompts)
    return not scores and all(req.shape.is_chain or not req.params.masks_text for req in reqs)
