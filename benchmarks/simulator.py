"""Replay recorded acceptance with a policy, without a model.

Accepted drafts of a round come from a trace, its time from `RoundCosts`. The policy gets the same
calls as from the engine. Drafts are admitted by their recorded logprobs as on the device
(`ops.admission`). Prompts are not chunked; they run in their own rounds or in mixed batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from time import thread_time
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from serve_spec.adaptive.drafts import logits
from serve_spec.adaptive.policy import StepPolicy
from serve_spec.bench.trace import TraceSet
from serve_spec.bench.workload import CLASSES, TextKind, place_of
from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.core.record import StepRecord, StepTimes
from serve_spec.core.round import GREEDY, SAMPLED, Calibration, DecodeBatch, RoundSteps

OnRound = Callable[[DecodeBatch, RoundSteps, StepRecord], None]


class RoundShape(NamedTuple):
    """Everything that the time of a round depends on."""

    batch_size: int
    """Decoding requests."""
    drafting: tuple[int, ...]
    """Requests that draft at least 1, 2, ... steps, up to the deepest."""
    num_tokens: int
    """Context tokens of all decoding requests."""
    num_sampled: int
    num_extend_tokens: int
    """Missing draft KV entries, computed before drafting."""
    num_prefill_tokens: int
    draft: DraftShape = PLAIN
    """Draft shape; `drafting` counts the levels, also of trees."""
    num_admitted: int | None = None
    """Drafts that are verified; None: all."""

    @property
    def num_steps(self) -> int:
        """Return the number of draft forwards."""
        return len(self.drafting)

    @property
    def num_rows(self) -> int:
        """Return the tokens of decoding requests in the target's forward, roots included."""
        if self.num_admitted is not None:
            return self.batch_size + self.num_admitted
        if self.draft.is_chain or not self.drafting:
            return self.batch_size + sum(self.drafting)
        # A request of fewer levels has the drafts of those levels.
        deeper = (*self.drafting[1:], 0)
        by_levels = enumerate(zip(self.drafting, deeper, strict=True), start=1)
        return self.batch_size + sum(
            (rows - beyond) * self.draft.size_at(levels) for levels, (rows, beyond) in by_levels
        )


RoundCosts: TypeAlias = Callable[[RoundShape], StepTimes]
"""Returns the time of a round."""


@dataclass(frozen=True)
class Phase:
    """A closed loop: `batch_size` requests run together, and the next starts when one ends."""

    prompt_class: str
    batch_size: int
    num_requests: int
    num_tokens: int
    """Mean output tokens of a request."""
    spread: float = 0.0
    """Lengths lie within this fraction around the mean, so that requests do not end together."""

    @property
    def total_tokens(self) -> int:
        """Return the tokens of all requests."""
        return sum(map(self.length, range(self.num_requests)))

    def length(self, request: int) -> int:
        """Return the output tokens of request number `request`."""
        return max(1, round(self.num_tokens * (1.0 + self.spread * place_of(request))))

    @property
    def kinds(self) -> tuple[TextKind, ...]:
        """Return the kinds of its requests, in turn."""
        return CLASSES[self.prompt_class]

    def kind(self, request: int) -> TextKind:
        """Return the kind of request number `request`."""
        return self.kinds[request % len(self.kinds)]

    def place(self, request: int) -> int:
        """Return how many requests of its kind came before request number `request`."""
        return request // len(self.kinds)


@dataclass
class PhaseReport:
    """Figures of a phase; the time of rounds without decoding requests is separate."""

    num_rounds: int = 0
    """Rounds with decoding requests."""
    num_output_tokens: int = 0
    """Tokens of decoding; the first token of every text comes from its prompt."""
    decode_ms: float = 0.0
    prompt_ms: float = 0.0

    @property
    def tokens_per_ms(self) -> float:
        """Return the decode speed."""
        return self.num_output_tokens / self.decode_ms


@dataclass(slots=True, eq=False)
class _Row:
    """A request while it runs."""

    request_id: str
    num_correct_drafts: Sequence[int]
    of_trees: Mapping[DraftShape, Sequence[int]]
    sampled: bool
    length: int
    """Tokens so far, with the prompt."""
    remaining: int
    """Tokens to go."""
    logprobs: Sequence[Sequence[float]] = ()
    """Log probabilities of the drafts, by position in the trace."""
    at: int = 0
    """Entry of the trace at which the next round starts."""
    num_draft_computed: int = 0
    num_prompt: int = 0

    def accepted(self, shape: DraftShape) -> int:
        """Return the drafts of a chain or tree that are accepted here."""
        counts = self.num_correct_drafts if shape.is_chain else self.of_trees[shape]
        return counts[self.at]


_Entry = TypeVar("_Entry")


def _from(start: int, counts: Sequence[_Entry]) -> Sequence[_Entry]:
    """Return the entries rotated to begin at `start`."""
    return [*counts[start:], *counts[:start]]


class Simulator:
    """Runs phases one after the other with one policy, which learns throughout, as in a server.

    traces: recorded at least as deep as the policy drafts and as long as the requests.
    max_num_batched_tokens: tokens a round computes at most, prompts and drafts together; drafts
        give way to prompts, which are never cut.
    charge_thinking: the policy's CPU time counts as time of the round, as in an engine that
        launches no step ahead.
    mixes_prompts: prompts run in the rounds of other requests, and count in their time.
    on_round: called after every round with decoding requests.

    Raises:
        ValueError: the policy may draft deeper than was recorded.
    """

    def __init__(
        self,
        policy: StepPolicy,
        traces: TraceSet,
        costs: RoundCosts,
        *,
        max_num_batched_tokens: int = 1 << 30,
        charge_thinking: bool = False,
        mixes_prompts: bool = False,
        on_round: OnRound | None = None,
    ) -> None:
        deepest = max(shape.depth for shape in policy.shapes)
        if deepest > traces.num_steps:
            fix = f"record traces of num_steps={deepest}, or use fewer steps"
            raise ValueError(f"shapes={list(map(str, policy.shapes))}: {fix}")
        self.policy = policy
        self.traces = traces
        self.costs = costs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.charge_thinking = charge_thinking
        self.mixes_prompts = mixes_prompts
        self._on_round = on_round
        self._num_phases = 0
        self._thought_ms = 0.0  # since the last round ended

    def run(self, phase: Phase) -> PhaseReport:
        """Run a phase from its first prompt to its last token.

        Raises:
            ValueError: a kind of text was not recorded, or not at this length.
        """
        report = PhaseReport()
        requests = self._requests(phase)
        self._num_phases += 1
        rows: list[_Row] = []
        while True:
            entering = list(islice(requests, phase.batch_size - len(rows)))
            if not rows and not entering:
                return report
            if entering and not (rows and self.mixes_prompts):
                shape = RoundShape(0, (), 0, 0, 0, sum(row.length for row in entering))
                report.prompt_ms += self.costs(shape).step_ms
            if rows:
                rows = self._round(rows, entering, report)
            for row in entering:  # the first token comes from the prompt
                row.length += 1
                row.remaining -= 1
            rows += [row for row in entering if row.remaining]

    def _requests(self, phase: Phase) -> Iterator[_Row]:
        traces = {kind: self.traces.of(kind) for kind in phase.kinds}
        for number in range(phase.num_requests):
            kind, place = phase.kind(number), phase.place(number)
            lap, index = divmod(place, len(traces[kind]))
            trace = traces[kind][index]
            num_tokens = phase.length(number)
            if num_tokens > trace.max_tokens:
                fix = f"the traces hold {trace.max_tokens}; ask for less or record longer ones"
                raise ValueError(f"num_tokens={num_tokens}: {fix}")
            # A repeated trace starts elsewhere, so that equal requests do not run in step.
            start = 37 * lap % len(trace.num_correct_drafts)
            trees = zip(self.traces.trees, trace.of_trees, strict=True)
            yield _Row(
                request_id=f"{self._num_phases}-{number}",
                num_correct_drafts=_from(start, trace.num_correct_drafts),
                logprobs=_from(start, trace.draft_logprobs),
                of_trees={tree: _from(start, counts) for tree, counts in trees},
                sampled=kind.temperature > 0,
                length=trace.num_prompt_tokens,
                num_prompt=trace.num_prompt_tokens,
                remaining=num_tokens,
            )

    def _round(self, rows: list[_Row], entering: list[_Row], report: PhaseReport) -> list[_Row]:
        """Run a round; return the requests that continue."""
        batch = self._batch(rows, entering)
        started = thread_time()
        steps = self.policy.choose(batch)
        self._thought_ms += 1e3 * (thread_time() - started)
        drafted = steps_per_req = _row_steps(steps, batch)
        logprobs = self._logprobs(rows, steps)
        num_admitted = None
        if logprobs is not None and steps.budget is not None:
            kinds = np.array([SAMPLED if row.sampled else GREEDY for row in rows])
            steps_per_req = admitted(
                logprobs, np.array(drafted), kinds, steps.calibration, steps.budget
            ).tolist()
            num_admitted = sum(steps_per_req)
        accepted = [
            min(num_steps, row.accepted(steps.shape))
            for num_steps, row in zip(steps_per_req, rows, strict=True)
        ]
        shape = RoundShape(
            batch_size=len(rows),
            drafting=_drafting(drafted),
            num_tokens=batch.num_tokens,
            num_sampled=batch.num_sampled,
            num_extend_tokens=_catch_up(rows, drafted),
            num_prefill_tokens=0,
            draft=steps.shape,
            num_admitted=num_admitted,
        )
        if self.mixes_prompts:
            shape = shape._replace(num_prefill_tokens=sum([row.length for row in entering]))
        sampled = [row.sampled for row in rows]
        live = self._commit(rows, accepted)
        record = replace(
            self._record(shape, live),
            shape=steps.shape,
            request_ids=tuple([batch.request_ids[i] for i in live]),
            steps_per_req=tuple([steps_per_req[i] for i in live]),
            correct_per_req=tuple([accepted[i] for i in live]),
            drafted_per_req=() if num_admitted is None else tuple([drafted[i] for i in live]),
            draft_logprobs=None if logprobs is None else logprobs[live].astype(np.float32),
            budget=None if num_admitted is None else steps.budget,
            is_sampled=tuple([sampled[i] for i in live]),
            accept_lengths=tuple([count + 1 for count in accepted]),
            notes=steps.notes,
        )
        started = thread_time()
        self.policy.observe(record)
        self._thought_ms = 1e3 * (thread_time() - started)
        report.num_rounds += 1
        report.num_output_tokens += record.num_output_tokens
        report.decode_ms += record.step_ms
        if self._on_round is not None:
            self._on_round(batch, steps, record)
        return [rows[i] for i in live]

    def _record(self, shape: RoundShape, live: list[int]) -> StepRecord:
        """Return the sums and times of a round, of which the requests `live` continue."""
        times = self.costs(shape)
        if self.charge_thinking:
            times = replace(times, step_ms=times.step_ms + self._thought_ms)
        return StepRecord(
            shape=shape.draft,
            num_draft_tokens=shape.num_rows - shape.batch_size,
            num_tokens=shape.num_tokens,
            num_sampled=shape.num_sampled,
            num_drafting=shape.drafting[0] if shape.drafting else 0,
            deepest=shape.num_steps,
            num_extend_tokens=shape.num_extend_tokens,
            num_prefill_tokens=shape.num_prefill_tokens,
            num_ended=shape.batch_size - len(live),
            num_ended_prompt_tokens=sum([ended.num_prompt for ended in self._ended]),
            num_ended_tokens=sum([ended.length - ended.num_prompt for ended in self._ended]),
            times=times,
        )

    def _logprobs(self, rows: list[_Row], steps: RoundSteps) -> NDArray[np.float64] | None:
        """Return the logprobs of what each request drafts, [B, depth]; None if unknown."""
        if (
            not steps.shape.depth
            or not steps.shape.is_chain
            or not all(row.logprobs for row in rows)
        ):
            return None
        return np.array([row.logprobs[row.at] for row in rows])[:, : steps.shape.depth]

    def _batch(self, rows: list[_Row], entering: list[_Row]) -> DecodeBatch:
        budget = self.max_num_batched_tokens - len(rows)
        budget -= min(sum([row.length for row in entering]), budget // 2)
        return DecodeBatch(
            request_ids=[row.request_id for row in rows],
            max_steps=[row.remaining - 1 for row in rows],
            num_tokens=sum([row.length for row in rows]),
            num_sampled=sum([row.sampled for row in rows]),
            max_draft_tokens=max(0, budget),
        )

    def _commit(self, rows: list[_Row], accepted: list[int]) -> list[int]:
        """Advance every request; return the indices of those that continue."""
        live = []
        self._ended: list[_Row] = []
        for index, (row, num_correct) in enumerate(zip(rows, accepted, strict=True)):
            emitted = num_correct + 1
            row.length += emitted
            row.remaining -= emitted
            row.at += emitted
            if row.remaining:
                live.append(index)
            else:
                self._ended.append(row)
                self.policy.forget(row.request_id)
        return live


def _row_steps(steps: RoundSteps, batch: DecodeBatch) -> list[int]:
    """Return drafts per request as the scheduler grants them, equally if scarce."""
    wanted = (
        [steps.shape.depth] * batch.size if steps.steps_per_req is None else steps.steps_per_req
    )
    usable = [
        want if want < most else most for want, most in zip(wanted, batch.max_steps, strict=True)
    ]
    if not steps.shape.is_chain or sum(usable) <= batch.max_draft_tokens:
        return usable
    each = batch.max_draft_tokens // batch.size
    return [min(num_steps, each) for num_steps in usable]


def admitted(
    logprobs: NDArray[np.float64],
    drafted: NDArray[np.intp],
    kinds: NDArray[np.intp],
    calibration: Calibration,
    budget: int,
) -> NDArray[np.intp]:
    """Return how many drafts of each chain are verified, as `ops.admission` decides.

    logprobs: [B, N]. drafted: [B], drafts of each. kinds: [B], rows of the calibration.
    """
    width = logprobs.shape[1]
    padded = [[*kind, *kind[-1:] * width][:width] for kind in calibration]
    pairs = np.array(padded)[kinds]
    probabilities = 1.0 / (1.0 + np.exp(-(pairs[..., 0] * logits(logprobs) + pairs[..., 1])))
    exists = (np.arange(width) < drafted[:, None]) & (logprobs > -np.inf)
    survival = np.cumprod(np.where(exists, probabilities, 0.0), axis=1).ravel()
    ranked = np.argsort(-survival, kind="stable")[:budget]
    taken = np.zeros(survival.size, dtype=bool)
    taken[ranked] = survival[ranked] > 0.0
    counts: NDArray[np.intp] = taken.reshape(logprobs.shape).sum(axis=1)
    return counts


def _drafting(steps_per_req: list[int]) -> tuple[int, ...]:
    """Return how many requests draft at least 1, 2, ... steps."""
    by_steps = Counter(steps_per_req)
    rows, counts = 0, []
    for depth in range(max(by_steps), 0, -1):
        rows += by_steps[depth]
        counts.append(rows)
    return tuple(reversed(counts))


def _catch_up(rows: list[_Row], steps_per_req: list[int]) -> int:
    """Compute the missing draft KV of the requests that draft; return the number of entries."""
    total = 0
    for row, num_steps in zip(rows, steps_per_req, strict=True):
        if num_steps:
            total += row.length - 1 - row.num_draft_computed
            row.num_draft_computed = row.length - 1
    return total
