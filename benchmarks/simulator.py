"""Replays recorded acceptance through any policy: no model, and time is the sum of the costs.

What a round keeps is looked up (`trace`), what it takes is computed (`RoundCosts`), and the
policy is asked and told what the engine would ask and tell. Drafts are admitted by their recorded
shares as on the device (`ops.admission`). Prompts are computed in one piece, in rounds of their own
or beside the drafts of others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from time import thread_time
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from benchmarks.phases import Phase
from benchmarks.regret import best_arms, phase_regrets, relative_rates, trace_regret
from serve_spec.adaptive import AdaptiveController
from serve_spec.adaptive.calibration import logits
from serve_spec.adaptive.policy import StaticPolicy, StepPolicy
from serve_spec.bench.report import table
from serve_spec.bench.trace import TraceSet
from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.record import StepRecord, StepTimes
from serve_spec.core.round import GREEDY, SAMPLED, Calibration, DecodeBatch, Reason, RoundSteps

OnRound = Callable[[DecodeBatch, RoundSteps, StepRecord], None]


class RoundShape(NamedTuple):
    """Everything a round's time may depend on."""

    batch_size: int
    """Decode rows."""
    drafting: tuple[int, ...]
    """Rows that draft at least 1, 2, ... steps; as long as the deepest row drafts."""
    num_tokens: int
    """Context tokens of all decode rows."""
    num_sampled: int
    num_catch_up: int
    """Draft entries made up before drafting."""
    num_prefill_tokens: int
    draft: DraftShape = PLAIN
    """What rows draft; `drafting` counts the levels, of chains and of trees."""
    num_admitted: int | None = None
    """Drafts that are verified; None: all."""

    @property
    def num_steps(self) -> int:
        """Draft forwards: the deepest row's drafts."""
        return len(self.drafting)

    @property
    def num_rows(self) -> int:
        """Rows of decoding sequences in the target's forward, roots included."""
        if self.num_admitted is not None:
            return self.batch_size + self.num_admitted
        if self.draft.is_chain or not self.drafting:
            return self.batch_size + sum(self.drafting)
        # A row of fewer levels has the drafts its beams make.
        deeper = (*self.drafting[1:], 0)
        by_levels = enumerate(zip(self.drafting, deeper, strict=True), start=1)
        return self.batch_size + sum(
            (rows - beyond) * self.draft.size_at(levels) for levels, (rows, beyond) in by_levels
        )


RoundCosts: TypeAlias = Callable[[RoundShape], StepTimes]
"""What a round takes."""


@dataclass
class PhaseReport:
    """What one phase came to. The time of rounds without decode rows is kept apart."""

    phase: Phase
    num_rounds: int = 0
    """Rounds with decode rows."""
    num_rows: int = 0
    """Decode rows of all rounds."""
    num_draft_tokens: int = 0
    policy_ms: float = 0.0
    """CPU time of the policy; part of `decode_ms` if it is charged."""
    num_output_tokens: int = 0
    """Tokens of decode rows; the first of every text comes from its prompt."""
    decode_ms: float = 0.0
    prompt_ms: float = 0.0
    num_probe_rounds: int = 0
    probe_ms: float = 0.0
    """Rounds run to learn, whole."""
    rounds_by_shape: Counter[DraftShape] = field(default_factory=Counter)
    switches: Counter[Reason] = field(default_factory=Counter)

    @property
    def tokens_per_ms(self) -> float:
        """Speed of decoding."""
        return self.num_output_tokens / self.decode_ms

    @property
    def accept_length(self) -> float:
        """Tokens per decode row and round."""
        return self.num_output_tokens / self.num_rows if self.num_rows else 1.0

    @property
    def probe_share(self) -> float:
        """Share of the decoding time that rounds run to learn took."""
        return self.probe_ms / self.decode_ms

    def count(self, record: StepRecord, decode_ms: float) -> None:
        """Adds one round with decode rows."""
        self.num_rounds += 1
        self.num_rows += record.batch_size
        self.num_draft_tokens += record.num_draft_tokens
        self.num_output_tokens += record.num_output_tokens
        self.decode_ms += decode_ms
        self.num_probe_rounds += record.notes.is_probe
        self.probe_ms += decode_ms * record.notes.is_probe
        self.rounds_by_shape[record.shape] += 1


class ControllerPolicy:
    """An `AdaptiveController` where a policy is wanted. Its reasons show at switches only."""

    def __init__(self, controller: AdaptiveController) -> None:
        self.controller = controller
        self.shapes = controller.shapes
        self.choose = controller.choose_steps
        self.observe = controller.on_verify_complete
        self.forget = controller.forget
        self.snapshot = controller.snapshot

    @property
    def last_reason(self) -> Reason:
        """Why the tier changed in the last round, if it did."""
        return self.controller.switch_reason or Reason.STEADY


@dataclass(slots=True, eq=False)
class _Row:
    """A request while it runs."""

    request_id: str
    num_correct_drafts: Sequence[int]
    of_trees: Mapping[DraftShape, Sequence[int]]
    sampled: bool
    length: int
    """Tokens so far, the prompt's included."""
    remaining: int
    """Tokens to go."""
    shares: Sequence[Sequence[float]] = ()
    """Of the drafts in a round from each entry on."""
    at: int = 0
    """Which entry of its trace the next round meets."""
    num_draft_computed: int = 0
    num_prompt: int = 0

    def kept(self, shape: DraftShape) -> int:
        """Return the drafts that would be kept here, of a chain or of a tree."""
        counts = self.num_correct_drafts if shape.is_chain else self.of_trees[shape]
        return counts[self.at]


_Entry = TypeVar("_Entry")


def _from(start: int, counts: Sequence[_Entry]) -> Sequence[_Entry]:
    """The same in a circle, from another place."""
    return [*counts[start:], *counts[:start]]


class Simulator:
    """Runs phases one after the other with one policy, which learns throughout, as in a server.

    traces: recorded at least as deep as any tier, and as long as any phase's requests.
    max_num_batched_tokens: tokens a round computes at most, prompts and drafts together; drafts
        give way to prompts, which are never cut.
    charge_thinking: the policy's CPU time counts as time of the round.
    mixes_prompts: prompts share the rounds of other requests, and count in their time.
    on_round: told of every round with decode rows, after the policy.

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
        self._shape: DraftShape | None = None

    def run(self, phase: Phase) -> PhaseReport:
        """One phase, from its first prompt to its last token.

        Raises:
            ValueError: a kind of text that was not recorded, or not at this length.
        """
        report = PhaseReport(phase)
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
            for row in entering:  # the prompt's round draws the first token
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
            # Traces that come a second time start elsewhere, or their rows would run in step.
            start = 37 * lap % len(trace.num_correct_drafts)
            trees = zip(self.traces.trees, trace.of_trees, strict=True)
            yield _Row(
                request_id=f"{self._num_phases}-{number}",
                num_correct_drafts=_from(start, trace.num_correct_drafts),
                shares=_from(start, trace.draft_shares),
                of_trees={tree: _from(start, counts) for tree, counts in trees},
                sampled=kind.temperature > 0,
                length=trace.num_prompt_tokens,
                num_prompt=trace.num_prompt_tokens,
                remaining=num_tokens,
            )

    def _round(self, rows: list[_Row], entering: list[_Row], report: PhaseReport) -> list[_Row]:
        """One round with decode rows; those that go on."""
        batch = self._batch(rows, entering)
        started = thread_time()
        steps = self.policy.choose(batch)
        policy_ms = 1e3 * (thread_time() - started)
        if self._shape not in (None, steps.shape):
            report.switches[self.policy.last_reason] += 1
        self._shape = steps.shape
        drafted = row_steps = _row_steps(steps, batch)
        shares = self._shares(rows, steps)
        num_admitted = None
        if shares is not None and steps.budget is not None:
            kinds = np.array([SAMPLED if row.sampled else GREEDY for row in rows])
            row_steps = admitted(
                shares, np.array(drafted), kinds, steps.calibration, steps.budget
            ).tolist()
            num_admitted = sum(row_steps)
        kept = [
            min(num_steps, row.kept(steps.shape))
            for num_steps, row in zip(row_steps, rows, strict=True)
        ]
        shape = RoundShape(
            batch_size=len(rows),
            drafting=_drafting(drafted),
            num_tokens=batch.num_tokens,
            num_sampled=batch.num_sampled,
            num_catch_up=_catch_up(rows, drafted),
            num_prefill_tokens=0,
            draft=steps.shape,
            num_admitted=num_admitted,
        )
        if self.mixes_prompts:
            shape = shape._replace(num_prefill_tokens=sum([row.length for row in entering]))
        times = self.costs(shape)
        sampled = [row.sampled for row in rows]
        live = self._commit(rows, kept)
        record = StepRecord(
            shape=steps.shape,
            request_ids=tuple([batch.request_ids[i] for i in live]),
            row_steps=tuple([row_steps[i] for i in live]),
            row_correct_drafts=tuple([kept[i] for i in live]),
            row_drafted=() if num_admitted is None else tuple([drafted[i] for i in live]),
            draft_shares=None if shares is None else shares[live].astype(np.float32),
            budget=None if num_admitted is None else steps.budget,
            is_sampled=tuple([sampled[i] for i in live]),
            accept_lengths=tuple([count + 1 for count in kept]),
            num_draft_tokens=shape.num_rows - shape.batch_size,
            num_tokens=shape.num_tokens,
            num_sampled=shape.num_sampled,
            num_drafting=shape.drafting[0] if shape.drafting else 0,
            deepest=shape.num_steps,
            num_catch_up=shape.num_catch_up,
            num_prefill_tokens=shape.num_prefill_tokens,
            num_ended=len(rows) - len(live),
            num_ended_prompt_rows=sum([ended.num_prompt for ended in self._ended]),
            num_ended_tokens=sum([ended.length - ended.num_prompt for ended in self._ended]),
            times=times,
            notes=steps.notes,
        )
        started = thread_time()
        self.policy.observe(record)
        policy_ms += 1e3 * (thread_time() - started)
        report.policy_ms += policy_ms
        report.count(record, times.step_ms + policy_ms * self.charge_thinking)
        if self._on_round is not None:
            self._on_round(batch, steps, record)
        return [rows[i] for i in live]

    def _shares(self, rows: list[_Row], steps: RoundSteps) -> NDArray[np.float64] | None:
        """Return the shares of what each request drafts, [B, depth]; None if unknown."""
        if not steps.shape.depth or not steps.shape.is_chain or not all(row.shares for row in rows):
            return None
        return np.array([row.shares[row.at] for row in rows])[:, : steps.shape.depth]

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

    def _commit(self, rows: list[_Row], kept: list[int]) -> list[int]:
        """Moves every row on; the indices of those with tokens to go."""
        live = []
        self._ended: list[_Row] = []
        for index, (row, num_correct) in enumerate(zip(rows, kept, strict=True)):
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
    """Drafts per row, as the scheduler grants them: never more than usable; shares when scarce."""
    wanted = [steps.shape.depth] * batch.size if steps.row_steps is None else steps.row_steps
    usable = [
        want if want < most else most for want, most in zip(wanted, batch.max_steps, strict=True)
    ]
    if not steps.shape.is_chain or sum(usable) <= batch.max_draft_tokens:
        return usable
    share = batch.max_draft_tokens // batch.size
    return [min(num_steps, share) for num_steps in usable]


def admitted(
    shares: NDArray[np.float64],
    drafted: NDArray[np.intp],
    kinds: NDArray[np.intp],
    calibration: Calibration,
    budget: int,
) -> NDArray[np.intp]:
    """Return how many drafts of each chain are verified, as `ops.admission` decides.

    shares: [B, N]. drafted: [B], drafts of each. kinds: [B], rows of the calibration.
    """
    width = shares.shape[1]
    padded = [[*kind, *kind[-1:] * width][:width] for kind in calibration]
    pairs = np.array(padded)[kinds]
    chances = 1.0 / (1.0 + np.exp(-(pairs[..., 0] * logits(shares) + pairs[..., 1])))
    exists = (np.arange(width) < drafted[:, None]) & (shares > -np.inf)
    survival = np.cumprod(np.where(exists, chances, 0.0), axis=1).ravel()
    ranked = np.argsort(-survival, kind="stable")[:budget]
    taken = np.zeros(survival.size, dtype=bool)
    taken[ranked] = survival[ranked] > 0.0
    counts: NDArray[np.intp] = taken.reshape(shares.shape).sum(axis=1)
    return counts


def _drafting(row_steps: list[int]) -> tuple[int, ...]:
    """How many rows draft at least 1, 2, ... steps."""
    by_steps = Counter(row_steps)
    rows, counts = 0, []
    for depth in range(max(by_steps), 0, -1):
        rows += by_steps[depth]
        counts.append(rows)
    return tuple(reversed(counts))


def _catch_up(rows: list[_Row], row_steps: list[int]) -> int:
    """Makes up the missing draft entries of the rows that draft; how many there were."""
    total = 0
    for row, num_steps in zip(rows, row_steps, strict=True):
        if num_steps:
            total += row.length - 1 - row.num_draft_computed
            row.num_draft_computed = row.length - 1
    return total


@dataclass(frozen=True)
class Comparison:
    """Policies and fixed depths over the same phases."""

    reports: Mapping[str, Sequence[PhaseReport]]
    """By arm, phase by phase; fixed depths are called `K=n`, off is `K=0`, trees by their shape."""
    statics: tuple[str, ...]

    @property
    def rates(self) -> dict[str, list[float]]:
        """Tokens per ms of every arm, phase by phase."""
        return {arm: [r.tokens_per_ms for r in reports] for arm, reports in self.reports.items()}

    @property
    def best(self) -> list[str]:
        """The fastest fixed depth of every phase."""
        return best_arms(self.rates, self.statics)

    def phase_regrets(self, arm: str) -> list[float]:
        """See `regret.phase_regrets`."""
        regrets = phase_regrets(self.rates, arm, self.best)
        return [regret for regret in regrets if regret is not None]

    def regret(self, arm: str) -> float:
        """Of the whole trace: see `regret.trace_regret`."""
        tokens = [report.phase.total_tokens for report in self.reports[arm]]
        regret = trace_regret(self.rates, arm, self.best, tokens)
        assert regret is not None, "every arm runs every phase"
        return regret

    def worst_cell(self, arm: str) -> float:
        """The arm's smallest speed relative to off in any phase."""
        ratios = relative_rates(self.rates, arm, "K=0")
        return min(ratio for ratio in ratios if ratio is not None)

    def __str__(self) -> str:
        """Tokens per ms phase by phase, then what every arm lost."""
        arms = list(self.reports)
        phases = [report.phase.name for report in self.reports[arms[0]]]
        rates = [self.rates[arm] for arm in arms]
        rows: list[list[object]] = [
            [name, *(f"{rate[i]:.3f}" for rate in rates)] for i, name in enumerate(phases)
        ]
        rows.append(["regret", *(f"{self.regret(arm):.1%}" for arm in arms)])
        rows.append(["worst / off", *(f"{self.worst_cell(arm):.3f}" for arm in arms)])
        probes = [[report.probe_share for report in self.reports[arm]] for arm in arms]
        rows.append(["most probing", *(f"{max(shares):.1%}" for shares in probes)])
        switches = [sum(r.switches.total() for r in self.reports[arm]) for arm in arms]
        rows.append(["switches", *switches])
        return table(["tokens/ms", *arms], rows)


def compare(
    policies: Mapping[str, StepPolicy],
    phases: Sequence[Phase],
    traces: TraceSet,
    costs: RoundCosts,
    static_steps: Sequence[int] = (0, 1, 2, 3, 5, 7),
) -> Comparison:
    """Every policy, every fixed depth and every recorded tree over all phases in order.

    static_steps: 0 must be among them.
    """
    statics = {f"K={steps}": StaticPolicy(DraftShape.chain(steps)) for steps in static_steps}
    statics |= {str(tree): StaticPolicy(tree) for tree in traces.trees}
    reports = {}
    for arm, policy in {**statics, **policies}.items():
        simulator = Simulator(policy, traces, costs)
        reports[arm] = [simulator.run(phase) for phase in phases]
    return Comparison(reports, tuple(statics))
