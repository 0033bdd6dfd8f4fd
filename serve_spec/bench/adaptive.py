"""`serve-spec bench adaptive`: compare adaptive policies with off and every fixed depth.

All variants share one worker. In every phase, each variant serves the same requests in short
interleaved trials, so changes of the machine's speed affect all variants alike.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from tqdm import tqdm

from serve_spec.adaptive import AdaptiveController
from serve_spec.bench import report, workload
from serve_spec.bench.adaptive_report import plot, summary, tables, trial_figures
from serve_spec.bench.command import configured
from serve_spec.bench.harness import ClosedLoop, engine_beside, equal_prefixes, room
from serve_spec.bench.prompts import dataset_prompts
from serve_spec.bench.variants import Variant, interleaved, make_variants
from serve_spec.bench.workload import Load, Prompts
from serve_spec.config import ServeSpecConfig
from serve_spec.engine.build import rank_device
from serve_spec.engine.engine import SpecEngine
from serve_spec.engine.llm import LLM
from serve_spec.engine.tokenizer import Tokenizer

BATCH_SIZES = {"cpu": (1, 4, 16, 64, 16, 4, 1), "cuda": (1, 8, 32, 64, 128, 256, 128, 64, 32, 8, 1)}
TRIAL_MS = {"cpu": 100.0, "cuda": 400.0}
"""Long, because the first step of a trial is not launched ahead."""
MIN_STEPS = 2
"""Plain steps of a trial."""
WARM_UP_FRACTION = 0.25
"""Part of a steady-state batch that passes before it is measured: fresh policies have to learn."""
WARM_UP_TOKENS = 12
PROMPT_TOKENS = 64
"""Tokens of a prompt from source files."""
NUM_PROMPTS = 256
DATASET_TEMPERATURES = (0.0, 1.0)

_MOST_PHASES = 1000


def run(args: argparse.Namespace) -> int:
    """Run the benchmark or read an old result; return 1 if texts differ unexpectedly."""
    records = report.records_of(args, "adaptive", _measured)
    result = summary(records)
    report.show(tables(result), result)
    if args.plot is not None:
        plot(result, args.plot)
    return report.status(result, all(phase["same_texts"] for phase in result["phases"]), args)


def _measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the record of the run, of every trial, and of the texts of every variant and phase."""
    config = configured(args).download()
    device = rank_device(config, 0).type
    batch_sizes = args.batch_sizes or BATCH_SIZES[device]
    tokens = args.output_tokens or (
        workload.STEADY_TOKENS if args.cells else workload.OUTPUT_TOKENS
    )
    deepest = max([*args.num_steps, 0])
    room_tokens = round(tokens * (1 + workload.SPREAD)) + deepest
    texts = _texts(args, config, room_tokens)
    loads = _loads(args, batch_sizes, texts, tokens)
    longest = room_tokens + max(len(prompt) for mine in texts.prompts.values() for prompt in mine)
    num_variants = 1 + len({*args.num_steps} - {0}) + len(args.variants)
    llm = LLM(
        config,
        **room(config, max(batch_sizes), longest, deepest, num_variants),
        speculative_adaptive=True,
        speculative_adaptive_strategy="goodput",  # measures costs and captures every depth
    )
    variants = make_variants(llm.engine.controller, args.num_steps, args.variants)
    bench = _Bench(llm.engine, variants, texts.prompts)
    yield report.run_record(
        "adaptive",
        args,
        config,
        prompts=texts.about,
        phases=[load.label for load in loads],
        classes=[load.prompt_class for load in loads],
        variants={variant.name: variant.is_static for variant in variants},
    )
    sizes = tqdm(sorted(set(batch_sizes)), "warm-up")
    plain_ms = {size: bench.warm_up(loads[0].prompt_class, size) for size in sizes}
    trial_ms = TRIAL_MS[device] if args.trial_ms is None else args.trial_ms
    gc.collect()
    gc.freeze()  # a full collection would slow the trial of one variant
    try:
        for repetition in range(args.repetitions):
            for number, load in enumerate(tqdm(loads, f"repetition {repetition + 1}")):
                step_ms = plain_ms[load.batch_size]
                num_steps = args.seconds_per_phase * 1e3 / step_ms
                if load.is_steady:
                    num_steps = min(num_steps, load.num_tokens)
                num_trials = max(1, round(num_steps / max(MIN_STEPS, trial_ms / step_ms)))
                place = {"phase": number, "repetition": repetition}
                for record in bench.run(load, place, round(num_steps), num_trials):
                    yield {**place, **record}
    finally:
        gc.unfreeze()


class _Texts(NamedTuple):
    """Prompts by source, and the classes of text made of them. about: of a dataset, in words."""

    prompts: Prompts
    classes: Sequence[str]
    temperatures: Sequence[float | None]
    about: str | None


def _texts(args: argparse.Namespace, config: ServeSpecConfig, output_tokens: int) -> _Texts:
    """Return the prompts; each category of a dataset is a class of text."""
    others = ("classes", "prompt_tokens")
    dataset = dataset_prompts(args, config, NUM_PROMPTS, output_tokens=output_tokens, others=others)
    if dataset is not None:
        temperatures = args.temperatures or DATASET_TEMPERATURES
        return _Texts(dataset.by_category, list(dataset.by_category), temperatures, dataset.about)
    prompts = workload.prompts_by_source(
        Tokenizer(config.model.tokenizer_folder).encode,
        count=NUM_PROMPTS,
        num_tokens=args.prompt_tokens or PROMPT_TOKENS,
    )
    classes = args.classes or list(workload.CLASSES)
    return _Texts(prompts, classes, args.temperatures or [None], None)


def _loads(
    args: argparse.Namespace, batch_sizes: Sequence[int], texts: _Texts, num_tokens: int
) -> list[Load]:
    make_loads = workload.steady_batches if args.cells else workload.phases
    loads = make_loads(batch_sizes, texts.classes, texts.temperatures, num_tokens)
    return [replace(load, may_stop=texts.about is not None) for load in loads]


class _Bench:
    """Interleaved variants on the worker of one engine."""

    def __init__(self, engine: SpecEngine, variants: Sequence[Variant], prompts: Prompts) -> None:
        self.variants = variants
        self.prompts = prompts
        self.engines = {each.name: engine_beside(engine, each.controller) for each in variants}
        self._policies: dict[tuple[int, str], AdaptiveController] = {}

    def warm_up(self, prompt_class: str, batch_size: int) -> float:
        """Run first steps, which are slow; return the milliseconds of a plain step."""
        load = Load(prompt_class, batch_size, workload.OUTPUT_TOKENS, 1.0, is_steady=True)
        deepest = [variant for variant in self.variants if variant.is_static][-1]
        for variant in (deepest, self.variants[0]):
            requests = load.requests(0, self.prompts)
            loop = ClosedLoop(self.engines[variant.name], requests, batch_size)
            loop.fill()
            steps = loop.advance(loop.num_emitted + batch_size * WARM_UP_TOKENS)
            loop.close()
        return median(step.ms for step in steps if step.record.decodes_only)

    def run(
        self, load: Load, place: Mapping[str, int], num_steps: int, num_trials: int
    ) -> Iterator[dict[str, Any]]:
        """Yield every trial; in total each variant emits the tokens of `num_steps` plain steps.

        A trial is a fraction of the tokens, not of the time, so all variants end in the same trial.
        """
        number, repetition = place["phase"], place["repetition"]
        work = load.batch_size * num_steps
        warm_up = round(WARM_UP_FRACTION * work) if load.is_steady else 0
        texts = number + _MOST_PHASES * repetition if load.is_steady else number
        loops = {
            variant.name: self._start(variant, load, number, texts, warm_up)
            for variant in self.variants
        }
        starts = {name: loop.num_emitted for name, loop in loops.items()}
        for trial, name in interleaved(num_trials, loops, f"{repetition} {number}"):
            loop = loops[name]
            before, began = loop.num_emitted, time.perf_counter()
            steps = loop.advance(starts[name] + (work - warm_up) * (trial + 1) // num_trials)
            ms = (time.perf_counter() - began) * 1e3
            figures = trial_figures(steps, ms, loop.num_emitted - before, load)
            yield {"section": "trial", "trial": trial, "variant": name, **figures}
        expected = loops[self.variants[0].name].texts
        for name, loop in loops.items():
            loop.close()
            compared = min(len(loop.texts), len(expected))
            same = equal_prefixes(loop.texts, expected)
            yield {"section": "texts", "variant": name, "texts": compared, "same_texts": same}

    def _start(
        self, variant: Variant, load: Load, number: int, texts: int, warm_up: int
    ) -> ClosedLoop:
        """Return a filled closed loop; for a steady-state batch with its own, warmed-up policy."""
        engine = self.engines[variant.name]
        if load.is_steady:
            fresh = copy.deepcopy(variant.controller)
            engine.controller = self._policies.setdefault((number, variant.name), fresh)
        loop = ClosedLoop(engine, load.requests(texts, self.prompts), load.batch_size)
        loop.fill()
        loop.advance(loop.num_emitted + warm_up)
        return loop
