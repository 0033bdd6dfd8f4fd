"""One plan on every rank: rank 0 broadcasts it, and all ranks execute it.

Ranks cannot diverge: the plan, the drafts and the draws are rank 0's, sums over ranks are equal on
all ranks to the last bit, and shapes depend on the plan and on what rank 0's masks leave of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from serve_spec.core.draft import DraftShape
from serve_spec.core.plan import (
    BatchResult,
    EditedText,
    PendingBatch,
    ScheduledBatch,
    ScheduledRequest,
)
from serve_spec.parallel.worker_ranks import WorkerRanks
from serve_spec.worker.worker import MaskedPlan, SpecWorker

_DRAIN = "drain"


class TensorParallelWorker(SpecWorker):
    """Rank 0's worker, which broadcasts every call to the other ranks.

    Every call may raise `RankLost`, after which none succeeds.
    """

    def __init__(self, worker_ranks: WorkerRanks, *args: Any) -> None:
        """args: see `SpecWorker`."""
        super().__init__(*args)
        self._worker_ranks = worker_ranks
        self._encoder = PlanEncoder()

    def init_states(self, shapes: Iterable[DraftShape]) -> None:
        """Capture every shape on every rank."""
        states = tuple(shapes)
        self._worker_ranks.broadcast(states)
        with self._worker_ranks.in_step():
            super().init_states(states)

    def submit(self, plan: ScheduledBatch) -> PendingBatch:
        """Launch a step on every rank."""
        self._worker_ranks.broadcast(self._encoder.encode(plan))
        with self._worker_ranks.in_step():
            return _JointStep(super().submit(plan), self._worker_ranks)

    def _mask(self, plan: ScheduledBatch) -> MaskedPlan:
        """Make the masks here alone; tell the other ranks which drafts are left, and which new."""
        masked = super()._mask(plan)
        if plan.has_masks and plan.shape.is_chain:
            num_drafts = [req.num_draft_tokens for req in masked.plan.sampling_requests]
            self._worker_ranks.broadcast([num_drafts, {**masked.forced}])
        return masked

    def drain(self) -> None:
        """Forget the state of all requests on every rank."""
        self._worker_ranks.broadcast(_DRAIN)
        with self._worker_ranks.in_step():
            super().drain()


@dataclass(frozen=True)
class _JointStep:
    local: PendingBatch
    worker_ranks: WorkerRanks

    def result(self) -> BatchResult:
        """Return rank 0's result."""
        with self.worker_ranks.in_step():
            return self.local.result()


class FollowingWorker(SpecWorker):
    """The worker of a rank other than 0. It draws without masks: all ranks take rank 0's draws."""

    def __init__(self, broadcasts: Iterator[object], *args: Any) -> None:
        """broadcasts: of a `TensorParallelWorker`. args: see `SpecWorker`."""
        super().__init__(*args)
        self.broadcasts = broadcasts

    def _mask(self, plan: ScheduledBatch) -> MaskedPlan:
        self.buffers.masks.clear()
        if plan.has_masks and plan.shape.is_chain:
            message = next(self.broadcasts, None)
            if not isinstance(message, list):
                raise RuntimeError("rank 0 ended within a step")
            num_drafts, forced = message
            self.buffers.write_forced(forced)
            plan = plan.cut(num_drafts)
        return MaskedPlan(plan)


def run_worker_loop(worker: FollowingWorker) -> None:
    """Execute what `TensorParallelWorker` broadcasts, on every rank but 0, until it ends."""
    before: PendingBatch | None = None
    decoder = PlanDecoder()
    for message in worker.broadcasts:
        if isinstance(message, PlanDelta):
            newest = worker.submit(decoder.decode(message))
            if before is not None:
                before.result()
            before = newest
        elif message == _DRAIN:
            worker.drain()
        else:
            assert isinstance(message, tuple), "broadcast a plan, the draft shapes, or _DRAIN"
            worker.init_states(message)
    if before is not None:
        before.result()  # rank 0 may still wait for this rank's part


class _Longer(NamedTuple):
    """A tuple that keeps the first `num_kept` values of the one before it."""

    num_kept: int
    added: tuple[Any, ...]


# Fields that grow by a few values a step, and may be long.
_GROWING = frozenset({"page_ids", "generated_ids"})


@dataclass(frozen=True)
class PlanDelta:
    """A plan whose requests are sent in full if new, and else as their changed fields."""

    plan: ScheduledBatch
    requests: tuple[ScheduledRequest | dict[str, Any], ...]


class PlanEncoder:
    """Encodes plans for a `PlanDecoder`."""

    def __init__(self) -> None:
        self._known: dict[str, ScheduledRequest] = {}

    def encode(self, plan: ScheduledBatch) -> PlanDelta:
        """Return the difference to the last plan."""
        reqs = tuple([self._encode(req) for req in plan.requests])
        self._known = {req.request_id: req for req in plan.requests}
        return PlanDelta(replace(plan, requests=()), reqs)

    def _encode(self, req: ScheduledRequest) -> ScheduledRequest | dict[str, Any]:
        known = self._known.get(req.request_id)
        if known is None:
            return req
        changes: dict[str, Any] = {"request_id": req.request_id}
        pairs: list[tuple[str, Any, Any]] = [
            *zip(ScheduledRequest._fields, known, req, strict=True)
        ]
        for name, old, new in pairs:
            if old is new or old == new:
                continue
            changes[name] = new
            if name in _GROWING:
                changes[name] = _longer(old, new)
            elif name == "edited" and old is not None and new is not None:
                longer = _longer(old.token_ids, new.token_ids)
                changes[name] = new.num_prompt_tokens, longer, new.held_ids
        return changes


class PlanDecoder:
    """Restores plans from their differences, in order."""

    def __init__(self) -> None:
        self._known: dict[str, ScheduledRequest] = {}

    def decode(self, delta: PlanDelta) -> ScheduledBatch:
        """Return the plan that was encoded."""
        reqs = tuple(
            [r if isinstance(r, ScheduledRequest) else self._decode(r) for r in delta.requests]
        )
        self._known = {req.request_id: req for req in reqs}
        return replace(delta.plan, requests=reqs)

    def _decode(self, changes: dict[str, Any]) -> ScheduledRequest:
        known = self._known[changes["request_id"]]
        for name, value in changes.items():
            if isinstance(value, _Longer):
                changes[name] = _grown(getattr(known, name), value)
            elif name == "edited" and known.edited is not None and value is not None:
                num_prompt_tokens, longer, held_ids = value
                token_ids = _grown(known.edited.token_ids, longer)
                changes[name] = EditedText(num_prompt_tokens, token_ids, held_ids)
        return known._replace(**changes)


def _longer(old: tuple[Any, ...], new: tuple[Any, ...]) -> _Longer:
    same = min(len(old), len(new))
    if old[:same] != new[:same]:
        same = next(i for i in range(same) if old[i] != new[i])
    return _Longer(same, new[same:])


def _grown(old: tuple[Any, ...], change: _Longer) -> tuple[Any, ...]:
    return old[: change.num_kept] + change.added
