"""The stages of a step: what each computes, and which of them a plan runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from serve_spec.core.draft import DraftShape
from serve_spec.core.plan import ScheduledBatch, ScheduledRequest
from serve_spec.ops import admission
from serve_spec.parallel.group import TensorParallel
from serve_spec.worker.drafters.base import Drafter
from serve_spec.worker.forward import QueryShape, TargetRunner, VerifiedTokens, run_target
from serve_spec.worker.graphs import StageRunner, StepSize
from serve_spec.worker.step_buffers import StepBuffers
from serve_spec.worker.verify import Verifier


@dataclass(frozen=True)
class StageBodies:
    """What the stages of a step compute on its buffers, captured or not."""

    target: TargetRunner
    drafter: Drafter | None
    buffers: StepBuffers
    verifier: Verifier
    parallel: TensorParallel

    def extend_chunks(self, size: StepSize) -> None:
        """Make the draft KV entries of `buffers.chunks`."""
        assert self.drafter is not None, "draft extend needs a draft model"
        self.drafter.extend_chunks(self.buffers, size)

    def extend(self, length: int, size: StepSize) -> None:
        """Make up to `length` draft KV entries of each request."""
        assert self.drafter is not None, "draft extend needs a draft model"
        self.drafter.extend(self.buffers, size.requests, length)

    def draft(self, shape: DraftShape, size: StepSize) -> None:
        """Draft with the model, for every request, behind the drafts that are given."""
        assert self.drafter is not None, "drafting needs a draft model"
        draft = partial(self.drafter.draft, self.buffers, size.requests, shape)
        self.buffers.keeping_given(size.requests, draft)
        # Ranks with different drafts would verify a mixture of them.
        self.parallel.broadcast(self.buffers.drafts)
        if not shape.is_chain and self.buffers.parents is not None:
            self.parallel.broadcast(self.buffers.parents)

    def admit(self, query: QueryShape, size: StepSize) -> None:
        """Admit the likeliest drafts; write `query_lens`, and trees."""
        buffers, reqs = self.buffers, slice(size.requests)
        drafts = parents = None
        if query.is_tree:
            assert buffers.parents is not None, "buffers without parents hold chains"
            drafts, parents = buffers.drafts[reqs], buffers.parents[reqs]
        query_lens = buffers.query_lens[reqs]
        admitted = admission.admit_drafts(
            buffers.draft_logprobs[reqs, : query.width - 1],
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

    def verify(self, query: QueryShape, size: StepSize) -> VerifiedTokens:
        """Run target and verification. Return the target's output."""
        tokens = run_target(self.target, self.buffers, size, query)
        accepted = self.verifier(tokens, self.buffers, has_drafts=query.width > 1)
        if query.is_tree:
            self.target.keep(tokens.layout, accepted)
        return tokens


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
class StepStages:
    """The stages that a plan runs, in this order. None: it does not run that one.

    Only some requests lack so many draft KV entries that `extend_chunks` makes all but one of them,
    from tokens that the host knows: `behind`. `extend` makes the others.
    `admit` runs only if the plan still has a budget once masks are known.
    `verify_prompts` runs in place of `verify` if prompts are scored: it returns hidden states, too,
    so it is never captured.
    """

    shape: DraftShape
    """Of the state that was chosen; at least as deep as the drafts."""
    behind: tuple[ScheduledRequest, ...]
    extend_chunks: StageRunner | None
    extend: StageRunner | None
    draft: StageRunner | None
    admit: StageRunner | None
    verify: StageRunner
    verify_prompts: Callable[[StepSize], VerifiedTokens] | None


@dataclass(frozen=True, eq=False)
class StageTable:
    """Every stage of a worker, and which of them a plan runs; see `CapturedShapes`.

    states: by shape. grammar: verification of grammar drafts deeper than any of them. extends:
    draft extend, by the entries it makes at most. mixed: verification with prefill chunks, by the
    widest query. admits: admission, by whether drafts are trees.
    largest_batch: the largest batch of a shape that its state is meant for. max_captured: largest
    batch whose stages are captured; None: no stage is, and each runs at its exact size.
    """

    bodies: StageBodies
    states: Mapping[DraftShape, SpecRuntimeState]
    grammar: SpecRuntimeState | None
    extends: Mapping[int, StageRunner]
    extend_chunks: StageRunner | None
    mixed: Mapping[QueryShape, StageRunner]
    admits: Mapping[bool, StageRunner]
    largest_batch: Callable[[DraftShape], int]
    max_captured: int | None

    @cached_property
    def max_extend(self) -> int:
        """Draft KV entries that the widest draft extend makes; 0 without draft KV."""
        return max(self.extends, default=0)

    @cached_property
    def _chains(self) -> list[SpecRuntimeState]:
        """The states of chains, the shallowest first."""
        chains = [shape for shape in self.states if shape.is_chain]
        return [self.states[shape] for shape in sorted(chains)]

    def of(self, plan: ScheduledBatch) -> StepStages:
        """Return the stages that a plan runs."""
        reqs = plan.decode_requests
        num_requests = len(reqs)
        wanted = _shape_of(plan, reqs)
        state = self._state(wanted, num_requests)
        shape, is_tree = state.shape, not state.shape.is_chain
        behind: tuple[ScheduledRequest, ...] = ()
        extend = draft = verify_prompts = None
        drafted = tuple([req for req in reqs if req.model_steps])
        if drafted and self.bodies.drafter is not None:
            draft = self._draft(_shape_of(plan, drafted, is_drafted=True), num_requests)
            if self.bodies.drafter.keeps_kv:
                behind = tuple([req for req in drafted if req.num_missing > self.max_extend])
                extend = self._extend(plan, num_requests, has_behind=bool(behind))
        if any(req.scored_ids for req in plan.prefill_requests):
            verify_prompts = partial(self.bodies.verify, QueryShape.of(shape))
        return StepStages(
            shape=shape,
            behind=behind,
            extend_chunks=self.extend_chunks if behind else None,
            extend=extend,
            draft=draft,
            admit=None if plan.budget is None else self.admits[is_tree],
            verify=self._mixed(QueryShape.of(wanted)) if plan.prefill_requests else state.verify,
            verify_prompts=verify_prompts,
        )

    def _mixed(self, query: QueryShape) -> StageRunner:
        """Return the narrowest verification with prefill chunks that holds a query."""
        fits = [q for q in self.mixed if q.is_tree == query.is_tree and q.width >= query.width]
        return self.mixed[min(fits)]

    def _state(self, shape: DraftShape, num_requests: int) -> SpecRuntimeState:
        """Return the smallest state that drafts `shape` for so many requests."""
        if not shape.is_chain:
            return self.states[shape]
        for state in self._chains:
            if state.shape.depth >= shape.depth and self.largest_batch(state.shape) >= num_requests:
                return state
        deepest = self._chains[-1]
        return self.grammar if self.grammar and shape > deepest.shape else deepest

    def _draft(self, shape: DraftShape, num_requests: int) -> StageRunner:
        """Return the shallowest stage that drafts `shape` for so many requests."""
        if self.max_captured is None:
            return StageRunner(partial(self.bodies.draft, shape))
        draft = self._state(shape, num_requests).draft
        assert draft is not None, "a draft model has draft stages"
        return draft

    def _extend(self, plan: ScheduledBatch, num_requests: int, *, has_behind: bool) -> StageRunner:
        """Return the narrowest draft extend that makes the missing entries of all requests."""
        num_missing = plan.max_missing
        if has_behind:
            most = self.max_extend
            num_missing = max(
                _missing_after(req, most) for req in plan.decode_requests if req.extends
            )
        if self.max_captured is None:
            return StageRunner(partial(self.bodies.extend, max(num_missing, 1)))
        most_captured = min(num_requests, self.max_captured)
        fits = [
            length
            for length, stage in self.extends.items()
            if length >= num_missing and stage.sizes[-1].requests >= most_captured
        ]
        return self.extends[min(fits)]


def _shape_of(
    plan: ScheduledBatch, reqs: tuple[ScheduledRequest, ...], *, is_drafted: bool = False
) -> DraftShape:
    """Return the shape that holds the drafts of these requests; is_drafted: of a model alone."""
    depths = (req.model_steps if is_drafted else req.num_steps for req in reqs)
    depth = max(depths, default=0)
    return DraftShape.chain(depth) if plan.shape.is_chain or not depth else plan.shape


def _missing_after(req: ScheduledRequest, max_extend: int) -> int:
    """Return the most draft KV entries a request lacks once those of its known tokens are made."""
    if req.num_missing <= max_extend:
        return req.num_missing
    # The entry that is left, and those of a step in flight.
    return req.num_missing - (req.start - req.draft_start) + 1
