"""Policies that benchmarks compare: off, fixed depths and adaptive ones, a controller each."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_spec.adaptive import AdaptiveController
from serve_spec.config.adaptive_file import PRESETS
from serve_spec.core.draft import DraftShape

OFF = "off"
ADAPTIVE_ARMS = ("ema", "ema-aggressive", "per-request", "goodput", "goodput-chains")
"""`ema` is as published: chains only. `goodput-chains` is goodput without trees."""


@dataclass(frozen=True)
class Arm:
    """A policy with everything it has learned."""

    name: str
    is_static: bool
    controller: AdaptiveController


def make_arms(
    controller: AdaptiveController, num_steps: Sequence[int], names: Sequence[str]
) -> list[Arm]:
    """Return off, the fixed depths, ascending, and the adaptive arms `names`.

    controller: that of an unused engine; it knows the costs and the captured shapes.

    Raises:
        ConfigError: a depth that was not captured, or goodput without costs.
    """
    fixed = {f"K={k}" if k else OFF: DraftShape.chain(k) for k in sorted({0, *num_steps})}
    settings = {name: fixed_shape(shape) for name, shape in fixed.items()}
    settings |= {name: _adaptive(name, controller.shapes) for name in names}
    arms = []
    for name, chosen in settings.items():
        mine = copy.deepcopy(controller)
        mine.reconfigure({"speculative_adaptive": name not in fixed, **chosen})
        arms.append(Arm(name, name in fixed, mine))
    return arms


def fixed_shape(shape: DraftShape) -> Mapping[str, object]:
    """Return the settings of a fixed shape."""
    rows = None if shape.is_chain else shape.size + 1
    return {"speculative_num_steps": shape.depth, "speculative_num_draft_tokens": rows}


def _adaptive(name: str, shapes: Sequence[DraftShape]) -> Mapping[str, object]:
    """Return the settings of an adaptive arm, within the captured shapes."""
    chains: dict[str, Any] = {
        "candidate_steps": [shape.depth for shape in shapes if shape.is_chain and shape.depth]
    }
    no_trees: dict[str, Any] = {} if all(s.is_chain for s in shapes) else {"candidate_trees": []}
    if name.startswith("ema"):
        preset = PRESETS["aggressive" if name == "ema-aggressive" else "conservative"]
        return {
            "speculative_adaptive_strategy": "ema",
            "speculative_adaptive_config": {**no_trees, **preset},
        }
    if name == "per-request":
        return {
            "speculative_adaptive_strategy": "per_request",
            "speculative_adaptive_config": chains,
        }
    if name == "goodput-chains":
        return {
            "speculative_adaptive_strategy": "goodput",
            "speculative_adaptive_config": {**chains, **no_trees},
        }
    return {"speculative_adaptive_strategy": "goodput"}
