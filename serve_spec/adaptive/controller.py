"""The engine's only contact with policy: asks for a tier, reports what was verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serve_spec.adaptive import trees
from serve_spec.adaptive.acceptance import PositionCounters, SlotAverages
from serve_spec.adaptive.ema import EmaPolicy
from serve_spec.adaptive.goodput import DEFAULT_MAX_STEPS as GOODPUT_STEPS
from serve_spec.adaptive.goodput import GoodputPolicy
from serve_spec.adaptive.guard import DEFAULT_DWELL_ROUNDS
from serve_spec.adaptive.params import AdaptiveSpeculativeParams
from serve_spec.adaptive.per_request import DEFAULT_MAX_STEPS as PER_REQUEST_STEPS
from serve_spec.adaptive.per_request import PerRequestPolicy
from serve_spec.adaptive.policy import BadMeasurement, Reason, StaticPolicy, StepPolicy
from serve_spec.adaptive.presets import conservative_slots
from serve_spec.adaptive.sharpness import SHARPNESSES, SharpnessPolicy
from serve_spec.config import ConfigError, SpeculativeConfig
from serve_spec.config.adaptive_file import SlotConfig, load_slots
from serve_spec.config.cost_table import CostTable
from serve_spec.config.speculative import Strategy, parse_update
from serve_spec.core.draft_shape import PLAIN, DraftShape
from serve_spec.core.record import DraftColumns, StepRecord
from serve_spec.core.round import DRAFT_SHARPNESS, NO_NOTES, DecodeBatch, RoundSteps

FALLBACK_ROUNDS = 1024
"""Rounds without drafts before a policy that failed is tried anew."""


@dataclass(frozen=True)
class PolicySettings:
    """Everything that decides which policy runs, and how."""

    shape: DraftShape
    """What a fixed policy drafts; an adaptive one starts as deep."""
    adaptive: bool = True
    strategy: Strategy = "goodput"
    slots: Mapping[int, SlotConfig] | None = None
    per_sequence: bool = True
    min_dwell_rounds: int = DEFAULT_DWELL_ROUNDS
    max_steps: int | None = None
    """Most drafts that whoever drafts can make; None: there is no limit."""
    sharpnesses: Sequence[float] = SHARPNESSES
    """What sampled drafts may be drawn at; the best of them is learnt."""
    tree: DraftShape | None = None
    """The largest tree an adaptive policy may draft, unless slots list others; None: chains."""
    cuda_graph_bs: Sequence[int] | None = None
    """The batch sizes there are recordings of: what strategy ema pads to before it picks a slot."""
    token_counts: Sequence[int] = ()
    """Tokens that captured graphs verify, ascending; none: any number costs its own time."""

    @classmethod
    def of(cls, config: SpeculativeConfig, max_steps: int | None = None) -> PolicySettings:
        """What a configuration asks for; fixed at no drafts when nothing drafts.

        Raises:
            ConfigError: the adaptive config file is unreadable or invalid.
        """
        source, shape = config.speculative_adaptive_config, _configured_shape(config)
        return cls(
            shape=shape,
            adaptive=config.speculative_adaptive,
            strategy=config.speculative_adaptive_strategy,
            slots=None if source is None else load_slots(source),
            per_sequence=config.speculative_per_sequence,
            min_dwell_rounds=config.min_dwell_rounds,
            max_steps=max_steps,
            sharpnesses=_sharpnesses(config),
            tree=None if shape.is_chain else shape,
        )

    @property
    def needs_costs(self) -> bool:
        """Whether the policy weighs what rounds cost."""
        return self.adaptive and self.strategy == "goodput" and self._deepest(GOODPUT_STEPS) > 0

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """Every shape the policy may choose: chains, then trees, each ascending.

        Known before its costs are. Where a tree may be chosen, so may the chain of its depth.
        """
        if self.needs_costs:
            depths: Iterable[int] = range(self._deepest(GOODPUT_STEPS) + 1)
            branched = {tree for shapes in self._trees.values() for tree in shapes}
        else:
            chosen = self.build(self.shape.depth, None).shapes
            depths = sorted({shape.depth for shape in chosen})
            branched = {shape for shape in chosen if not shape.is_chain}
        return (*map(DraftShape.chain, depths), *sorted(branched))

    @property
    def trees(self) -> tuple[DraftShape, ...]:
        """Of these, the trees."""
        return tuple(shape for shape in self.shapes if not shape.is_chain)

    @property
    def max_depth(self) -> int:
        """Levels of the deepest of them."""
        return max(shape.depth for shape in self.shapes)

    def largest_batch(self, num_steps: int) -> int | None:
        """The largest batch size a tier can be chosen for; None: there is no limit.

        Whatever is built by batch size need not be built beyond it.
        """
        slots = self.tier_slots if self.strategy == "ema" else self.slots
        if slots is None or not self.adaptive or num_steps == 0:
            return None
        keys = sorted(slots)
        reaching = [key for key in keys if slots[key].candidate_steps[-1] >= num_steps]
        after = [key for key in keys if reaching and key > reaching[-1]]
        # Below the first key the first slot decides.
        return after[0] - 1 if after else None

    def build(
        self,
        initial_steps: int,
        costs: CostTable | None,
        accept_rates: Sequence[float] | None = None,
    ) -> StepPolicy:
        """A fresh policy. An adaptive one starts at, or near, `initial_steps`.

        costs: what goodput weighs; until they are known, ema decides in its place.
        accept_rates: expected by position, for a policy that estimates them; None: its default.
        """
        if not self.adaptive or self.strategy == "static":
            return StaticPolicy(self.shape)
        if self.strategy == "ema":
            return self._ema(initial_steps, self._tier_trees)
        if self._deepest(1) == 0:
            return StaticPolicy(PLAIN)  # the user's slots allow nothing else
        if self.strategy == "per_request":
            return PerRequestPolicy(self._request_steps, self._request_tree)
        if costs is None:  # other trees than goodput's were not built
            return self._ema(initial_steps, {})
        max_steps = self._deepest(GOODPUT_STEPS)
        return GoodputPolicy(
            costs,
            max_steps=max_steps,
            bounds={key: slot.candidate_steps[-1] for key, slot in (self.slots or {}).items()},
            trees=self._trees,
            per_sequence=self.per_sequence,
            min_dwell_rounds=self.min_dwell_rounds,
            initial_steps=initial_steps,
            accept_rates=accept_rates,
            token_counts=self.token_counts,
        )

    def _ema(self, initial_steps: int, trees: Mapping[int, Mapping[int, DraftShape]]) -> EmaPolicy:
        params = AdaptiveSpeculativeParams(initial_steps, self.tier_slots)
        params.set_cuda_graph_bs(self.cuda_graph_bs)
        return EmaPolicy(params, self.min_dwell_rounds, trees)

    @property
    def _trees(self) -> Mapping[int, tuple[DraftShape, ...]]:
        """Of strategy goodput, by slot."""
        if self.tree is None:
            return {}
        if self.slots is not None:
            return trees.by_slot(self.tree, self.slots)
        tree = trees.cut(self.tree, self._deepest(GOODPUT_STEPS))
        return {} if tree is None else {1: trees.ladder(tree)}

    @property
    def tier_slots(self) -> Mapping[int, SlotConfig]:
        """The batch-size slots of strategy ema."""
        return conservative_slots(self.max_steps) if self.slots is None else self.slots

    @property
    def _tier_trees(self) -> Mapping[int, Mapping[int, DraftShape]]:
        """Of strategy ema, by slot and number of steps."""
        if self.tree is None:
            return {}
        return trees.by_depth(self.tree, self.tier_slots)

    @property
    def _request_steps(self) -> int:
        return min(self._deepest(PER_REQUEST_STEPS), PER_REQUEST_STEPS)

    @property
    def _request_tree(self) -> DraftShape | None:
        """Of strategy per_request: one for all, of which each row drafts its own levels."""
        if self.tree is None:
            return None
        return trees.cut(self.tree, self._request_steps)

    def _deepest(self, default: int) -> int:
        """The user's slots bound the depth; without any, `default`."""
        if self.slots is None:
            return default if self.max_steps is None else min(default, self.max_steps)
        return max(slot.candidate_steps[-1] for slot in self.slots.values())


class AdaptiveController:
    """Picks the tier before drafting, learns after verification, keeps the counts.

    A policy that cannot decide (a broken clock, a defect) gives way to a fixed tier, 0; that is
    said once, and the engine goes on. After a while the policy is tried anew. Strategy goodput
    gives way to ema until costs are known: see `use_costs`.

    One thread drives it (the engine's); `snapshot` may be called from any.
    """

    def __init__(
        self,
        settings: PolicySettings,
        costs: CostTable | None = None,
        say: Callable[[str], None] = lambda warning: None,
        *,
        costs_are_rough: bool = False,
    ) -> None:
        """costs_are_rough: they are dropped, and ema decides, once rounds contradict them."""
        self._configured = self._settings = settings
        self._costs = costs
        self._costs_are_rough = costs_are_rough
        self._say = say
        self._accept_rates: Sequence[float] | None = None
        self._fallback: str | None = None
        self._fallback_rounds_left = 0
        self._num_fallbacks = 0
        self._policy = settings.build(settings.shape.depth, costs)
        self._sharpness = SharpnessPolicy(settings.sharpnesses)
        self.shapes = settings.shapes
        """Every shape the worker must build: chains, then trees, each ascending; never grows.

        `PLAIN` is among them only if the policy can choose it: rows that may not speculate need it
        anyway, so a worker always has it.
        """
        self._active: DraftShape | None = None
        self._batch_size = 0
        self._last_reason = self._policy.last_reason
        self._reconfigured = False
        self.switch_reason: Reason | None = None
        """Why the tier chosen last differs from the one before; None when it does not."""
        self.notes = NO_NOTES
        """What the policy thinks of its last answer."""
        deepest = settings.max_depth
        self._positions = PositionCounters(deepest)
        self._averages = SlotAverages(settings.tier_slots)
        self._levels = {tree: PositionCounters(deepest) for tree in settings.trees}
        # All keys from the start: a reader in another thread never meets a dict that grows.
        self._switches = dict.fromkeys(Reason, 0)
        self._rounds_by_shape = dict.fromkeys((PLAIN, *self.shapes), 0)

    @classmethod
    def create(
        cls,
        config: SpeculativeConfig,
        costs: CostTable | None = None,
        say: Callable[[str], None] = lambda warning: None,
    ) -> AdaptiveController:
        """The controller a configuration asks for; fixed at 0 steps when nothing drafts.

        Args:
            costs: what strategy goodput weighs; until they are known, ema decides.
            say: told, once each, why the controller falls back.

        Raises:
            ConfigError: the adaptive config file is unreadable or invalid.
        """
        return cls(PolicySettings.of(config), costs, say)

    def choose_steps(self, batch: DecodeBatch) -> RoundSteps:
        """The tier of the next round and each row's share of it, asked before drafting.

        Prefill rows are not in the batch: counting them would let one arriving prompt flip the
        tier. An empty batch gets 0 steps and is not a round.
        """
        if not batch.size:
            self.switch_reason, self.notes = None, NO_NOTES
            return RoundSteps(PLAIN)
        steps = self._sharpened(self._guarded_choice(batch), batch)
        reason = Reason.RECONFIGURED if self._reconfigured else self._policy.last_reason
        self._reconfigured = False
        switched = self._active not in (None, steps.shape)
        self.switch_reason = reason if switched else None
        self._switches[reason] += switched
        self._active = steps.shape
        self._batch_size = batch.size
        self._last_reason, self.notes = reason, steps.notes
        self._rounds_by_shape[steps.shape] += 1
        return steps

    def on_verify_complete(self, record: StepRecord) -> None:
        """Learns from one step.

        Raises:
            ValueError: a row kept more drafts than it had.
        """
        drafts = record.model_drafts
        counters = self._positions if record.shape.is_chain else self._levels[record.shape]
        counters.observe(drafts.row_correct_drafts, drafts.row_steps)
        self._averages.observe(record.batch_size, drafts.row_correct_drafts, drafts.row_steps)
        self._learn_sharpness(record, drafts)
        try:
            self._policy.observe(record)
        except BadMeasurement as error:
            if self._costs_are_rough:
                self._costs, self._costs_are_rough = None, False
                self._replace_policy(self._settings)
            else:
                self._fall_back(str(error))
        except Exception as error:
            self._fall_back(f"the policy failed to learn: {error!r}")

    def start_from(self, accept_rates: Sequence[float]) -> None:
        """Starts anew from what others learned of this pair; for a controller that has no rounds.

        A policy that does not estimate acceptance passes it over.

        accept_rates: by position, at least one for each the policy may draft.

        Raises:
            ValueError: too few, or not all within (0, 1); nothing changed.
        """
        policy = self._settings.build(self._settings.shape.depth, self._costs, accept_rates)
        self._policy, self._accept_rates = policy, accept_rates

    @property
    def weighs_costs(self) -> bool:
        """Whether the strategy of now weighs what rounds cost."""
        return self._settings.needs_costs

    def use_costs(self, costs: CostTable, *, are_rough: bool = False) -> None:
        """Lets strategy goodput, if it is configured, decide by `costs` from the next round on."""
        self._costs, self._costs_are_rough = costs, are_rough
        if self.weighs_costs:
            self._replace_policy(self._settings)

    def forget(self, request_id: str) -> None:
        """Drops what is known of a request that finished, was aborted or preempted."""
        self._policy.forget(request_id)

    def reconfigure(self, settings: Mapping[str, Any]) -> None:
        """Replaces the policy between rounds; counts survive, averages start anew.

        What is left out is as configured, whatever earlier changes said: an engine that starts
        later and is told the same does the same.

        Keys: speculative_adaptive, speculative_adaptive_strategy, speculative_per_sequence,
        speculative_num_steps and speculative_num_draft_tokens (of the static strategy: without the
        latter a chain, unless the number of steps is the configured one),
        speculative_adaptive_config (a mapping or its file), min_dwell_rounds. The new policy starts
        at the tier of now.

        Raises:
            ConfigError: unknown or invalid, or a tier the worker did not build; nothing changed.
        """
        update = parse_update(settings)
        given = update.said()
        source = given.get("speculative_adaptive_config")
        changes: dict[str, Any] = {
            field: given[key]
            for field, key in (
                ("adaptive", "speculative_adaptive"),
                ("strategy", "speculative_adaptive_strategy"),
                ("per_sequence", "speculative_per_sequence"),
                ("min_dwell_rounds", "min_dwell_rounds"),
            )
            if key in given
        }
        if "speculative_adaptive_config" in given:
            changes["slots"] = None if source is None else load_slots(source)
        configured = self._configured
        depth = given.get("speculative_num_steps", configured.shape.depth)
        if (rows := given.get("speculative_num_draft_tokens")) is not None:
            # An engine of chains built no tree at all: whatever its topk, it is refused below.
            topk = 2 if configured.tree is None else configured.tree.topk
            changes["shape"] = DraftShape(depth, rows - 1, topk)
        elif "speculative_num_draft_tokens" in given or depth != configured.shape.depth:
            changes["shape"] = DraftShape.chain(depth)
        wanted = replace(configured, **changes)
        if wanted.adaptive and self.shapes == (PLAIN,):
            raise ConfigError(
                "speculative_adaptive=True: no tier was built that drafts; "
                "restart with the new configuration"
            )
        self._refuse_unbuilt(wanted.shapes)
        self._replace_policy(wanted)

    def _replace_policy(self, settings: PolicySettings) -> None:
        """Starts anew with these settings, at the tier of now."""
        start = self._active or settings.shape
        self._policy = settings.build(start.depth, self._costs, self._accept_rates)
        self._settings, self._reconfigured, self._fallback = settings, True, None

    def _sharpened(self, steps: RoundSteps, batch: DecodeBatch) -> RoundSteps:
        """The same answer, with how sharp the round drafts."""
        noticed = steps.shape.depth and batch.num_sampled
        sharpness = self._sharpness.choose() if noticed else self._sharpness.best
        is_as_told = steps.draft_sharpness == sharpness
        return steps if is_as_told else replace(steps, draft_sharpness=sharpness)

    def _learn_sharpness(self, record: StepRecord, drafts: DraftColumns) -> None:
        at = [row for row, is_sampled in enumerate(record.is_sampled) if is_sampled]
        if not at:
            return
        self._sharpness.observe(
            record.draft_sharpness,
            [drafts.row_steps[row] for row in at],
            [drafts.row_correct_drafts[row] for row in at],
        )

    def _guarded_choice(self, batch: DecodeBatch) -> RoundSteps:
        if self._fallback is not None:
            self._fallback_rounds_left -= 1
            if self._fallback_rounds_left <= 0:
                assert self._active is not None, "a fallback has chosen before"
                self._fallback = None
                self._policy = self._settings.build(
                    self._active.depth, self._costs, self._accept_rates
                )
        try:
            return self._policy.choose(batch)
        except Exception as error:  # a fixed tier serves everybody; a dead engine nobody
            self._fall_back(f"the policy failed to choose: {error!r}")
            return self._policy.choose(batch)

    def _fall_back(self, why: str) -> None:
        """Plain decoding for a while: the one tier that can not be worse than off."""
        self._fallback = why
        self._fallback_rounds_left = FALLBACK_ROUNDS
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
            shown, known = unknown, _as_rows(self.shapes)
            raise ConfigError(
                f"candidate_trees={shown}: no such tree was built at start; use some of {known} "
                "(the root counted), or restart with the new configuration"
            )

    def snapshot(self) -> dict[str, object]:
        """What an operator should see, JSON-able: the active tier, why, and what it is based on."""
        positions = self._positions
        rate = positions.accept_rate
        active = self._active or self._settings.shape  # before the first round: where it starts
        policy = self._policy.snapshot()
        return {
            **policy,
            "slots": self._slots_snapshot(policy.get("slots")),
            "speculative_num_steps": active.depth,
            "speculative_num_draft_tokens": active.size + 1,
            "batch_size": self._batch_size,
            "candidate_steps": _depths(self.shapes),
            "last_reason": self._last_reason.value,
            "fallback": self._fallback,
            "num_fallbacks": self._num_fallbacks,
            "switches": {reason.value: n for reason, n in self._switches.items() if n},
            "rounds_by_num_steps": {
                str(shape): n for shape, n in self._rounds_by_shape.items() if n
            },
            "positions": positions.snapshot(),
            # Of live rows that drafted: less than what was drafted in all.
            "learned_draft_tokens": positions.num_draft_tokens,
            "learned_correct_drafts": positions.num_correct_drafts,
            "learned_accept_length": round(positions.accept_length, 4),
            "accept_rate": None if rate is None else round(rate, 4),
            "draft_sharpness": self._sharpness.snapshot(),
            **(self._trees_snapshot() if self._levels else {}),
        }

    def _slots_snapshot(self, of_policy: object) -> dict[str, object]:
        """Return the policy's slots, each with the average of accepted drafts."""
        slots: dict[str, object] = dict(self._averages.snapshot())
        for key, shown in of_policy.items() if isinstance(of_policy, dict) else ():
            observed = slots.get(key)
            slots[key] = {**(observed if isinstance(observed, dict) else {}), **shown}
        return slots

    def _trees_snapshot(self) -> dict[str, object]:
        """What the figures above, which are of chains, leave out."""
        return {
            "speculative_tree": str(self._active) if self._active in self._levels else None,
            "candidate_trees": list(map(str, self._levels)),
            "trees": {
                str(tree): {
                    "learned_accept_length": round(levels.accept_length, 4),
                    "levels": levels.snapshot(),
                }
                for tree, levels in self._levels.items()
                if levels.num_rows
            },
        }


def _sharpnesses(config: SpeculativeConfig) -> Sequence[float]:
    """What there is to choose from; one where it is given, or where no draft is coupled."""
    wanted = config.speculative_draft_sharpness
    if wanted != "auto":
        return (wanted,)
    return SHARPNESSES if config.couples_drafts else (DRAFT_SHARPNESS,)


def _configured_shape(config: SpeculativeConfig) -> DraftShape:
    depth, topk = config.speculative_num_steps, config.speculative_eagle_topk
    if not config.enabled or not depth:
        return PLAIN
    if topk == 1:
        return DraftShape.chain(depth)
    return DraftShape(depth, config.num_draft_tokens - 1, topk)


def _depths(shapes: Sequence[DraftShape]) -> list[int]:
    """Of the chains."""
    return [shape.depth for shape in shapes if shape.is_chain]


def _as_rows(shapes: Sequence[DraftShape]) -> list[list[int]]:
    """Return the trees as a user gives them, the root counted."""
    return [[shape.depth, shape.size + 1] for shape in shapes if not shape.is_chain]
