"""Steady-state batches of random prompts that switch between variants every few steps.

Variants change within the same texts, so the prompts are computed once, and a change of the
machine's speed affects all variants alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, cycle
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np

from serve_spec.adaptive import AdaptiveController
from serve_spec.bench.harness import room, steady_batch
from serve_spec.bench.workload import TextKind, TextRequest
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.core.record import StepRecord
from serve_spec.engine.engine import SpecEngine

WARM_UP_STEPS = 4
"""Steps not counted after a change of variant: one was launched ahead, and drafts are extended."""
TRIAL_STEPS = 12

Controllers: TypeAlias = Mapping[str, Sequence[AdaptiveController]]
"""Controllers by variant; a variant alternates between its controllers every step."""


@dataclass(frozen=True)
class SteadyLoad:
    """Greedy requests of random prompts, all with the same lengths."""

    batch_size: int
    prompt_tokens: int
    output_tokens: int
    """Mean output tokens of a request."""
    seed: int = 0

    @property
    def max_tokens(self) -> int:
        """Twice the mean, because requests that accept more drafts run ahead."""
        return 2 * self.output_tokens

    def requests(self, vocab_size: int) -> list[tuple[TextRequest, int]]:
        """Return the requests with their output tokens."""
        rng, greedy = random.Random(self.seed), TextKind("random", 0.0)
        return [
            (
                TextRequest(
                    greedy,
                    rng.choices(range(vocab_size), k=self.prompt_tokens),
                    rng.getrandbits(32),
                ),
                self.max_tokens,
            )
            for _ in range(self.batch_size)
        ]


def with_room(config: ServeSpecConfig, largest: SteadyLoad, max_steps: int) -> ServeSpecConfig:
    """Return the configuration with room for the largest batch, so that no draft is cut."""
    num_tokens = largest.prompt_tokens + largest.max_tokens + 2 * (max_steps + 1)
    sizes = room(config, largest.batch_size, num_tokens, max_steps)
    return ServeSpecConfig.load(config, **sizes)


def run_variants(
    engine: SpecEngine, load: SteadyLoad, plain: AdaptiveController, variants: Controllers
) -> dict[str, list[StepRecord]]:
    """Run interleaved trials of the variants and return their full steps. The engine must be idle.

    Trials end when every variant has one and the mean text is long enough.

    Raises:
        ConfigError: the texts end before every variant was measured.
    """
    shapes = [s for each in variants.values() for controller in each for s in controller.shapes]
    margin = 2 * (max(shape.depth for shape in shapes) + 1)
    order = random.Random(load.seed).sample(list(variants), len(variants))
    steps: dict[str, list[StepRecord]] = {name: [] for name in variants}
    requests = load.requests(engine.tokenizer.vocab_size)
    with steady_batch(engine, requests, plain) as batch:
        for name, number in _turns(order):
            mean = fmean(sequence.num_output_tokens for sequence in batch.sequences)
            is_over = all(steps.values()) and mean >= load.output_tokens
            # Complete the trial if there is room.
            may_end = number == 0 or len(variants) == 1
            if batch.num_remaining <= margin or (is_over and may_end):
                break
            step = batch.step(variants[name][number % len(variants[name])])
            if number >= WARM_UP_STEPS and step is not None:
                steps[name].append(step)
    missing = [name for name, mine in steps.items() if not mine]
    if missing:
        raise ConfigError(
            f"--output-tokens={load.output_tokens}: at batch size {load.batch_size} the texts end "
            f"before a step of {', '.join(missing)} could be measured; raise it"
        )
    return steps


def figures(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """Return medians with spread, in ms, and tokens per second over all steps."""
    low, middle, high = np.percentile([step.step_ms for step in steps], (10, 50, 90))
    tokens = sum(step.num_output_tokens for step in steps)
    return {
        "rounds": len(steps),
        "ms": float(middle),
        "p10_ms": float(low),
        "p90_ms": float(high),
        "draft_ms": float(np.median([step.draft_ms for step in steps])),
        "verify_ms": float(np.median([step.verify_ms for step in steps])),
        "idle_ms": float(np.median([step.idle_ms for step in steps])),
        "accept_length": tokens / sum(step.batch_size for step in steps),
        "tokens_per_second": tokens / sum(step.step_ms for step in steps) * 1e3,
    }


def _turns(names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the variant of each step, and the step's number in its trial."""
    for name in cycle(names):
        for number in range(TRIAL_STEPS) if len(names) > 1 else count():
            yield name, number
