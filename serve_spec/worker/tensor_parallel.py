"""One plan on every rank: rank 0 broadcasts it, and all ranks execute it.

Ranks cannot diverge: the plan, the drafts and the draws are rank 0's, sums over ranks are equal on
all ranks to the last bit, and shapes depend on the plan alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from serve_spec.core.draft import DraftShape
from serve_spec.core.plan import BatchResult, PendingBatch, ScheduledBatch, WorkerLimits
from serve_spec.parallel.worker_ranks import WorkerRanks
from serve_spec.worker.capture import SpecRuntimeState
from serve_spec.worker.plan_delta import PlanDecoder, PlanDelta, PlanEncoder
from serve_spec.worker.worker import Worker

_DRAIN = "drain"


class TensorParallelWorker:
    """Rank 0's worker, which broadcasts every call to the other ranks. See `Worker`.

    Every call may raise `RankLost`, after which none succeeds.
    """

    def __init__(self, worker: Worker, worker_ranks: WorkerRanks) -> None:
        self.vocab_size = worker.vocab_size
        self.device = worker.device
        self.synthetic_acceptance = worker.synthetic_acceptance
        self.grammars = worker.grammars
        self.async_scheduling = worker.async_scheduling
        self._worker = worker
        self._worker_ranks = worker_ranks
        self._encoder = PlanEncoder()

    @property
    def dtype(self) -> torch.dtype:
        """See `Worker`."""
        return self._worker.dtype

    @property
    def draft_dtype(self) -> torch.dtype | None:
        """See `Worker`."""
        return self._worker.draft_dtype

    @property
    def limits(self) -> WorkerLimits:
        """See `Worker`."""
        return self._worker.limits

    @property
    def states(self) -> Mapping[DraftShape, SpecRuntimeState]:
        """See `Worker`."""
        return self._worker.states

    def init_states(self, shapes: Iterable[DraftShape]) -> None:
        """Capture every shape on every rank."""
        states = tuple(shapes)
        self._worker_ranks.broadcast(states)
        with self._worker_ranks.in_step():
            self._worker.init_states(states)

    def submit(self, plan: ScheduledBatch) -> PendingBatch:
        """Launch a step on every rank."""
        self._worker_ranks.broadcast(self._encoder.encode(plan))
        with self._worker_ranks.in_step():
            return _JointStep(self._worker.submit(plan), self._worker_ranks)

    def execute(self, plan: ScheduledBatch) -> BatchResult:
        """Run a step to its end."""
        return self.submit(plan).result()

    def drain(self) -> None:
        """Forget the state of all requests on every rank."""
        self._worker_ranks.broadcast(_DRAIN)
        with self._worker_ranks.in_step():
            self._worker.drain()


@dataclass(frozen=True)
class _JointStep:
    """See `PendingBatch`."""

    local: PendingBatch
    worker_ranks: WorkerRanks

    def result(self) -> BatchResult:
        """Return rank 0's result."""
        with self.worker_ranks.in_step():
            return self.local.result()


def run_worker_loop(worker: Worker, broadcasts: Iterable[object]) -> None:
    """Execute what `TensorParallelWorker` broadcasts, on every rank but 0, until it ends."""
    before: PendingBatch | None = None
    decoder = PlanDecoder()
    for message in broadcasts:
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
        before.result()  # rank 0 may still wait for this rank's share
