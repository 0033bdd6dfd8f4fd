"""What a section of `bench kernels` is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from serve_spec.adaptive import AdaptiveController
from serve_spec.bench.adaptive.arms import make_arms
from serve_spec.bench.kernels.aims import Aim
from serve_spec.bench.waves import Wave
from serve_spec.config import ServeSpecConfig
from serve_spec.engine.engine import SpecEngine
from serve_spec.engine.llm import LLM
from serve_spec.models import Llama
from serve_spec.models.expand import SHAPES

Acceptance = float | tuple[float, ...]
Row = dict[str, Any]


_MIN_BATCHED_TOKENS = 2048
_MIN_PAGES = 256
"""Of an engine for the smallest batches: more than its longest text."""


class LeftOut(Exception):
    """A section that can not be measured here, and why."""


@dataclass
class Section:
    """Rows of one table, figures that stand alone, aims, and what could not be measured here."""

    rows: list[Row]
    facts: dict[str, Any] = field(default_factory=dict)
    aims: list[Aim] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sizes:
    """What is run. `batch_sizes` and `num_steps` ascend, the latter from 0."""

    batch_sizes: tuple[int, ...]
    num_steps: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    repetitions: int
    rows: tuple[int, ...]
    """Rows of the products that make the floor."""


@dataclass(frozen=True)
class Setting:
    """An idle engine, and what to run on it.

    `controller`: the engine's own, still unused. `acceptance`: what is forced; None: nothing.
    `assistant`: a small target's folder. `say` reports progress.
    """

    llm: LLM
    controller: AdaptiveController
    sizes: Sizes
    acceptance: Acceptance | None
    assistant: str | None
    say: Callable[[str], None]

    @property
    def engine(self) -> SpecEngine:
        """It runs one wave at a time."""
        return self.llm.engine

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.engine.worker.device

    @property
    def target(self) -> Llama:
        """The loaded model.

        Raises:
            LeftOut: several GPUs share it.
        """
        self._refuse_ranks()
        worker: Any = self.engine.worker  # one that puts rounds on lanes holds an eager one
        target: Llama = getattr(worker, "eager", worker).target.model
        return target

    @property
    def lane_worker(self) -> Any:
        """The worker, if it runs rounds on lanes: what only such a one has may be asked of it.

        Raises:
            LeftOut: rounds run eagerly, or several GPUs share them.
        """
        self._refuse_ranks()
        if self.engine.worker.execution != "lanes":
            raise LeftOut(
                "rounds run eagerly here: nothing is recorded, and tiers share their code"
            )
        return self.engine.worker

    @property
    def is_reference(self) -> bool:
        """Whether figures may be held against those of `kernels_aims`: its GPU, shape, texts."""
        if self.device.type == "cpu" or self._num_ranks > 1:
            return False
        shape, wanted = self.target.shape, SHAPES["llama-3.1-8b"]
        fields = ("hidden_size", "intermediate_size", "num_layers", "num_kv_heads", "vocab_size")
        return (
            "H200" in torch.cuda.get_device_name(self.device)
            and all(getattr(shape, name) == getattr(wanted, name) for name in fields)
            and (self.sizes.prompt_tokens, self.sizes.output_tokens) == (256, 256)
        )

    def fixed(self, num_steps: int) -> AdaptiveController:
        """A policy of one depth.

        Raises:
            ConfigError: the engine has no such tier.
        """
        return make_arms(self.controller, [num_steps], [])[-1].controller

    def goodput(self) -> AdaptiveController:
        """The policy that weighs costs, with nothing learned."""
        return make_arms(self.controller, [], ["goodput"])[-1].controller

    def wave(self, batch_size: int, seed: int) -> Wave:
        """Requests of the setting's lengths."""
        return Wave(batch_size, self.sizes.prompt_tokens, self.sizes.output_tokens, seed)

    def depths(self, wanted: Sequence[int]) -> list[int]:
        """Those of `wanted` that are to be run; the deepest there is if none of them is."""
        return [k for k in wanted if k in self.sizes.num_steps] or [self.sizes.num_steps[-1]]

    @property
    def _num_ranks(self) -> int:
        return self.llm.config.model.tensor_parallel_size

    def _refuse_ranks(self) -> None:
        if self._num_ranks > 1:
            raise LeftOut(f"tensor_parallel_size={self._num_ranks}: measured on one GPU alone")


def with_room(config: ServeSpecConfig, sizes: Sizes) -> ServeSpecConfig:
    """The same with room for the largest batch, so that no draft is ever cut, and no more."""
    most, deepest = sizes.batch_sizes[-1], sizes.num_steps[-1]
    longest = Wave(most, sizes.prompt_tokens, sizes.output_tokens).num_tokens + 2 * (deepest + 1)
    pages = most * -(-longest // config.cache.page_size)
    num_batched = max(_MIN_BATCHED_TOKENS, 2 * most * (deepest + 1))
    return ServeSpecConfig.load(
        config,
        max_num_seqs=most,
        max_num_batched_tokens=max(config.scheduler.max_num_batched_tokens, num_batched),
        num_pages=max(config.cache.num_pages or 0, pages, _MIN_PAGES),
    )


def forced_acceptance(values: Sequence[float]) -> Acceptance:
    """What --acceptance means: one number from 1 on is an accept length, else chances."""
    return values[0] if len(values) == 1 and values[0] >= 1 else tuple(values)
