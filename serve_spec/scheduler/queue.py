"""Waiting and running sequences, and the request slots and pages that they hold."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, MutableSequence
from itertools import islice
from typing import Protocol

from serve_spec.core.errors import BrokenLogits
from serve_spec.core.plan import ScheduledRequest
from serve_spec.core.request import FinishReason
from serve_spec.core.sequence import Sequence
from serve_spec.kvcache.manager import KVCacheManager
from serve_spec.kvcache.radix import PrefixHit
from serve_spec.scheduler.prompts import Prompt, in_turn

MIN_SHARED_TOKENS = 128
"""Fewest prompt tokens for which waiting for another request's prefill costs less than computing
them again."""


class MaskSource(Protocol):
    """Makes the masks of grammars; see `structured.masks.Grammars`."""

    def prepare(self, running: list[Sequence]) -> tuple[set[str], Mapping[str, Exception]]:
        """Return which requests have no mask of the next draw yet, and which fail, and why."""

    def drafts(self, seq: Sequence) -> tuple[int, ...]:
        """Return the grammar drafts of a request whose mask is ready."""


class RequestQueue:
    """Admits by priority, then in order of arrival; preempts in reverse order if pages run out.

    `running` is in order of priority, then of admission.

    A preempted sequence keeps its tokens and recomputes its KV cache later, except for cached
    prefix pages. Its text does not change: a draw depends on (prefix, seed, position) only.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        max_num_seqs: int,
        on_leave: Callable[[Sequence], None],
        first_draft_entry: int = 0,
    ) -> None:
        """on_leave: called with every sequence that leaves the batch: finished, aborted or
        preempted. first_draft_entry: see `Sequence`.
        """
        self.cache = cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_planned_prompt_tokens = 0
        """Of all prompts since the start, for their turns."""
        self.masks: MaskSource | None = None
        self.failed: dict[str, Exception] = {}
        """Requests that ended without an answer, and why, until `take_failed`."""
        self._on_leave = on_leave
        self._first_draft_entry = first_draft_entry
        self._max_num_seqs = max_num_seqs
        self._prefix_counts = 0, 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence behind those of its priority."""
        _insert(self.waiting, seq)

    def abort(self, request_id: str) -> Sequence | None:
        """End a sequence between steps. Return None if it is unknown or has ended."""
        seq = next((s for s in self.sequences() if s.request_id == request_id), None)
        if seq is not None:
            self.finish(seq, FinishReason.ABORT)
        return seq

    def sequences(self) -> Iterator[Sequence]:
        """Yield every unfinished sequence."""
        yield from self.running
        yield from self.waiting

    @property
    def has_work(self) -> bool:
        """Return whether any sequence is unfinished."""
        return bool(self.running or self.waiting)

    def take_failed(self) -> dict[str, Exception]:
        """Return the requests that ended without an answer since the last call, and why."""
        failed, self.failed = self.failed, {}
        return failed

    def take_prefix_counts(self) -> tuple[int, int]:
        """Return the tokens of sequences admitted since the last call, and those in the cache."""
        counts, self._prefix_counts = self._prefix_counts, (0, 0)
        return counts

    def check_integrity(self) -> None:
        """Raise AssertionError unless reference counts and lengths are consistent."""
        self.cache.check_integrity(self.sequences())
        assert all(not seq.page_ids for seq in self.waiting), "a waiting sequence holds pages"
        waiting = {seq.request_id for seq in self.waiting}
        assert self.cache.searched_ids <= waiting, "a search of a request that does not wait"
        assert len(self.running) <= self._max_num_seqs, "more sequences run than allowed"

    def admit(self, in_flight: Container[str] = ()) -> None:
        """Admit waiting sequences in order while their uncached tokens fit the free pages.

        in_flight: requests of a step whose result is not known; they wait for it.
        """
        for seq in tuple(islice(self.waiting, len(self._free_slots))):
            if seq.request_id in in_flight:
                continue
            hit = self.cache.find(seq)
            if not self.cache.can_start(seq, hit, len(seq) + 1):
                break  # first come, first served
            if self._is_being_computed(seq, hit):
                continue
            self.waiting.remove(seq)
            seq.request_slot = self._free_slots.pop()
            seq.num_draft_computed = self._first_draft_entry
            self.cache.start(seq, hit)
            self.cache.reserve(seq, len(seq))
            seq.prefill_turn = self.num_planned_prompt_tokens + seq.num_pending
            if seq.num_cached_tokens is None:  # it is admitted for the first time
                seq.num_cached_tokens = seq.num_computed
                seq.admitted_at = time.perf_counter()
                num_queries, num_hits = self._prefix_counts
                self._prefix_counts = num_queries + len(seq), num_hits + seq.num_computed
            _insert(self.running, seq)

    def _is_being_computed(self, seq: Sequence, hit: PrefixHit) -> bool:
        """Return whether a running prefill will compute half or more of what `seq` lacks.

        If several requests with one prompt arrive together, the first computes it for all.
        """
        known = len(hit.page_ids) * self.cache.page_size
        shared = known + max(MIN_SHARED_TOKENS, (len(seq) - known) // 2)
        if shared > self.cache.most_cached(seq):
            return False
        return any(
            not other.is_decoding
            and other.params.cache_salt == seq.params.cache_salt
            and other.num_computed < shared < len(other)
            and other.token_ids[shared] == seq.token_ids[shared]
            and other.token_ids[:shared] == seq.token_ids[:shared]
            for other in self.running
        )

    def without_masks(self) -> set[str]:
        """Return the running requests whose masks are not ready; end those that fail."""
        if self.masks is None:
            return set()
        unready, failed = self.masks.prepare(self.running)
        for seq in [seq for seq in self.running if seq.request_id in failed]:
            self.finish(seq, FinishReason.ABORT)
        self.failed |= failed
        return unready

    def grammar_drafts(self, seq: Sequence) -> tuple[int, ...]:
        """Return the drafts that the grammar of a request forces, if it has one."""
        return self.masks.drafts(seq) if self.masks is not None and seq.params.grammar else ()

    def after_step(
        self, in_flight: Mapping[str, ScheduledRequest], unready: Container[str] = ()
    ) -> tuple[list[Sequence], list[Prompt]]:
        """Return the sequences that decode, and the unfinished prompts in turn, after a step in
        flight.

        A decoding request gains at least one token, so one that needs no more has ended.
        unready: requests that sit out.
        """
        decoding: list[Sequence] = []
        prompts: list[Prompt] = []
        for seq in self.running:
            if seq.request_id in unready:
                continue
            req = in_flight.get(seq.request_id)
            if req is None:
                if seq.is_decoding:
                    decoding.append(seq)
                else:
                    prompts.append(Prompt(seq, seq.num_computed))
            elif not req.samples:
                prompts.append(Prompt(seq, req.length))
            elif seq.num_remaining > 1:
                decoding.append(seq)
        return decoding, in_turn(prompts)

    def preempt_less_urgent_than(self, seq: Sequence) -> bool:
        """Preempt the least urgent running sequence. Return False if that is `seq`."""
        last = self.running[-1]
        if last is seq:
            return False
        self.preempt(last)
        return True

    def preempt(self, seq: Sequence) -> None:
        """Move a running sequence back, to the front of the waiting ones of its priority."""
        self.move_back(seq)
        self.num_preemptions += 1

    def drop_broken(self, seq: Sequence) -> None:
        """Move a sequence whose logits are NaN back, to be computed anew; the second time end it.

        What was NaN may be a rejected draft, or a cached page.
        """
        self.cache.discard(seq)
        if seq.is_recomputed:
            self.failed[seq.request_id] = BrokenLogits()
            self.finish(seq, FinishReason.ABORT)
        else:
            seq.is_recomputed = seq.has_broken_draft = True
            self.move_back(seq)

    def move_back(self, seq: Sequence) -> None:
        """Let a running sequence wait again, to be computed anew."""
        self._leave(seq)
        seq.forget_computed()
        priority = seq.params.priority
        first = (place for place, s in enumerate(self.waiting) if s.params.priority >= priority)
        self.waiting.insert(next(first, len(self.waiting)), seq)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence and free what it holds."""
        seq.finish_reason = reason
        if seq in self.running:
            self._leave(seq)
        else:
            self.waiting.remove(seq)
            self.cache.forget(seq)

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._free_slots.append(seq.request_slot)
        seq.request_slot = -1
        self.cache.release(seq)
        self._on_leave(seq)


def _insert(sequences: MutableSequence[Sequence], seq: Sequence) -> None:
    """Insert a sequence behind those of its priority."""
    place = len(sequences)
    while place and sequences[place - 1].params.priority > seq.params.priority:
        place -= 1
    sequences.insert(place, seq)
