"""From a configuration, or a live change of it, to a policy and the shapes that it may draft."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serve_spec.adaptive.candidates import DEFAULT_MAX_STEPS, SMALL_TREES, AllowedShapes
from serve_spec.adaptive.ema import AdaptiveSpeculativeParams, EmaPolicy
from serve_spec.adaptive.goodput import GoodputPolicy
from serve_spec.adaptive.per_request import MAX_STEPS as PER_REQUEST_STEPS
from serve_spec.adaptive.per_request import PerRequestPolicy
from serve_spec.adaptive.plugin import build_policy, load_policy
from serve_spec.adaptive.policy import PolicyContext, StaticPolicy, StepPolicy
from serve_spec.adaptive.prompts import NO_LIMITS, PromptLimits
from serve_spec.config import SpeculativeConfig
from serve_spec.config.adaptive_file import SlotConfig, load_slots
from serve_spec.config.cost_table import CostTable
from serve_spec.config.speculative import Strategy, is_plugin, parse_update
from serve_spec.core.draft import DraftShape

_FIELDS = {
    "speculative_adaptive": "adaptive",
    "speculative_adaptive_strategy": "strategy",
    "speculative_per_sequence": "per_sequence",
    "min_dwell_rounds": "min_dwell_rounds",
}


@dataclass(frozen=True)
class PolicySettings:
    """What decides which policy runs, how, and over which shapes."""

    shape: DraftShape  # of a fixed policy; an adaptive one starts as deep
    adaptive: bool = True
    strategy: Strategy = "goodput"
    slots: Mapping[int, SlotConfig] | None = None
    per_sequence: bool = True
    min_dwell_rounds: int = 8
    max_steps: int | None = None  # most drafts that the draft can make
    tree: DraftShape | None = None  # the largest of an adaptive policy, unless slots list others
    has_small_trees: bool = False  # whether goodput adds trees for few requests
    cuda_graph_bs: Sequence[int] | None = None  # batch sizes of captured graphs
    token_counts: Sequence[int] = ()  # tokens that captured graphs verify, ascending
    prompts: PromptLimits = NO_LIMITS  # of the prompt tokens of a step

    @classmethod
    def of(
        cls, config: SpeculativeConfig, max_steps: int | None = None, *, may_branch: bool = True
    ) -> PolicySettings:
        """Return what a configuration asks for; unnamed trees only if `may_branch`."""
        depth, topk = config.speculative_num_steps, config.topk
        source = config.speculative_adaptive_config
        shape = DraftShape.chain(depth if config.enabled else 0)
        if shape.depth and topk > 1:
            shape = DraftShape(depth, config.num_draft_tokens - 1, topk)
        return cls(
            shape=shape,
            slots=None if source is None else load_slots(source),
            max_steps=max_steps,
            tree=None if shape.is_chain else shape,
            has_small_trees=may_branch and config.adds_small_trees,
            **{field: getattr(config, key) for key, field in _FIELDS.items()},
        )

    def changed(self, settings: Mapping[str, Any]) -> PolicySettings:
        """Return these settings with a live change; raise ConfigError if any of it is invalid."""
        given = parse_update(settings)
        changes = {field: given[key] for key, field in _FIELDS.items() if key in given}
        if "speculative_adaptive_config" in given:
            source = given["speculative_adaptive_config"]
            changes["slots"] = None if source is None else load_slots(source)
        depth = given.get("speculative_num_steps", self.shape.depth)
        if (num_tokens := given.get("speculative_num_draft_tokens")) is not None:
            # An engine of chains built no tree at all: whatever its topk, it is refused later.
            topk = 2 if self.tree is None else self.tree.topk
            changes["shape"] = DraftShape(depth, num_tokens - 1, topk)
        elif "speculative_num_draft_tokens" in given or depth != self.shape.depth:
            changes["shape"] = DraftShape.chain(depth)
        return replace(self, **changes)

    @property
    def needs_costs(self) -> bool:
        """Return whether the policy weighs what rounds cost."""
        if self._has_plugin:
            return load_policy(self.strategy).needs_costs
        return self._is_goodput

    @property
    def _has_plugin(self) -> bool:
        return self.adaptive and is_plugin(self.strategy) and self._deepest > 0

    @property
    def _is_goodput(self) -> bool:
        return self.adaptive and self.strategy == "goodput" and self._deepest > 0

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """Every shape the policy may choose: chains, and trees after chains of their depths."""
        if self._is_goodput:
            chosen = set(map(DraftShape.chain, range(self._deepest + 1)))
            chosen.update(*self._trees.values())
        else:
            chosen = set(self.build(self.shape.depth, None).shapes)
        chains = {DraftShape.chain(shape.depth) for shape in chosen}
        return (*sorted(chains), *sorted(chosen - chains))

    @property
    def trees(self) -> tuple[DraftShape, ...]:
        """Of these, the trees."""
        return tuple(shape for shape in self.shapes if not shape.is_chain)

    @property
    def max_depth(self) -> int:
        """Levels of the deepest of them."""
        return max(shape.depth for shape in self.shapes)

    def largest_batch(self, shape: DraftShape) -> int | None:
        """Return the largest batch size that may draft `shape`; None: there is no limit."""
        if shape.is_chain:
            slots = self.ema_slots if self.strategy == "ema" else self.slots or {}
            has = {key: slot.candidate_steps[-1] >= shape.depth for key, slot in slots.items()}
        else:
            has = {} if self.tree else {key: shape in listed for key, listed in self._trees.items()}
        last = max((key for key in has if has[key]), default=math.inf)
        after = [key for key in has if key > last]
        return after[0] - 1 if after and self.adaptive else None

    def build(
        self, initial_steps: int, costs: CostTable | None, accept_rates: Sequence[float] = ()
    ) -> StepPolicy:
        """Return a fresh policy; ema in place of goodput until costs are known.

        Raises ConfigError, one line: a policy of another package cannot be built.
        """
        if not self.adaptive or self.strategy == "static":
            return StaticPolicy(self.shape)
        if self._has_plugin:
            return build_policy(self.strategy, self._context(initial_steps, costs))
        if self.strategy == "per_request" and self._deepest:
            most = min(self._deepest, PER_REQUEST_STEPS)
            tree = self.tree and of_depth(self.tree, min(self.tree.depth, most))
            return PerRequestPolicy(tree or DraftShape.chain(most))
        if costs is None or not self._is_goodput:
            params = AdaptiveSpeculativeParams(initial_steps, self.ema_slots, self.min_dwell_rounds)
            params.set_cuda_graph_bs(self.cuda_graph_bs)
            return EmaPolicy(params, self._trees if self.strategy == "ema" else {})
        return GoodputPolicy(
            costs,
            AllowedShapes(
                self._deepest,
                {key: slot.candidate_steps[-1] for key, slot in (self.slots or {}).items()},
                self._trees,
            ),
            per_sequence=self.per_sequence,
            min_dwell_rounds=self.min_dwell_rounds,
            initial_steps=initial_steps,
            accept_rates=accept_rates or None,
            token_counts=self.token_counts,
            prompts=self.prompts,
        )

    def _context(self, initial_steps: int, costs: CostTable | None) -> PolicyContext:
        return PolicyContext(
            max_steps=self._deepest,
            initial_steps=min(initial_steps, self._deepest),
            trees=tuple(sorted({tree for trees in self._trees.values() for tree in trees})),
            slots=self.slots,
            costs=costs if self.needs_costs else None,
            token_counts=self.token_counts,
        )

    @property
    def ema_slots(self) -> Mapping[int, SlotConfig]:
        """The batch-size slots of strategy ema; by default no deeper than the draft."""
        if self.slots is not None:
            return self.slots
        slots = load_slots()
        for key, slot in slots.items():
            steps = {min(k, self.max_steps or k) for k in slot.candidate_steps}
            slots[key] = slot.model_copy(update={"candidate_steps": tuple(sorted(steps))})
        return slots

    @property
    def _trees(self) -> Mapping[int, tuple[DraftShape, ...]]:
        """Of strategies ema and goodput, by slot."""
        if self.tree is None:
            listed = any(s.candidate_trees is not None for s in (self.slots or {}).values())
            if not self.has_small_trees or listed or self.strategy != "goodput":
                return {}
            small = SMALL_TREES.items()
            return {k: tuple(t for t in each if t.depth <= self._deepest) for k, each in small}
        if self.strategy == "ema":
            return {k: by_depth(self.tree, slot) for k, slot in self.ema_slots.items()}
        slots = self.slots or {1: SlotConfig(candidate_steps=(self._deepest,))}
        return {k: candidates(self.tree, slot) for k, slot in slots.items()}

    @property
    def _deepest(self) -> int:
        """The depth that the user's slots allow; without any, the strategy's and the draft's."""
        if self.slots is not None:
            return max(slot.candidate_steps[-1] for slot in self.slots.values())
        default = PER_REQUEST_STEPS if self.strategy == "per_request" else DEFAULT_MAX_STEPS
        return min(default, self.max_steps or default)


def ladder(tree: DraftShape) -> tuple[DraftShape, ...]:
    """Return `tree`, half its drafts and a level less, and so on while it branches; ascending."""
    shapes = [tree]
    while len(shapes) < 3:  # each has to be built and measured
        depth = shapes[-1].depth - 1
        size = min(shapes[-1].size // 2, shapes[-1].size_at(depth))
        if not 1 <= depth < size:
            break
        shapes.append(DraftShape(depth, size, tree.topk))
    return tuple(sorted(shapes))


def of_depth(tree: DraftShape, depth: int) -> DraftShape:
    """Return the tree of another depth: as many drafts as `tree`, or all its beam makes."""
    return DraftShape(depth, max(tree.size_at(depth), depth), tree.topk)


def candidates(tree: DraftShape, slot: SlotConfig) -> tuple[DraftShape, ...]:
    """Return the trees a slot lists, or else the ladder from `tree` within the slot's depth."""
    if slot.candidate_trees is not None:
        return tuple(
            DraftShape(depth, tokens - 1, tree.topk) for depth, tokens in slot.candidate_trees
        )
    depth = min(tree.depth, slot.candidate_steps[-1])
    return ladder(of_depth(tree, depth)) if depth else ()


def by_depth(tree: DraftShape, slot: SlotConfig) -> tuple[DraftShape, ...]:
    """Return a tree for each number of steps: the largest a slot lists, or else one like `tree`."""
    if slot.candidate_trees is None:
        return tuple(of_depth(tree, steps) for steps in slot.candidate_steps if steps)
    largest = {listed.depth: listed for listed in candidates(tree, slot)}
    return tuple(largest[steps] for steps in slot.candidate_steps if steps in largest)
