"""Continuous batching: admit, plan a round, commit its result. Plain host code, no tensors."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from serve_spec.config import SchedulerConfig
from serve_spec.core.draft import TextDrafter
from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.plan import BatchResult, ScheduledBatch, ScheduledRequest, WorkerLimits
from serve_spec.core.request import FinishReason
from serve_spec.core.round import DecodeBatch, RoundSteps
from serve_spec.core.sequence import Sequence
from serve_spec.kvcache.manager import KVCacheManager
from serve_spec.kvcache.radix import PrefixHit
from serve_spec.scheduler.choice import PostponedChoice
from serve_spec.scheduler.prompts import Prompt, prompt_rows
from serve_spec.scheduler.rows import (
    RowDrafts,
    decode_row,
    fair_drafts,
    kept_up_to,
    missing_after,
    most_coming,
    text_drafted_row,
    usable_steps,
)
from serve_spec.scheduler.texts import Texts

WORTH_A_ROUND = 128
"""Prompt tokens that cost at least what a round costs that waits for somebody else's."""

ChooseSteps = Callable[[DecodeBatch], RoundSteps]
CutOutput = Callable[[Sequence, list[int]], tuple[int, FinishReason | None]]


@dataclass
class PrefixCounts:
    """Tokens of the texts that were admitted, and those of them that were computed before. What is
    admitted again after a preemption does not count."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0


class CommittedRow(NamedTuple):
    """What a step did to one sequence, as planned in `row`: the tokens it gained.

    The target kept `num_correct_drafts` of its drafts, some of them past the end of the text.
    """

    seq: Sequence
    row: ScheduledRequest
    token_ids: list[int]
    num_correct_drafts: int


class Scheduler:
    """Runs the oldest sequences first; when pages run out, the youngest gives way.

    A preempted sequence keeps its tokens and recomputes its caches later, but for the pages that
    are known then. Since every draw is a function of (prefix, seed, position), the text does not
    notice.
    """

    def __init__(
        self,
        limits: SchedulerConfig,
        cache: KVCacheManager,
        on_leave: Callable[[Sequence], None] = lambda seq: None,
        text_drafter: TextDrafter | None = None,
        first_draft_entry: int = 0,
        *,
        has_draft_model: bool = True,
        vocab_size: int = sys.maxsize,
    ) -> None:
        """text_drafter: who drafts from texts, if anybody: such drafts are in a row's plan.
        first_draft_entry: of every sequence, see `Sequence`.
        has_draft_model: whether a model drafts, where there is a text drafter for the rows in whose
        text it finds nothing. vocab_size: of the target, which a text drafter may get wrong.
        """
        self.limits = limits
        self.cache = cache
        self.texts = None if text_drafter is None else Texts(text_drafter, vocab_size)
        self.vocab_size = vocab_size
        self.first_draft_entry = first_draft_entry
        self.has_draft_model = has_draft_model or text_drafter is None
        self.on_leave = on_leave
        """Told of every sequence that leaves the batch: finished, aborted or preempted."""
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._prefix_counts = PrefixCounts()
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._newest: ScheduledBatch | None = None
        self._postponed: PostponedChoice | None = None

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence."""
        self.waiting.append(seq)

    def abort(self, request_id: str) -> Sequence | None:
        """Drops a sequence at any moment between rounds; None if it is not (or no longer) here."""
        seq = next((s for s in self.sequences() if s.request_id == request_id), None)
        if seq is not None:
            self._finish(seq, FinishReason.ABORT)
        return seq

    def sequences(self) -> Iterator[Sequence]:
        """Every sequence that is not finished."""
        yield from self.running
        yield from self.waiting

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self.running or self.waiting)

    def plan(
        self, choose_steps: ChooseSteps, limits: WorkerLimits, before: ScheduledBatch | None = None
    ) -> ScheduledBatch | None:
        """Return the next step: every decoding request, then prefill within the token budget.

        choose_steps: asked once, before anything is drafted. before: a step in flight. Lengths of
        its requests are then bounds, and nothing is preempted.

        None: there is nothing to do, or the outcome of `before` must be known first. Drafts from
        texts and grammar masks depend on it. The known text decides: if it has no drafts for any
        request now, it hardly has them one step later.
        """
        in_flight = {} if before is None else {row.request_id: row for row in before.rows}
        self._admit()
        decoding, prompts = self._after(in_flight)
        if before is not None and (
            not (decoding or prompts)
            or any(seq.params.grammar for seq in (*decoding, *(each.seq for each in prompts)))
        ):
            return None
        rows_before = [in_flight.get(seq.request_id) for seq in decoding]
        budget = self.limits.max_num_batched_tokens
        batch = self._decode_batch(decoding, prompts, budget, rows_before)
        was_postponed = self._postponed is not None and self._postponed.has_drafts
        steps = self._choose(choose_steps, batch) if decoding else RoundSteps(PLAIN)
        drafts = fair_drafts(steps, batch)
        kept_up = kept_up_to(limits, drafts)
        if before is None:
            # Only decode rows preempt, the oldest first, and only younger requests, so no row that
            # is planned already loses its pages.
            planned = [
                self._plan_decode(seq, of_row, kept_up) if seq.page_ids else None
                for seq, of_row in zip(decoding, drafts, strict=True)
            ]
            rows = [row for row in planned if row is not None]
        elif self._reserve_beside(decoding, rows_before, drafts):
            rows = [
                decode_row(
                    seq, of_row, missing_after(seq, row), kept_up, is_under_way=row is not None
                )
                for seq, row, of_row in zip(decoding, rows_before, drafts, strict=True)
            ]
        else:
            self._postponed = PostponedChoice.of(steps, batch)
            return None
        rows += prompt_rows(
            prompts,
            budget - sum(row.query_len for row in rows),
            chunked=self.limits.chunked_prefill,
        )
        if not rows:
            return None
        return self._planned(
            rows,
            steps,
            batch,
            follows=before is not None,
            was_postponed=was_postponed and before is None,
        )

    def _reserve_beside(
        self,
        decoding: list[Sequence],
        rows_before: list[ScheduledRequest | None],
        drafts: list[RowDrafts],
    ) -> bool:
        """Reserve pages beside a step in flight, for whatever it commits.

        False: there is no room, or drafts have to be found in texts that are not known yet.
        """
        ends = [
            len(seq) + most_coming(row) + self._slots_past(of_row.shape)
            for seq, row, of_row in zip(decoding, rows_before, drafts, strict=True)
        ]
        has_room = self.cache.can_reserve_all(decoding, ends)
        if not has_room or any(map(self._is_from_text, drafts)):
            return False
        for seq, end in zip(decoding, ends, strict=True):
            self.cache.reserve(seq, end)
        return True

    def _planned(
        self,
        rows: list[ScheduledRequest],
        steps: RoundSteps,
        batch: DecodeBatch,
        *,
        follows: bool = False,
        was_postponed: bool = False,
    ) -> ScheduledBatch:
        """The plan of these rows, the newest from now on."""
        if not any(row.model_steps for row in rows):  # no draft runs, so nothing catches up with it
            rows = [row._replace(extends=False) if row.extends else row for row in rows]
        num_missing = max(row.num_missing if row.extends else 0 for row in rows)
        shape = steps.shape
        if shape.is_chain:
            shape = max([shape, *(row.shape for row in rows if row.draft_ids)])
        self._newest = ScheduledBatch(
            tuple(rows),
            shape,
            batch.size,
            follows,
            was_postponed,
            num_missing,
            draft_sharpness=steps.draft_sharpness,
        )
        return self._newest

    def commit(
        self, plan: ScheduledBatch, result: BatchResult, cut: CutOutput
    ) -> list[CommittedRow]:
        """Appends what the round drew, ends what is done, returns surplus pages.

        cut: how many of the drawn tokens the text keeps, and why it ends (stop, length), if so.
        """
        by_id = {seq.request_id: seq for seq in self.running}
        for number in result.broken_drafts:
            seq = by_id.get(plan.sampling_rows[number].request_id)
            if seq is not None:
                seq.has_broken_draft = True
        drawn = iter(result.token_ids)
        committed = []
        for row in plan.rows:
            tokens = next(drawn) if row.samples else None
            seq = by_id.get(row.request_id)
            if seq is None:
                continue  # it ended while the round ran
            if row.scored_ids:
                seq.prompt_logprobs += result.prompt_logprobs[row.request_id]
            if tokens is None:
                seq.num_computed = row.length
                self.cache.publish(seq)
            else:
                committed.append(self._commit_row(seq, row, tokens, cut))
        self._return_pages(plan, [row.seq for row in committed])
        return committed

    def take_prefix_counts(self) -> PrefixCounts:
        """What was admitted since this was asked last."""
        counts, self._prefix_counts = self._prefix_counts, PrefixCounts()
        return counts

    def check_integrity(self) -> None:
        """Every page counted as often as held, every length consistent. Raises AssertionError."""
        self.cache.check_integrity(self.sequences())
        assert all(not seq.page_ids for seq in self.waiting), "a waiting sequence holds pages"
        assert len(self.running) <= self.limits.max_num_seqs, "more sequences run than allowed"

    def _admit(self) -> None:
        """Moves waiting sequences in while what is not known of their texts fits the free pages."""
        for seq in tuple(islice(self.waiting, len(self._free_slots))):
            hit = self.cache.find(seq)
            if not self.cache.can_start(seq, hit, len(seq) + 1):
                break  # first come, first served: for want of room nobody overtakes
            if self._is_computed_now(seq, hit):
                continue
            self.waiting.remove(seq)
            seq.request_slot = self._free_slots.pop()
            seq.num_draft_computed = self.first_draft_entry
            self.cache.start(seq, hit)
            self.cache.reserve(seq, len(seq))
            self._count_hit(seq)
            self.running.append(seq)

    def _is_computed_now(self, seq: Sequence, hit: PrefixHit) -> bool:
        """Whether a prompt that runs is about to compute the better half of what `seq` lacks.

        Several answers to one prompt arrive together: the first computes it for all of them.
        """
        known = len(hit.page_ids) * self.cache.page_size
        shared = known + max(WORTH_A_ROUND, (len(seq) - known) // 2)
        if shared > self.cache.most_cached(seq):
            return False
        return any(
            not other.is_decoding
            and other.num_computed < shared < len(other)
            and other.token_ids[shared] == seq.token_ids[shared]
            and other.token_ids[:shared] == seq.token_ids[:shared]
            for other in self.running
        )

    def _count_hit(self, seq: Sequence) -> None:
        """Counts what a sequence begins with, the first time it is admitted."""
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed
            self._prefix_counts.num_query_tokens += len(seq)
            self._prefix_counts.num_hit_tokens += seq.num_computed

    def _choose(self, choose_steps: ChooseSteps, batch: DecodeBatch) -> RoundSteps:
        """The policy's answer, which is asked for once a round."""
        choice, self._postponed = self._postponed, None
        return choose_steps(batch) if choice is None else choice.now(batch)

    def _after(
        self, under_way: Mapping[str, ScheduledRequest]
    ) -> tuple[list[Sequence], list[Prompt]]:
        """Who decodes and whose prompt is not done once the round of these rows is committed.

        Who decodes gains one token at least: whoever needs no other is done.
        """
        decoding: list[Sequence] = []
        prompts: list[Prompt] = []
        for seq in self.running:
            row = under_way.get(seq.request_id)
            if row is None:
                if seq.is_decoding:
                    decoding.append(seq)
                else:
                    prompts.append(Prompt(seq, seq.num_computed))
            elif not row.samples:
                prompts.append(Prompt(seq, row.length))
            elif seq.num_remaining > 1:
                decoding.append(seq)
        return decoding, prompts

    def _decode_batch(
        self,
        decoding: list[Sequence],
        prompts: list[Prompt],
        budget: int,
        rows_before: list[ScheduledRequest | None],
    ) -> DecodeBatch:
        """Return what the policy may know of the decoding requests of the next step.

        rows_before: their rows of a step in flight.
        """
        budget -= len(decoding)
        num_prompt_rows = max(0, min(sum(prompt.num_pending for prompt in prompts), budget))
        # Prompts that wait keep half of what the decode rows leave.
        budget -= min(num_prompt_rows, budget // 2)
        lengths = [len(seq) for seq in decoding]
        page_size = self.cache.page_size
        held = sum(len(seq.page_ids) for seq in decoding) * page_size - sum(lengths)
        held -= sum(map(most_coming, rows_before))
        max_steps = [
            usable_steps(seq, 0 if row is None else 1)
            for seq, row in zip(decoding, rows_before, strict=True)
        ]
        text_steps = [] if self.texts is None else self.texts.find(decoding, max_steps)
        return DecodeBatch(
            request_ids=[seq.request_id for seq in decoding],
            max_steps=max_steps if self.has_draft_model else text_steps,
            num_tokens=sum(lengths),
            num_sampled=sum(not seq.params.is_greedy for seq in decoding),
            max_draft_tokens=max(0, min(budget, held + self.cache.num_free_pages * page_size)),
            backlogs=[len(seq) - 1 - seq.num_draft_computed for seq in decoding]
            if self.has_draft_model
            else [],
            num_remaining=[seq.num_remaining for seq in decoding],
            num_prompts=len(prompts),
            num_prompt_rows=num_prompt_rows,
            text_steps=text_steps if self.has_draft_model else [],
        )

    def _slots_past(self, shape: DraftShape) -> int:
        """Return the KV entries past a request's length that its drafts take.

        Texts are not drafted in a cache. Beside a model, their trees take the room of the model's:
        it drafts for every row of a round.
        """
        return shape.draft_slots if self.has_draft_model else shape.size

    def _is_from_text(self, drafts: RowDrafts) -> bool:
        """Whether they have to be found in the row's text; without a model, all there are."""
        return drafts.from_text or (drafts.shape.depth > 0 and not self.has_draft_model)

    def _plan_decode(
        self, seq: Sequence, drafts: RowDrafts, kept_up: int
    ) -> ScheduledRequest | None:
        found = None
        if self.texts is not None and self._is_from_text(drafts):
            found = self.texts.drafts(seq, drafts)
        if found is not None and found.parents:
            drafts = drafts._replace(shape=replace(drafts.shape, size=len(found.token_ids)))
        while not self.cache.can_reserve(seq, len(seq) + self._slots_past(drafts.shape)):
            if drafts.shape.depth:
                drafts = drafts.less()  # drafts are optional; somebody else's text is not
                continue
            if not self._preempt_younger_than(seq):
                self._preempt(seq)
                return None
        self.cache.reserve(seq, len(seq) + self._slots_past(drafts.shape))
        num_missing = len(seq) - 1 - seq.num_draft_computed
        if found is None:
            return decode_row(seq, drafts, num_missing, kept_up)
        return text_drafted_row(seq, drafts, found, num_missing, kept_up)

    def _commit_row(
        self, seq: Sequence, row: ScheduledRequest, tokens: list[int], cut: CutOutput
    ) -> CommittedRow:
        num_kept, reason = cut(seq, tokens)
        kept = tokens[:num_kept]
        num_entries = seq.num_draft_computed
        if row.extends:
            # Catch-up made the entries before the root; those of the drafting itself are stale.
            seq.num_draft_computed = len(seq) - 1
        if row.is_decode:
            # The last emitted token of a round is its final token, also where a stop cut the run.
            seq.stats.observe(row.num_steps, len(kept) - 1, row.num_draft_tokens)
        seq.token_ids += kept
        seq.num_computed = len(seq) - 1
        if reason is not None:
            self._finish(seq, reason)
        elif not row.is_decode or num_entries < seq.num_prompt_tokens <= seq.num_draft_computed:
            # A prompt is computed, or the draft has caught up with it. Texts follow when they end.
            self.cache.publish(seq)
        return CommittedRow(seq, row, kept, len(tokens) - 1)

    def _return_pages(self, plan: ScheduledBatch, sequences: list[Sequence]) -> None:
        """Gives back what rejected drafts leave, but not what a round under way writes to.

        A sequence that ended may give back all: whoever gets the pages writes after that round.
        """
        ahead = self._newest
        rows_ahead = () if ahead is None or ahead is plan else ahead.rows
        slots_ahead = {row.request_id: self._slots_past(row.shape) for row in rows_ahead}
        for seq in sequences:
            if not seq.finished:
                self.cache.trim(seq, len(seq) + slots_ahead.get(seq.request_id, 0))

    def _preempt_younger_than(self, seq: Sequence) -> bool:
        """Preempts the youngest running sequence; False if `seq` itself is the youngest."""
        youngest = self.running[-1]
        if youngest is seq:
            return False
        self._preempt(youngest)
        return True

    def _preempt(self, seq: Sequence) -> None:
        self._leave(seq)
        seq.forget_computed()
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        if seq in self.running:
            self._leave(seq)
        else:
            self.waiting.remove(seq)

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._free_slots.append(seq.request_slot)
        seq.request_slot = -1
        self.cache.release(seq)
        if self.texts is not None:
            self.texts.forget(seq.request_id)
        self.on_leave(seq)
