"""The stages of every draft shape, captured once at startup at every size they can meet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.log import get_logger
from serve_spec.ops import admission
from serve_spec.parallel.group import TensorParallel
from serve_spec.worker import graphs
from serve_spec.worker.eagle import DraftModel
from serve_spec.worker.forward import TargetRunner, VerifiedTokens, run_target
from serve_spec.worker.graphs import GraphRecorder, Run, Stage, StageRunner, StepSize
from serve_spec.worker.step_buffers import StepBuffers
from serve_spec.worker.verify import Verifier

logger = get_logger(__name__)

MAX_CAPTURED_PROMPT_TOKENS = 2048
"""Most tokens of a captured step with prefill chunks: computing more takes longer than launching
the kernels one by one."""

WIDE_EXTEND = 16
"""Draft KV entries that steps without drafts may leave missing before the host has to send the
tokens; more than one step of any usual depth leaves."""

_TIMING_NOISE = 1.005


@dataclass(frozen=True)
class SpecRuntimeState:
    """The captured stages of one draft shape, so that switching shapes is one look-up.

    `extend` makes up to depth + 1 draft KV entries per request, `draft` drafts, `verify` runs the
    target and the verification. Without a draft model there is only `verify`.
    """

    shape: DraftShape
    extend: StageRunner | None
    draft: StageRunner | None
    verify: StageRunner


@dataclass(frozen=True)
class CaptureReport:
    """Time and memory of capturing a shape, without stages shared with deeper shapes.

    shape: None for the stages with prefill chunks, which all shapes share.
    """

    shape: DraftShape | None
    num_stages: int
    seconds: float
    num_bytes: int

    def __str__(self) -> str:
        """Return one clause of a log line."""
        return (
            f"{'prompts' if self.shape is None else f'shape {self.shape}'}: "
            f"{self.num_stages} stages, {self.num_bytes / 2**20:.0f} MiB, {self.seconds:.1f} s"
        )


@dataclass(frozen=True)
class Stages:
    """What the stages of a step run on its buffers, captured or not."""

    target: TargetRunner
    drafter: DraftModel | None
    buffers: StepBuffers
    verifier: Verifier
    parallel: TensorParallel

    def extend(self, length: int, size: StepSize) -> None:
        """Make up to `length` draft KV entries of each request."""
        assert self.drafter is not None, "draft extend needs a draft model"
        self.drafter.extend(self.buffers, size.requests, length)

    def draft(self, shape: DraftShape, size: StepSize) -> None:
        """Draft with the model, for every request."""
        assert self.drafter is not None, "drafting needs a draft model"
        self.drafter.draft(self.buffers, size.requests, shape)
        # Ranks with different drafts would verify a mixture of them.
        self.parallel.broadcast(self.buffers.drafts)
        if not shape.is_chain and self.buffers.parents is not None:
            self.parallel.broadcast(self.buffers.parents)

    def admit(self, width: int, size: StepSize, *, has_trees: bool) -> None:
        """Admit the likeliest of the first `width` drafts; write `query_lens`, and trees."""
        buffers, reqs = self.buffers, slice(size.requests)
        drafts = parents = None
        if has_trees:
            assert buffers.parents is not None, "buffers without parents hold chains"
            drafts, parents = buffers.drafts[reqs], buffers.parents[reqs]
        query_lens = buffers.query_lens[reqs]
        admitted = admission.admit_drafts(
            buffers.draft_logprobs[reqs, :width],
            query_lens,
            buffers.depths[reqs],
            buffers.kinds[reqs],
            buffers.calibration,
            buffers.budget,
            drafts=drafts,
            parents=parents,
        )
        moved = [(query_lens, admitted.query_lens)]
        if drafts is not None and parents is not None:
            assert admitted.drafts is not None
            assert admitted.parents is not None
            moved += [(drafts, admitted.drafts), (parents, admitted.parents)]
        for before, after in moved:
            # The same drafts on every rank, also if their log probabilities differ in a bit.
            before.copy_(self.parallel.broadcast(after))

    def verify(self, max_query_len: int, size: StepSize, *, has_trees: bool) -> VerifiedTokens:
        """Run target and verification. Return the target's output."""
        tokens = run_target(self.target, self.buffers, size, max_query_len, has_trees=has_trees)
        accepted = self.verifier(tokens, self.buffers, has_drafts=max_query_len > 1)
        if has_trees:
            self.target.keep(tokens.layout, accepted)
        return tokens


@dataclass(eq=False, repr=False)
class CapturedShapes:
    """All draft shapes of a worker. The largest is captured first; the others fit into its memory.

    recorder: captures the stages; None: they run as they are, at the exact size.
    largest_batch: for a shape, the batch size beyond which no policy chooses it; None: no limit.
    The deepest chain has stages for every batch size and is used where another has none.
    max_captured: largest batch whose stages are captured; they run as they are in larger ones.
    """

    stages: Stages
    recorder: GraphRecorder | None
    max_tokens: int
    largest_batch: Callable[[DraftShape], int | None]
    max_captured: int | None = None

    def __post_init__(self) -> None:
        self.states: dict[DraftShape, SpecRuntimeState] = {}
        self.report: list[CaptureReport] = []
        self._buffers, self._device = self.stages.buffers, self.stages.target.pool.device
        most = self._buffers.max_requests
        self._max_captured = min(most, self.max_captured or most)
        self._extends: dict[int, StageRunner] = {}
        self._verify_runs: dict[tuple[StepSize, int, bool], tuple[Run, float]] = {}

    def build(self, shapes: Iterable[DraftShape]) -> None:
        """Capture every shape, and the plain one, then the stages with prefill chunks.

        Raises MemoryError: one does not fit; the message says what each takes.
        """
        wanted = {PLAIN, *shapes}
        self._deepest = max(shape.depth for shape in wanted if shape.is_chain)
        has_trees = any(not shape.is_chain for shape in wanted)
        ordered = sorted(wanted, key=lambda s: (self._most_tokens(s), s), reverse=True)
        captures = self.recorder is not None
        with torch.inference_mode():
            for shape in tqdm(ordered, "draft shapes", leave=False, disable=not captures):
                with self._reported(shape):
                    self.states[shape] = self._state(shape)
            with self._reported(None):
                mixed = self._mixed_sizes()
                self._mixed: dict[bool, StageRunner] = {}
                for trees in (True, False) if has_trees else (False,):
                    width = self._most_drafts(has_trees=trees) + 1
                    self._mixed[trees] = self._verify_stage(mixed, width, has_trees=trees)
                self.extend_chunks: StageRunner | None = None
                if (drafter := self.stages.drafter) is not None:
                    extend = partial(drafter.extend_chunks, self._buffers)
                    self.extend_chunks = self._captured(extend, mixed)
                self._admits = {trees: self._admit_stage(has_trees=trees) for trees in self._mixed}
        if captures:
            logger.info("captured: %s", "; ".join(map(str, self.report)))

    @property
    def max_extend(self) -> int:
        """Draft KV entries that the widest draft extend makes; 0 without a draft model."""
        return max(self._extends, default=0)

    def state_for(self, shape: DraftShape, num_requests: int) -> SpecRuntimeState:
        """Return the smallest state that drafts `shape` for so many requests."""
        if not shape.is_chain:
            return self.states[shape]
        chains = [s for s in self.states if s.is_chain]
        fits = (s for s in chains if s.depth >= shape.depth and self._largest(s) >= num_requests)
        return self.states[min(fits, default=max(chains))]

    def mixed(self, shape: DraftShape) -> StageRunner:
        """Return the verification of a mixed prefill-decode batch."""
        return self._mixed[not shape.is_chain]

    def admit_for(self, shape: DraftShape) -> StageRunner:
        """Return the stage that admits drafts within a budget."""
        return self._admits[not shape.is_chain]

    def extend_for(self, num_missing: int, num_requests: int) -> StageRunner:
        """Return the smallest draft extend that makes so many entries for so many requests."""
        if self.recorder is None:
            return self._extend_stage(max(num_missing, 1), ())
        most = min(num_requests, self._max_captured)
        fits = [
            length
            for length, stage in self._extends.items()
            if length >= num_missing and stage.sizes[-1].requests >= most
        ]
        return self._extends[min(fits)]

    def draft_for(self, shape: DraftShape, num_requests: int) -> StageRunner:
        """Return the shallowest stage that drafts `shape` for so many requests."""
        if self.recorder is None:
            return StageRunner(partial(self.stages.draft, shape))
        draft = self.state_for(shape, num_requests).draft
        assert draft is not None, "a draft model has draft stages"
        return draft

    def run_target(self, shape: DraftShape, size: StepSize) -> VerifiedTokens:
        """Run the target and the verification without a captured graph, to read hidden states."""
        return self.stages.verify(shape.size + 1, size, has_trees=not shape.is_chain)

    def _state(self, shape: DraftShape) -> SpecRuntimeState:
        most = self._most_requests(shape)
        requests = [StepSize(n, n) for n in graphs.batch_sizes(most)]
        extend = draft = None
        if shape.depth and self.stages.drafter is not None:
            extend = self._extends_after(shape, requests)
            draft = self._captured(partial(self.stages.draft, shape), requests)
        counts = (
            graphs.token_counts(self._most_tokens(shape))
            if shape.depth
            else graphs.batch_sizes(most)
        )
        sizes = [StepSize(n, min(n, self._buffers.max_requests)) for n in counts]
        verify = self._verify_stage(sizes, shape.size + 1, has_trees=not shape.is_chain)
        return SpecRuntimeState(shape, extend, draft, verify)

    def _largest(self, shape: DraftShape) -> int:
        most = self._buffers.max_requests
        if shape.is_chain and shape.depth == self._deepest:
            return most
        return min(most, self.largest_batch(shape) or most)

    def _most_requests(self, shape: DraftShape) -> int:
        return min(self._largest(shape), self._max_captured)

    def _most_tokens(self, shape: DraftShape) -> int:
        return min(self._most_requests(shape) * (shape.size + 1), self.max_tokens)

    def _extends_after(self, shape: DraftShape, sizes: Sequence[StepSize]) -> StageRunner:
        """Capture draft extend after steps of a shape, and first of all the widest one."""
        if not self._extends:
            # A step leaves max_depth + 1 entries missing, and `_extend_known` leaves one.
            widest = max(WIDE_EXTEND, self._buffers.max_depth + 2)
            ring = self._buffers.slots.recent.shape[1]
            assert widest <= ring, f"draft extend reads {widest} tokens of {ring}"
            all_sizes = [StepSize(n, n) for n in graphs.batch_sizes(self._max_captured)]
            self._extends[widest] = self._extend_stage(widest, all_sizes)
        length = shape.depth + 1
        known = self._extends.get(length)
        if known is None or (known.sizes and known.sizes[-1] < sizes[-1]):
            self._extends[length] = self._extend_stage(length, sizes)
        return self._extends[length]

    def _extend_stage(self, length: int, sizes: Iterable[StepSize]) -> StageRunner:
        return self._captured(partial(self.stages.extend, length), sizes)

    def _captured(self, stage: Stage, sizes: Iterable[StepSize]) -> StageRunner:
        if self.recorder is None:
            return StageRunner(stage)
        capture = self.recorder.capture
        return StageRunner(
            stage, {size: capture(partial(stage, size)) for size in sorted(sizes, reverse=True)}
        )

    def _verify_stage(
        self, sizes: Iterable[StepSize], max_query_len: int, *, has_trees: bool
    ) -> StageRunner:
        """Capture a verification. Shapes of similar width share it: only attention's tiles differ.

        A size that takes longer than a larger one, by more than `_TIMING_NOISE`, is left out: some
        matrix products are slower at smaller sizes.
        """
        width = 1 << (max_query_len - 1).bit_length()

        def verify(size: StepSize) -> Tensor:
            return self.stages.verify(width, size, has_trees=has_trees).logits

        if self.recorder is None:
            return StageRunner(verify)
        kept: dict[StepSize, Run] = {}
        fastest = math.inf
        for size in sorted(sizes, reverse=True):
            key = size, width, has_trees
            if key not in self._verify_runs:
                run = self.recorder.capture(partial(verify, size))
                # The time on rank 0, so that all ranks pad alike.
                found = torch.tensor([self.recorder.milliseconds(run)], device=self._device)
                self._verify_runs[key] = run, float(self.stages.parallel.broadcast(found))
            run, milliseconds = self._verify_runs[key]
            if milliseconds <= fastest * _TIMING_NOISE:
                kept[size], fastest = run, min(fastest, milliseconds)
        return StageRunner(verify, kept)

    def _most_drafts(self, *, has_trees: bool) -> int:
        """Return the most drafts of a request in a step with trees, or with chains only."""
        return self._buffers.max_drafts if has_trees else self._deepest

    def _mixed_sizes(self) -> list[StepSize]:
        chunks = self._buffers.chunks
        most = min(MAX_CAPTURED_PROMPT_TOKENS, self.max_tokens)
        return [
            StepSize(n, min(n, self._buffers.max_requests), min(n, chunks.max_chunks))
            for n in graphs.mixed_token_counts(most)
        ]

    def _admit_stage(self, *, has_trees: bool) -> StageRunner:
        most_drafts = self._most_drafts(has_trees=has_trees)
        stage = partial(self.stages.admit, most_drafts, has_trees=has_trees)
        if not self._deepest:  # without drafts there is nothing to admit
            return StageRunner(stage)
        shapes = [s for s in self.states if s.depth and s.is_chain != has_trees]
        most = max(map(self._most_requests, shapes))
        return self._captured(stage, [StepSize(n, n) for n in graphs.batch_sizes(most)])

    @contextmanager
    def _reported(self, shape: DraftShape | None) -> Iterator[None]:
        started, reserved = time.perf_counter(), self._reserved_bytes()
        before = self._num_captured

        def taken() -> CaptureReport:
            seconds, num_bytes = time.perf_counter() - started, self._reserved_bytes() - reserved
            return CaptureReport(shape, self._num_captured - before, seconds, num_bytes)

        try:
            yield
        except torch.OutOfMemoryError as error:
            raise MemoryError(self._no_room_for(taken())) from error
        self.report.append(taken())

    @property
    def _num_captured(self) -> int:
        return 0 if self.recorder is None else self.recorder.num_captured

    def _reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0

    def _no_room_for(self, failed: CaptureReport) -> str:
        shape, max_requests = failed.shape, self._buffers.max_requests
        if shape is None:
            what, remedy = f"max_num_batched_tokens={self.max_tokens}", "max_num_batched_tokens"
        elif shape.is_chain:
            what = f"num_steps={shape.depth}, max_num_seqs={max_requests}"
            remedy = f"leave {shape.depth} out of the candidate steps (speculative_adaptive_config)"
        else:
            what = (
                f"speculative_num_draft_tokens={shape.size + 1}, num_steps={shape.depth}, "
                f"max_num_seqs={max_requests}"
            )
            remedy = "draft smaller trees, or chains (speculative_eagle_topk=1)"
        return (
            f"{what}: the device has no memory left for these stages, of which it holds {failed} "
            f"(captured before: {'; '.join(map(str, self.report)) or 'nothing'}). "
            f"Lower memory_fraction, max_num_seqs or cuda_graph_max_bs, or {remedy}"
        )
