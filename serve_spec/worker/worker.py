"""Executes planned steps: extend, draft, verify. Steps may be launched ahead of their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from serve_spec.core.draft import DraftShape, GrammarLimits
from serve_spec.core.plan import BatchResult, PendingBatch, ScheduledBatch, ScheduledRequest
from serve_spec.core.round import Calibration
from serve_spec.parallel.group import SINGLE, TensorParallel
from serve_spec.structured.masks import Grammars
from serve_spec.worker.capture import CapturedShapes, grammar_limits
from serve_spec.worker.drafters.base import Drafter
from serve_spec.worker.forward import TargetRunner, VerifiedTokens
from serve_spec.worker.graphs import GraphRecorder, StageRunner, StepSize
from serve_spec.worker.logprobs import Logprobs, emitted_logprobs, prompt_logprobs
from serve_spec.worker.request_slots import RequestSlots, RequestStates
from serve_spec.worker.stages import SpecRuntimeState, StageBodies, StageTable, StepStages
from serve_spec.worker.step_buffers import Chunk, ReadBack, StepBuffers, grouped
from serve_spec.worker.trace import name_stages
from serve_spec.worker.verify import Acceptance, Verifier, read_results


class StageTimer:
    """Marks points of a step and measures the time between them.

    On a GPU the marks are CUDA events, so the host waits only when a time is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: dict[str, torch.cuda.Event | float] = {}

    def mark(self, name: str) -> None:
        """Mark this point as `name`."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks[name] = event
        else:
            self._marks[name] = time.perf_counter()

    def wait(self, name: str) -> None:
        """Wait until the device has passed mark `name`."""
        mark = self._marks[name]
        if not isinstance(mark, float):
            mark.synchronize()

    def ms_since(self, before: StageTimer, name: str) -> float:
        """Return the milliseconds from mark `name` of `before` to the first mark of this one."""
        return _ms_between(before._marks[name], next(iter(self._marks.values())))

    def ms(self, start: str, end: str) -> float:
        """Return the milliseconds from mark `start` to mark `end`; on a GPU, wait for `end`."""
        return _ms_between(self._marks[start], self._marks[end])


def _ms_between(first: Any, last: Any) -> float:
    """Return the milliseconds between two marks of one kind."""
    if isinstance(first, float):
        return float(last - first) * 1e3
    last.synchronize()
    return float(first.elapsed_time(last))


_STEPS_IN_FLIGHT = 2


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a worker.

    `max_tokens`: most tokens of one target forward. `largest_batch`, `max_captured`: see
    `CapturedShapes`. `synthetic_acceptance`: for load tests; see `worker.verify`.
    `rejection_sample_method`: how sampled drafts are verified. `draft_sharpness`: temperature of
    coupled drafts over their requests'.
    """

    max_tokens: int
    largest_batch: Callable[[DraftShape], int | None]
    async_scheduling: bool = False
    """Whether a step may be launched before the result of the one before is read."""
    synthetic_acceptance: Acceptance | None = None
    rejection_sample_method: str = "coupled"
    draft_sharpness: float = 1.0
    max_captured: int | None = None

    @property
    def samples_drafts(self) -> bool:
        """Return whether drafts are sampled from distributions of their own."""
        return self.rejection_sample_method != "coupled"


@dataclass(eq=False, repr=False)
class SpecWorker:
    """A target, a draft model (or none), and one captured state per draft shape.

    Lengths and last tokens stay on the device, so a step can be launched before the result of the
    one before it is read. The host reads one small tensor per step.
    """

    target: TargetRunner
    drafter: Drafter | None
    slots: RequestSlots
    recorder: GraphRecorder | None
    grammars: Grammars
    settings: WorkerSettings
    parallel: TensorParallel = SINGLE

    def __post_init__(self) -> None:
        self.vocab_size = self.slots.vocab_size
        self.device = self.slots.lengths.device
        self._requests = RequestStates(self.slots)
        self._written: tuple[tuple[int, ...], ...] | None = None
        self._budget: tuple[int, list[int], Calibration] | None = None
        self._newest_timer: StageTimer | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype of the target."""
        return self.target.model.dtype

    def slots_past(self, shape: DraftShape) -> int:
        """Return the KV slots past a request's length that drafting and verifying a shape takes."""
        return shape.size if self.drafter is None else self.drafter.slots_past(shape)

    @property
    def has_constant_draft(self) -> bool:
        """Return whether the draft takes the same time at every depth."""
        return self.drafter is not None and self.drafter.has_constant_cost

    @property
    def stages(self) -> StageTable:
        """The stages, and which of them a plan runs."""
        return self.captured.table

    @property
    def states(self) -> Mapping[DraftShape, SpecRuntimeState]:
        """Captured states by draft shape."""
        return self.stages.states

    @property
    def max_missing(self) -> int:
        """Most missing draft KV entries that a step with drafts makes for any decoding request.

        Entries whose tokens are in the plan do not count.
        """
        return self.stages.max_extend

    def init_states(self, shapes: Iterable[DraftShape]) -> None:
        """Capture every shape the policy may choose, and the plain one, before the first step."""
        shapes = tuple(shapes)
        settings = self.settings
        max_requests = self.slots.padding
        self.grammar_limits = GrammarLimits()
        if not settings.samples_drafts and settings.synthetic_acceptance is None:
            self.grammar_limits = grammar_limits(shapes, captures=self.recorder is not None)
        limits = self.grammar_limits
        self.grammars.most_drafts = limits.steps

        def drafts(shape: DraftShape) -> int:
            # Chains of any depth may run at every batch size.
            most = None if shape.is_chain else settings.largest_batch(shape)
            return min(most or max_requests, max_requests) * shape.size

        sampled_from = None
        if self.drafter is not None and settings.samples_drafts:
            sampled_from = self.drafter.vocabulary()
        self.buffers = StepBuffers(
            self.slots,
            max([limits.steps, *(shape.depth for shape in shapes)]),
            settings.max_tokens + 1,  # a prompt may exceed the budget by a token
            max((shape.size for shape in shapes if not shape.is_chain), default=0),
            max_draws=max_requests
            + max([limits.tokens or max_requests * limits.steps, *map(drafts, shapes)]),
            sampled_from=sampled_from,
            draft_sharpness=settings.draft_sharpness,
        )
        pinned = self.device.type == "cuda"
        self._read_backs = cycle(
            self.buffers.host_copy(pin_memory=pinned) for _ in range(_STEPS_IN_FLIGHT + 1)
        )
        self._written = self._budget = None
        if self.recorder is not None:
            self.recorder.start_over()
        verifier = Verifier(
            self.buffers.max_depth,
            self.device,
            settings.synthetic_acceptance,
            settings.rejection_sample_method,
            self.parallel,
        )
        self.captured = CapturedShapes(
            name_stages(
                StageBodies(self.target, self.drafter, self.buffers, verifier, self.parallel)
            ),
            self.recorder,
            max_tokens=settings.max_tokens,
            largest_batch=settings.largest_batch,
            max_captured=settings.max_captured,
            grammar=limits,
        )
        self.captured.build(shapes)

    @torch.inference_mode()
    def submit(self, plan: ScheduledBatch) -> PendingBatch:
        """Launch a step; the host does not wait for a GPU."""
        reqs, prompts = plan.decode_requests, plan.prefill_requests
        self._requests.forget(prompts)  # a preemption may have changed their pages
        self._requests.sync(plan.requests)
        # A prompt that is not complete has no root for the next step: send its state again then.
        self._requests.forget(req for req in prompts if not req.samples)
        stages = self.stages.of(plan)
        # The host's work so far is idle time of the device, not time of the step.
        timer = StageTimer(self.device)
        timer.mark("start")
        if stages.shape.depth:
            self._write_requests(reqs)
            self._draft(reqs, stages)
        timer.mark("drafted")
        masked = self._mask(plan)
        step = self._verify(masked, stages, timer)
        timer.mark("verified")
        self._newest_timer = timer
        return step

    def execute(self, plan: ScheduledBatch) -> BatchResult:
        """Run a step to its end."""
        return self.submit(plan).result()

    def drain(self) -> None:
        """Forget all requests, for those of another scheduler. No step may be in flight."""
        self._requests.forget_all()
        self._newest_timer = None

    def _draft(self, reqs: Sequence[ScheduledRequest], stages: StepStages) -> None:
        """Write n-gram and grammar drafts; extend and draft with the model for every request."""
        if given := {b: req.given_drafts for b, req in enumerate(reqs) if req.draft_ids}:
            self.buffers.write_drafts(given)
        size = StepSize(len(reqs), len(reqs))
        if stages.extend_chunks is not None:
            self._extend_chunks(stages.behind, stages.extend_chunks)
        if stages.extend is not None:
            stages.extend.run(size)
        if stages.draft is not None:
            stages.draft.run(size)

    def _extend_chunks(self, reqs: Sequence[ScheduledRequest], stage: StageRunner) -> None:
        """Make the draft KV entries of prompts and after long pauses from tokens the host knows.

        One entry is left: draft extend makes it from the tokens in the request slots.
        """
        chunks = (Chunk(req.request_slot, req.draft_start, req.extend_ids[:-1]) for req in reqs)
        buffer = self.buffers.chunks
        for group in grouped(chunks, buffer.max_tokens, buffer.max_chunks):
            count = buffer.write(group)
            stage.run(StepSize(sum(len(c.token_ids) for c in group), 0, count))
        self._requests.set_draft_lengths([req._replace(draft_start=req.start - 1) for req in reqs])

    def _mask(self, plan: ScheduledBatch) -> MaskedPlan:
        """Write the step's grammar masks, and grammar drafts behind a model's.

        Return the plan without drafts that cannot be drawn.
        """
        if not plan.has_masks:
            self.buffers.masks.clear()
            return MaskedPlan(plan)
        reqs = plan.sampling_requests
        is_tree = not plan.shape.is_chain
        if any(req.model_steps for req in reqs):
            token_ids = self.buffers.drafts[: len(reqs)].tolist()
            parents = None
            if is_tree and self.buffers.parents is not None:
                parents = self.buffers.parents[: len(reqs)].tolist()
        else:
            token_ids = [req.draft_ids for req in reqs]
            parents = [req.draft_parents for req in reqs] if is_tree else None
        # Rejection sampling needs all sampled drafts, also those that the grammar forbids.
        keeps_all = is_tree or (
            self.settings.samples_drafts and any(req.model_steps for req in reqs)
        )
        masks = self.grammars.round_masks(reqs, token_ids, parents, keeps_all=keeps_all)
        self.buffers.masks.write(masks)
        self.buffers.write_forced(masks.forced)
        if not is_tree:
            plan = plan.cut(masks.num_drafts)
        return MaskedPlan(plan, masks.late, masks.forced)

    def _verify(self, masked: MaskedPlan, stages: StepStages, timer: StageTimer) -> _StepInFlight:
        """Run target and verification, and start to read the results."""
        plan = masked.plan
        reqs, prompts = plan.sampling_requests, plan.prefill_requests
        # Complete prompts draw, too, but did not draft.
        self._write_requests(reqs)
        if plan.budget is not None and stages.admit is not None:
            self._admit(plan, plan.budget, stages.admit)
        num_chunks = 0
        if prompts:
            # Without the last token of a prompt, which draws: it is a root.
            num_chunks = self.buffers.chunks.write(
                Chunk(
                    req.request_slot, req.start, req.token_ids[: len(req.token_ids) - req.samples]
                )
                for req in prompts
            )
        size = StepSize(plan.num_tokens, max(1, len(reqs)), num_chunks)
        tokens: VerifiedTokens | None = None
        if stages.verify_prompts is not None:
            tokens = stages.verify_prompts(size)
        logits = stages.verify.run(size) if tokens is None else tokens.logits
        read_back = next(self._read_backs)
        read_back.memory.copy_(self.buffers.read_back, non_blocking=True)
        logprobs = None
        if plan.wants_logprobs:
            assert logits is not None, "a verification returns its logits"
            paths = None if stages.shape.is_chain else self.buffers.paths
            logprobs = emitted_logprobs(reqs, logits, self.buffers, paths)
        scored = None
        if tokens is not None:  # last, because ranks gather these logits where the others were
            scored = prompt_logprobs(plan, tokens.hidden, self.target.model.logits, self.vocab_size)
        before = self._newest_timer
        return _StepInFlight(read_back, len(reqs), timer, before, logprobs, scored, masked)

    def _admit(self, plan: ScheduledBatch, num_drafts: int, stage: StageRunner) -> None:
        """Admit the likeliest `num_drafts` drafts of the step."""
        kinds = [req.draft_kind for req in plan.sampling_requests]
        budget = num_drafts, kinds, plan.calibration
        if budget != self._budget:
            self.buffers.write_budget(*budget)
            self._budget = budget
        stage.run(StepSize(len(kinds), len(kinds)))
        self._written = None  # the device changes `query_lens`

    def _write_requests(self, reqs: Sequence[ScheduledRequest]) -> None:
        requests = (
            tuple([req.request_slot for req in reqs]),
            tuple([req.num_steps for req in reqs]),
            tuple([req.num_draft_tokens for req in reqs]),
            tuple([len(req.draft_ids) for req in reqs]),
        )
        if requests != self._written:
            self.buffers.write_requests(*requests)
            self._written = requests


class MaskedPlan(NamedTuple):
    """A plan whose masks are made; see `RoundMasks`."""

    plan: ScheduledBatch
    late: tuple[int, ...] = ()
    forced: Mapping[int, tuple[int, tuple[int, ...]]] = MappingProxyType({})


@dataclass(frozen=True)
class _StepInFlight:
    """See `PendingBatch`. before: the timer of the step before, if any."""

    read_back: ReadBack
    num_requests: int
    timer: StageTimer
    before: StageTimer | None
    logprobs: Callable[[Sequence[Sequence[int]]], Logprobs] | None
    prompt_logprobs: Callable[[], Logprobs] | None
    masked: MaskedPlan

    def result(self) -> BatchResult:
        """Wait for the results."""
        self.timer.wait("verified")
        num_requests = self.num_requests
        read_back, logprobs = self.read_back, self.read_back.draft_logprobs
        results = read_back.results[:num_requests].tolist()
        token_ids, broken_drafts, broken_logits = read_results(results)
        return BatchResult(
            token_ids=token_ids,
            draft_ms=self.timer.ms("start", "drafted"),
            verify_ms=self.timer.ms("drafted", "verified"),
            broken_drafts=broken_drafts,
            broken_logits=broken_logits,
            late_masks=self.masked.late,
            grammar_starts={at: start for at, (start, _) in self.masked.forced.items()},
            num_drafts=[count - 1 for count in read_back.query_lens[:num_requests].tolist()],
            draft_logprobs=logprobs[:num_requests].copy() if logprobs.size else None,
            logprobs={} if self.logprobs is None else self.logprobs(token_ids),
            prompt_logprobs={} if self.prompt_logprobs is None else self.prompt_logprobs(),
            idle_ms=0.0 if self.before is None else self.timer.ms_since(self.before, "verified"),
        )
