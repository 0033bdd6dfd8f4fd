"""One plan on every rank: rank 0 decides and tells, the others do the same.

What could make ranks differ is rank 0's alone: the plan (who runs, the tier, the tokens committed
so far) comes with every order, and workers take over rank 0's drafts, and its draws where they
stay on the device. All else follows from them: sums over ranks are the same everywhere to the last
bit, and shapes depend on the plan alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.plan import BatchResult, PendingBatch, ScheduledBatch, WorkerLimits
from serve_spec.parallel.followers import Followers
from serve_spec.worker.capture import SpecRuntimeState
from serve_spec.worker.plan_delta import PlanDecoder, PlanDelta, PlanEncoder
from serve_spec.worker.worker import Worker

_DRAIN = "drain"


class TensorParallelWorker:
    """Rank 0's worker, which all other ranks follow. See `Worker`.

    Every call may raise `RankLost`, after which none succeeds.
    """

    def __init__(self, worker: Worker, followers: Followers) -> None:
        self.vocab_size = worker.vocab_size
        self.device = worker.device
        self.synthetic_acceptance = worker.synthetic_acceptance
        self.grammars = worker.grammars
        self.async_scheduling = worker.async_scheduling
        self._worker = worker
        self._followers = followers
        self._encoder = PlanEncoder()

    @property
    def dtype(self) -> torch.dtype:
        """What the target computes in."""
        return self._worker.dtype

    @property
    def draft_dtype(self) -> torch.dtype | None:
        """What the draft computes in; None: there is none."""
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
        """Builds every tier on every rank."""
        order = tuple(shapes)
        self._followers.tell(order)
        with self._followers.in_step():
            self._worker.init_states(order)

    def submit(self, plan: ScheduledBatch) -> PendingBatch:
        """Starts a round on every rank."""
        self._followers.tell(self._encoder.encode(plan))
        with self._followers.in_step():
            return _JointRound(self._worker.submit(plan), self._followers)

    def execute(self, plan: ScheduledBatch) -> BatchResult:
        """Run a step to its end."""
        return self.submit(plan).result()

    def drain(self) -> None:
        """Forget the state of all requests on every rank."""
        self._followers.tell(_DRAIN)
        with self._followers.in_step():
            self._worker.drain()


@dataclass(frozen=True)
class _JointRound:
    """See `PendingBatch`."""

    mine: PendingBatch
    followers: Followers

    def result(self) -> BatchResult:
        """Rank 0's."""
        with self.followers.in_step():
            return self.mine.result()


def obey(worker: Worker, orders: Iterable[object]) -> None:
    """What every other rank does with `TensorParallelWorker`'s orders until there are no more."""
    before: PendingBatch | None = None
    decoder = PlanDecoder()
    for order in orders:
        if isinstance(order, PlanDelta):
            newest = worker.submit(decoder.decode(order))
            if before is not None:
                before.result()
            before = newest
        elif order == _DRAIN:
            worker.drain()
        else:
            assert isinstance(order, tuple), "an order is a plan, the draft shapes, or _DRAIN"
            worker.init_states(order)
    if before is not None:
        before.result()  # rank 0 may still wait for this rank's part of it
