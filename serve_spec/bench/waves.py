"""A wave: requests that start together and decode as one full batch, arms taking turns on them.

Arms change every few rounds within the same texts, so whatever drifts hits all of them alike, and
the prompts are paid for once. Only full rounds count: every request decodes, none near its end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, cycle
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np

from serve_spec.adaptive import AdaptiveController
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.core.record import StepRecord
from serve_spec.core.request import SamplingParams
from serve_spec.core.sequence import Sequence as TextSequence
from serve_spec.engine.engine import SpecEngine

SETTLE_ROUNDS = 4
"""Not counted after a change of arm: rounds the arm before left under way, then a catch-up."""
BLOCK_ROUNDS = 12
"""An arm's turn."""
_MIN_BATCHED_TOKENS = 2048
_MIN_PAGES = 256
"""Of an engine for the smallest batches: more than its longest text."""

Arms: TypeAlias = Mapping[str, Sequence[AdaptiveController]]
"""By name; the controllers of an arm change every round."""


@dataclass(frozen=True)
class Wave:
    """Greedy requests of random prompts, all of a length: `output_tokens` in the mean."""

    batch_size: int
    prompt_tokens: int
    output_tokens: int
    seed: int = 0

    @property
    def max_tokens(self) -> int:
        """Twice the mean: rows that keep many drafts run ahead of the others."""
        return 2 * self.output_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens a request may come to."""
        return self.prompt_tokens + self.max_tokens


def with_room(config: ServeSpecConfig, largest: Wave, max_steps: int) -> ServeSpecConfig:
    """Return the configuration with room for the largest wave, so that no draft is ever cut."""
    batch_size = largest.batch_size
    num_tokens = largest.num_tokens + 2 * (max_steps + 1)
    num_pages = batch_size * -(-num_tokens // config.cache.page_size)
    num_batched = max(_MIN_BATCHED_TOKENS, 2 * batch_size * (max_steps + 1))
    return ServeSpecConfig.load(
        config,
        max_num_seqs=batch_size,
        max_num_batched_tokens=max(config.scheduler.max_num_batched_tokens, num_batched),
        num_pages=max(config.cache.num_pages or 0, num_pages, _MIN_PAGES),
    )


@contextmanager
def heard_rounds(engine: SpecEngine) -> Iterator[list[StepRecord]]:
    """The rounds run inside; metrics and policy are put back after it."""
    heard: list[StepRecord] = []
    sink, controller = engine.metrics, engine.controller
    engine.metrics = _Listener(heard)
    try:
        yield heard
    finally:
        engine.metrics, engine.controller = sink, controller


def run_wave(
    engine: SpecEngine,
    wave: Wave,
    plain: AdaptiveController,
    arms: Arms,
) -> dict[str, list[StepRecord]]:
    """The full rounds of every arm, once its turn has settled. The engine must be idle.

    Prompts run under `plain`, then arms take turns, in an order the wave's seed decides, until
    every arm had one and the mean text is long enough. One arm alone runs to the end.

    Raises:
        ConfigError: the texts end before every arm has had its turn.
    """
    sequences = _sequences(engine, wave)
    deepest = max(
        shape.depth
        for controllers in arms.values()
        for controller in controllers
        for shape in controller.shapes
    )
    order = random.Random(wave.seed).sample(list(arms), len(arms))
    rounds: dict[str, list[StepRecord]] = {name: [] for name in arms}
    with heard_rounds(engine) as heard:
        try:
            _start(engine, sequences, plain)
            for name, number in _turns(order):
                is_over = all(rounds.values()) and _is_long_enough(sequences, wave)
                # Nobody's turn is cut short while there is room.
                may_end = number == 0 or len(arms) == 1
                if _nears_end(sequences, deepest) or (is_over and may_end):
                    return _complete(rounds, wave)
                engine.controller = arms[name][number % len(arms[name])]
                engine.step()
                if number >= SETTLE_ROUNDS and _is_full(heard[-1], wave):
                    rounds[name].append(heard[-1])
        finally:
            for seq in sequences:
                engine.abort(seq.request_id)
            while engine.has_work:  # a round may still be under way
                engine.step()
    raise AssertionError("turns have no end")


def figures(rounds: Sequence[StepRecord]) -> dict[str, Any]:
    """Medians with spread, in milliseconds; tokens per second over all of them together."""
    low, middle, high = np.percentile([r.step_ms for r in rounds], (10, 50, 90))
    tokens = sum(r.num_output_tokens for r in rounds)
    return {
        "rounds": len(rounds),
        "ms": float(middle),
        "p10_ms": float(low),
        "p90_ms": float(high),
        "draft_ms": float(np.median([r.draft_ms for r in rounds])),
        "verify_ms": float(np.median([r.verify_ms for r in rounds])),
        "idle_ms": float(np.median([r.idle_ms for r in rounds])),
        "accept_length": tokens / sum(r.batch_size for r in rounds),
        "tokens_per_second": tokens / sum(r.step_ms for r in rounds) * 1e3,
    }


def _sequences(engine: SpecEngine, wave: Wave) -> list[TextSequence]:
    chance = random.Random(wave.seed)
    ids = range(engine.tokenizer.vocab_size)
    return [
        engine.new_sequence(
            f"wave-{wave.seed}-{i}",
            chance.choices(ids, k=wave.prompt_tokens),
            SamplingParams(
                max_tokens=wave.max_tokens,
                temperature=0.0,
                seed=chance.getrandbits(32),
                ignore_eos=True,
            ),
        )
        for i in range(wave.batch_size)
    ]


def _start(
    engine: SpecEngine, sequences: Sequence[TextSequence], plain: AdaptiveController
) -> None:
    for seq in sequences:
        engine.add(seq)
    engine.controller = plain
    while not all(seq.is_decoding for seq in sequences):
        engine.step()


def _turns(names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Whose turn each round is, and its number in the turn. One alone has a turn without end."""
    for name in cycle(names):
        for number in range(BLOCK_ROUNDS) if len(names) > 1 else count():
            yield name, number


def _is_long_enough(sequences: Sequence[TextSequence], wave: Wave) -> bool:
    return fmean(seq.num_output_tokens for seq in sequences) >= wave.output_tokens


def _nears_end(sequences: Sequence[TextSequence], deepest: int) -> bool:
    """Whether drafts of a text may be cut in the next rounds."""
    return min(seq.num_remaining for seq in sequences) <= 2 * (deepest + 1)


def _is_full(record: StepRecord, wave: Wave) -> bool:
    return record.decodes_only and record.batch_size == wave.batch_size


def _complete(rounds: dict[str, list[StepRecord]], wave: Wave) -> dict[str, list[StepRecord]]:
    missing = [name for name, mine in rounds.items() if not mine]
    if missing:
        raise ConfigError(
            f"output_tokens={wave.output_tokens}: at batch size {wave.batch_size} the texts end "
            f"before a round of {', '.join(missing)} could be measured; give more"
        )
    return rounds


@dataclass(frozen=True)
class _Listener:
    heard: list[StepRecord]

    def observe(self, record: StepRecord) -> None:
        self.heard.append(record)
