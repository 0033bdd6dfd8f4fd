"""`serve-spec bench offline`: run the same requests with every variant on one engine.

Two speeds are measured: of complete runs, including prefill, and of full decoding batches.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import fmean, median
from typing import Any

from tqdm import tqdm

from serve_spec.bench import report
from serve_spec.bench.command import configured
from serve_spec.bench.harness import full_batch_speed, recorded_steps, sampling_params
from serve_spec.bench.prompts import dataset_prompts, max_model_len
from serve_spec.bench.replay import replay, replay_keys
from serve_spec.bench.variants import Variant, interleaved, make_variants
from serve_spec.bench.workload import (
    HELD_OUT_PACKAGES,
    PROMPT_TOKENS,
    TextKind,
    TextRequest,
    held_out_prompts,
)
from serve_spec.config import ServeSpecConfig
from serve_spec.core.draft import MAX_TREE_TOKENS
from serve_spec.core.record import StepRecord
from serve_spec.core.request import RequestOutput
from serve_spec.engine.llm import LLM
from serve_spec.engine.tokenizer import Tokenizer

WARM_UP_TOKENS = 24
SOURCE_FILES = "source files"
"""Category of prompts that are of no dataset."""
_COLUMNS = (
    *("T", "batch", "category", "variant", "tok/s", "x off", "x best fixed"),
    *("decode tok/s", "x off", "accept length", "K"),
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
    """Run the benchmark and print its tables; return 1 if texts differ unexpectedly."""
    count = max(args.num_prompts, *args.batch_sizes)
    replays = {} if args.replay is None else replay_keys(args.replay)
    config = ServeSpecConfig.load(configured(args), **replays).download()
    deepest = max(args.num_steps)
    prompts = dataset_prompts(
        args,
        config,
        count,
        output_tokens=args.output_tokens + deepest,
        others=("packages", "prompt_tokens"),
    )
    by_category = _source_files(args, config, count) if prompts is None else prompts.by_category
    longest = max(len(prompt) for mine in by_category.values() for prompt in mine)
    max_batch_size, num_tokens = max(args.batch_sizes), longest + args.output_tokens
    num_slots = max(max_batch_size * (num_tokens + MAX_TREE_TOKENS), max_model_len(config))
    num_pages = max(256, -(-num_slots // config.cache.page_size))
    sizes = {"num_pages": num_pages, "max_num_seqs": max_batch_size}
    llm = LLM(configured(args, **{"speculative_adaptive": True, **sizes}), **replays)
    bench = _Bench(llm, args, may_stop=prompts is not None)
    head = report.run_record(
        "offline", args, llm.config, prompts=None if prompts is None else prompts.about
    )
    report.append_record(args.json, head)
    measurements: list[report.Record] = []
    for batch_size in args.batch_sizes:
        for category, mine in by_category.items():
            for figures in bench.measure(category, mine, batch_size):
                measurements.append(figures)
                report.append_record(args.json, {"section": "measurement", **figures})
    llm.shutdown()
    report.show(_tables(head, measurements), head)
    if args.plot is not None:
        plot(head, measurements, args.plot)
    same = all(each["same_texts"] == each["num_texts"] for each in measurements)
    return report.status(head, same, args)


def _source_files(
    args: argparse.Namespace, config: ServeSpecConfig, count: int
) -> dict[str, list[list[int]]]:
    prompts = held_out_prompts(
        Tokenizer(config.model.tokenizer_folder).encode,
        count=count,
        num_tokens=args.prompt_tokens or PROMPT_TOKENS,
        packages=args.packages or HELD_OUT_PACKAGES,
    )
    return {SOURCE_FILES: prompts}


class _Bench:
    """Interleaved variants on one engine."""

    def __init__(self, llm: LLM, args: argparse.Namespace, *, may_stop: bool) -> None:
        self._llm = llm
        self._args = args
        self._may_stop = may_stop
        controller = llm.engine.controller
        self._fixed = make_variants(controller, args.num_steps, [])
        self._variants = [*self._fixed, Variant("adaptive", False, controller)]
        self._warm: set[int] = set()

    def measure(
        self, category: str, prompts: Sequence[Sequence[int]], batch_size: int
    ) -> Iterator[report.Record]:
        """Yield the figures of every temperature and variant on the prompts of a category."""
        count = max(self._args.num_prompts, batch_size)
        mine = list(islice(cycle(prompts), count))
        if batch_size not in self._warm:  # first steps are slow
            self._warm.add(batch_size)
            few = self._requests(mine[:batch_size], category, 0.0)
            self._save_answers(few, WARM_UP_TOKENS, batch_size)
            for variant in self._variants:
                _generate(self._llm, variant, few, WARM_UP_TOKENS, batch_size)
        for temperature in self._args.temperatures:
            requests = self._requests(mine, category, temperature)
            title = f"{category} T={temperature} batch={batch_size}"
            runs = self._run(requests, batch_size, title)
            fixed = [variant.name for variant in self._fixed]
            for figures in measure(runs, temperature, fixed):
                yield {"category": category, **figures}

    def _run(
        self, requests: Sequence[TextRequest], batch_size: int, title: str
    ) -> dict[str, list[Run]]:
        """Return the repetitions of every variant."""
        llm, num_tokens = self._llm, self._args.output_tokens
        self._save_answers(requests, num_tokens, batch_size)
        runs: dict[str, list[Run]] = {variant.name: [] for variant in self._variants}
        trials = list(interleaved(self._args.repetitions, self._variants))
        for _, variant in tqdm(trials, desc=title, leave=False):
            found = _generate(llm, variant, requests, num_tokens, batch_size)
            runs[variant.name].append(found)
        return runs

    def _save_answers(
        self, requests: Sequence[TextRequest], num_tokens: int, batch_size: int
    ) -> None:
        """Replay what off answers, if answers are replayed."""
        if self._args.replay is not None:
            off = _generate(self._llm, self._variants[0], requests, num_tokens, batch_size)
            replay(self._llm.engine, self._llm.config, off.outputs)

    def _requests(
        self, prompts: Sequence[Sequence[int]], category: str, temperature: float
    ) -> list[TextRequest]:
        kind = TextKind(category, temperature)
        numbered = enumerate(prompts, start=1000)
        return [TextRequest(kind, prompt, seed, self._may_stop) for seed, prompt in numbered]


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


def measure(
    by_variant: dict[str, list[Run]], temperature: float, fixed: Sequence[str]
) -> list[report.Record]:
    """Return the figures of every variant; the first is the reference for speeds and texts.

    fixed: the variants of which the fastest is the best fixed depth, off included.
    Speeds are of the median repetition, the range from the slowest to the fastest. Decode speeds
    are of full batches; None if all texts were too short. The rest is of the last repetition.
    """
    off, *_ = by_variant.values()
    best_seconds = min(median(run.seconds for run in by_variant[name]) for name in fixed)
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
                "over_best_fixed": best_seconds / median(times),
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


def _tables(head: report.Record, measurements: Sequence[report.Record]) -> str:
    """Return the table of all measurements; of a dataset also its prompts, and the adaptive ones.

    Of one variant the categories are easier to compare.
    """
    found = _table(measurements)
    if head["prompts"] is None:
        return found
    columns = ["category", "T", "batch", "x off", "x best fixed", "accept length", "same texts"]
    adaptive = [m for m in measurements if m["variant"] == "adaptive"]
    rows = [
        [
            *(m[key] for key in ("category", "temperature", "batch_size", "speedup")),
            *(m["over_best_fixed"], m["accept_length"], f"{m['same_texts']}/{m['num_texts']}"),
        ]
        for m in sorted(adaptive, key=lambda m: (m["batch_size"], m["temperature"]))
    ]
    return f"{head['prompts']}\n\n{found}\n\nadaptive, by category\n{report.table(columns, rows)}"


def _table(measurements: Sequence[report.Record]) -> str:
    rows = [
        [
            *(m[key] for key in ("temperature", "batch_size", "category", "variant")),
            *(m[key] for key in ("tokens_per_second", "speedup", "over_best_fixed")),
            *(m[key] for key in ("decode_tokens_per_second", "decode_speedup")),
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
    if not total:  # every text ended with its first token
        return ""
    mean = sum(steps * count for steps, count in rounds.items()) / total
    often = sorted(rounds, key=lambda steps: -rounds[steps])[:3]
    fractions = " ".join(f"{steps}:{rounds[steps] / total:.0%}" for steps in often)
    return f"{mean:.1f} ({fractions})"


def plot(head: report.Record, measurements: Sequence[report.Record], path: Any) -> None:
    """Draw speed over off, accept length above: a panel per batch size, bars per temperature.

    Of several categories: a panel per batch size and temperature, bars per category.
    """
    decodes = all(m["decode_speedup"] is not None for m in measurements)
    key = "decode_speedup" if decodes else "speedup"
    label = "decode tokens/s of full batches" if decodes else "tokens/s"
    by_category = len({m["category"] for m in measurements}) > 1
    panels: dict[str, list[report.Record]] = {}
    for m in measurements:
        title = f"batch {m['batch_size']}" + f", T={m['temperature']:g}" * by_category
        panels.setdefault(title, []).append(m)
    report.draw(
        [
            report.variant_bars(
                title,
                [(m["category"] if by_category else f"T={m['temperature']:g}", m) for m in mine],
                key,
                f"{label}, relative to off",
            )
            for title, mine in panels.items()
        ],
        path,
        f"{report.plot_title(head)}; accept length above each bar",
        columns=min(len(panels), 3),
    )
