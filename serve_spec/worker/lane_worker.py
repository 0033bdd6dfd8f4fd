"""Executes decode rounds on lanes, one launched before the one before it is read."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor
from tqdm import tqdm

from serve_spec.core.plan import PendingRound, RowPlan, StepPlan, StepResult
from serve_spec.drafters.eagle_lanes import EagleLaneDrafter
from serve_spec.log import get_logger
from serve_spec.runtime.graphs import Recorder, Run, StageGraphs, batch_sizes, row_counts
from serve_spec.runtime.lane_round import LaneRound
from serve_spec.runtime.lane_target import verify_rows
from serve_spec.runtime.lanes import LaneKeeper, Lanes
from serve_spec.runtime.spec_state import LaneStages, SpecRuntimeState
from serve_spec.runtime.timer import StageTimer
from serve_spec.verify.lanes import LaneJudge
from serve_spec.verify.verifier import whole
from serve_spec.worker.worker import SpecWorker

logger = get_logger(__name__)

_ROUNDS_IN_FLIGHT = 2
_WIDE_BACKLOG = 16
"""Entries made up without the host where rounds without drafts went before; more than any tier's
own catch-up of its drafts and one."""


@dataclass(frozen=True)
class TierCapture:
    """What recording one tier took; stages it shares with deeper tiers are counted there."""

    num_steps: int
    num_stages: int
    seconds: float
    num_bytes: int

    def __str__(self) -> str:
        return (
            f"tier {self.num_steps}: {self.num_stages} stages, {self.num_bytes / 2**20:.0f} MiB, "
            f"{self.seconds:.1f} s"
        )


class LaneWorker:
    """Rounds of nothing but decoding run on lanes, from graphs; all others on the eager worker.

    Lengths and last tokens of such rounds stay on the device, so the next one may be submitted at
    any time; the host reads one small tensor of each.

    max_rows: most rows of one target forward. largest_batch: of a number of steps, the batch size
    beyond which no policy chooses it; None: it has no limit.
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
        self.tiers: dict[int, SpecRuntimeState] = {}
        self.capture_report: list[TierCapture] = []
        self._keeper = LaneKeeper(lanes)
        self._seats: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._verify_stages: dict[tuple[int, int], tuple[Run, float]] = {}
        self._extends: dict[int, StageGraphs] = {}
        self._newest_timer: StageTimer | None = None

    @property
    def max_backlog_ahead(self) -> int:
        """Entries the widest catch-up stage makes."""
        return max(self._extends, default=0)

    def init_states(self, candidate_steps: Iterable[int]) -> None:
        """Records every tier's stages, the deepest first, and the plain one."""
        self.eager.init_states(candidate_steps)
        max_steps, head = max(self.eager.tiers), self.drafter.head if self.drafter else None
        self.round = LaneRound.create(self.lanes, max_steps, head)
        self.judge = LaneJudge(
            max_steps, self.device, self.synthetic_acceptance, self.eager.parallel
        )
        self._read_backs = cycle(
            torch.empty_like(self.round.verdicts, device="cpu", pin_memory=self.lanes.pages.is_cuda)
            for _ in range(_ROUNDS_IN_FLIGHT + 1)
        )
        self._seats = None
        self._verify_stages.clear()
        self._extends.clear()
        self.tiers.clear()
        self.recorder.start_over()
        tiers = sorted(self.eager.tiers, reverse=True)
        for num_steps in tqdm(tiers, desc="recording tiers", leave=False):
            self.capture_report.append(self._build_tier(num_steps))
        logger.info("recorded: %s", "; ".join(map(str, self.capture_report)))

    def _build_tier(self, num_steps: int) -> TierCapture:
        started, reserved = time.perf_counter(), self._reserved_bytes()
        before = self.recorder.num_recorded
        try:
            self.tiers[num_steps] = self.build_adaptive_runtime_state(num_steps)
        except torch.OutOfMemoryError as error:
            raise MemoryError(self._no_room_for(num_steps)) from error
        return TierCapture(
            num_steps,
            self.recorder.num_recorded - before,
            time.perf_counter() - started,
            self._reserved_bytes() - reserved,
        )

    def _reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def _no_room_for(self, num_steps: int) -> str:
        """What a GPU too small for the tiers is told."""
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        held = "; ".join(map(str, self.capture_report)) or "none was recorded"
        return (
            f"num_steps={num_steps}, max_num_seqs={self.lanes.padding}: no memory is left "
            f"for this tier ({free_bytes / 2**20:.0f} MiB are free; {held}). Lower memory_fraction "
            f"or max_num_seqs, or leave {num_steps} out of the candidate steps "
            "(speculative_adaptive_config)"
        )

    @torch.inference_mode()
    def build_adaptive_runtime_state(self, num_steps: int) -> SpecRuntimeState:
        """The stages of one tier at every size it can meet."""
        is_deepest = num_steps == max(self.eager.tiers)
        most = self.round.max_batch_size if is_deepest else self._largest(num_steps)
        sizes = batch_sizes(most)
        rows = row_counts(min(most * (num_steps + 1), self.max_rows)) if num_steps else sizes
        extend = draft = StageGraphs({})
        if num_steps:
            if is_deepest:
                self._extends[_WIDE_BACKLOG] = self._record_extends(_WIDE_BACKLOG, sizes)
            extend = self._extends[num_steps + 1] = self._record_extends(num_steps + 1, sizes)
            draft = StageGraphs({n: self._record_draft(n, num_steps) for n in reversed(sizes)})
        verify = self._record_verify_stages(rows, num_steps + 1)
        return replace(
            self.eager.tiers[num_steps], stages=LaneStages(extend, draft, StageGraphs(verify))
        )

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
        tier = self.tier_for(max(row.num_steps for row in rows), len(rows))
        if tier.num_steps:
            self._extend(backlog, len(rows)).run(len(rows))
            self._stages(tier).draft.run(len(rows))
        timer.mark("drafted")
        self._stages(tier).verify.run(sum(row.num_steps + 1 for row in rows))
        read_back = next(self._read_backs)
        read_back.copy_(self.round.verdicts, non_blocking=True)
        timer.mark("verified")
        before, self._newest_timer = self._newest_timer, timer
        return _LaneRoundUnderWay(read_back, len(rows), timer, before)

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a round to its end."""
        return self.submit(plan).result()

    def tier_for(self, num_steps: int, batch_size: int) -> SpecRuntimeState:
        """The shallowest tier that holds `num_steps` of so many sequences: the whole switch."""
        deepest = max(self.tiers)
        fitting = (s for s in self.tiers if s >= num_steps and self._largest(s) >= batch_size)
        return self.tiers[min(fitting, default=deepest)]

    def _largest(self, num_steps: int) -> int:
        """The largest batch size a tier can be chosen for."""
        most = self.round.max_batch_size
        return min(most, self.largest_batch(num_steps) or most)

    def _extend(self, backlog: int, batch_size: int) -> StageGraphs:
        """The narrowest catch-up that makes `backlog` entries of so many sequences."""
        extends = self._extends.items()
        return self._extends[
            min(n for n, extend in extends if n >= backlog and extend.sizes[-1] >= batch_size)
        ]

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

    def _record_extends(self, extend_len: int, sizes: Sequence[int]) -> StageGraphs:
        drafter = self.drafter
        assert drafter is not None, "a tier that drafts needs a drafter"
        record = self.recorder.record
        return StageGraphs(
            {n: record(partial(drafter.extend, self.round, n, extend_len)) for n in reversed(sizes)}
        )

    def _record_draft(self, batch_size: int, num_steps: int) -> Run:
        drafter = self.drafter
        assert drafter is not None, "a tier that drafts needs a drafter"

        def draft() -> None:
            drafter.draft(self.round, batch_size, num_steps)
            # Ranks with different drafts would verify a mixture of them.
            self.eager.parallel.broadcast(self.round.drafts)

        return self.recorder.record(draft)

    def _record_verify_stages(self, row_counts: Sequence[int], query_len: int) -> dict[int, Run]:
        """By rows. Tiers of about the same width share theirs: only attention's tiles differ.

        Products of some sizes take longer than those of larger ones; such sizes are left out, so
        that their rows are padded to the larger.
        """
        width = 1 << (query_len - 1).bit_length()
        runs: dict[int, Run] = {}
        fastest = math.inf
        for num_rows in sorted(row_counts, reverse=True):
            key = num_rows, width
            if key not in self._verify_stages:
                run = self.recorder.record(partial(self._verify, num_rows, width))
                self._verify_stages[key] = run, self._milliseconds(run)
            run, milliseconds = self._verify_stages[key]
            if milliseconds <= fastest:
                runs[num_rows], fastest = run, milliseconds
        return runs

    def _milliseconds(self, run: Run) -> float:
        """What a recorded stage takes: rank 0's word, so that all ranks pad alike."""
        found = torch.tensor([self.recorder.milliseconds(run)], device=self.device)
        return float(self.eager.parallel.broadcast(found))

    def _verify(self, num_rows: int, width: int) -> None:
        self.judge(verify_rows(self.eager.target, self.round, num_rows, width), self.round)


@dataclass(frozen=True)
class _LaneRoundUnderWay:
    """See `PendingRound`. `before` are the marks of the round before, if one was."""

    read_back: Tensor
    batch_size: int
    timer: StageTimer
    before: StageTimer | None

    def result(self) -> StepResult:
        """Waits for the read-back, [B, K + 3] integers."""
        self.timer.wait("verified")
        verdicts = self.read_back[: self.batch_size].tolist()
        return StepResult(
            token_ids=whole([verdict[2 : verdict[0] + 3] for verdict in verdicts]),
            draft_ms=self.timer.ms("start", "drafted"),
            verify_ms=self.timer.ms("drafted", "verified"),
            broken_drafts=tuple(b for b, verdict in enumerate(verdicts) if verdict[1]),
            idle_ms=0.0 if self.before is None else self.timer.ms_since(self.before, "verified"),
        )
