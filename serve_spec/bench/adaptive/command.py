"""`serve-spec bench adaptive`: adaptive policies against off and every fixed depth.

All arms share one engine's worker. In every phase each arm runs a closed loop of the same requests,
in short turns, so that a change of the machine's speed affects all arms alike. Each arm keeps its
policy through all phases and repetitions, as a server does. With --cells, the batches are full
instead: they start together, every cell has a policy of its own, and only steps without prompt
tokens count. Every repetition of a cell has other texts.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from serve_spec.adaptive import AdaptiveController
from serve_spec.bench.adaptive.arms import ADAPTIVE_ARMS, Arm, make_arms
from serve_spec.bench.adaptive.loads import CELL_TOKENS, OUTPUT_TOKENS, SPREAD, Load, cells, phases
from serve_spec.bench.adaptive.plots import plot_adaptive
from serve_spec.bench.adaptive.report import (
    Record,
    equal_prefixes,
    last_run,
    summary,
    tables,
    turn_figures,
)
from serve_spec.bench.closed_loop import ClosedLoop, engine_beside
from serve_spec.bench.configuration import add_allow_differences, add_configuration, configured
from serve_spec.bench.phases import CLASSES, shuffled
from serve_spec.bench.report import append_row, environment, forced_acceptance, show
from serve_spec.bench.workload import held_out_prompts
from serve_spec.config import ServeSpecConfig
from serve_spec.engine.build import rank_device
from serve_spec.engine.engine import SpecEngine
from serve_spec.engine.llm import LLM

BATCH_SIZES = {"cpu": (1, 4, 16, 64, 16, 4, 1), "cuda": (1, 8, 32, 64, 128, 256, 128, 64, 32, 8, 1)}
TURN_MS = {"cpu": 100.0, "cuda": 400.0}
"""Long enough that the first step of a turn, which is not launched ahead, costs little."""
MIN_ROUNDS = 2
SETTLE_SHARE = 0.25
"""Part of a full batch that passes before it is measured: fresh policies have to learn."""
WARM_UP_TOKENS = 12
NUM_PROMPTS = 256
MIN_BATCHED_TOKENS = 2048

_MOST_PHASES = 1000

Prompts = Mapping[str, Sequence[Sequence[int]]]


def main(argv: list[str]) -> int:
    """Run the benchmark or read an old result; print tables and, last, one JSON line."""
    args = _parser().parse_args(argv)
    if args.from_json is None:
        records: list[Record] = []
        for record in _measured(args):
            records.append(record)
            append_row(args.json, record)
    else:
        records = last_run(json.loads(line) for line in args.from_json.read_text().splitlines())
    result = summary(records)
    show(tables(result), result)
    if args.plot is not None:
        plot_adaptive(result, args.plot)
    print(json.dumps(result))
    is_forced = forced_acceptance(result) is not None  # texts differ by construction
    same = all(phase["same_texts"] for phase in result["phases"])
    return 0 if same or is_forced or args.allow_differences else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serve-spec bench adaptive", description=__doc__)
    add_configuration(parser)
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", help="in order; default: up and down again"
    )
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument(
        "--temperatures", type=float, nargs="+", metavar="T",
        help="every class at each of these; default: that of the class",
    )  # fmt: skip
    parser.add_argument("--cells", action="store_true", help="full batches instead of phases")
    parser.add_argument(
        "--seconds-per-phase", type=float, default=5.0, help="of plain decoding, about"
    )
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument(
        "--output-tokens", type=int,
        help=f"mean tokens of a request; default: {OUTPUT_TOKENS}, {CELL_TOKENS} with --cells",
    )  # fmt: skip
    parser.add_argument("--num-steps", type=int, nargs="+", default=[1, 2, 3, 5, 7])
    parser.add_argument(
        "--arms", nargs="*", choices=ADAPTIVE_ARMS, default=["ema", "goodput"], metavar="ARM",
        help=f"besides off and fixed depths: {', '.join(ADAPTIVE_ARMS)}",
    )  # fmt: skip
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--turn-ms", type=float, metavar="MS",
        help="turn of an arm, in ms of plain decoding; default: "
        f"{TURN_MS['cpu']:g} on a CPU, {TURN_MS['cuda']:g} on a GPU",
    )  # fmt: skip
    add_allow_differences(parser)
    parser.add_argument("--json", type=Path, help="append every record to this file (JSON lines)")
    parser.add_argument("--plot", type=Path, help="draw the result here (PNG)")
    parser.add_argument(
        "--from-json", type=Path, metavar="FILE",
        help="run nothing: show the last run in this file, also one that was cut off",
    )  # fmt: skip
    return parser


def _measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the record of the run, of every turn, and of the texts of every arm and phase."""
    config = configured(args)
    device = rank_device(config, 0).type
    batch_sizes = args.batch_sizes or BATCH_SIZES[device]
    temperatures = args.temperatures or [None]
    tokens = args.output_tokens or (CELL_TOKENS if args.cells else OUTPUT_TOKENS)
    loads = (cells if args.cells else phases)(batch_sizes, args.classes, temperatures, tokens)
    llm = LLM(config, **_sizes(config, args, max(batch_sizes), tokens))
    arms = make_arms(llm.engine.controller, args.num_steps, args.arms)
    bench = _Bench(llm.engine, arms, _prompts(llm.engine, args.prompt_tokens))
    outputs = ("json", "plot", "from_json")
    yield {
        "section": "run",
        "environment": environment(config),
        "arguments": {key: value for key, value in vars(args).items() if key not in outputs},
        "phases": [load.label for load in loads],
        "arms": {arm.name: arm.is_static for arm in arms},
    }
    plain_ms = {size: bench.warm_up(size) for size in tqdm(sorted(set(batch_sizes)), "warm-up")}
    turn_ms = TURN_MS[device] if args.turn_ms is None else args.turn_ms
    gc.collect()
    gc.freeze()  # a collection would look through all of torch in the turn of one arm
    try:
        for repetition in range(args.repetitions):
            for number, load in enumerate(tqdm(loads, f"repetition {repetition + 1}")):
                num_rounds = args.seconds_per_phase * 1e3 / plain_ms[load.batch_size]
                if load.is_steady:
                    num_rounds = min(num_rounds, load.num_tokens)
                turns = round(num_rounds / max(MIN_ROUNDS, turn_ms / plain_ms[load.batch_size]))
                place = {"phase": number, "repetition": repetition}
                for record in bench.run(load, place, round(num_rounds), max(1, turns)):
                    yield {**place, **record}
    finally:
        gc.unfreeze()


def _sizes(
    config: ServeSpecConfig, args: argparse.Namespace, max_batch_size: int, num_tokens: int
) -> dict[str, Any]:
    """Return room for the largest batch of every arm, so that drafts are never cut.

    The engine is built for strategy goodput: it measures costs and captures every depth.
    """
    deepest = max([*args.num_steps, 0])
    num_batched = max(MIN_BATCHED_TOKENS, 2 * max_batch_size * (deepest + 1))
    sizes = {
        "speculative_adaptive": True,
        "speculative_adaptive_strategy": "goodput",
        "max_num_seqs": max_batch_size,
        "max_num_batched_tokens": max(config.scheduler.max_num_batched_tokens, num_batched),
    }
    if config.cache.num_pages is not None:
        longest = args.prompt_tokens + round(num_tokens * (1 + SPREAD)) + deepest
        num_arms = 1 + len({*args.num_steps} - {0}) + len(args.arms)
        num_pages = num_arms * max_batch_size * -(-longest // config.cache.page_size)
        sizes["num_pages"] = max(config.cache.num_pages, num_pages)
    return sizes


def _prompts(engine: SpecEngine, num_tokens: int) -> Prompts:
    code = held_out_prompts(engine.tokenizer.encode, count=NUM_PROMPTS, num_tokens=num_tokens)
    return {"code": code, "shuffled": shuffled(code)}


class _Bench:
    """Arms that take turns on the worker of one engine."""

    def __init__(self, engine: SpecEngine, arms: Sequence[Arm], prompts: Prompts) -> None:
        self.arms = arms
        self.prompts = prompts
        self.engines = {arm.name: engine_beside(engine, arm.controller) for arm in arms}
        self._policies: dict[tuple[int, str], AdaptiveController] = {}

    def warm_up(self, batch_size: int) -> float:
        """Run first steps, which are slow; return the milliseconds of a plain one."""
        load = Load("heated", batch_size, OUTPUT_TOKENS, is_steady=True)
        deepest = [arm for arm in self.arms if arm.is_static][-1]
        for arm in (deepest, self.arms[0]):
            requests = load.requests(0, self.prompts)
            loop = ClosedLoop(self.engines[arm.name], requests, batch_size)
            loop.fill()
            rounds = loop.advance(loop.num_emitted + batch_size * WARM_UP_TOKENS)
            loop.close()
        return median(r.ms for r in rounds if r.record.decodes_only)

    def run(
        self, load: Load, place: Mapping[str, int], num_rounds: int, num_turns: int
    ) -> Iterator[dict[str, Any]]:
        """Yield the record of every turn. Every arm emits the tokens of `num_rounds` plain steps.

        A turn is a share of the tokens, not of the time, so all arms end in the same one.
        """
        number, repetition = place["phase"], place["repetition"]
        work = load.batch_size * num_rounds
        settle = round(SETTLE_SHARE * work) if load.is_steady else 0
        texts = number + _MOST_PHASES * repetition if load.is_steady else number
        loops = {}
        for arm in self.arms:
            engine = self.engines[arm.name]
            if load.is_steady:
                fresh = copy.deepcopy(arm.controller)
                engine.controller = self._policies.setdefault((number, arm.name), fresh)
            loop = ClosedLoop(engine, load.requests(texts, self.prompts), load.batch_size)
            loop.fill()
            loop.advance(loop.num_emitted + settle)
            loops[arm.name] = loop
        starts = {name: loop.num_emitted for name, loop in loops.items()}
        rng = random.Random(f"{repetition} {number}")
        for turn in range(num_turns):
            for name in rng.sample(list(loops), len(loops)):
                loop = loops[name]
                before, began = loop.num_emitted, time.perf_counter()
                rounds = loop.advance(starts[name] + (work - settle) * (turn + 1) // num_turns)
                ms = (time.perf_counter() - began) * 1e3
                figures = turn_figures(rounds, ms, loop.num_emitted - before, load)
                yield {"section": "turn", "turn": turn, "arm": name, **figures}
        expected = loops[self.arms[0].name].texts
        for name, loop in loops.items():
            loop.close()
            yield {"section": "texts", "arm": name, **equal_prefixes(loop.texts, expected)}
