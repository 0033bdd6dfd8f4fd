"""`serve-spec bench offline`: the same requests with speculation off, at fixed depths, adaptive."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from serve_spec.bench.plots import plot_offline
from serve_spec.bench.report import emit, environment, table
from serve_spec.bench.workload import HELD_OUT_PACKAGES, held_out_prompts
from serve_spec.config.root import parse_override
from serve_spec.core.request import RequestOutput, SamplingParams
from serve_spec.engine.llm import LLM

Overrides = dict[str, Any]


@dataclass
class Arm:
    """One way to run the workload and what it measured, per repetition."""

    name: str
    llm: LLM
    seconds: list[float] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    rounds: int = 0


@dataclass(frozen=True)
class Cell:
    """The figures of one arm at one temperature and batch size."""

    arm: str
    temperature: float
    batch_size: int
    tokens_per_second: float
    speedup: float
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
    sizes = {"max_num_seqs": max(args.batch_sizes), **_overrides(args)}
    arms = [Arm(name, LLM(args.config, **sizes | how)) for name, how in _arms(args.num_steps)]
    prompts = held_out_prompts(
        arms[0].llm.engine.tokenizer.encode,
        count=args.num_prompts,
        num_tokens=args.prompt_tokens,
        packages=args.packages,
    )
    cells: list[Cell] = []
    for batch_size in args.batch_sizes:
        for temperature in args.temperatures:
            _measure(arms, prompts, temperature, batch_size, args.output_tokens, args.repetitions)
            cells += _cells(arms, temperature, batch_size)
    print(_table(cells))
    config = arms[-1].llm.config
    result = {
        "bench": "offline",
        "environment": environment(config),
        "arguments": {k: v for k, v in vars(args).items() if k not in ("json", "plot")},
        "cells": [asdict(cell) for cell in cells],
    }
    if args.plot is not None:
        plot_offline(result, args.plot)
    emit(result, args.json)
    if config.speculative.synthetic_acceptance is not None:
        return 0  # texts differ by construction
    same = all(cell.same_texts == cell.num_texts for cell in cells)
    return 0 if same or args.allow_differences else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serve-spec bench offline", description=__doc__)
    parser.add_argument("--config", default="configs/tiny.yaml")
    parser.add_argument("--device", help="overrides the configuration")
    parser.add_argument("--dtype", help="overrides the configuration")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="other keys, for every arm"
    )
    parser.add_argument("--num-steps", type=int, nargs="+", default=[1, 3, 7], help="static arms")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3, help="per arm, interleaved")
    parser.add_argument("--packages", nargs="+", default=list(HELD_OUT_PACKAGES))
    parser.add_argument(
        "--allow-differences",
        action="store_true",
        help="exit 0 although texts differ (bfloat16 rounds differently per batch shape)",
    )
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--plot", type=Path, help="draw the result here (PNG)")
    return parser


def _overrides(args: argparse.Namespace) -> Overrides:
    """The arguments that replace keys of the configuration, and a cache that fits every arm."""
    tokens = max(args.batch_sizes) * (args.prompt_tokens + args.output_tokens + 64)
    overrides: Overrides = {"num_pages": max(256, tokens // 16)}
    for key in ("device", "dtype"):
        if getattr(args, key) is not None:
            overrides[key] = getattr(args, key)
    return {**overrides, **dict(parse_override(pair) for pair in args.set)}


def _arms(num_steps: Sequence[int]) -> list[tuple[str, Overrides]]:
    off = {
        "speculative_algorithm": "NONE",
        "speculative_num_steps": 0,
        "speculative_adaptive": False,
        "synthetic_acceptance": None,
    }
    arms: list[tuple[str, Overrides]] = [("off", off)]
    for steps in num_steps:
        how = {"speculative_num_steps": steps, "speculative_adaptive": False}
        arms.append((f"K={steps}", how))
    return [*arms, ("adaptive", {"speculative_adaptive": True})]


def _measure(
    arms: list[Arm],
    prompts: list[list[int]],
    temperature: float,
    batch_size: int,
    output_tokens: int,
    repetitions: int,
) -> None:
    """Every arm in turn, `repetitions` times after one warm-up prompt each."""
    params = [
        SamplingParams(
            max_tokens=output_tokens, temperature=temperature, seed=1000 + i, ignore_eos=True
        )
        for i in range(len(prompts))
    ]
    for arm in arms:
        arm.seconds, arm.outputs = [], []
        arm.llm.generate([prompts[0]] * batch_size, params[0])
    title = f"T={temperature} batch={batch_size}"
    for _ in tqdm(range(repetitions), desc=title, leave=False):
        for arm in arms:
            _run(arm, prompts, params, batch_size)


def _run(arm: Arm, prompts: list[list[int]], params: list[SamplingParams], batch_size: int) -> None:
    counters = arm.llm.engine.counters
    before = (counters.draft_ms, counters.verify_ms, counters.num_steps_executed)
    outputs: list[RequestOutput] = []
    started = time.perf_counter()
    for first in range(0, len(prompts), batch_size):
        group = slice(first, first + batch_size)
        outputs += arm.llm.generate(prompts[group], params[group])
    arm.seconds.append(time.perf_counter() - started)
    arm.outputs = outputs
    arm.draft_ms = counters.draft_ms - before[0]
    arm.verify_ms = counters.verify_ms - before[1]
    arm.rounds = counters.num_steps_executed - before[2]


def _cells(arms: list[Arm], temperature: float, batch_size: int) -> list[Cell]:
    reference = [output.token_ids for output in arms[0].outputs]
    off_seconds = statistics.median(arms[0].seconds)
    cells = []
    for arm in arms:
        seconds = statistics.median(arm.seconds)
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
                tokens_per_second=sum(len(o.token_ids) for o in arm.outputs) / seconds,
                speedup=off_seconds / seconds,
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


def _table(cells: list[Cell]) -> str:
    columns = ["T", "batch", "arm", "tok/s", "x off", "accept", "draft ms", "verify ms", "host ms"]
    rows = [
        [
            cell.temperature,
            cell.batch_size,
            cell.arm,
            cell.tokens_per_second,
            cell.speedup,
            cell.accept_length,
            cell.draft_ms_per_round,
            cell.verify_ms_per_round,
            cell.host_ms_per_round,
            f"{cell.same_texts}/{cell.num_texts}",
        ]
        for cell in cells
    ]
    return table([*columns, "same texts"], rows)
