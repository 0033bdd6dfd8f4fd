"""Executes plans: draft, verify, accept. The paper's round, one verb per line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from serve_spec.core.context import AttentionBackend
from serve_spec.core.draft import DraftChain, DraftTrees, VerifyResult, padded_drafts
from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.plan import (
    AheadLimits,
    FinishedRound,
    PendingRound,
    RowPlan,
    StepPlan,
    StepResult,
)
from serve_spec.drafters.base import Drafter
from serve_spec.ops import token_masks
from serve_spec.ops.sampling import SamplingRows
from serve_spec.parallel.group import SINGLE, TensorParallel
from serve_spec.runtime.inputs import VerifyInputs, verify_inputs
from serve_spec.runtime.score_edits import edit_round
from serve_spec.runtime.spec_state import SpecRuntimeState
from serve_spec.runtime.target import TargetRunner
from serve_spec.runtime.timer import StageTimer
from serve_spec.runtime.token_masks import mask_tensors
from serve_spec.structured.masks import Grammars, RoundMasks
from serve_spec.verify.logprobs import (
    Logprobs,
    ScoredTokens,
    emitted_tokens,
    prompt_tokens,
    read_logprobs,
)
from serve_spec.verify.synthetic import Acceptance, choose_verdict, forced_counts
from serve_spec.verify.trees import judge_trees


class Worker(Protocol):
    """What an engine asks of whatever executes its plans."""

    vocab_size: int
    device: torch.device
    synthetic_acceptance: Acceptance | None
    grammars: Grammars
    execution: str
    """How decode rounds run: eager, or lanes."""

    @property
    def dtype(self) -> torch.dtype:
        """What the target computes in."""
        ...

    @property
    def draft_dtype(self) -> torch.dtype | None:
        """What the draft computes in; None: there is none."""
        ...

    @property
    def ahead(self) -> AheadLimits | None:
        """What a plan that `follows` may ask for; None: no plan may follow."""
        ...

    @property
    def tiers(self) -> Mapping[DraftShape, SpecRuntimeState]:
        """Built tiers by shape."""
        ...

    def init_states(self, shapes: Iterable[DraftShape]) -> None:
        """Builds every tier the policy may choose, before the first round."""
        ...

    def submit(self, plan: StepPlan) -> PendingRound:
        """Starts a round."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs a round to its end."""
        ...


class SpecWorker:
    """A target, a drafter (or none) and one runtime state per shape.

    synthetic_acceptance: forces the verdict, for load tests; see `verify.synthetic`.
    rejection_sample_method: how drafts are judged; the drafter draws them for it.
    """

    execution = "eager"

    def __init__(
        self,
        target: TargetRunner,
        drafter: Drafter | None,
        *,
        target_attention: AttentionBackend,
        draft_attention: AttentionBackend | None,
        page_size: int,
        vocab_size: int,
        device: torch.device,
        grammars: Grammars,
        synthetic_acceptance: Acceptance | None = None,
        rejection_sample_method: str = "coupled",
        parallel: TensorParallel = SINGLE,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.target_attention = target_attention
        self.draft_attention = draft_attention
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.device = device
        self.grammars = grammars
        self.synthetic_acceptance = synthetic_acceptance
        self.rejection_sample_method = rejection_sample_method
        self.parallel = parallel
        self.verdict = choose_verdict(synthetic_acceptance, rejection_sample_method)
        self.tiers: dict[DraftShape, SpecRuntimeState] = {}
        self.ahead: AheadLimits | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What the target computes in."""
        return self.target.pool.keys.dtype

    @property
    def draft_dtype(self) -> torch.dtype | None:
        """What the draft computes in; None: there is none."""
        return None if self.drafter is None else self.drafter.dtype

    @property
    def samples_drafts(self) -> bool:
        """Whether drafts are drawn from distributions of their own, by which they are judged."""
        return self.rejection_sample_method != "coupled"

    def init_states(self, shapes: Iterable[DraftShape]) -> None:
        """Builds every tier the policy may choose, and the plain one, before the first round."""
        for shape in {PLAIN, *shapes}:
            self.tiers[shape] = self.build_adaptive_runtime_state(shape)

    def build_adaptive_runtime_state(self, shape: DraftShape) -> SpecRuntimeState:
        """Everything built for `shape`. Eager attention has no shapes, so tiers share it."""
        return SpecRuntimeState(
            shape,
            draft=self.draft_attention,
            verify=self.target_attention,
            extend=self.draft_attention,
        )

    def submit(self, plan: StepPlan) -> PendingRound:
        """The round, run to its end: what follows needs its tokens on the host."""
        return FinishedRound(self.execute(plan))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """One round: propose, run the target over every row, judge."""
        tier = self.tiers[plan.shape]
        timer = StageTimer(self.device)
        timer.mark("start")
        sampling = self._sampling_rows(plan)
        timer.mark("noise made")
        drafts = self._propose(plan, sampling, tier)
        timer.mark("drafted")
        masks = None
        if plan.has_grammars:
            masks = self.round_masks(plan, drafts)
            if isinstance(drafts, DraftChain):
                plan, drafts, sampling = _without_illegal_drafts(plan, drafts, sampling, masks)
        inputs = verify_inputs(plan, drafts, self.page_size, self.device)
        hidden = self.target.forward(inputs.token_ids, inputs.batch, tier.verify)
        verdict = VerifyResult([])
        logprobs: Logprobs = {}
        if len(inputs.draw_rows):
            logits = self.target.logits(hidden[inputs.draw_rows])
            edit_round(plan, inputs.token_ids[inputs.draw_rows], logits, inputs.trees)
            if masks is not None:
                token_masks.mask_scores(logits, *mask_tensors(masks, self.device))
            verdict = self._judge(plan, logits, drafts, sampling, inputs)
            logprobs = self._read_logprobs(emitted_tokens(plan, verdict), lambda at: logits[at])
        prompt_logprobs = self._read_logprobs(
            prompt_tokens(plan), lambda at: self.target.logits(hidden[at])
        )
        timer.mark("verified")
        return StepResult(
            token_ids=verdict.token_ids,
            draft_ms=timer.ms("noise made", "drafted"),
            # The noise is the target's; drafts only read it.
            verify_ms=timer.ms("start", "noise made") + timer.ms("drafted", "verified"),
            broken_drafts=verdict.broken_drafts,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def round_masks(self, plan: StepPlan, drafts: DraftChain | DraftTrees) -> RoundMasks:
        """What the draws of a round may be; drafts: of each sampling row, and perhaps of more.

        The host waits for the drafts, unless they are its own.
        """
        rows = plan.sampling_rows
        is_tree = isinstance(drafts, DraftTrees)
        if not any(row.model_steps for row in rows):
            token_ids = [row.draft_ids for row in rows]
            parents = [row.draft_parents for row in rows] if is_tree else None
            return self.grammars.round_masks(rows, token_ids, parents, keeps_all=is_tree)
        self.grammars.read(rows)  # while the device drafts
        token_ids = drafts.token_ids[: len(rows)].tolist()
        if isinstance(drafts, DraftTrees):
            parents = drafts.parents[: len(rows)].tolist()
            return self.grammars.round_masks(rows, token_ids, parents, keeps_all=True)
        # Rejection weighs sampled drafts as they were drawn, those of no probability, too.
        return self.grammars.round_masks(rows, token_ids, keeps_all=self.samples_drafts)

    def _read_logprobs(
        self, scored: list[ScoredTokens], logits_of: Callable[[Tensor], Tensor]
    ) -> Logprobs:
        # On every rank, for each has only its share of the head.
        return read_logprobs(scored, logits_of, self.vocab_size, self.device)

    def _sampling_rows(self, plan: StepPlan) -> SamplingRows:
        """One row per position of the round: row `r` of sequence b decides length_b + r.

        In a tree several draws decide one position.
        """
        draws = [(row, i) for row in plan.sampling_rows for i in range(row.num_steps + 1)]
        return SamplingRows.create(
            params=[row.params for row, _ in draws],
            seeds=[row.seed for row, _ in draws],
            positions=[row.length + i for row, i in draws],
            vocab_size=self.vocab_size,
            device=self.device,
            draft_sharpness=plan.draft_sharpness,
        )

    def _judge(
        self,
        plan: StepPlan,
        logits: Tensor,
        drafts: DraftChain | DraftTrees,
        sampling: SamplingRows,
        inputs: VerifyInputs,
    ) -> VerifyResult:
        """What every row emits. What a tree's kept drafts left in the caches becomes a chain's."""
        if isinstance(drafts, DraftChain):
            return self.verdict(logits, drafts, sampling)
        trees = inputs.trees
        assert trees is not None, "drafts that branch are verified as trees"
        rows = plan.sampling_rows
        steps = [row.num_steps for row in rows]
        forced = forced_counts(self.verdict, steps, sampling)
        params = [row.params for row in rows for _ in range(row.num_draft_tokens + 1)]
        first = torch.tensor([0, *accumulate(n + 1 for n in steps)][:-1], device=self.device)
        draws = sampling.spread(first[trees.owners] + trees.depths, params)
        verdict, accepted = judge_trees(logits, trees, draws, max(steps), forced)
        slots = inputs.batch.slots[inputs.draw_rows]
        self.target.keep(slots, trees.query_starts, accepted)
        return verdict

    def _propose(
        self, plan: StepPlan, sampling: SamplingRows, tier: SpecRuntimeState
    ) -> DraftChain | DraftTrees:
        rows = plan.sampling_rows
        steps = tuple(row.num_steps for row in rows)
        drafting = [b for b, row in enumerate(rows) if row.model_steps]
        root_draws = [sum(steps[:b]) + b for b in drafting]
        if not plan.shape.is_chain and any(steps):
            return self._propose_trees(rows, drafting, root_draws, sampling, tier)
        # What the host found is the same on every rank.
        tokens, laws = self._padded((row.draft_ids for row in rows), max(steps, default=0)), None
        if self.drafter is not None and drafting:
            proposal = self.drafter.propose([rows[b] for b in drafting], root_draws, sampling, tier)
            drafts, laws = proposal.token_ids, proposal.laws
            # Ranks with different drafts would verify a mixture of them.
            self.parallel.broadcast(drafts)
            if drafts.shape == tokens.shape:
                tokens = drafts
            else:
                tokens[drafting, : drafts.shape[1]] = drafts
        return DraftChain(tokens, steps, laws)

    def _propose_trees(
        self,
        rows: Sequence[RowPlan],
        drafting: Sequence[int],
        root_draws: Sequence[int],
        sampling: SamplingRows,
        tier: SpecRuntimeState,
    ) -> DraftTrees:
        counts = tuple(row.num_draft_tokens for row in rows)
        token_ids = self._padded((row.draft_ids for row in rows), max(counts))
        parents = self._padded((row.draft_parents for row in rows), max(counts)).to(torch.int32)
        if self.drafter is not None and drafting:
            of_model = [rows[b] for b in drafting]
            found = self.drafter.propose_trees(of_model, root_draws, sampling, tier)
            self.parallel.broadcast(found.token_ids)
            self.parallel.broadcast(found.parents)
            width = found.token_ids.shape[1]
            token_ids[drafting, :width] = found.token_ids
            parents[drafting, :width] = found.parents
        return DraftTrees(token_ids, parents, counts)

    def _padded(self, drafts: Iterable[Sequence[int]], width: int) -> Tensor:
        """Drafts of each row, or their parents, int64 [B, width]."""
        padded = padded_drafts(drafts, width)
        return torch.tensor(padded, dtype=torch.int64, device=self.device).view(len(padded), width)


def _without_illegal_drafts(
    plan: StepPlan, drafts: DraftChain, sampling: SamplingRows, masks: RoundMasks
) -> tuple[StepPlan, DraftChain, SamplingRows]:
    """The same round without drafts that can not be drawn, nor those behind them."""
    if masks.num_drafts == drafts.num_steps:
        return plan, drafts, sampling
    draws = [
        (depth, most)
        for before, most in zip(drafts.num_steps, masks.num_drafts, strict=True)
        for depth in range(before + 1)
    ]
    left = [number for number, (depth, most) in enumerate(draws) if depth <= most]
    return (
        plan.cut(masks.num_drafts),
        replace(drafts, num_steps=masks.num_drafts),
        sampling.select(left),
    )
