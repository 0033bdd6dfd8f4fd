"""The public protocol of policies: how far does the next round speculate?"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from serve_spec.config.adaptive_file import SlotConfig
from serve_spec.config.cost_table import CostTable
from serve_spec.core.draft import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, Reason, RoundSteps


@dataclass(frozen=True)
class PolicyContext:
    """What a policy of another package is built from."""

    max_steps: int
    """Most drafts of a chain: a limit of the draft model and of the user."""
    initial_steps: int
    """Depth to start with: `speculative_num_steps`, or the depth that ran last."""
    trees: tuple[DraftShape, ...] = ()
    """Trees that the user's keys allow, ascending."""
    slots: Mapping[int, SlotConfig] | None = None
    """`speculative_adaptive_config` by the smallest batch size of a slot; None: not given."""
    costs: CostTable | None = None
    """Measured milliseconds of steps; None unless the class has `needs_costs`, and until they are
    measured."""
    token_counts: Sequence[int] = ()
    """Tokens that captured CUDA graphs verify, ascending; empty: any number costs its own."""


class StepPolicy(ABC):
    """Chooses the drafts of every round.

    The engine's thread calls `choose` before a round and `observe` after it, so each call delays
    the batch: a few hundred microseconds are too many. With asynchronous scheduling `choose` comes
    one round before the last one is observed. If a call raises, the engine decodes without drafts
    for 1024 rounds and then builds the policy anew. A policy needs no lock, except that `snapshot`
    may be called from any thread.

    A policy of another package is named by `speculative_adaptive_strategy: MODULE:CLASS` and built
    as `CLASS(context)`, see `PolicyContext`: at startup, to read its `shapes`, and at every change
    of its settings.
    """

    needs_costs: ClassVar[bool] = False
    """Whether the engine measures the costs of steps at startup, for `PolicyContext.costs`."""
    state_version: ClassVar[int] = 1
    """Format of `state`; states of another version are not restored."""
    shapes: tuple[DraftShape, ...]
    """Every shape that it may choose, fixed once built. The engine captures each of them; `PLAIN`
    is always possible."""
    last_reason: Reason = Reason.STEADY
    """Why the last shape was chosen, for metrics."""

    @abstractmethod
    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return the shape of the next round and, if requests differ, the levels of each.

        batch: at least one request; its columns have an entry per decoding request. `steps_per_req`
        of the result must have as many. The engine drafts less where a request or the step has no
        room.
        """

    @abstractmethod
    def snapshot(self) -> dict[str, Any]:
        """Return what an operator should see in `/server_info`, JSON-able.

        `slots`, if there are any, is a mapping by the name of the slot.
        """

    def observe(self, record: StepRecord) -> None:  # noqa: B027
        """Learn from one step; by default nothing.

        record: the drafts that each request verified and those accepted, the batch size, and the
        times in ms (`record.times`, None without a clock). Steps without decoding requests come,
        too.
        """

    def state(self) -> Mapping[str, Any]:
        """Return what should outlive a restart, JSON-able; by default nothing.

        The engine asks every few minutes and at shutdown, between steps, and keeps the answer for
        the next start with the same models, settings and version, unless it is empty.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Continue from a `state` of this class, of the same `state_version`.

        Called on a policy that has just been built. May raise ValueError, in one line, if the state
        does not fit: then a new one takes its place.
        """

    def forget(self, request_id: str) -> None:  # noqa: B027
        """Drop what is known of a request that finished, was aborted or preempted."""


class StaticPolicy(StepPolicy):
    """Always the same shape; `PLAIN` is plain decoding."""

    def __init__(self, shape: DraftShape, reason: Reason = Reason.STATIC) -> None:
        self.shapes = (shape,)
        self.last_reason = reason

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return the one shape."""
        return RoundSteps(self.shapes[0])

    def snapshot(self) -> dict[str, Any]:
        """Return its name."""
        return {"strategy": "static"}
