"""Executes decode rounds on lanes, one launched before the one before it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from serve_spec.core.plan import PendingRound, RowPlan, StepPlan, StepResult
from serve_spec.drafters.eagle_lanes import EagleLaneDrafter
from serve_spec.runtime.graphs import Recorder
from serve_spec.runtime.lane_round import LaneRound
from serve_spec.runtime.lanes import LaneKeeper, Lanes
from serve_spec.runtime.spec_state import LaneStages, SpecRuntimeState
from serve_spec.runtime.timer import StageTimer
from serve_spec.verify.logprobs import LaneLogprobs
from serve_spec.verify.verifier import read_verdicts
from serve_spec.worker.lane_tiers import LaneTiers
from serve_spec.worker.worker import SpecWorker

_ROUNDS_IN_FLIGHT = 2


class LaneWorker:
    """Rounds of nothing but decoding run on lanes, from graphs; all others on the eager worker.

    Lengths and last tokens of such rounds stay on the device, so the next one may be submitted at
    any time; the host reads one small tensor of each.

    max_rows: most rows of one target forward. largest_batch: see `LaneTiers`.
    """

    execution = "lanes"

    def __init__(
        self,
        eager: SpecWorker,
        drafter: EagleLaneDrafter | None,
        lanes: Lanes,
        recorder: Recorder,
        max_rows: int,
        largest_batch: Callable[[int], int | None],
    ) -> None:
        self.eager = eager
        self.drafter = drafter
        self.lanes = lanes
        self.recorder = recorder
        self.max_rows = max_rows
        self.largest_batch = largest_batch
        self.vocab_size = eager.vocab_size
        self.device = eager.device
        self.dtype = eager.dtype
        self.draft_dtype = eager.draft_dtype
        self.synthetic_acceptance = eager.synthetic_acceptance
        self._keeper = LaneKeeper(lanes)
        self._seats: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._newest_timer: StageTimer | None = None

    @property
    def tiers(self) -> Mapping[int, SpecRuntimeState]:
        """Recorded tiers by num_steps."""
        return self.recorded.states

    @property
    def max_backlog_ahead(self) -> int:
        """Draft entries the widest catch-up stage makes."""
        return self.recorded.max_backlog

    def init_states(self, candidate_steps: Iterable[int]) -> None:
        """Records every tier's stages, and the plain one's."""
        self.eager.init_states(candidate_steps)
        head = None if self.drafter is None else self.drafter.head
        self.round = LaneRound.create(self.lanes, max(self.eager.tiers), head)
        self._read_backs = cycle(
            torch.empty_like(self.round.verdicts, device="cpu", pin_memory=self.lanes.pages.is_cuda)
            for _ in range(_ROUNDS_IN_FLIGHT + 1)
        )
        self._seats = None
        self.recorder.start_over()
        self.recorded = LaneTiers(
            self.eager,
            self.drafter,
            self.round,
            self.recorder,
            max_rows=self.max_rows,
            largest_batch=self.largest_batch,
        )
        self.recorded.build()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingRound:
        """Starts a round; on lanes, nothing is waited for."""
        if not all(row.is_decode for row in plan.rows):
            assert not plan.follows, "only decode rounds may follow one under way"
            self._keeper.forget(plan.rows)
            return self.eager.submit(plan)
        rows, backlog = plan.rows, plan.max_backlog
        if backlog > self.max_backlog_ahead:
            rows, backlog = self._shorten_backlogs(rows), self.max_backlog_ahead
        self._keeper.sync(rows)
        self._seat(rows)
        # From here on nothing is for the host to do: what it took before is the device's idle time.
        timer = StageTimer(self.device)
        timer.mark("start")
        tier = self.recorded.tier_for(max(row.num_steps for row in rows), len(rows))
        if tier.num_steps:
            self.recorded.extend_for(backlog, len(rows)).run(len(rows))
            self._stages(tier).draft.run(len(rows))
        timer.mark("drafted")
        num_rows = sum(row.num_steps + 1 for row in rows)
        self._stages(tier).verify.run(num_rows)
        read_back = next(self._read_backs)
        read_back.copy_(self.round.verdicts, non_blocking=True)
        logprobs = self._start_logprobs(tier, rows, num_rows) if plan.wants_logprobs else None
        timer.mark("verified")
        before, self._newest_timer = self._newest_timer, timer
        return _LaneRoundUnderWay(read_back, len(rows), timer, before, logprobs)

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a round to its end."""
        return self.submit(plan).result()

    def _start_logprobs(
        self, tier: SpecRuntimeState, rows: Sequence[RowPlan], num_rows: int
    ) -> LaneLogprobs:
        stages = self._stages(tier)
        logits = stages.logits[stages.verify.padded(num_rows)].tensor()
        return LaneLogprobs(rows, logits, self.round)

    @staticmethod
    def _stages(tier: SpecRuntimeState) -> LaneStages:
        assert tier.stages is not None, "a tier of this worker has stages"
        return tier.stages

    def _seat(self, rows: Sequence[RowPlan]) -> None:
        """Tells the device who takes part, unless it is as the round before."""
        seats = tuple(row.lane for row in rows), tuple(row.num_steps for row in rows)
        if seats != self._seats:
            self.round.seat(*seats)
            self._seats = seats

    def _shorten_backlogs(self, rows: Sequence[RowPlan]) -> tuple[RowPlan, ...]:
        """Makes the entries of prompts and long pauses, which no stage has room for."""
        drafter, longest = self.eager.drafter, self.max_backlog_ahead
        assert drafter is not None, "a plan with drafts needs a drafter"
        long = [row for row in rows if row.num_steps and len(row.catch_up_ids) > longest]
        # Their lanes do not hold the tokens of the backlog.
        self._keeper.forget(long)
        attention = self.eager.tiers[max(self.eager.tiers)].extend
        short = {row.lane: row for row in drafter.shorten_backlogs(long, longest, attention)}
        return tuple(short.get(row.lane, row) for row in rows)


@dataclass(frozen=True)
class _LaneRoundUnderWay:
    """See `PendingRound`. `before` are the marks of the round before, if one was; `logprobs` are
    for the rows that ask, if one does."""

    read_back: Tensor
    batch_size: int
    timer: StageTimer
    before: StageTimer | None
    logprobs: LaneLogprobs | None

    def result(self) -> StepResult:
        """Waits for the read-back, [B, K + 3] integers."""
        self.timer.wait("verified")
        verdict = read_verdicts(self.read_back[: self.batch_size].tolist())
        return StepResult(
            token_ids=verdict.token_ids,
            draft_ms=self.timer.ms("start", "drafted"),
            verify_ms=self.timer.ms("drafted", "verified"),
            broken_drafts=verdict.broken_drafts,
            logprobs={} if self.logprobs is None else self.logprobs.read(verdict.token_ids),
            idle_ms=0.0 if self.before is None else self.timer.ms_since(self.before, "verified"),
        )
