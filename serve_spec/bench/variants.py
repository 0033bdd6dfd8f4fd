"""Policies that benchmarks compare: off, fixed depths and adaptive ones, a controller each."""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from serve_spec.adaptive import AdaptiveController
from serve_spec.config.adaptive_file import PRESETS
from serve_spec.core.draft import DraftShape

OFF = "off"
ADAPTIVE_VARIANTS = ("ema", "ema-aggressive", "per-request", "goodput", "goodput-chains")
"""`ema` drafts chains only, as published. `goodput-chains` is goodput without trees."""

T = TypeVar("T")


@dataclass(frozen=True)
class Variant:
    """A policy with its own learned state."""

    name: str
    is_static: bool
    controller: AdaptiveController


def make_variants(
    controller: AdaptiveController, num_steps: Sequence[int], names: Sequence[str]
) -> list[Variant]:
    """Return off, the fixed depths in ascending order, and the adaptive variants `names`.

    controller: of an unused engine, with costs and captured shapes. May raise ConfigError.
    """
    depths = sorted({0, *num_steps})
    fixed = [
        Variant(f"K={k}" if k else OFF, True, fixed_controller(controller, DraftShape.chain(k)))
        for k in depths
    ]
    adaptive = [
        Variant(name, False, _configured(controller, _adaptive(name, controller.shapes)))
        for name in names
    ]
    return fixed + adaptive


def fixed_controller(controller: AdaptiveController, shape: DraftShape) -> AdaptiveController:
    """Return a copy that drafts one shape; raise ConfigError if it was not captured."""
    num_tokens = None if shape.is_chain else shape.size + 1
    steps = {"speculative_num_steps": shape.depth, "speculative_num_draft_tokens": num_tokens}
    return _configured(controller, {"speculative_adaptive": False, **steps})


def interleaved(trials: int, variants: Collection[T], seed: object = "") -> Iterator[tuple[int, T]]:
    """Yield every variant once per trial, in a new random order.

    So changes of the machine's speed affect all alike.
    """
    rng = random.Random(str(seed))
    for trial in range(trials):
        for variant in rng.sample(list(variants), len(variants)):
            yield trial, variant


def _configured(
    controller: AdaptiveController, settings: Mapping[str, object]
) -> AdaptiveController:
    mine = copy.deepcopy(controller)
    mine.reconfigure({"speculative_adaptive": True, **settings})
    return mine


def _adaptive(name: str, shapes: Sequence[DraftShape]) -> Mapping[str, object]:
    """Return the settings of an adaptive variant, within the captured shapes."""
    chains: dict[str, Any] = {
        "candidate_steps": [shape.depth for shape in shapes if shape.is_chain and shape.depth]
    }
    no_trees: dict[str, Any] = {} if all(s.is_chain for s in shapes) else {"candidate_trees": []}
    strategy, config = {
        "ema": ("ema", {**no_trees, **PRESETS["conservative"]}),
        "ema-aggressive": ("ema", {**no_trees, **PRESETS["aggressive"]}),
        "per-request": ("per_request", chains),
        "goodput": ("goodput", None),
        "goodput-chains": ("goodput", {**chains, **no_trees}),
    }[name]
    settings = {"speculative_adaptive_strategy": strategy}
    return settings if config is None else {**settings, "speculative_adaptive_config": config}
