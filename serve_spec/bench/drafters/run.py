"""Runs the drafters one after the other, each in an engine of its own; its arms take turns."""

from __future__ import annotations

import copy
import gc
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from serve_spec.adaptive import AdaptiveController
from serve_spec.bench.adaptive.arms import make_arms
from serve_spec.bench.drafters.drafters import Drafter
from serve_spec.bench.offline import Arm, Workload, cells_of, measure, room, warm_up
from serve_spec.bench.workload import HELD_OUT_PACKAGES, held_out_prompts
from serve_spec.core.round import TreeShape
from serve_spec.engine.llm import LLM

OFF = "off"
CHAIN, TREE, POLICY = "chain", "tree", "policy"

Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What every drafter runs."""

    num_steps: tuple[int, ...]
    """Of chains."""
    trees: tuple[TreeShape, ...]
    topk: int
    policies: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    temperatures: tuple[float, ...]
    num_prompts: int
    """At least; a batch of them is run in any case."""
    prompt_tokens: int
    output_tokens: int
    repetitions: int
    packages: tuple[str, ...] = HELD_OUT_PACKAGES


def measured(
    drafter: Drafter, draft: str | None, config: str, keys: dict[str, Any], sizes: Sizes
) -> Iterator[list[Row]]:
    """The rows of one temperature and batch size after another. The first arm is off.

    draft: another checkpoint than the shipped one. keys: of the configuration, for every drafter.

    Raises:
        CheckpointError, ConfigError, ValueError: it can not be built like this.
    """
    with _engine(drafter, draft, config, keys, sizes) as llm:
        named = make_arms(llm.engine.controller, sizes.num_steps, sizes.policies, sizes.trees)
        arms = [Arm(arm.name, arm.controller) for arm in named]
        prompts = held_out_prompts(
            llm.engine.tokenizer.encode,
            count=max(sizes.num_prompts, *sizes.batch_sizes),
            num_tokens=sizes.prompt_tokens,
            packages=sizes.packages,
        )
        for batch_size in sizes.batch_sizes:
            mine = prompts[: max(sizes.num_prompts, batch_size)]
            # A policy that has run is another one: what it learns here is not to count.
            warm_up(
                llm, [Arm(a.name, copy.deepcopy(a.controller)) for a in arms], mine[:batch_size]
            )
            for temperature in sizes.temperatures:
                before = [_rounds(arm.controller) for arm in arms]
                run = Workload(mine, sizes.output_tokens, temperature, batch_size)
                measure(llm, arms, run, sizes.repetitions)
                rounds = [
                    _rounds(arm.controller) - old for arm, old in zip(arms, before, strict=True)
                ]
                cells = cells_of(arms, temperature, batch_size)
                yield [
                    {
                        "drafter": drafter.name,
                        "drafts": _kind(cell.arm, sizes.trees, sizes.policies),
                        **asdict(cell),
                        "rounds_by_tier": dict(run),
                    }
                    for cell, run in zip(cells, rounds, strict=True)
                ]


@contextmanager
def _engine(
    drafter: Drafter, draft: str | None, config: str, keys: dict[str, Any], sizes: Sizes
) -> Iterator[LLM]:
    """An engine with every tier that is to run; its memory is free again afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = {
            **room(max(sizes.batch_sizes), sizes.prompt_tokens + sizes.output_tokens),
            **drafter.keys(draft),
            **tiers(sizes, Path(folder)),
            **keys,
        }
        llm = LLM(config, **wanted)
    try:
        yield llm
    finally:
        llm.shutdown()
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def tiers(sizes: Sizes, folder: Path) -> dict[str, Any]:
    """Keys that build what is to run and no more.

    One chain and one tree of its depth are two fixed tiers. With policies, or more of either, it is
    strategy goodput that is built: it measures costs at start. folder: for its file of tiers.
    """
    trees = sizes.trees
    deepest = max([*sizes.num_steps, *(tree.num_steps for tree in trees)])
    largest = max(trees, key=lambda tree: tree.num_draft_tokens, default=None)
    keys: dict[str, Any] = {"speculative_num_steps": deepest}
    if largest is not None:
        keys |= {
            "speculative_num_steps": largest.num_steps,
            "speculative_eagle_topk": sizes.topk,
            "speculative_num_draft_tokens": largest.num_draft_tokens + 1,
        }
    depths = {*sizes.num_steps, *(tree.num_steps for tree in trees)}
    if not sizes.policies and len(depths) == 1 and len(trees) <= 1:
        return {**keys, "speculative_adaptive": False}
    file = folder / "tiers.json"
    listed = [[tree.num_steps, tree.num_draft_tokens + 1] for tree in trees]
    file.write_text(json.dumps({"candidate_steps": [deepest], "candidate_trees": listed}))
    return {
        **keys,
        "speculative_adaptive": True,
        "speculative_adaptive_strategy": "goodput",
        "speculative_adaptive_config": str(file),
    }


def _kind(arm: str, trees: Sequence[TreeShape], policies: Sequence[str]) -> str:
    if arm == OFF:
        return OFF
    if arm in policies:
        return POLICY
    return TREE if arm in map(str, trees) else CHAIN


def _rounds(controller: AdaptiveController) -> Counter[str]:
    """Rounds of every tier so far."""
    found = controller.snapshot()["rounds_by_num_steps"]
    assert isinstance(found, dict), "a mapping of tiers to counts"
    return Counter(found)


class Clock:
    """Says whether there is time for one more."""

    def __init__(
        self, max_seconds: float | None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._end = None if max_seconds is None else now() + max_seconds
        self._longest = 0.0
        self._since = now()

    def lap(self) -> None:
        """One more is done."""
        now = self._now()
        self._longest = max(self._longest, now - self._since)
        self._since = now

    def is_over(self) -> bool:
        """Whether one that takes as long as the longest would end too late."""
        return self._end is not None and self._now() + self._longest > self._end
