"""The engine's only contact with policy: asks for a tier, reports what was verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serve_spec.adaptive.acceptance import PositionCounters
from serve_spec.adaptive.ema import EmaPolicy
from serve_spec.adaptive.guard import DEFAULT_DWELL_ROUNDS
from serve_spec.adaptive.params import AdaptiveSpeculativeParams
from serve_spec.adaptive.policy import Reason, StaticPolicy, StepPolicy
from serve_spec.adaptive.presets import CONSERVATIVE
from serve_spec.config import ConfigError, SpeculativeConfig
from serve_spec.config.adaptive_file import SlotConfig, load_slots
from serve_spec.config.speculative import parse_update


@dataclass(frozen=True)
class PolicySettings:
    """Everything that decides which policy runs, and how."""

    num_steps: int
    adaptive: bool
    strategy: str
    slots: Mapping[int, SlotConfig]
    min_dwell_rounds: int = DEFAULT_DWELL_ROUNDS

    def build(self, initial_steps: int) -> StepPolicy:
        """A fresh policy. An adaptive one starts at the candidates nearest to `initial_steps`."""
        if not self.adaptive or self.strategy == "static":
            return StaticPolicy(self.num_steps)
        assert self.strategy == "ema", f"{self.strategy}: config refuses what is not here yet"
        params = AdaptiveSpeculativeParams(initial_steps, self.slots)
        return EmaPolicy(params, self.min_dwell_rounds)


class AdaptiveController:
    """Picks the tier before drafting, learns after verification, keeps the counts.

    One thread drives it (the engine's); `snapshot` may be called from any.
    """

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._policy = settings.build(settings.num_steps)
        self._candidate_steps = self._policy.candidate_steps
        self._active_steps: int | None = None
        self._batch_size = 0
        self._last_reason = self._policy.last_reason
        self._reconfigured = False
        self.switch_reason: Reason | None = None
        """Why the tier chosen last differs from the one before; None when it does not."""
        self._positions = PositionCounters(max(self._candidate_steps))
        # All keys from the start: a reader in another thread never meets a dict that grows.
        self._switches = dict.fromkeys(Reason, 0)
        self._rounds_by_num_steps = dict.fromkeys(sorted({0, *self._candidate_steps}), 0)

    @classmethod
    def create(cls, config: SpeculativeConfig) -> AdaptiveController:
        """The controller a configuration asks for; fixed at 0 steps when nothing drafts.

        Raises:
            ConfigError: the adaptive config file is unreadable or invalid.
        """
        source = config.speculative_adaptive_config
        settings = PolicySettings(
            num_steps=config.speculative_num_steps if config.enabled else 0,
            adaptive=config.speculative_adaptive,
            strategy=config.speculative_adaptive_strategy,
            slots=load_slots(CONSERVATIVE if source is None else source),
        )
        return cls(settings)

    @property
    def candidate_steps(self) -> tuple[int, ...]:
        """Every tier the worker must build, ascending; never grows afterwards.

        0 is among them only if the policy can choose it: rows that may not speculate need it
        anyway, so a worker always has it.
        """
        return self._candidate_steps

    def choose_steps(self, batch_size: int) -> int:
        """The tier of the next round, asked before drafting.

        batch_size: decode rows; counting prefill rows would let one arriving prompt flip the tier.
        """
        steps = self._policy.choose_steps(batch_size)
        reason = Reason.RECONFIGURED if self._reconfigured else self._policy.last_reason
        self._reconfigured = False
        switched = self._active_steps is not None and steps != self._active_steps
        self.switch_reason = reason if switched else None
        self._switches[reason] += switched
        self._active_steps, self._batch_size, self._last_reason = steps, batch_size, reason
        self._rounds_by_num_steps[steps] += 1
        return steps

    def on_verify_complete(
        self, num_correct_drafts: Sequence[int], batch_size: int, num_steps: int
    ) -> int | None:
        """Learns from one verified round; the new tier of the batch's slot if it changed.

        Args:
            num_correct_drafts: one count per live row that drafted the full `num_steps`, as the
                target judged it, before any stop. Finished and aborted rows are not live.
            batch_size: what `choose_steps` was asked for this round.
            num_steps: the tier that produced the result, which need not be the active one.

        Raises:
            ValueError: a count outside 0..num_steps.
        """
        self._positions.observe(num_correct_drafts, num_steps)
        return self._policy.observe(num_correct_drafts, batch_size, num_steps)

    def reconfigure(self, settings: Mapping[str, Any]) -> None:
        """Replaces the policy between rounds; counts survive, averages start anew.

        Keys: speculative_adaptive, speculative_adaptive_strategy, speculative_num_steps,
        speculative_adaptive_config (a mapping or its file), min_dwell_rounds. The new policy
        starts at the tier of now.

        Raises:
            ConfigError: unknown or invalid, or a tier the worker did not build; nothing changed.
        """
        update = parse_update(settings)
        given = update.said()
        source = given.get("speculative_adaptive_config")
        changes: dict[str, Any] = {
            field: given[key]
            for field, key in (
                ("num_steps", "speculative_num_steps"),
                ("adaptive", "speculative_adaptive"),
                ("strategy", "speculative_adaptive_strategy"),
                ("min_dwell_rounds", "min_dwell_rounds"),
            )
            if key in given
        }
        if "speculative_adaptive_config" in given:
            changes["slots"] = load_slots(CONSERVATIVE if source is None else source)
        wanted = replace(self._settings, **changes)
        start = wanted.num_steps if self._active_steps is None else self._active_steps
        policy = wanted.build(start)
        self._refuse_unbuilt(policy.candidate_steps)
        self._settings, self._policy, self._reconfigured = wanted, policy, True

    def _refuse_unbuilt(self, wanted: tuple[int, ...]) -> None:
        built = {0, *self._candidate_steps}
        missing = [steps for steps in wanted if steps not in built]
        if missing:
            raise ConfigError(
                f"candidate_steps={list(wanted)}: no tier was built for {missing} at start; "
                f"use a subset of {sorted(built)}, or restart with the new configuration"
            )

    def snapshot(self) -> dict[str, object]:
        """What an operator should see, JSON-able: the active tier, why, and what it is based on."""
        positions = self._positions
        rate = positions.accept_rate
        return {
            **self._policy.snapshot(),
            "speculative_num_steps": self._active_steps,
            "batch_size": self._batch_size,
            "candidate_steps": list(self._candidate_steps),
            "last_reason": self._last_reason.value,
            "switches": {reason.value: n for reason, n in self._switches.items() if n},
            "rounds_by_num_steps": {str(k): n for k, n in self._rounds_by_num_steps.items() if n},
            "positions": positions.snapshot(),
            # Of live rows that drafted the full tier: less than what was drafted in all.
            "learned_draft_tokens": positions.num_draft_tokens,
            "learned_correct_drafts": positions.num_correct_drafts,
            "learned_accept_length": round(positions.accept_length, 4),
            "accept_rate": None if rate is None else round(rate, 4),
        }
