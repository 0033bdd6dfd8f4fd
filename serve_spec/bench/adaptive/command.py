"""`serve-spec bench adaptive`: policies over phases of load and text, against fixed depths.

One worker, one controller per arm. In every phase all arms run the same requests, and each keeps
its controller through all phases and repetitions, as a server would: the first repetition is cold,
the others are not. On a CPU, whose speed wanders, arms take turns of some ten milliseconds; on a
GPU each runs a phase in one piece. Where steps are planned ahead, every turn ends with none in
flight: texts are the same, but not all rounds are those of an arm alone. The arm `off-again`
repeats `off`: what it differs by is what the measurement cannot resolve.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm import tqdm

from serve_spec.bench.adaptive.arms import ADAPTIVE_ARMS, POLICIES, Arm, make_arms
from serve_spec.bench.adaptive.plots import plot_adaptive
from serve_spec.bench.adaptive.report import CONTROL, OFF, measure, result_of, tables
from serve_spec.bench.closed_loop import ClosedLoop, PhaseRun, prompt_ms_per_token, run_phase
from serve_spec.bench.configuration import add_allow_differences, add_configuration, configured
from serve_spec.bench.phases import (
    CLASSES,
    CPU_BATCH_SIZES,
    GPU_BATCH_SIZES,
    LONGEST_TOKENS,
    SPREAD,
    Phase,
    phase_requests,
    phase_trace,
    shuffled,
)
from serve_spec.bench.report import emit, environment, forced_acceptance, save, show
from serve_spec.bench.turns import engine_beside, run_in_turns, turns_of
from serve_spec.bench.workload import held_out_prompts
from serve_spec.config import ServeSpecConfig
from serve_spec.engine.build import rank_device
from serve_spec.engine.engine import SpecEngine
from serve_spec.engine.llm import LLM

HOPELESS = 0.7
"""A fixed depth below this share of the best speed in a phase is not run there again."""
CPU_TURN_MS = 40.0
"""Long enough for caches that another arm left cold to cost little: they are warm after a round."""
WARM_UP_TOKENS = 12
NUM_PROMPTS = 256
MIN_BATCHED_TOKENS = 2048

Prompts = Mapping[str, Sequence[Sequence[int]]]


def main(argv: list[str]) -> int:
    """Runs the benchmark, or draws an old result; prints tables and, last, one JSON line."""
    args = _parser().parse_args(argv)
    if args.from_json is None:
        for result in _measured(args):
            save(result, args.json)
    else:
        result = json.loads(args.from_json.read_text())
    show(tables(result), result)
    if args.plot is not None:
        plot_adaptive(result, args.plot)
    if args.from_json is not None:
        return 0
    emit(result, args.json)
    if forced_acceptance(result) is not None:
        return 0  # texts differ by construction
    same = all(cell["same_texts"] == cell["num_texts"] for cell in result["cells"])
    return 0 if same or args.allow_differences else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="serve-spec bench adaptive", description=__doc__)
    add_configuration(parser)
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", help="in order; default: up and down again"
    )
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    parser.add_argument(
        "--seconds-per-phase", type=float, default=5.0,
        help="of plain decoding, about; a short phase is mostly its end, when requests run out",
    )  # fmt: skip
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--num-steps", type=int, nargs="+", default=[1, 2, 3, 5, 7])
    parser.add_argument(
        "--arms", nargs="+", choices=POLICIES, default=list(ADAPTIVE_ARMS), metavar="ARM",
        help=f"besides off and fixed depths: {', '.join(POLICIES)}",
    )  # fmt: skip
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--max-seconds", type=float, metavar="S",
        help="begin no repetition that would end later than S seconds after the start",
    )  # fmt: skip
    parser.add_argument(
        "--turn-ms", type=float, metavar="MS",
        help="arms take turns that long, by the time of plain decoding; 0: every arm runs its "
        f"phase in one piece. Default: {CPU_TURN_MS:g} on a CPU, 0 on a GPU",
    )  # fmt: skip
    add_allow_differences(parser)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--plot", type=Path, help="draw the result here (PNG)")
    parser.add_argument(
        "--from-json", type=Path, metavar="FILE", help="run nothing: print and draw this result"
    )
    return parser


def _measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The result after every repetition; the last is of them all."""
    started = time.monotonic()
    config = configured(args)
    args.turn_ms = _turn_ms(config, args.turn_ms)
    batch_sizes = args.batch_sizes or _ramp(config.model.device)
    llm = LLM(config, **_sizes(config, args, max(batch_sizes)))
    prompts = _prompts(llm.engine, args.prompt_tokens)
    arms = make_arms(llm.engine.controller, args.num_steps, args.arms)
    plain_ms = _warm_up(llm.engine, arms, sorted(set(batch_sizes)), prompts)
    arms.append(Arm(CONTROL, True, copy.deepcopy(arms[0].controller)))
    phases = phase_trace(batch_sizes, args.classes, plain_ms, args.seconds_per_phase)
    turns = [turns_of(phase, plain_ms[phase.batch_size], args.turn_ms) for phase in phases]
    trace = _Trace(_engines(llm.engine, arms, args.turn_ms), arms, phases, turns, prompts)
    gc.collect()
    gc.freeze()  # looking through all of torch now and then would hit whoever has its turn
    try:
        for _ in range(args.repetitions):
            began = time.monotonic()
            trace.repeat()
            yield _result(args, config, trace)
            now = time.monotonic()
            if args.max_seconds is not None and now - started + now - began > args.max_seconds:
                return
    finally:
        gc.unfreeze()


def _result(args: argparse.Namespace, config: ServeSpecConfig, trace: _Trace) -> dict[str, Any]:
    num_requests = [phase.num_requests for phase in trace.phases]
    outputs = ("json", "plot", "from_json")
    said = {k: v for k, v in vars(args).items() if k not in outputs}
    return {
        "bench": "adaptive",
        "environment": environment(config),
        "arguments": {**said, "repetitions": trace.num_repetitions},
        "turns": trace.turns,
        **result_of(trace.phases, [arm.runs(num_requests) for arm in trace.arms]),
        "controllers": {
            arm.name: arm.controller.snapshot() for arm in trace.arms if not arm.is_static
        },
    }


def _turn_ms(config: ServeSpecConfig, wanted: float | None) -> float:
    """Return the milliseconds that were asked for, or those that suit the device."""
    if wanted is not None:
        return wanted
    return CPU_TURN_MS if rank_device(config, 0).type == "cpu" else 0.0


def _engines(engine: SpecEngine, arms: Sequence[Arm], turn_ms: float) -> dict[str, SpecEngine]:
    """By arm: engines of their own where arms take turns, else always `engine`."""
    return {arm.name: engine_beside(engine, arm.controller) if turn_ms else engine for arm in arms}


def _ramp(device: str) -> tuple[int, ...]:
    on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return GPU_BATCH_SIZES if on_gpu else CPU_BATCH_SIZES


def _sizes(
    config: ServeSpecConfig, args: argparse.Namespace, max_batch_size: int
) -> dict[str, Any]:
    """Rows, tokens and pages enough for the largest batch, so that no draft is ever cut.

    Strategy goodput is what the engine is built for: it measures costs and builds every tier.
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
        pages_per_request = -(
            -(args.prompt_tokens + LONGEST_TOKENS + deepest) // config.cache.page_size
        )
        num_open = max_batch_size * (_num_arms(args) if args.turn_ms else 1)
        sizes["num_pages"] = max(config.cache.num_pages, num_open * pages_per_request)
    return sizes


def _num_arms(args: argparse.Namespace) -> int:
    """Off, off again, the fixed depths, the policies."""
    return 2 + len(set(args.num_steps)) + len(args.arms)


def _prompts(engine: SpecEngine, num_tokens: int) -> Prompts:
    code = held_out_prompts(engine.tokenizer.encode, count=NUM_PROMPTS, num_tokens=num_tokens)
    return {"code": code, "shuffled": shuffled(code)}


def _warm_up(
    engine: SpecEngine, arms: Sequence[Arm], batch_sizes: Sequence[int], prompts: Prompts
) -> dict[int, float]:
    """First rounds are slow, whatever runs them: with and without drafts, and beside the prompts
    of those that come later. Milliseconds of a plain one, by batch size."""
    off, deepest = arms[0], [arm for arm in arms if arm.is_static][-1]
    plain_ms = {}
    for batch_size in tqdm(batch_sizes, desc="warm-up", leave=False):
        in_step = Phase("heated", batch_size, batch_size, WARM_UP_TOKENS)
        refilled = Phase("heated", batch_size, 2 * batch_size, WARM_UP_TOKENS, SPREAD)
        for phase in (refilled, in_step):
            requests = phase_requests(phase, 0, prompts)
            for arm in (deepest, off):
                engine.controller = copy.deepcopy(arm.controller)
                run = run_phase(engine, requests, batch_size, phase.lengths)
        plain_ms[batch_size] = median(r.ms for r in run.rounds if r.record.decodes_only)
    return plain_ms


@dataclass
class _Trace:
    """Every phase with every arm, over and over. Texts are compared with the first ones of off."""

    engines: Mapping[str, SpecEngine]
    arms: Sequence[Arm]
    phases: Sequence[Phase]
    turns: Sequence[int]
    """Of every phase, see `run_in_turns`."""
    prompts: Prompts
    num_repetitions: int = 0
    expected: dict[int, list[int]] = field(default_factory=dict)
    """Hashes of the texts, by phase."""

    def __post_init__(self) -> None:
        for arm in self.arms:
            arm.measurements = [[] for _ in self.phases]
            arm.different_texts = [set() for _ in self.phases]

    def repeat(self) -> None:
        """Runs it once more."""
        for index in tqdm(range(len(self.phases)), desc=f"repetition {self.num_repetitions + 1}"):
            runs = self._run(index)
            expected = self.expected.setdefault(index, _hashes(runs[OFF]))
            _note(self.arms, index, runs, expected)
        self.num_repetitions += 1

    def _run(self, index: int) -> dict[str, PhaseRun]:
        phase = self.phases[index]
        requests = phase_requests(phase, index, self.prompts)
        again = self.num_repetitions > 0
        arms = [arm for arm in self.arms if not (again and _is_hopeless(arm, index, self.arms))]
        loops = [
            ClosedLoop(self.engines[arm.name], requests, phase.batch_size, phase.lengths)
            for arm in arms
        ]
        rng = random.Random(f"{self.num_repetitions} {index}")
        run_in_turns(loops, [arm.controller for arm in arms], self.turns[index], rng)
        return {arm.name: loop.run for arm, loop in zip(arms, loops, strict=True)}


def _note(
    arms: Sequence[Arm], phase: int, runs: Mapping[str, PhaseRun], expected: Sequence[int]
) -> None:
    """Gives every arm its figures of the phase; those left out get None."""
    prompt_ms = prompt_ms_per_token(runs.values())
    for arm in arms:
        run = runs.get(arm.name)
        arm.measurements[phase].append(None if run is None else measure(run, prompt_ms))
        if run is not None:
            arm.compare_texts(phase, _hashes(run), expected)


def _hashes(run: PhaseRun) -> list[int]:
    return [hash(tuple(text)) for text in run.texts]


def _is_hopeless(arm: Arm, phase: int, arms: Sequence[Arm]) -> bool:
    if not arm.is_static or arm.name in (OFF, CONTROL):
        return False
    return arm.first_rate(phase) < HOPELESS * max(other.first_rate(phase) for other in arms)
