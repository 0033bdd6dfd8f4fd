"""Continuous batching: admit, plan a round, commit its result. Plain host code, no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from serve_spec.config import SchedulerConfig
from serve_spec.core.plan import RowPlan, StepPlan, StepResult
from serve_spec.core.request import FinishReason
from serve_spec.core.round import DecodeBatch, RoundSteps
from serve_spec.core.sequence import Sequence
from serve_spec.kvcache.manager import KVCacheManager

ChooseSteps = Callable[[DecodeBatch], RoundSteps]
CutOutput = Callable[[Sequence, list[int]], tuple[int, FinishReason | None]]


@dataclass(frozen=True)
class CommittedRow:
    """What a round did to one sequence: the tokens it really gained and the drafts among them.

    `num_judged_correct` is what the target kept of `num_steps` drafts, before any stop cut the run.
    """

    seq: Sequence
    token_ids: list[int]
    num_steps: int
    num_judged_correct: int
    was_decoding: bool


class Scheduler:
    """Runs the oldest sequences first; when pages run out, the youngest gives way.

    A preempted sequence keeps its tokens and recomputes its caches later. Since every draw is a
    function of (prefix, seed, position), the text does not notice.
    """

    def __init__(
        self,
        limits: SchedulerConfig,
        cache: KVCacheManager,
        on_leave: Callable[[Sequence], None] = lambda seq: None,
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.on_leave = on_leave
        """Told of every sequence that leaves the batch: finished, aborted or preempted."""
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

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

    def plan(self, choose_steps: ChooseSteps) -> StepPlan | None:
        """The next round: every decoding row, then prefill within the token budget.

        choose_steps: asked once, before anything is drafted; the tier and each row's share of it.
        """
        self._admit()
        decoding = [seq for seq in self.running if seq.is_decoding]
        prefilling = [seq for seq in self.running if not seq.is_decoding]
        batch = self._decode_batch(decoding, prefilling)
        steps = choose_steps(batch) if decoding else RoundSteps(0)
        rows: list[RowPlan] = []
        budget = self.limits.max_num_batched_tokens
        # Only decode rows preempt, the oldest first, and only younger sequences, so no row that is
        # planned already loses its pages.
        for seq, num_steps in zip(decoding, _fair_steps(steps, batch), strict=True):
            row = self._plan_decode(seq, num_steps) if seq.page_ids else None
            if row is not None:
                rows.append(row)
                budget -= row.query_len
        num_decode_rows = len(rows)
        for seq in prefilling:
            is_first = len(rows) == num_decode_rows
            row = self._plan_prefill(seq, budget, is_first=is_first) if seq.page_ids else None
            if row is not None:
                rows.append(row)
                budget -= row.query_len
        return StepPlan(tuple(rows), steps.num_steps, batch.size) if rows else None

    def commit(self, plan: StepPlan, result: StepResult, cut: CutOutput) -> list[CommittedRow]:
        """Appends what the round drew, ends what is done, returns surplus pages.

        cut: how many of the drawn tokens the text keeps, and why it ends (stop, length), if so.
        """
        by_id = {seq.request_id: seq for seq in self.running}
        drawn = iter(result.token_ids)
        committed = []
        for row in plan.rows:
            tokens = next(drawn) if row.samples else None
            seq = by_id.get(row.request_id)
            if seq is None:
                continue  # aborted while the round ran
            if tokens is None:
                seq.num_computed = row.length
            else:
                committed.append(self._commit_row(seq, row, tokens, cut))
        return committed

    def check_integrity(self) -> None:
        """Every page owned once, every length consistent. Raises AssertionError."""
        self.cache.check_integrity(self.sequences())
        assert all(not seq.page_ids for seq in self.waiting), "a waiting sequence holds pages"
        assert len(self.running) <= self.limits.max_num_seqs, "more sequences run than allowed"

    def _admit(self) -> None:
        """Moves waiting sequences in while their whole text so far fits the free pages."""
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            seq = self.waiting[0]
            if not self.cache.can_reserve(seq, len(seq) + 1):
                break  # first come, first served: nobody overtakes
            self.cache.reserve(seq, len(seq))
            self.running.append(self.waiting.popleft())

    def _decode_batch(self, decoding: list[Sequence], prefilling: list[Sequence]) -> DecodeBatch:
        """What the policy may know of the next round's decode rows."""
        budget = self.limits.max_num_batched_tokens - len(decoding)
        # Prompts that wait keep half of what the decode rows leave.
        budget -= min(sum(seq.num_pending for seq in prefilling), budget // 2)
        lengths = [len(seq) for seq in decoding]
        page_size = self.cache.page_size
        held = sum(len(seq.page_ids) for seq in decoding) * page_size - sum(lengths)
        return DecodeBatch(
            request_ids=[seq.request_id for seq in decoding],
            max_steps=[_usable_steps(seq) for seq in decoding],
            num_tokens=sum(lengths),
            num_sampled=sum(not seq.params.is_greedy for seq in decoding),
            max_draft_tokens=max(0, min(budget, held + self.cache.num_free_pages * page_size)),
        )

    def _plan_decode(self, seq: Sequence, num_steps: int) -> RowPlan | None:
        while not self.cache.can_reserve(seq, len(seq) + num_steps):
            if num_steps:
                num_steps -= 1  # drafts are optional; somebody else's text is not
                continue
            if not self._preempt_younger_than(seq):
                self._preempt(seq)
                return None
        self.cache.reserve(seq, len(seq) + num_steps)
        return _decode_row(seq, num_steps)

    def _plan_prefill(self, seq: Sequence, budget: int, *, is_first: bool) -> RowPlan | None:
        # One prompt a round may overrun the budget, by a token or, without chunks, whole: decode
        # rows could otherwise keep it waiting for ever.
        count = seq.num_pending
        if self.limits.chunked_prefill:
            count = min(count, max(budget, 1 if is_first else 0))
        elif count > budget and not is_first:
            count = 0
        if count <= 0:
            return None
        start = seq.num_computed
        return RowPlan(
            request_id=seq.request_id,
            token_ids=tuple(seq.token_ids[start : start + count]),
            start=start,
            samples=count == seq.num_pending,
            page_ids=tuple(seq.page_ids),
            params=seq.params,
            seed=seq.seed,
        )

    def _commit_row(
        self, seq: Sequence, row: RowPlan, tokens: list[int], cut: CutOutput
    ) -> CommittedRow:
        num_kept, reason = cut(seq, tokens)
        kept = tokens[:num_kept]
        if row.is_decode:
            # The last emitted token of a round is its final token, also where a stop cut the run.
            seq.stats.observe(row.num_steps, len(kept) - 1)
        seq.token_ids += kept
        seq.num_computed = len(seq) - 1
        if row.num_steps:
            # Catch-up made the entries before the root; those of the drafting itself are stale.
            seq.num_draft_computed = row.start
        if reason is not None:
            self._finish(seq, reason)
        else:
            self.cache.trim(seq, len(seq))
        return CommittedRow(seq, kept, row.num_steps, len(tokens) - 1, row.is_decode)

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
        self.cache.release(seq)
        self.on_leave(seq)


def _usable_steps(seq: Sequence) -> int:
    """Most drafts a sequence wants and can still use."""
    options = seq.params.speculative
    if not options.enabled:
        return 0
    # The final token needs no draft: with r tokens to go, r-1 drafts can still be emitted.
    useful = max(0, seq.num_remaining - 1)
    return useful if options.max_steps is None else min(useful, options.max_steps)


def _fair_steps(steps: RoundSteps, batch: DecodeBatch) -> list[int]:
    """Drafts per row: what the policy wants, what the row can use, an even share of the room."""
    wanted = [steps.num_steps] * batch.size if steps.row_steps is None else steps.row_steps
    usable = [min(want, most) for want, most in zip(wanted, batch.max_steps, strict=True)]
    if sum(usable) <= batch.max_draft_tokens:
        return usable
    share = batch.max_draft_tokens // batch.size
    return [min(num_steps, share) for num_steps in usable]


def _decode_row(seq: Sequence, num_steps: int) -> RowPlan:
    last = len(seq) - 1
    return RowPlan(
        request_id=seq.request_id,
        token_ids=(seq.token_ids[last],),
        start=last,
        samples=True,
        page_ids=tuple(seq.page_ids),
        params=seq.params,
        seed=seq.seed,
        is_decode=True,
        num_steps=num_steps,
        draft_start=seq.num_draft_computed if num_steps else 0,
        # Draft entry j carries token j+1; entries up to last-1 exist once these are added.
        catch_up_ids=tuple(seq.token_ids[seq.num_draft_computed + 1 :]) if num_steps else (),
    )
