"""The arms of `bench adaptive`: a controller each, and what it measured so far."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from serve_spec.adaptive import AdaptiveController
from serve_spec.bench.adaptive.report import OFF, ArmRuns, Measurement
from serve_spec.config.adaptive_file import PRESETS
from serve_spec.core.draft_shape import PLAIN, DraftShape

ADAPTIVE_ARMS: Mapping[str, Mapping[str, object]] = {
    "ema": {
        "speculative_adaptive_strategy": "ema",
        "speculative_adaptive_config": dict(PRESETS["conservative"]),
    },
    "ema-aggressive": {
        "speculative_adaptive_strategy": "ema",
        "speculative_adaptive_config": dict(PRESETS["aggressive"]),
    },
    "per-request": {"speculative_adaptive_strategy": "per_request"},
    "goodput-uniform": {
        "speculative_adaptive_strategy": "goodput",
        "speculative_per_sequence": False,
    },
    "goodput": {
        "speculative_adaptive_strategy": "goodput",
        "speculative_per_sequence": True,
    },
}
"""The policies besides fixed depths, and how a controller is told of them."""

CHAINS_ALONE = "goodput-chains"
"""Where trees are built, goodput without them."""

POLICIES = (*ADAPTIVE_ARMS, CHAINS_ALONE)
"""Every name of one. `ema` is as published: chains, also where trees are built."""


@dataclass
class Arm:
    """A policy with everything it has learned."""

    name: str
    is_static: bool
    controller: AdaptiveController
    measurements: list[list[Measurement | None]] = field(default_factory=list)
    """By phase, then by repetition."""
    different_texts: list[set[int]] = field(default_factory=list)
    """By phase: requests whose text was not that of off."""

    def first_rate(self, phase: int) -> float:
        """Tokens per second when it ran this phase first."""
        first = self.measurements[phase][0]
        assert first is not None, "nothing is skipped before it was tried"
        return first.tokens_per_second

    def compare_texts(self, phase: int, texts: Sequence[int], expected: Sequence[int]) -> None:
        """Notes where texts, given as hashes, differ from those of off."""
        pairs = enumerate(zip(texts, expected, strict=True))
        self.different_texts[phase] |= {i for i, (text, other) in pairs if text != other}

    def runs(self, num_requests: Sequence[int]) -> ArmRuns:
        """Everything it measured; `num_requests` of every phase."""
        different = zip(num_requests, self.different_texts, strict=True)
        same = [total - len(which) for total, which in different]
        return ArmRuns(self.name, self.is_static, self.measurements, same)


def make_arms(
    controller: AdaptiveController,
    num_steps: Sequence[int],
    names: Sequence[str],
    trees: Sequence[DraftShape] = (),
) -> list[Arm]:
    """Off, the fixed depths, ascending, the trees and the policies `names`.

    controller: the engine's own, still unused: it knows what rounds cost and which tiers exist.

    Raises:
        ConfigError: a depth or tree that no tier was built for, or goodput without costs.
    """

    def arm(name: str, settings: Mapping[str, object], *, is_static: bool) -> Arm:
        mine = copy.deepcopy(controller)
        mine.reconfigure({"speculative_adaptive": not is_static, **settings})
        return Arm(name, is_static, mine)

    fixed = {OFF: PLAIN, **{f"K={k}": DraftShape.chain(k) for k in sorted(set(num_steps))}}
    fixed |= {str(tree): tree for tree in trees}
    arms = [arm(name, fixed_shape(shape), is_static=True) for name, shape in fixed.items()]
    chains = [shape.depth for shape in controller.shapes if shape.is_chain]
    built = {"candidate_steps": [depth for depth in chains if depth]}
    for name in names:
        settings = dict(ADAPTIVE_ARMS["goodput" if name == CHAINS_ALONE else name])
        if settings["speculative_adaptive_strategy"] == "ema" and len(chains) < len(
            controller.shapes
        ):
            published = ADAPTIVE_ARMS[name]["speculative_adaptive_config"]
            assert isinstance(published, dict), "presets are mappings"
            settings["speculative_adaptive_config"] = {"candidate_trees": [], **published}
        if name == "per-request":  # left alone, it goes deeper than there are tiers
            settings["speculative_adaptive_config"] = built
        if name == CHAINS_ALONE:
            settings["speculative_adaptive_config"] = {**built, "candidate_trees": []}
        arms.append(arm(name, settings, is_static=False))
    return arms


def fixed_shape(shape: DraftShape) -> Mapping[str, object]:
    """Return what a controller is told of a fixed shape."""
    rows = None if shape.is_chain else shape.size + 1
    return {"speculative_num_steps": shape.depth, "speculative_num_draft_tokens": rows}
