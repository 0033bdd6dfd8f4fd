"""Tiers of a worker on lanes: their stages, recorded once at every size they can meet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from tqdm import tqdm

from serve_spec.core.draft_shape import DraftShape
from serve_spec.drafters.eagle_lanes import EagleLaneDrafter
from serve_spec.log import get_logger
from serve_spec.runtime.graphs import (
    Leftover,
    Recorder,
    Run,
    StageGraphs,
    VerifyGraphs,
    batch_sizes,
    prompt_row_counts,
    row_counts,
)
from serve_spec.runtime.lane_round import LaneRound
from serve_spec.runtime.lane_target import verify_rows
from serve_spec.runtime.spec_state import LaneStages, SpecRuntimeState
from serve_spec.verify.lanes import LaneJudge
from serve_spec.worker.worker import SpecWorker

logger = get_logger(__name__)

WIDE_BACKLOG = 16
"""Draft entries that rounds without drafts may leave behind before the host has to help; more than
what any usual tier leaves, its drafts and one."""


@dataclass(frozen=True)
class StageCapture:
    """What recording some stages took; those a tier shares with deeper ones are counted there.

    shape: what the tier drafts; None: what all tiers share, the stages over texts the host knows.
    """

    shape: DraftShape | None
    num_stages: int
    seconds: float
    num_bytes: int

    def __str__(self) -> str:
        what = "prompts" if self.shape is None else f"tier {self.shape}"
        return (
            f"{what}: {self.num_stages} stages, {self.num_bytes / 2**20:.0f} MiB, "
            f"{self.seconds:.1f} s"
        )


@dataclass(frozen=True)
class _VerifyStage:
    """One verification, what it takes, and the logits it leaves."""

    run: Run
    milliseconds: float
    logits: Leftover


class LaneTiers:
    """All tiers of a worker, the largest recorded first: the others fit into its memory.

    Trees come before chains, and are recorded for every batch size.
    largest_batch: of a number of steps, the batch size beyond which no policy chooses it; None: it
    has no limit. The deepest tier has stages for every batch size, and stands in for the others.
    """

    def __init__(
        self,
        eager: SpecWorker,
        drafter: EagleLaneDrafter | None,
        round: LaneRound,
        recorder: Recorder,
        *,
        max_rows: int,
        largest_batch: Callable[[int], int | None],
    ) -> None:
        self.states: dict[DraftShape, SpecRuntimeState] = {}
        self.report: list[StageCapture] = []
        self._eager = eager
        self._drafter = drafter
        self._round = round
        self._recorder = recorder
        self._max_rows = max_rows
        self._largest_batch = largest_batch
        self._deepest = max(shape for shape in eager.tiers if shape.is_chain)
        self._judge = LaneJudge(
            round.max_steps,
            eager.device,
            eager.synthetic_acceptance,
            eager.rejection_sample_method,
            eager.parallel,
        )
        self._extends: dict[int, StageGraphs] = {}
        self._verify_stages: dict[tuple[int, int, bool], _VerifyStage] = {}

    def build(self) -> None:
        """Records every tier of the eager worker, then what runs over prompts.

        Raises:
            MemoryError: one does not fit; says what each takes.
        """
        shapes = sorted(self._eager.tiers, key=_size, reverse=True)
        for shape in tqdm(shapes, "tiers", leave=False):
            with self._reported(shape):
                self.states[shape] = self._tier(shape)
        with self._reported(None):
            kinds = dict.fromkeys(not shape.is_chain for shape in shapes)
            self._beside_prompts = {
                trees: self._record_beside_prompts(trees=trees) for trees in kinds
            }
            self.make_up = self._record_make_up()
        logger.info("recorded: %s", "; ".join(map(str, self.report)))

    @contextmanager
    def _reported(self, shape: DraftShape | None) -> Iterator[None]:
        """Notes what recording this takes."""
        started, reserved = time.perf_counter(), self._reserved_bytes()
        before = self._recorder.num_recorded

        def taken() -> StageCapture:
            return StageCapture(
                shape,
                self._recorder.num_recorded - before,
                time.perf_counter() - started,
                self._reserved_bytes() - reserved,
            )

        try:
            yield
        except torch.OutOfMemoryError as error:
            raise MemoryError(self._no_room_for(taken())) from error
        self.report.append(taken())

    @property
    def max_backlog(self) -> int:
        """Draft entries the widest catch-up makes; 0 without a drafter."""
        return max(self._extends, default=0)

    def tier_for(self, num_steps: int, batch_size: int) -> SpecRuntimeState:
        """The shallowest tier that holds `num_steps` of so many sequences: the whole switch."""
        fitting = (
            shape
            for shape in self.states
            if shape.is_chain and shape.depth >= num_steps and self._largest(shape) >= batch_size
        )
        return self.states[min(fitting, default=self._deepest)]

    def beside_prompts(self, tier: SpecRuntimeState) -> VerifyGraphs:
        """The verification of a tier in a round that computes prompts, too."""
        return self._beside_prompts[not tier.shape.is_chain]

    def extend_for(self, backlog: int, batch_size: int) -> StageGraphs:
        """The narrowest catch-up that makes `backlog` entries of so many sequences."""
        extends = self._extends.items()
        return self._extends[
            min(n for n, extend in extends if n >= backlog and extend.sizes[-1] >= batch_size)
        ]

    @torch.inference_mode()
    def _tier(self, shape: DraftShape) -> SpecRuntimeState:
        most = self._largest(shape)
        sizes = batch_sizes(most)
        query_len = shape.size + 1
        rows = row_counts(min(most * query_len, self._max_rows)) if shape.size else sizes
        extend = draft = StageGraphs({})
        if shape.depth and self._drafter is not None:
            extend = self._extend_stages(shape.depth, sizes)
            draft = StageGraphs({n: self._record_draft(n, shape) for n in reversed(sizes)})
        verify = self._record_verify_stages(rows, query_len, trees=not shape.is_chain)
        return replace(self._eager.tiers[shape], stages=LaneStages(extend, draft, verify))

    def _largest(self, shape: DraftShape) -> int:
        """The largest batch size a tier is recorded for."""
        most = self._round.max_batch_size
        if shape == self._deepest or not shape.is_chain:
            return most
        return min(most, self._largest_batch(shape.depth) or most)

    def _extend_stages(self, num_steps: int, sizes: Sequence[int]) -> StageGraphs:
        """Catch-ups after rounds of `num_steps`; before the first of them the widest one."""
        if not self._extends:
            # What a round leaves behind, and an entry that the host leaves of older ones.
            widest = max(WIDE_BACKLOG, self._round.max_steps + 2)
            all_sizes = batch_sizes(self._round.max_batch_size)
            self._extends[widest] = self._record_extends(widest, all_sizes)
        length = num_steps + 1
        if length not in self._extends or self._extends[length].sizes[-1] < sizes[-1]:
            self._extends[length] = self._record_extends(length, sizes)
        return self._extends[length]

    def _record_extends(self, extend_len: int, sizes: Sequence[int]) -> StageGraphs:
        drafter = self._drafter
        assert drafter is not None, "a tier that drafts needs a drafter"
        record = self._recorder.record
        return StageGraphs(
            {
                n: record(partial(drafter.extend, self._round, n, extend_len))
                for n in reversed(sizes)
            }
        )

    def _record_draft(self, batch_size: int, shape: DraftShape) -> Run:
        drafter, round = self._drafter, self._round
        assert drafter is not None, "a tier that drafts needs a drafter"

        def draft() -> None:
            if shape.is_chain:
                drafter.draft(round, batch_size, shape.depth)
            else:
                drafter.draft_trees(round, batch_size, shape)
            # Ranks with different drafts would verify a mixture of them.
            self._eager.parallel.broadcast(round.drafts)
            if not shape.is_chain:
                assert round.parents is not None, "a round with trees has room for them"
                self._eager.parallel.broadcast(round.parents)

        return self._recorder.record(draft)

    def _record_verify_stages(
        self, counts: Collection[int], query_len: int, *, trees: bool = False
    ) -> VerifyGraphs:
        """By rows. Tiers of about the same width share theirs: only attention's tiles differ."""
        width = 1 << (query_len - 1).bit_length()

        def stage(num_rows: int) -> _VerifyStage:
            key = num_rows, width, trees
            if key not in self._verify_stages:
                self._verify_stages[key] = self._record_verify(num_rows, width, trees=trees)
            return self._verify_stages[key]

        by_size = ((num_rows, stage(num_rows)) for num_rows in sorted(counts, reverse=True))
        return _verify_graphs(_none_slower(by_size))

    @torch.inference_mode()
    def _record_beside_prompts(self, *, trees: bool) -> VerifyGraphs:
        """By rows, those of prompts and those that draw, of whatever tier of trees or chains."""
        most = self._round.max_drafts if trees else self._deepest.depth
        width = 1 << most.bit_length()
        counts = prompt_row_counts(self._round.pieces.max_rows)
        return _verify_graphs(
            _none_slower(
                (rows, self._record_verify(rows, width, beside_prompts=True, trees=trees))
                for rows in reversed(counts)
            )
        )

    @torch.inference_mode()
    def _record_make_up(self) -> StageGraphs:
        drafter = self._drafter
        if drafter is None:
            return StageGraphs({})
        counts = prompt_row_counts(self._round.pieces.max_rows)
        record = self._recorder.record
        return StageGraphs(
            {n: record(partial(drafter.make_up, self._round, n)) for n in reversed(counts)}
        )

    def _record_verify(
        self, num_rows: int, width: int, *, beside_prompts: bool = False, trees: bool = False
    ) -> _VerifyStage:
        logits = self._recorder.leftover()
        target = self._eager.target

        def verify() -> None:
            rows = verify_rows(
                target, self._round, num_rows, width, beside_prompts=beside_prompts, trees=trees
            )
            logits.leave(rows.logits)
            accepted = self._judge(rows, self._round, has_drafts=width > 1)
            if trees:
                target.keep(rows.layout.slots, rows.layout.query_starts, accepted)

        run = self._recorder.record(verify)
        return _VerifyStage(run, self._milliseconds(run), logits)

    def _milliseconds(self, run: Run) -> float:
        """What a recorded stage takes: rank 0's word, so that all ranks pad alike."""
        found = torch.tensor([self._recorder.milliseconds(run)], device=self._eager.device)
        return float(self._eager.parallel.broadcast(found))

    def _reserved_bytes(self) -> int:
        return (
            torch.cuda.memory_reserved(self._eager.device)
            if self._eager.device.type == "cuda"
            else 0
        )

    def _no_room_for(self, failed: StageCapture) -> str:
        """What a device too small for the tiers is told: what each took, `failed` until then."""
        shape = failed.shape
        held = "; ".join(map(str, self.report)) or "nothing"
        if shape is None:
            what = f"max_num_batched_tokens={self._max_rows}"
            way_out = "max_num_batched_tokens"
        else:
            what = f"num_steps={shape.depth}, max_num_seqs={self._round.max_batch_size}"
            way_out = f"leave {shape} out of the candidate steps (speculative_adaptive_config)"
            if not shape.is_chain:
                what = f"speculative_num_draft_tokens={shape.size + 1}, {what}"
                way_out = "draft smaller trees, or chains (speculative_eagle_topk=1)"
        return (
            f"{what}: the device has no memory left for these stages, of which it holds {failed} "
            f"(recorded before: {held}). "
            f"Lower memory_fraction or max_num_seqs, or {way_out}"
        )


def _none_slower(stages: Iterable[tuple[int, _VerifyStage]]) -> dict[int, _VerifyStage]:
    """Of stages by size, the largest first, those that take no longer than a larger one.

    Products of some sizes do; their rows are padded to the larger.
    """
    kept: dict[int, _VerifyStage] = {}
    fastest = math.inf
    for num_rows, stage in stages:
        if stage.milliseconds <= fastest:
            kept[num_rows], fastest = stage, stage.milliseconds
    return kept


def _size(shape: DraftShape) -> tuple[bool, int, int]:
    """Trees above all chains."""
    return not shape.is_chain, shape.size, shape.depth


def _verify_graphs(stages: Mapping[int, _VerifyStage]) -> VerifyGraphs:
    return VerifyGraphs(
        {size: stage.run for size, stage in stages.items()},
        {size: stage.logits for size, stage in stages.items()},
    )
