"""`serve-spec bench offline`: the same requests with speculation off, at fixed depths, adaptive.

One engine, one policy per arm; "off" is its tier without drafts. Two speeds are given: of whole
runs, prompts and thinning ends included, and of decoding alone while the batch is full.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from serve_spec.adaptive import AdaptiveController
from serve_spec.bench.adaptive.arms import make_arms
from serve_spec.bench.configuration import add_allow_differences, add_configuration, overrides
from serve_spec.bench.full_batches import FullBatches
from serve_spec.bench.plots import plot_offline
from serve_spec.bench.report import (
    emit,
    environment,
    forced_acceptance,
    save,
    show,
    table,
)
from serve_spec.bench.waves import heard_rounds
from serve_spec.bench.workload import HELD_OUT_PACKAGES, held_out_prompts
from serve_spec.config import ServeSpecConfig
from serve_spec.core.request import RequestOutput, SamplingParams
from serve_spec.engine.llm import LLM

WARM_UP_TOKENS = 24


@dataclass
class Arm:
    """One way to run the workload and what it measured, per repetition."""

    name: str
    controller: AdaptiveController
    seconds: list[float] = field(default_factory=list)
    decoding: list[FullBatches] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    rounds: int = 0


@dataclass(frozen=True)
class Workload:
    """Prompts to run at one temperature, `batch_size` at a time."""

    prompts: Sequence[list[int]]
    output_tokens: int
    temperature: float
    batch_size: int

    @property
    def params(self) -> list[SamplingParams]:
        """Of every prompt: seeds of its own, and no end before the last token."""
        return [
            SamplingParams(
                max_tokens=self.output_tokens,
                temperature=self.temperature,
                seed=1000 + i,
                ignore_eos=True,
            )
            for i in range(len(self.prompts))
        ]


@dataclass(frozen=True)
class Cell:
    """The figures of one arm at one temperature and batch size."""

    arm: str
    temperature: float
    batch_size: int
    tokens_per_second: float
    """Of the median repetition."""
    tokens_per_second_range: tuple[float, float]
    """Of the slowest repetition and of the fastest."""
    speedup: float
    decode_tokens_per_second: float | None
    """Of a batch that is always full; None where no text was long enough to tell."""
    decode_speedup: float | None
    accept_length: float
    same_texts: int
    num_texts: int
    draft_ms_per_round: float
    verify_ms_per_round: float
    host_ms_per_round: float
    rounds_by_num_steps: dict[int, int]


def main(argv: list[str]) -> int:
    """Runs the benchmark; prints a table and, last, one JSON line."""
    args = _parser().parse_args(argv)
    num_tokens = args.prompt_tokens + args.output_tokens
    sizes = {**room(max(args.batch_sizes), num_tokens), "speculative_adaptive": True}
    llm = LLM(args.config, **{**sizes, **overrides(args)})
    arms = _arms(llm.engine.controller, args.num_steps)
    prompts = held_out_prompts(
        llm.engine.tokenizer.encode,
        count=max(args.num_prompts, *args.batch_sizes),
        num_tokens=args.prompt_tokens,
        packages=args.packages,
    )
    cells: list[Cell] = []
    for batch_size in args.batch_sizes:
        mine = prompts[: max(args.num_prompts, batch_size)]
        warm_up(llm, arms, mine[:batch_size])
        for temperature in args.temperatures:
            run = Workload(mine, args.output_tokens, temperature, batch_size)
            measure(llm, arms, run, args.repetitions)
            cells += cells_of(arms, temperature, batch_size)
            save(_result(args, llm.config, cells), args.json)
    result = _result(args, llm.config, cells)
    show(_table(cells), result)
    if args.plot is not None:
        plot_offline(result, args.plot)
    emit(result, args.json)
    if forced_acceptance(result) is not None:
        return 0  # texts differ by construction
    same = all(cell.same_texts == cell.num_texts for cell in cells)
    return 0 if same or args.allow_differences else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serve-spec bench offline", description=__doc__)
    add_configuration(parser, "other keys, for every arm")
    parser.add_argument("--num-steps", type=int, nargs="+", default=[1, 3, 7], help="static arms")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--num-prompts", type=int, default=8, help="at least a batch of them is run in any case"
    )
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3, help="per arm, interleaved")
    parser.add_argument("--packages", nargs="+", default=list(HELD_OUT_PACKAGES))
    add_allow_differences(parser)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--plot", type=Path, help="draw the result here (PNG)")
    return parser


def _result(
    args: argparse.Namespace, config: ServeSpecConfig, cells: Sequence[Cell]
) -> dict[str, Any]:
    return {
        "bench": "offline",
        "environment": environment(config),
        "arguments": {k: v for k, v in vars(args).items() if k not in ("json", "plot")},
        "cells": [asdict(cell) for cell in cells],
    }


def room(batch_size: int, num_tokens: int) -> dict[str, Any]:
    """Keys with which so many requests of so many tokens fit, however they draft."""
    tokens = batch_size * (num_tokens + 64)
    return {"num_pages": max(256, tokens // 16), "max_num_seqs": batch_size}


def _arms(controller: AdaptiveController, num_steps: Sequence[int]) -> list[Arm]:
    """Off, the fixed depths, and the policy the configuration names."""
    fixed = [Arm(arm.name, arm.controller) for arm in make_arms(controller, num_steps, [])]
    return [*fixed, Arm("adaptive", controller)]


def warm_up(llm: LLM, arms: Sequence[Arm], prompts: list[list[int]]) -> None:
    """First rounds are slow, whatever runs them."""
    params = SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0.0, seed=1, ignore_eos=True)
    for arm in arms:
        llm.engine.controller = arm.controller
        llm.generate(prompts, params)


def measure(llm: LLM, arms: Sequence[Arm], workload: Workload, repetitions: int) -> None:
    """Every arm in turn, over and over."""
    for arm in arms:
        arm.seconds, arm.decoding, arm.outputs = [], [], []
    title = f"T={workload.temperature} batch={workload.batch_size}"
    for _ in tqdm(range(repetitions), desc=title, leave=False):
        for arm in arms:
            llm.engine.controller = arm.controller
            _run(llm, arm, workload)


def _run(llm: LLM, arm: Arm, workload: Workload) -> None:
    prompts, params, batch_size = workload.prompts, workload.params, workload.batch_size
    counters = llm.engine.counters
    before = (counters.draft_ms, counters.verify_ms, counters.num_steps_executed)
    outputs: list[RequestOutput] = []
    decoding = FullBatches(batch_size)
    started = time.perf_counter()
    for first in range(0, len(prompts), batch_size):
        group = slice(first, first + batch_size)
        with heard_rounds(llm.engine) as rounds:
            outputs += llm.generate(prompts[group], params[group])
        decoding.add(rounds)
    arm.seconds.append(time.perf_counter() - started)
    arm.decoding.append(decoding)
    arm.outputs = outputs
    arm.draft_ms = counters.draft_ms - before[0]
    arm.verify_ms = counters.verify_ms - before[1]
    arm.rounds = counters.num_steps_executed - before[2]


def cells_of(arms: list[Arm], temperature: float, batch_size: int) -> list[Cell]:
    reference = [output.token_ids for output in arms[0].outputs]
    off_seconds = statistics.median(arms[0].seconds)
    off_speed = _decode_speed(arms[0])
    cells = []
    for arm in arms:
        seconds = statistics.median(arm.seconds)
        tokens = sum(len(output.token_ids) for output in arm.outputs)
        speed = _decode_speed(arm)
        stats = [output.speculation for output in arm.outputs]
        num_rounds = sum(s.num_rounds for s in stats)
        by_steps: dict[int, int] = {}
        for s in stats:
            for steps, count in s.rounds_by_num_steps.items():
                by_steps[steps] = by_steps.get(steps, 0) + count
        host_ms = arm.seconds[-1] * 1e3 - arm.draft_ms - arm.verify_ms
        cells.append(
            Cell(
                arm=arm.name,
                temperature=temperature,
                batch_size=batch_size,
                tokens_per_second=tokens / seconds,
                tokens_per_second_range=(tokens / max(arm.seconds), tokens / min(arm.seconds)),
                speedup=off_seconds / seconds,
                decode_tokens_per_second=speed,
                decode_speedup=speed / off_speed if speed and off_speed else None,
                accept_length=1 + sum(s.num_correct_drafts for s in stats) / max(1, num_rounds),
                same_texts=sum(
                    o.token_ids == r for o, r in zip(arm.outputs, reference, strict=True)
                ),
                num_texts=len(reference),
                draft_ms_per_round=arm.draft_ms / arm.rounds,
                verify_ms_per_round=arm.verify_ms / arm.rounds,
                host_ms_per_round=host_ms / arm.rounds,
                rounds_by_num_steps=by_steps,
            )
        )
    return cells


def _decode_speed(arm: Arm) -> float | None:
    """Median over repetitions."""
    speeds = [decoding.tokens_per_second for decoding in arm.decoding]
    known = [speed for speed in speeds if speed is not None]
    return statistics.median(known) if known else None


def _table(cells: list[Cell]) -> str:
    columns = ["T", "batch", "arm", "tok/s", "x off", "decode tok/s", "x off", "accept", "chosen K"]
    rows = [
        [
            cell.temperature,
            cell.batch_size,
            cell.arm,
            cell.tokens_per_second,
            cell.speedup,
            "" if cell.decode_tokens_per_second is None else cell.decode_tokens_per_second,
            "" if cell.decode_speedup is None else cell.decode_speedup,
            cell.accept_length,
            _chosen(cell.rounds_by_num_steps),
            cell.draft_ms_per_round,
            cell.verify_ms_per_round,
            cell.host_ms_per_round,
            f"{cell.same_texts}/{cell.num_texts}",
        ]
        for cell in cells
    ]
    return table([*columns, "draft ms", "verify ms", "host ms", "same texts"], rows)


def _chosen(rounds_by_num_steps: dict[int, int]) -> str:
    """Mean drafts per row, then the most frequent numbers with their shares."""
    total = sum(rounds_by_num_steps.values())
    mean = sum(steps * count for steps, count in rounds_by_num_steps.items()) / total
    often = sorted(rounds_by_num_steps, key=lambda steps: -rounds_by_num_steps[steps])[:3]
    shares = " ".join(f"{steps}:{rounds_by_num_steps[steps] / total:.0%}" for steps in often)
    return f"{mean:.1f} ({shares})"
