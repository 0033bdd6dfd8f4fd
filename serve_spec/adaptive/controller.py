"""The engine's only contact with policy: asks for a shape, reports what was verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serve_spec.adaptive.acceptance import PositionCounters, SlotAverages
from serve_spec.adaptive.policy import BadMeasurement, Reason, StaticPolicy
from serve_spec.adaptive.settings import PolicySettings
from serve_spec.config import ConfigError, SpeculativeConfig
from serve_spec.config.cost_table import CostTable
from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import NO_NOTES, DecodeBatch, RoundSteps

FALLBACK_ROUNDS = 1024
"""Rounds without drafts before a policy that failed is tried anew."""


class AdaptiveController:
    """Picks the shape before drafting, learns after verification, keeps the counts.

    A policy that fails (a broken clock, a defect) gives way to plain decoding; that is said once,
    and after a while it is built anew. One thread drives it; `snapshot` may be called from any.
    """

    def __init__(
        self,
        settings: PolicySettings,
        costs: CostTable | None = None,
        say: Callable[[str], None] = lambda warning: None,
        *,
        costs_are_rough: bool = False,
    ) -> None:
        """Start; goodput gives way to ema without costs, and if rounds contradict rough ones."""
        self._configured = self._settings = settings
        self._costs, self._costs_are_rough, self._say = costs, costs_are_rough, say
        self._accept_rates: Sequence[float] | None = None
        self._fallback: str | None = None
        self._fallback_rounds_left = self._num_fallbacks = 0
        self._policy = settings.build(settings.shape.depth, costs)
        self.shapes = settings.shapes
        """Every shape the worker must build, and `PLAIN`, which it always has; never grows."""
        self._active: DraftShape | None = None
        self._batch_size = 0
        self._last_reason = self._policy.last_reason
        self._reconfigured = False
        self.switch_reason: Reason | None = None
        """Why the shape chosen last differs from the one before; None when it does not."""
        self.notes = NO_NOTES
        """The policy's notes on its last answer."""
        self._positions = PositionCounters(settings.max_depth)
        self._levels = {tree: PositionCounters(settings.max_depth) for tree in settings.trees}
        self._averages = SlotAverages(settings.ema_slots)
        # All keys from the start: a reader in another thread never meets a dict that grows.
        self._switches = dict.fromkeys(Reason, 0)
        self._rounds_by_shape = dict.fromkeys((PLAIN, *self.shapes), 0)
        if settings.warning:
            say(settings.warning)

    @classmethod
    def create(
        cls,
        config: SpeculativeConfig,
        costs: CostTable | None = None,
        say: Callable[[str], None] = lambda warning: None,
    ) -> AdaptiveController:
        """Return the controller a configuration asks for, see `PolicySettings.of`."""
        return cls(PolicySettings.of(config), costs, say)

    def choose_steps(self, batch: DecodeBatch) -> RoundSteps:
        """Return the shape of the next round and each row's share of it, before drafting.

        An empty batch gets 0 steps and is not a round.
        """
        if not batch.size:
            self.switch_reason, self.notes = None, NO_NOTES
            return RoundSteps(PLAIN)
        if self._fallback is not None:
            self._fallback_rounds_left -= 1
            if self._fallback_rounds_left <= 0:
                self._build_policy(self._settings)
                self._reconfigured = False
        try:
            steps = self._policy.choose(batch)
        except Exception as error:  # plain decoding serves every request, a dead engine none
            self._fall_back(f"the policy failed to choose: {error!r}")
            steps = self._policy.choose(batch)
        reason = Reason.RECONFIGURED if self._reconfigured else self._policy.last_reason
        self._reconfigured = False
        switched = self._active not in (None, steps.shape)
        self.switch_reason = reason if switched else None
        self._switches[reason] += switched
        self._active, self._batch_size = steps.shape, batch.size
        self._last_reason, self.notes = reason, steps.notes
        self._rounds_by_shape[steps.shape] += 1
        return steps

    def on_verify_complete(self, record: StepRecord) -> None:
        """Learn from one step.

        Raises:
            ValueError: a row kept more drafts than it had.
        """
        _, steps, correct, _ = record.model_drafts
        counters = self._positions if record.shape.is_chain else self._levels[record.shape]
        counters.observe(correct, steps)
        self._averages.observe(record.batch_size, correct, steps)
        try:
            self._policy.observe(record)
        except BadMeasurement as error:
            if self._costs_are_rough:
                self._costs, self._costs_are_rough = None, False
                self._build_policy(self._settings)
            else:
                self._fall_back(str(error))
        except Exception as error:
            self._fall_back(f"the policy failed to learn: {error!r}")

    def start_from(self, accept_rates: Sequence[float]) -> None:
        """Start anew from acceptance rates by position, if the policy estimates any.

        Raises:
            ValueError: fewer than it may draft, or not all within (0, 1); nothing changed.
        """
        policy = self._settings.build(self._settings.shape.depth, self._costs, accept_rates)
        self._policy, self._accept_rates = policy, accept_rates

    @property
    def weighs_costs(self) -> bool:
        """Whether the strategy of now weighs what rounds cost."""
        return self._settings.needs_costs

    def use_costs(self, costs: CostTable, *, are_rough: bool = False) -> None:
        """Let strategy goodput, if it is configured, decide by `costs` from the next round on."""
        self._costs, self._costs_are_rough = costs, are_rough
        if self.weighs_costs:
            self._build_policy(self._settings)

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request that finished, was aborted or preempted."""
        self._policy.forget(request_id)

    def reconfigure(self, settings: Mapping[str, Any]) -> None:
        """Replace the policy between rounds, at the shape of now; counts survive.

        settings: keys of `PolicyUpdate`; those left out are as configured, whatever earlier
            changes said, so that an engine that starts later and is told the same does the same.

        Raises:
            ConfigError: unknown or invalid, or a shape the worker did not build; nothing changed.
        """
        wanted = self._configured.changed(settings)
        if wanted.adaptive and self.shapes == (PLAIN,):
            raise ConfigError(
                "speculative_adaptive=True: no tier was built that drafts; "
                "restart with the new configuration"
            )
        self._refuse_unbuilt(wanted.shapes)
        self._build_policy(wanted)

    def _build_policy(self, settings: PolicySettings) -> None:
        """Start anew with these settings, at the shape of now."""
        start = self._active or settings.shape
        self._policy = settings.build(start.depth, self._costs, self._accept_rates)
        self._settings, self._reconfigured, self._fallback = settings, True, None

    def _fall_back(self, why: str) -> None:
        """Decode plainly for a while, which cannot be worse than speculation turned off."""
        self._fallback, self._fallback_rounds_left = why, FALLBACK_ROUNDS
        self._policy = StaticPolicy(PLAIN, Reason.FALLBACK)
        if not self._num_fallbacks:
            self._say(f"speculation is off for now: {why}")
        self._num_fallbacks += 1

    def _refuse_unbuilt(self, shapes: tuple[DraftShape, ...]) -> None:
        wanted, built = _depths(shapes), sorted({0, *_depths(self.shapes)})
        if missing := [depth for depth in wanted if depth not in built]:
            raise ConfigError(
                f"candidate_steps={wanted}: no tier was built for {missing} at start; "
                f"use a subset of {built}, or restart with the new configuration"
            )
        if unknown := _as_rows([shape for shape in shapes if shape not in self.shapes]):
            raise ConfigError(
                f"candidate_trees={unknown}: no such tree was built at start; use some of "
                f"{_as_rows(self.shapes)} (the root counted), or restart with the new configuration"
            )

    def snapshot(self) -> dict[str, object]:
        """Return what an operator should see, JSON-able: the shape, why, and what it rests on."""
        active = self._active or self._settings.shape  # before the first round: where it starts
        policy = self._policy.snapshot()
        slots: dict[str, Any] = dict(self._averages.snapshot())
        of_policy: Any = policy["slots"]
        for key, shown in of_policy.items():
            slots[key] = {**slots.get(key, {}), **shown}
        rounds = {str(shape): n for shape, n in self._rounds_by_shape.items() if n}
        return {
            **policy,
            "slots": slots,
            "speculative_num_steps": active.depth,
            "speculative_num_draft_tokens": active.size + 1,
            "batch_size": self._batch_size,
            "candidate_steps": _depths(self.shapes),
            "last_reason": self._last_reason.value,
            "fallback": self._fallback,
            "num_fallbacks": self._num_fallbacks,
            "switches": {reason.value: n for reason, n in self._switches.items() if n},
            "rounds_by_num_steps": rounds,
            "positions": self._positions.snapshot(),
            **self._positions.totals(),
            **(self._trees_snapshot() if self._levels else {}),
        }

    def _trees_snapshot(self) -> dict[str, object]:
        """Return what the figures above, which are of chains, leave out."""
        shown = {}
        for tree, levels in self._levels.items():
            if levels.num_rows:
                length = levels.totals()["learned_accept_length"]
                shown[str(tree)] = {"learned_accept_length": length, "levels": levels.snapshot()}
        return {
            "speculative_tree": str(self._active) if self._active in self._levels else None,
            "candidate_trees": list(map(str, self._levels)),
            "trees": shown,
        }


def _depths(shapes: Sequence[DraftShape]) -> list[int]:
    """Return the depths of the chains."""
    return [shape.depth for shape in shapes if shape.is_chain]


def _as_rows(shapes: Sequence[DraftShape]) -> list[list[int]]:
    """Return the trees as a user gives them, the root counted."""
    return [[shape.depth, shape.size + 1] for shape in shapes if not shape.is_chain]
