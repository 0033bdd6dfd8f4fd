"""Learns from the times that rounds took: costs, and whether drafting is faster than not."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, median_low

from serve_spec.adaptive.costs import Costs, Work, bucket
from serve_spec.adaptive.exploration import SpeedGuards
from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.core.record import StepRecord


def work_of(record: StepRecord, max_steps: int) -> Work | None:
    """Return what a round computed; None if its time is unknown."""
    size, drafts = record.num_planned_seqs, record.num_planned_drafts
    if record.times is None or not size or not 0.0 < record.times.step_ms < math.inf:
        return None
    shape = record.shape if drafts or record.num_drafting else PLAIN
    if shape.is_chain and drafts:
        shape = DraftShape.chain(min(record.deepest or shape.depth, max_steps))
    context, sampled = record.num_tokens / size, record.num_sampled / size
    prompts, pairs = record.num_prefill_tokens, record.num_prefill_pairs
    return Work(size, context, sampled, shape, drafts, prompts, pairs, record.num_extend_tokens)


class RoundTimes:
    """Tells costs and guards the times of rounds.

    Of rounds alike it takes the median, because other processes delay some. The first round of a
    plan does not count: its time includes planning, which a few plain rounds would look slow by.
    """

    def __init__(self, costs: Costs, guards: SpeedGuards) -> None:
        self._costs, self._guards = costs, guards

    def learn(self, records: Sequence[StepRecord], works: Sequence[Work | None]) -> None:
        """Learn from some rounds. works: what each computed; None: it does not count."""
        alike: dict[tuple[Work, bool], list[tuple[float, float, float]]] = defaultdict(list)
        for record, work in zip(records, works, strict=True):
            guard = self._guards.of(bucket(record.num_planned_seqs))
            guard.rounds_left = max(0, guard.rounds_left - 1)
            if work is None or record.notes.begins_plan or not record.batch_size:
                continue
            if work.shape != PLAIN and 2 * record.num_drafting < work.size:
                continue  # a trial: fewer drafts are made than in a batch that drafts
            if self._costs.is_usual(work):
                key = work._replace(context=0.0, entries=0), record.is_plain
                tokens = record.num_drafted_tokens / record.batch_size
                alike[key].append((record.step_ms, work.context, tokens))
            else:
                self._costs.learn_prompts(work, record.step_ms)
        for (work, is_plain), rounds in alike.items():
            self._learn_alike(work, is_plain, rounds)

    def _learn_alike(
        self, work: Work, is_plain: bool, rounds: Sequence[tuple[float, float, float]]
    ) -> None:
        """Learn from rounds of equal work: ms, context and tokens per request of each."""
        times, contexts, tokens = zip(*rounds, strict=True)
        ms, num = median_low(times), len(rounds)
        work = work._replace(context=fmean(contexts))
        self._costs.learn(work, ms, num)
        guard = self._guards.of(bucket(work.size))
        units = ms / self._costs.table_ms(Work(*work[:3]))
        if is_plain:
            guard.observe_plain(units)
        else:
            guard.observe(fmean(tokens), units, num)
