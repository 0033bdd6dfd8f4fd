"""Executes decode rounds on lanes, one launched before the one before it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from serve_spec.core.draft import TextDrafts
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.plan import AheadLimits, PendingRound, RowPlan, StepPlan, StepResult
from serve_spec.drafters.eagle_lanes import EagleLaneDrafter
from serve_spec.runtime.graphs import Recorder
from serve_spec.runtime.lane_round import LaneRound
from serve_spec.runtime.lanes import LaneKeeper, Lanes
from serve_spec.runtime.pieces import Stretch, parted
from serve_spec.runtime.spec_state import LaneStages, SpecRuntimeState
from serve_spec.runtime.timer import StageTimer
from serve_spec.verify.logprobs import LaneLogprobs
from serve_spec.verify.verifier import read_verdicts
from serve_spec.worker.lane_tiers import LaneTiers
from serve_spec.worker.worker import SpecWorker

MAX_PROMPT_ROWS = 1024
"""Most rows of a round on lanes that computes prompts. The arithmetic of more takes longer than
launching it, so that recording it gains nothing."""

MAX_PROMPT_LENGTH = 2048
"""Of longer texts every piece would read too much of the cache; FlashInfer reads it less often."""

_ROUNDS_IN_FLIGHT = 2


class LaneWorker:
    """Rounds of decoding and short prompts run on lanes, from graphs; others on the eager worker.

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
        self.grammars = eager.grammars
        self._keeper = LaneKeeper(lanes)
        self._seats: tuple[tuple[int, ...], ...] | None = None
        self._sharpness: float | None = None
        self._newest_timer: StageTimer | None = None

    @property
    def tiers(self) -> Mapping[DraftShape, SpecRuntimeState]:
        """Recorded tiers by shape."""
        return self.recorded.states

    def init_states(self, shapes: Iterable[DraftShape]) -> None:
        """Records every tier's stages, and the plain one's."""
        self.eager.init_states(shapes)
        deepest = max(shape.depth for shape in self.eager.tiers)
        largest = max(shape.tree_size for shape in self.eager.tiers)
        head = None if self.drafter is None else self.drafter.head
        max_prompt_rows = min(MAX_PROMPT_ROWS, self.max_rows)
        self.round = LaneRound.create(
            self.lanes,
            deepest,
            head,
            max_prompt_rows,
            largest,
            samples_drafts=self.eager.samples_drafts,
        )
        self._read_backs = cycle(
            torch.empty_like(self.round.verdicts, device="cpu", pin_memory=self.lanes.pages.is_cuda)
            for _ in range(_ROUNDS_IN_FLIGHT + 1)
        )
        self._seats = self._sharpness = None
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
        self.ahead = AheadLimits(self.recorded.max_backlog, max_prompt_rows, MAX_PROMPT_LENGTH)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> PendingRound:
        """Starts a round; on lanes, nothing is waited for."""
        if not self.ahead.take(plan):
            assert not plan.follows, "what the host has to plan may not follow a round under way"
            self._keeper.forget(plan.rows)
            return self.eager.submit(plan)
        rows, prompts = plan.decode_rows, plan.prompt_rows
        self._keeper.forget(prompts)  # they may have been here before, and lost their pages
        self._keeper.sync(plan.rows)
        # Theirs is no place to go on from: of a text whose last token alone is left, that token is
        # the root of the next round.
        self._keeper.forget(row for row in prompts if not row.samples)
        tier = self._tier(plan, max((row.num_steps for row in rows), default=0), len(rows))
        if tier.shape.depth:
            self._seat(rows)
        # From here on nothing is for the host to do: what it took before is the device's idle time.
        timer = StageTimer(self.device)
        timer.mark("start")
        if tier.shape.depth:
            self._sharpen(plan.draft_sharpness)
            self._draft(rows, plan)
        timer.mark("drafted")
        plan = self._mask(plan)
        read_back, logprobs = self._verify(plan, tier)
        timer.mark("verified")
        before, self._newest_timer = self._newest_timer, timer
        return _LaneRoundUnderWay(read_back, timer, before, logprobs)

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a round to its end."""
        return self.submit(plan).result()

    def _tier(self, plan: StepPlan, num_steps: int, batch_size: int) -> SpecRuntimeState:
        if not plan.shape.is_chain and num_steps:
            return self.recorded.states[plan.shape]
        return self.recorded.tier_for(num_steps, batch_size)

    def _draft(self, rows: Sequence[RowPlan], plan: StepPlan) -> None:
        """Catches up and drafts, where a model is asked; drafts from texts go in between."""
        if self.drafter is not None and any(row.model_steps for row in rows):
            self._ask_model(rows, plan)
        from_text = {
            b: TextDrafts(row.draft_ids, row.draft_parents)
            for b, row in enumerate(rows)
            if row.draft_ids
        }
        if from_text:
            self.round.write_drafts(from_text)

    def _ask_model(self, rows: Sequence[RowPlan], plan: StepPlan) -> None:
        """Drafts for every row, as deep as any of them is to."""
        max_backlog = plan.max_backlog
        long = [row for row in rows if row.model_steps and row.backlog > self.ahead.max_backlog]
        if long:
            self._make_up(long)
            max_backlog = max(self._backlog_left(row) for row in rows if row.catches_up)
        self.recorded.extend_for(max_backlog, len(rows)).run(len(rows))
        tier = self._tier(plan, max(row.model_steps for row in rows), len(rows))
        self._stages(tier).draft.run(len(rows))

    def _mask(self, plan: StepPlan) -> StepPlan:
        """Writes the round's masks by grammar; the plan without drafts that can not be drawn."""
        if not plan.has_grammars:
            self.round.masks.clear()
            return plan
        masks = self.eager.round_masks(plan, self.round.drafted(plan))
        self.round.masks.write(masks)
        return plan.cut(masks.num_drafts) if plan.shape.is_chain else plan

    def _verify(self, plan: StepPlan, tier: SpecRuntimeState) -> tuple[Tensor, LaneLogprobs | None]:
        """Where the host will find the verdicts of the sampling rows, and what else they ask."""
        members = plan.sampling_rows
        # The last rows of prompts draw with the others, but took no part in drafting.
        self._seat(members)
        prompts = plan.prompt_rows
        verify = self._stages(tier).verify
        num_rows = plan.num_rows
        if prompts:
            fewest = self.round.pieces.write(_computed_only(row) for row in prompts)
            num_rows = max(num_rows, fewest)
            verify = self.recorded.beside_prompts(tier)
        verify.run(num_rows)
        read_back = next(self._read_backs)
        read_back.copy_(self.round.verdicts, non_blocking=True)
        logprobs = None
        if plan.wants_logprobs:
            trees = not tier.shape.is_chain
            logits = verify.logits(num_rows)
            logprobs = LaneLogprobs(members, logits, self.round, trees=trees)
        return read_back[: len(members)], logprobs

    @staticmethod
    def _stages(tier: SpecRuntimeState) -> LaneStages:
        assert tier.stages is not None, "a tier of this worker has stages"
        return tier.stages

    def _seat(self, rows: Sequence[RowPlan]) -> None:
        """Tells the device who takes part, unless it is as the round before."""
        seats = (
            tuple([row.lane for row in rows]),
            tuple([row.num_steps for row in rows]),
            tuple([row.num_draft_tokens for row in rows]),
        )
        if seats != self._seats:
            self.round.seat(*seats)
            self._seats = seats

    def _sharpen(self, sharpness: float) -> None:
        """Tells the device how sharp to draft, unless it is as the round before."""
        if sharpness != self._sharpness:
            self.round.sharpness.fill_(sharpness)
            self._sharpness = sharpness

    def _make_up(self, rows: Sequence[RowPlan]) -> None:
        """Makes the draft entries of prompts and long pauses, all the host knows the tokens of.

        But for one: what a stage makes up from there on is among the tokens that lanes hold.
        """
        made_up = [row._replace(draft_start=row.start - 1) for row in rows]
        backlogs = (Stretch(row.lane, row.draft_start, row.catch_up_ids[:-1]) for row in rows)
        pieces = self.round.pieces
        for group in parted(backlogs, pieces.max_rows):
            self.recorded.make_up.run(pieces.write(group))
        self._keeper.caught_up(made_up)

    def _backlog_left(self, row: RowPlan) -> int:
        """Most entries a row lacks after `_make_up`: that one, and those of a round under way."""
        if row.backlog <= self.ahead.max_backlog:
            return row.backlog
        return row.backlog - (row.start - row.draft_start) + 1


def _computed_only(row: RowPlan) -> Stretch:
    """What a round computes of a prompt beside the row that draws, if one does."""
    return Stretch(row.lane, row.start, row.token_ids[:-1] if row.samples else row.token_ids)


@dataclass(frozen=True)
class _LaneRoundUnderWay:
    """See `PendingRound`. `before` are the marks of the round before, if one was; `logprobs` are
    for the rows that ask, if one does."""

    read_back: Tensor
    timer: StageTimer
    before: StageTimer | None
    logprobs: LaneLogprobs | None

    def result(self) -> StepResult:
        """Waits for the read-back, [B, K + 3] integers."""
        self.timer.wait("verified")
        verdict = read_verdicts(self.read_back.tolist())
        return StepResult(
            token_ids=verdict.token_ids,
            draft_ms=self.timer.ms("start", "drafted"),
            verify_ms=self.timer.ms("drafted", "verified"),
            broken_drafts=verdict.broken_drafts,
            logprobs={} if self.logprobs is None else self.logprobs.read(verdict.token_ids),
            idle_ms=0.0 if self.before is None else self.timer.ms_since(self.before, "verified"),
        )
