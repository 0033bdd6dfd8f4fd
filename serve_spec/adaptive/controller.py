"""Connects the engine with a policy: chooses the drafts of a round, reports verified rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from serve_spec.adaptive.policy import StaticPolicy, StepPolicy
from serve_spec.adaptive.prompts import MeasuredPrompts
from serve_spec.adaptive.reasons import explain
from serve_spec.adaptive.settings import PolicySettings
from serve_spec.adaptive.state import section
from serve_spec.config import ConfigError
from serve_spec.config.adaptive_file import slot_of
from serve_spec.config.cost_table import CostTable
from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.registry import one_line
from serve_spec.core.round import NO_NOTES, DecodeBatch, Reason, RoundSteps

FALLBACK_ROUNDS = 1024
"""Rounds without drafts before a policy that failed is tried anew."""


class AdaptiveController:
    """Picks the shape before drafting, learns after verification, keeps the counts.

    A policy that fails gives way to plain decoding for a while, with a warning the first time. One
    thread drives it; `snapshot` may be called from any.
    """

    def __init__(
        self,
        settings: PolicySettings,
        costs: CostTable | None = None,
        warn: Callable[[str], None] = lambda warning: None,
    ) -> None:
        """Start; goodput gives way to ema without costs."""
        self._configured = self.settings = settings
        self._costs, self._warn = costs, warn
        self._accept_rates: Sequence[float] = ()
        self._kept: Mapping[str, Any] = {}
        self._policy = settings.build(settings.shape.depth, costs)
        # Under policies that leave the prompt tokens of a step open.
        self._prompts = MeasuredPrompts(settings.prompts)
        self.shapes = settings.shapes  # that the worker must build beside `PLAIN`; never grows
        self.switch_reason: Reason | None = None  # why the last shape differs from the one before
        self.notes = NO_NOTES  # the policy's, on its last answer
        self._active: DraftShape | None = None
        self._reconfigured = self._limited = False
        self._fallback: str | None = None
        self._fallback_rounds_left = self._num_fallbacks = 0
        self._slots = settings.ema_slots
        self._averages: dict[int, float] = {}
        self._switches: Counter[Reason] = Counter()
        self._rounds_by_shape: Counter[DraftShape] = Counter()
        self._rounds_by_reason: Counter[Reason] = Counter()

    def choose_steps(self, batch: DecodeBatch) -> RoundSteps:
        """Return the drafts of the next round; an empty batch has none."""
        if not batch.size:
            self.switch_reason, self.notes = None, NO_NOTES
            return RoundSteps(PLAIN)
        try:
            steps = self._choose(batch)
        except Exception as error:  # plain decoding serves every request, a dead engine none
            self._fall_back(f"the policy failed to choose: {error!r}")
            steps = self._policy.choose(batch)
        if steps.prompt_tokens is None and batch.max_prompt_tokens:
            steps = replace(steps, prompt_tokens=self._prompts.tokens(batch, steps))
        self._limited = not any(batch.max_steps)
        reason = Reason.RECONFIGURED if self._reconfigured else self._last_reason
        switched = self._active not in (None, steps.shape)
        self.switch_reason = reason if switched else None
        self._switches[reason] += switched
        self._rounds_by_shape[steps.shape] += 1
        self._rounds_by_reason[reason] += 1
        self._active, self.notes, self._reconfigured = steps.shape, steps.notes, False
        return steps

    @property
    def _last_reason(self) -> Reason:
        """Return the policy's reason for the last round, or `LIMIT` if no request could draft."""
        return Reason.LIMIT if self._limited else self._policy.last_reason

    def _choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return the policy's answer; raise if it fails or does not fit the batch."""
        if self._fallback is not None:
            self._fallback_rounds_left -= 1
            if self._fallback_rounds_left <= 0:
                self._build_policy(self.settings)
                self._reconfigured = False
        steps = self._policy.choose(batch)
        if steps.shape != PLAIN and steps.shape not in self.shapes:
            raise ValueError(f"shape {steps.shape} is not one of its shapes")
        if steps.steps_per_req is not None and len(steps.steps_per_req) != batch.size:
            raise ValueError(f"{len(steps.steps_per_req)} steps_per_req for {batch.size} requests")
        return steps

    def on_verify_complete(self, record: StepRecord) -> None:
        """Learn from one step."""
        self._follow_average(record)
        self._prompts.observe(record)
        try:
            self._policy.observe(record)
        except Exception as error:
            self._fall_back(f"the policy failed to learn: {error!r}")

    def _follow_average(self, record: StepRecord) -> None:
        """Average the accepted drafts of requests that drafted, by slot, under every strategy."""
        steps, correct = record.model_drafts[1:3]
        if accepted := [kept for kept, k in zip(correct, steps, strict=True) if k]:
            key = slot_of(self._slots, record.batch_size)
            mean = sum(accepted) / len(accepted)
            before = self._averages.get(key, mean)
            self._averages[key] = before + self._slots[key].ema_alpha * (mean - before)

    def start_from(self, accept_rates: Sequence[float]) -> None:
        """Start anew from acceptance rates by position, if the policy estimates any.

        Raises:
            ValueError: fewer than it may draft, or not all within (0, 1); nothing changed.
        """
        policy = self._built(self.settings, self.settings.shape, accept_rates)
        self._policy, self._accept_rates = policy, accept_rates

    def state(self) -> dict[str, Any]:
        """Return what the policy has learned, for `restore` after a restart; empty: nothing."""
        if self._waits_for_costs or not (learned := self._policy.state()):
            return {}
        return {**_kind(self._policy), "learned": learned}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`, at the latest when costs are known.

        Acceptance rates of `start_from` take precedence, whichever comes first.

        Raises:
            ValueError: of another policy or version, or damaged; nothing changed.
        """
        policy = self.settings.build(self.settings.shape.depth, self._costs, self._accept_rates)
        if not self._waits_for_costs:
            _restore(policy, state)
        self._policy, self._kept = policy, state

    @property
    def num_rounds(self) -> int:
        """Return the rounds that were chosen since the start."""
        return self._rounds_by_shape.total()

    @property
    def _waits_for_costs(self) -> bool:
        """Return whether another policy stands in for the configured one."""
        return self._costs is None and self.settings.needs_costs

    def use_costs(self, costs: CostTable) -> None:
        """Let strategy goodput, if it is configured, decide by `costs` from the next round on."""
        self._costs = costs
        if self.settings.needs_costs:
            self._build_policy(self.settings)

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request that finished, was aborted or preempted."""
        try:
            self._policy.forget(request_id)
        except Exception as error:
            self._fall_back(f"the policy failed to forget a request: {error!r}")

    def reconfigure(self, settings: Mapping[str, Any]) -> None:
        """Replace the policy between rounds, at the shape of now; counts survive.

        settings: see `config.speculative.parse_update`; those left out are as configured at start.

        Raises:
            ConfigError: unknown or invalid, or a shape the worker did not build; nothing changed.
        """
        wanted = self._configured.changed(settings)
        built = {PLAIN, *self.shapes}
        if missing := set(wanted.shapes) - built:
            unbuilt, known = (", ".join(map(str, sorted(shapes))) for shapes in (missing, built))
            raise ConfigError(
                f"drafts of {unbuilt}: not built at start; use some of {known} (steps, and of "
                "trees x drafts without the root), or restart with the new configuration"
            )
        self._build_policy(wanted)

    def _build_policy(self, settings: PolicySettings) -> None:
        """Build the policy of these settings at the current shape."""
        start = self._active or settings.shape
        self._policy = self._built(settings, start, self._accept_rates)
        self.settings, self._reconfigured, self._fallback = settings, True, None

    def _built(
        self, settings: PolicySettings, start: DraftShape, accept_rates: Sequence[float]
    ) -> StepPolicy:
        """Return a new policy that knows what was kept at a restart, if that fits it."""
        policy = settings.build(start.depth, self._costs, accept_rates)
        if not _is_of(self._kept, policy):
            return policy
        try:
            _restore(policy, self._kept)
        except ValueError as error:
            self._kept = {}
            self._warn(f"what the policy learned before the restart is not used: {error}")
            policy = settings.build(start.depth, self._costs, accept_rates)
        return policy

    def _fall_back(self, why: str) -> None:
        """Decode plainly for a while, which cannot be worse than speculation turned off."""
        self._fallback, self._fallback_rounds_left = why, FALLBACK_ROUNDS
        self._policy = StaticPolicy(PLAIN, Reason.FALLBACK)
        self._kept = {}  # it may be the cause
        if not self._num_fallbacks:
            self._warn(f"speculation is off for now: {why}")
        self._num_fallbacks += 1

    def snapshot(self) -> dict[str, object]:
        """Return what an operator should see, JSON-able: the shape, why, and what it rests on."""
        active = self._active or self.settings.shape  # before the first round: where it starts
        averages = sorted(self._averages.copy().items())
        try:
            policy = {"strategy": self.settings.strategy, **self._policy.snapshot()}
        except Exception as error:  # what is shown must not stop what is served
            policy = {"strategy": self.settings.strategy, "snapshot_error": repr(error)}
        slots: dict[str, Any] = {str(k): {"ema_accept_len": round(x, 4)} for k, x in averages}
        for key, shown in policy.get("slots", {}).items():
            slots[key] = slots.get(key, {}) | shown
        shown = {
            "prompt_tokens": self._prompts.sizer.snapshot(),
            **policy,
            "slots": slots,
            "speculative_num_steps": active.depth,
            "speculative_num_draft_tokens": active.size + 1,
            "candidate_steps": [shape.depth for shape in self.shapes if shape.is_chain],
            "candidate_trees": [str(shape) for shape in self.shapes if not shape.is_chain],
            "last_reason": self._last_reason.value,
            "fallback": self._fallback,
            "num_fallbacks": self._num_fallbacks,
            "switches": {why.value: n for why, n in self._switches.copy().items() if n},
            "rounds_by_num_steps": {str(k): n for k, n in self._rounds_by_shape.copy().items()},
            "rounds_by_reason": {why.value: n for why, n in self._rounds_by_reason.copy().items()},
        }
        try:
            return {**shown, "decision": explain(shown)}
        except Exception as error:  # another package's policy may show anything
            return {**shown, "snapshot_error": repr(error)}


def _kind(policy: StepPolicy) -> dict[str, Any]:
    """Return what tells whose state is whose."""
    name = f"{type(policy).__module__}:{type(policy).__qualname__}"
    return {"policy": name, "version": policy.state_version}


def _is_of(state: Mapping[str, Any], policy: StepPolicy) -> bool:
    return {name: state.get(name) for name in ("policy", "version")} == _kind(policy)


def _restore(policy: StepPolicy, state: Mapping[str, Any]) -> None:
    """Restore a new policy; raise ValueError, after which it must not be used."""
    if not _is_of(state, policy):
        given = {name: state.get(name) for name in _kind(policy)}
        raise ValueError(f"of {given!r:.120}, but {_kind(policy)} is needed")
    try:
        policy.restore(section(state, "learned"))
    except Exception as error:  # a policy may raise anything
        raise ValueError(one_line(error)) from error
