"""`serve-spec bench offline`: run the same requests with every variant on one engine.

Two speeds are measured: of complete runs, including prefill, and of full decoding batches.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from tqdm import tqdm

from serve_spec.bench import report
from serve_spec.bench.command import configured
from serve_spec.bench.harness import full_batch_speed, recorded_steps, sampling_params
from serve_spec.bench.variants import Variant, interleaved, make_variants
from serve_spec.bench.workload import TextKind, TextRequest, held_out_prompts
from serve_spec.core.record import StepRecord
from serve_spec.core.request import RequestOutput
from serve_spec.engine.llm import LLM

WARM_UP_TOKENS = 24
_COLUMNS = (
    *("T", "batch", "variant", "tok/s", "x off", "decode tok/s", "x off", "accept length", "K"),
    *("draft ms", "verify ms", "host ms", "same texts"),
)


@dataclass(frozen=True)
class Run:
    """A repetition of a variant at one temperature and batch size."""

    seconds: float
    outputs: list[RequestOutput]
    batches: list[list[StepRecord]]
    """The steps of every batch."""
    batch_size: int


def run(args: argparse.Namespace) -> int:
    """Run the benchmark and print its table; return 1 if texts differ unexpectedly."""
    max_batch_size, num_tokens = max(args.batch_sizes), args.prompt_tokens + args.output_tokens
    num_pages = max(256, max_batch_size * (num_tokens + 64) // 16)
    sizes = {"num_pages": num_pages, "max_num_seqs": max_batch_size}
    llm = LLM(configured(args, speculative_adaptive=True, **sizes))
    controller = llm.engine.controller
    variants = make_variants(controller, args.num_steps, [])
    variants.append(Variant("adaptive", False, controller))
    prompts = held_out_prompts(
        llm.engine.tokenizer.encode,
        count=max(args.num_prompts, *args.batch_sizes),
        num_tokens=args.prompt_tokens,
        packages=args.packages,
    )
    head = report.run_record("offline", args, llm.config)
    report.append_record(args.json, head)
    measurements: list[report.Record] = []
    for batch_size in args.batch_sizes:
        mine = prompts[: max(args.num_prompts, batch_size)]
        for variant in variants:  # first steps are slow
            _generate(llm, variant, _requests(mine[:batch_size], 0.0), WARM_UP_TOKENS, batch_size)
        for temperature in args.temperatures:
            requests = _requests(mine, temperature)
            runs: dict[str, list[Run]] = {variant.name: [] for variant in variants}
            title = f"T={temperature} batch={batch_size}"
            trials = list(interleaved(args.repetitions, variants))
            for _, variant in tqdm(trials, desc=title, leave=False):
                found = _generate(llm, variant, requests, args.output_tokens, batch_size)
                runs[variant.name].append(found)
            for figures in measure(runs, temperature):
                measurements.append(figures)
                report.append_record(args.json, {"section": "measurement", **figures})
    report.show(_table(measurements), head)
    if args.plot is not None:
        plot(head, measurements, args.plot)
    same = all(each["same_texts"] == each["num_texts"] for each in measurements)
    return report.status(head, same, args)


def _requests(prompts: Sequence[Sequence[int]], temperature: float) -> list[TextRequest]:
    kind = TextKind("code", temperature)
    return [TextRequest(kind, prompt, 1000 + i) for i, prompt in enumerate(prompts)]


def _generate(
    llm: LLM, variant: Variant, requests: Sequence[TextRequest], num_tokens: int, batch_size: int
) -> Run:
    outputs: list[RequestOutput] = []
    batches = []
    started = time.perf_counter()
    for first in range(0, len(requests), batch_size):
        group = requests[first : first + batch_size]
        params = [sampling_params(request, num_tokens) for request in group]
        with recorded_steps(llm.engine) as steps:
            llm.engine.controller = variant.controller
            outputs += llm.generate([request.prompt for request in group], params)
        batches.append(steps)
    return Run(time.perf_counter() - started, outputs, batches, batch_size)


def measure(by_variant: dict[str, list[Run]], temperature: float) -> list[report.Record]:
    """Return the figures of every variant; the first is the reference for speeds and texts.

    Speeds are of the median repetition, the range from the slowest to the fastest. Decode speeds
    are of full batches; None if all texts were too short. The rest is of the last repetition.
    """
    off, *_ = by_variant.values()
    off_seconds, off_speed = median(run.seconds for run in off), _decode_speed(off)
    found: list[report.Record] = []
    for name, runs in by_variant.items():
        times, speed, last = [run.seconds for run in runs], _decode_speed(runs), runs[-1]
        tokens = sum(len(output.token_ids) for output in last.outputs)
        stats = [output.speculation for output in last.outputs]
        rounds = sum((Counter(each.rounds_by_num_steps) for each in stats), Counter[int]())
        num_correct = sum(each.num_correct_drafts for each in stats)
        steps = [step for batch in last.batches for step in batch]
        draft_ms, verify_ms = fmean(s.draft_ms for s in steps), fmean(s.verify_ms for s in steps)
        pairs = zip(last.outputs, off[-1].outputs, strict=True)
        found.append(
            {
                "variant": name,
                "temperature": temperature,
                "batch_size": last.batch_size,
                "tokens_per_second": tokens / median(times),
                "tokens_per_second_range": (tokens / max(times), tokens / min(times)),
                "speedup": off_seconds / median(times),
                "decode_tokens_per_second": speed,
                "decode_speedup": speed / off_speed if speed and off_speed else None,
                "accept_length": 1 + num_correct / max(1, rounds.total()),
                "same_texts": sum(a.token_ids == b.token_ids for a, b in pairs),
                "num_texts": len(last.outputs),
                "draft_ms_per_round": draft_ms,
                "verify_ms_per_round": verify_ms,
                "host_ms_per_round": last.seconds * 1e3 / len(steps) - draft_ms - verify_ms,
                "rounds_by_num_steps": dict(rounds),
            }
        )
    return found


def _decode_speed(runs: Sequence[Run]) -> float | None:
    speeds = [full_batch_speed(run.batch_size, run.batches) for run in runs]
    return median(known) if (known := [speed for speed in speeds if speed]) else None


def _table(measurements: Sequence[report.Record]) -> str:
    rows = [
        [
            *(m[key] for key in ("temperature", "batch_size", "variant", "tokens_per_second")),
            *(m[key] for key in ("speedup", "decode_tokens_per_second", "decode_speedup")),
            m["accept_length"],
            _depths(m["rounds_by_num_steps"]),
            *(m[f"{part}_ms_per_round"] for part in ("draft", "verify", "host")),
            f"{m['same_texts']}/{m['num_texts']}",
        ]
        for m in measurements
    ]
    return report.table(_COLUMNS, rows)


def _depths(rounds: dict[int, int]) -> str:
    """Return the mean depth of a request's rounds, and how often the most frequent ones are."""
    total = sum(rounds.values())
    mean = sum(steps * count for steps, count in rounds.items()) / total
    often = sorted(rounds, key=lambda steps: -rounds[steps])[:3]
    fractions = " ".join(f"{steps}:{rounds[steps] / total:.0%}" for steps in often)
    return f"{mean:.1f} ({fractions})"


def plot(head: report.Record, measurements: Sequence[report.Record], path: Any) -> None:
    """Draw speed over off: a panel per batch size, bars per temperature, accept length above."""
    decodes = all(m["decode_speedup"] is not None for m in measurements)
    key = "decode_speedup" if decodes else "speedup"
    label = "decode tokens/s of full batches" if decodes else "tokens/s"
    temperatures = list(dict.fromkeys(m["temperature"] for m in measurements))
    panels = []
    for batch_size in dict.fromkeys(m["batch_size"] for m in measurements):
        mine = [m for m in measurements if m["batch_size"] == batch_size]
        by_variant = {
            name: [m for m in mine if m["variant"] == name]
            for name in dict.fromkeys(m["variant"] for m in mine)
        }
        panels.append(
            report.Panel(
                f"batch {batch_size}",
                {name: [(i, m[key]) for i, m in enumerate(ms)] for name, ms in by_variant.items()},
                kind="bars",
                ticks=[f"T={t:g}" for t in temperatures],
                y_label=f"{label}, relative to off",
                baseline=1.0,
                bar_labels={
                    name: [f"{m['accept_length']:.1f}" for m in ms]
                    for name, ms in by_variant.items()
                },
            )
        )
    report.draw(panels, path, f"{report.plot_title(head)}; accept length above each bar")
