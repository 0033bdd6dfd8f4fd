"""The stages of every draft shape, captured once at startup at every size they can meet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from serve_spec.core.draft import PLAIN, DraftShape, GrammarLimits
from serve_spec.log import get_logger
from serve_spec.worker import graphs
from serve_spec.worker.forward import QueryShape
from serve_spec.worker.graphs import GraphRecorder, Run, Stage, StageRunner, StepSize
from serve_spec.worker.stages import SpecRuntimeState, StageBodies, StageTable
from serve_spec.worker.trace import named

logger = get_logger(__name__)

MAX_CAPTURED_PROMPT_TOKENS = 2048
"""Most tokens of a captured step with prefill chunks: computing more takes longer than launching
the kernels one by one."""

LONG_STEP_UNIT = 128
"""Longer steps are padded to multiples of so many tokens: kernels compile for some properties of a
size, and this way those of captured steps serve all of them."""

NARROW_QUERY = 2
"""Width of the queries of a second set of steps with prefill chunks, for plain steps and depth 1.
Attention with tiles for the deepest query computes mostly empty rows for them: 205 instead of 130
us a layer for 256 plain requests at 250 tokens, on one H200."""

WIDE_EXTEND = 16
"""Draft KV entries that steps without drafts may leave missing before the host has to send the
tokens; more than one step of any usual depth leaves."""

GRAMMAR_STEPS = 7
"""Most grammar drafts of a request in a step, unless deeper chains are drafted."""

GRAMMAR_TOKENS = 256
"""Most roots and drafts of a captured step with grammar drafts where nothing else is drafted. Each
has logits of the whole vocabulary, and a step of so many tokens is about as fast as a plain one."""

_TIMING_NOISE = 1.005


def grammar_limits(shapes: Iterable[DraftShape], *, captures: bool) -> GrammarLimits:
    """Return the grammar drafts that steps of a worker of these shapes have room for.

    Stages that are not captured have any width. Captured ones are as wide as the deepest chain;
    without drafts there is one more, for steps without prefill chunks.
    """
    deepest = max((shape.depth for shape in shapes if shape.is_chain), default=0)
    if not captures:
        most = max(deepest, GRAMMAR_STEPS)
        return GrammarLimits(most, most)
    if deepest:
        return GrammarLimits(deepest, deepest)
    return GrammarLimits(GRAMMAR_STEPS, 0, GRAMMAR_TOKENS)


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


@dataclass(eq=False, repr=False)
class CapturedShapes:
    """All draft shapes of a worker. The largest is captured first; the others fit into its memory.

    recorder: captures the stages; None: they run as they are, at the exact size.
    largest_batch: for a shape, the batch size beyond which no policy chooses it; None: no limit.
    The deepest chain has stages for every batch size and is used where another has none.
    max_captured: largest batch whose stages are captured; they run as they are in larger ones.
    grammar: grammar drafts to have room for.
    """

    bodies: StageBodies
    recorder: GraphRecorder | None
    max_tokens: int
    largest_batch: Callable[[DraftShape], int | None]
    max_captured: int | None = None
    grammar: GrammarLimits = field(default_factory=GrammarLimits)

    def __post_init__(self) -> None:
        self.report: list[CaptureReport] = []
        self._buffers, self._device = self.bodies.buffers, self.bodies.target.pool.device
        most = self._buffers.max_requests
        self._max_captured = min(most, self.max_captured or most)
        drafter = self.bodies.drafter
        self._keeps_kv = drafter is not None and drafter.keeps_kv
        self._states: dict[DraftShape, SpecRuntimeState] = {}
        self._extends: dict[int, StageRunner] = {}
        self._drafts: dict[DraftShape, StageRunner] = {}
        self._verify_runs: dict[tuple[StepSize, QueryShape], tuple[Run, float]] = {}

    def build(self, shapes: Iterable[DraftShape]) -> None:
        """Capture every shape, and the plain one, then the stages with prefill chunks: `table`.

        Raises MemoryError: one does not fit; the message says what each takes.
        """
        wanted = {PLAIN, *shapes}
        self._deepest = max(shape.depth for shape in wanted if shape.is_chain)
        widest = self._deepest + 1
        widths = {min(NARROW_QUERY, widest), widest}
        widths.add(max(widest, self.grammar.steps_with_prompts + 1))
        queries = [QueryShape(width) for width in sorted(widths)]
        if not all(shape.is_chain for shape in wanted):
            queries.append(QueryShape(self._buffers.max_drafts + 1, is_tree=True))
        ordered = sorted(wanted, key=lambda s: (self._most_tokens(s), s), reverse=True)
        captures = self.recorder is not None
        with torch.inference_mode():
            for shape in tqdm(ordered, "draft shapes", leave=False, disable=not captures):
                with self._reported(shape):
                    self._states[shape] = self._state(shape)
            grammar = self._grammar_state()
            with self._reported(None):
                sizes = self._mixed_sizes()
                mixed = {query: self._verify_stage(sizes, query) for query in queries}
                extend_chunks = None
                if self._keeps_kv:
                    extend_chunks = self._captured(
                        "extend_chunks", self.bodies.extend_chunks, sizes
                    )
                for runner in filter(None, (*mixed.values(), extend_chunks)):
                    _pad_longer_steps(runner, self._mixed_size, self.max_tokens)
                admits = {query.is_tree: self._admit_stage(query) for query in queries}
        if captures:
            logger.info("captured: %s", "; ".join(map(str, self.report)))
        self.table = StageTable(
            self.bodies,
            self._states,
            grammar,
            self._extends,
            extend_chunks,
            mixed,
            admits,
            self._largest,
            self._max_captured if captures else None,
        )

    def _state(self, shape: DraftShape) -> SpecRuntimeState:
        most = self._most_requests(shape)
        requests = [StepSize(n, n) for n in graphs.batch_sizes(most)]
        extend = draft = None
        if shape.depth and self.bodies.drafter is not None:
            if self._keeps_kv:
                extend = self._extends_after(shape, requests)
            draft = self._draft_stage(shape)
        counts = (
            graphs.token_counts(self._most_tokens(shape))
            if shape.depth
            else graphs.batch_sizes(most)
        )
        sizes = [StepSize(n, min(n, self._buffers.max_requests)) for n in counts]
        verify = self._verify_stage(sizes, QueryShape.of(shape))
        return SpecRuntimeState(shape, extend, draft, verify)

    def _grammar_state(self) -> SpecRuntimeState | None:
        """Capture the verification of grammar drafts deeper than any other chain."""
        depth = self.grammar.steps
        if depth <= self._deepest:
            return None
        shape = DraftShape.chain(depth)
        most = min(self.grammar.tokens or self.max_tokens, self.max_tokens)
        counts = [n for n in graphs.token_counts(most) if n > 1]
        sizes = [StepSize(n, min(n, self._max_captured)) for n in counts]
        with self._reported(shape):
            verify = self._verify_stage(sizes, QueryShape.of(shape))
            return SpecRuntimeState(shape, None, None, verify)

    def _largest(self, shape: DraftShape) -> int:
        most = self._buffers.max_requests
        if shape.is_chain and shape.depth == self._deepest:
            return most
        return min(most, self.largest_batch(shape) or most)

    def _most_requests(self, shape: DraftShape) -> int:
        return min(self._largest(shape), self._max_captured)

    def _most_tokens(self, shape: DraftShape) -> int:
        return min(self._most_requests(shape) * (shape.size + 1), self.max_tokens)

    def _draft_stage(self, shape: DraftShape) -> StageRunner:
        """Capture the drafting of a shape; of the deepest chain, if all depths cost the same."""
        drafter = self.bodies.drafter
        if drafter is not None and drafter.has_constant_cost:
            shape = DraftShape.chain(self._deepest)
        if shape not in self._drafts:
            requests = [StepSize(n, n) for n in graphs.batch_sizes(self._most_requests(shape))]
            stage = partial(self.bodies.draft, shape)
            self._drafts[shape] = self._captured(f"draft {shape}", stage, requests)
        return self._drafts[shape]

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
        return self._captured(f"extend {length}", partial(self.bodies.extend, length), sizes)

    def _captured(self, name: str, stage: Stage, sizes: Iterable[StepSize]) -> StageRunner:
        if self.recorder is None:
            return StageRunner(stage)
        recorder = self.recorder
        runs = {size: _capture(recorder, name, stage, size) for size in sorted(sizes, reverse=True)}
        return StageRunner(stage, runs)

    def _verify_stage(self, sizes: Iterable[StepSize], query: QueryShape) -> StageRunner:
        """Capture a verification. Queries of similar width share it: only attention's tiles differ.

        A size that takes longer than a larger one, by more than `_TIMING_NOISE`, is left out: some
        matrix products are slower at smaller sizes.
        """
        query = query._replace(width=1 << (query.width - 1).bit_length())

        def verify(size: StepSize) -> Tensor:
            return self.bodies.verify(query, size).logits

        if self.recorder is None:
            return StageRunner(verify)
        kept: dict[StepSize, Run] = {}
        fastest = math.inf
        for size in sorted(sizes, reverse=True):
            key = size, query
            if key not in self._verify_runs:
                run = _capture(self.recorder, f"verify {query}", verify, size)
                # The time on rank 0, so that all ranks pad alike.
                found = torch.tensor([self.recorder.milliseconds(run)], device=self._device)
                self._verify_runs[key] = run, float(self.bodies.parallel.broadcast(found))
            run, milliseconds = self._verify_runs[key]
            if milliseconds <= fastest * _TIMING_NOISE:
                kept[size], fastest = run, min(fastest, milliseconds)
        return StageRunner(verify, kept)

    def _mixed_sizes(self) -> list[StepSize]:
        most = min(MAX_CAPTURED_PROMPT_TOKENS, self.max_tokens)
        return [self._mixed_size(n) for n in graphs.mixed_token_counts(most)]

    def _mixed_size(self, num_tokens: int) -> StepSize:
        most = self._buffers.max_requests, self._buffers.chunks.max_chunks
        return StepSize(num_tokens, *(min(num_tokens, n) for n in most))

    def _admit_stage(self, query: QueryShape) -> StageRunner:
        stage = partial(self.bodies.admit, query)
        if not self._deepest:  # without drafts there is nothing to admit
            return StageRunner(stage)
        shapes = [s for s in self._states if s.depth and s.is_chain != query.is_tree]
        most = max(map(self._most_requests, shapes))
        sizes = [StepSize(n, n) for n in graphs.batch_sizes(most)]
        return self._captured(f"admit {query}", stage, sizes)

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


def _pad_longer_steps(
    runner: StageRunner, padded: Callable[[int], StepSize], max_tokens: int
) -> None:
    """Run steps longer than the captured ones at padded sizes, and the longest of them once.

    So none of them meets a kernel that was never launched.
    """
    if not runner.sizes or max_tokens <= runner.sizes[-1].tokens:
        return

    def run(size: StepSize) -> Tensor | None:
        tokens = -(-size.tokens // LONG_STEP_UNIT) * LONG_STEP_UNIT
        # A prompt may exceed the limit.
        return stage(padded(max(size.tokens, min(tokens, max_tokens))))

    stage, runner.stage = runner.stage, run
    stage(padded(max_tokens))


def _capture(recorder: GraphRecorder, name: str, stage: Stage, size: StepSize) -> Run:
    return named(f"replay {name}: {size}", recorder.capture(partial(stage, size)))
