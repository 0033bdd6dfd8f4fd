"""`serve-spec bench mixed`: prompts that arrive while other requests decode.

All variants, a depth and a chunk size each, serve the same requests on one worker: a chunk size is
a number that the scheduler reads. First every trace runs as a closed loop; the fastest variant is
its capacity. Then it arrives at random at fractions of that, at the same times for all variants.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from tqdm import tqdm

from serve_spec.adaptive import AdaptiveController
from serve_spec.bench import report
from serve_spec.bench.command import ADAPTIVE, CLOSED, DEPTHS, configured, positive
from serve_spec.bench.harness import engine_beside, recorded_steps, room
from serve_spec.bench.mixed_report import figures, plot, tables
from serve_spec.bench.online.in_process import run_offline
from serve_spec.bench.online.load import ClosedLoop, Load, LoadRun, Poisson, Requests
from serve_spec.bench.online.report import Objective
from serve_spec.bench.prompts import max_model_len, prompt_pool
from serve_spec.bench.request_trace import TRACES, PromptPool, RequestTrace
from serve_spec.bench.variants import OFF, fixed_controller, interleaved
from serve_spec.config import ConfigError, SchedulerConfig, ServeSpecConfig
from serve_spec.config.flags import read_value
from serve_spec.core.draft import DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.engine.engine import SpecEngine
from serve_spec.engine.llm import LLM

DRAFTS_PER_REQUEST = 16
"""Tokens of a decoding request that the largest chunk leaves room for."""
WARM_UP_TOKENS = 16
"""Most output tokens of a request of the warm-up."""

AUTO = "auto"


@dataclass(frozen=True)
class Chunk:
    """A value of `chunked_prefill_size`, tokens or auto.

    max_inter_token_ms: of auto; None: as configured.
    """

    size: int | str
    max_inter_token_ms: float | None = None

    @property
    def name(self) -> str:
        """Return it as it is typed."""
        bound = self.max_inter_token_ms
        return str(self.size) if bound is None else f"{self.size}:{bound:g}"

    def applied(self, limits: SchedulerConfig) -> SchedulerConfig:
        """Return the limits of a scheduler with this chunk."""
        keys = {"chunked_prefill_size": self.size, "max_inter_token_ms": self.max_inter_token_ms}
        return limits.model_copy(update={k: value for k, value in keys.items() if value})


def run(args: argparse.Namespace) -> int:
    """Run the benchmark or read an old result; return 1 if texts differ unexpectedly."""
    head, *measurements = report.records_of(args, "mixed", _measured)
    report.show(tables(head, measurements), head)
    if args.plot is not None:
        plot(head, measurements, args.plot)
    same = all(each["same_texts"] == each["num_texts"] for each in measurements)
    return report.status(head, same, args)


@dataclass(frozen=True)
class Variant:
    """A depth, `off`, `K=n` or `adaptive`, and a chunk size; a policy with its own learned state.

    is_fixed: neither is chosen at run time.
    """

    depth: str
    chunk: Chunk
    controller: AdaptiveController

    @property
    def is_fixed(self) -> bool:
        """Return whether neither depth nor chunk is chosen at run time."""
        return self.depth != ADAPTIVE and self.chunk.size != AUTO

    @property
    def name(self) -> str:
        """Return depth and chunk in words."""
        return f"{self.depth}, {self.chunk.name}"


def _measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the record of the run, and of every repetition of a variant under a load."""
    traces = _traces(args)
    config = configured(args, **_acceptance(args)).download()
    depths, chunks = _depths(args, config), _chunks(args)
    _check_lengths(traces, config)
    pool = prompt_pool(args, config)
    llm = LLM(
        config, **_sizes(config, traces, chunks), speculative_adaptive=config.speculative.enabled
    )
    variants = [_variant(llm.engine, depth, chunk) for depth in depths for chunk in chunks]
    bench = _Bench(llm, args, pool, variants)
    yield report.run_record(
        "mixed",
        args,
        llm.config,
        prompts=pool.about,
        traces=[trace.label for trace in traces],
        objective=vars(bench.objective),
        inter_token_ms=bench.inter_token_ms,
        variants={
            each.name: {"depth": each.depth, "chunk": each.chunk.name, "is_fixed": each.is_fixed}
            for each in variants
        },
    )
    gc.collect()
    gc.freeze()  # a full collection would slow the run of one variant
    try:
        for trace in traces:
            yield from bench.measure(trace)
    finally:
        gc.unfreeze()
        llm.shutdown()


def _acceptance(args: argparse.Namespace) -> dict[str, Any]:
    if args.acceptance is None:
        return {}
    if "synthetic_acceptance" in args.flags:
        given = " ".join(map(str, args.acceptance))
        raise ConfigError(f"--acceptance={given}: --synthetic-acceptance is given, too; leave one")
    rates = args.acceptance
    is_length = len(rates) == 1 and rates[0] > 1
    return {"synthetic_acceptance": rates[0] if is_length else rates}


def _traces(args: argparse.Namespace) -> list[RequestTrace]:
    """Return the wanted traces in their sizes; raise ConfigError for loads without a capacity."""
    if args.capacity is not None and len(args.traces) > 1:
        fix = "give one of --traces"
        raise ConfigError(f"--capacity={args.capacity:g}: is the capacity of one trace; {fix}")
    if CLOSED not in args.loads and args.capacity is None:
        loads = " ".join(map(str, args.loads))
        fix = f"add {CLOSED} or --capacity"
        raise ConfigError(f"--loads={loads}: are fractions of an unknown capacity; {fix}")
    sizes = args.num_requests, args.prompt_tokens, args.output_tokens, args.streams
    return [TRACES[name].scaled(args.scale).resized(*sizes) for name in dict.fromkeys(args.traces)]


def _check_lengths(traces: Sequence[RequestTrace], config: ServeSpecConfig) -> None:
    most = max_model_len(config)
    for trace in traces:
        if trace.longest > most:
            raise ConfigError(
                f"--traces={trace.name}: a request has up to {trace.longest} tokens, "
                f"max_model_len={most}; give a smaller --scale or sizes, or leave it out"
            )


def _depths(args: argparse.Namespace, config: ServeSpecConfig) -> list[int | str]:
    """Return the depths to compare; without drafts only off."""
    if config.speculative.enabled:
        return list(dict.fromkeys(args.depths or DEPTHS))
    if wrong := [each for each in args.depths or () if each != 0]:
        fix = "give 0, or name a draft"
        raise ConfigError(f"--depths={wrong[0]}: speculative_algorithm=NONE drafts nothing; {fix}")
    return [0]


def _chunks(args: argparse.Namespace) -> list[Chunk]:
    """Return the chunk sizes to compare, or raise ConfigError."""
    if "chunked_prefill_size" in args.flags:
        flag, value = args.flags["chunked_prefill_size"]
        raise ConfigError(f"{flag}={value}: every variant has its own; give --chunks")
    return list(dict.fromkeys(map(_chunk, args.chunks)))


def _chunk(text: str) -> Chunk:
    """Parse tokens, auto, or auto:MS."""
    size, colon, ms = text.partition(":")
    try:
        if size == AUTO:
            return Chunk(AUTO, positive(ms) if colon else None)
        tokens = read_value("chunked_prefill_size", text, f"--chunks={text}")
        if type(tokens) is int and tokens > 0:
            return Chunk(tokens)
    except (ValueError, argparse.ArgumentTypeError):
        pass  # the message below says what is right
    raise ConfigError(f"--chunks={text}: give a number of tokens, auto, or auto:MS with a bound")


def _sizes(
    config: ServeSpecConfig, traces: Sequence[RequestTrace], chunks: Sequence[Chunk]
) -> dict[str, int]:
    """Return sizes of an engine for all traces and chunk sizes."""
    streams = max(trace.streams for trace in traces)
    longest = max(trace.longest for trace in traces) + DRAFTS_PER_REQUEST
    sizes = room(config, streams, longest, DRAFTS_PER_REQUEST - 1)
    largest = max((chunk.size for chunk in chunks if isinstance(chunk.size, int)), default=0)
    num_batched = largest + streams * DRAFTS_PER_REQUEST
    return {**sizes, "max_num_batched_tokens": max(sizes["max_num_batched_tokens"], num_batched)}


def _variant(engine: SpecEngine, depth: int | str, chunk: Chunk) -> Variant:
    """Return a variant with its own policy; may raise ConfigError."""
    controller = engine.controller
    if chunk.max_inter_token_ms is not None:
        controller = _bounded(engine, chunk)
    if isinstance(depth, int):
        fixed = fixed_controller(controller, DraftShape.chain(depth))
        return Variant(f"K={depth}" if depth else OFF, chunk, fixed)
    return Variant(depth, chunk, copy.deepcopy(controller))


def _bounded(engine: SpecEngine, chunk: Chunk) -> AdaptiveController:
    """Return a policy that keeps the bound of a chunk, with costs and knowledge of the engine's."""
    settings = engine.controller.settings
    limits = chunk.applied(settings.prompts.config)
    prompts = replace(settings.prompts, config=limits)
    costs = None if engine.costs is None or not settings.needs_costs else engine.costs.load()
    if settings.needs_costs and costs is None:
        fix = "make $SERVE_SPEC_CACHE writable, or give --max-inter-token-ms instead"
        raise ConfigError(f"--chunks={chunk.name}: the costs of steps are not cached; {fix}")
    controller = AdaptiveController(replace(settings, prompts=prompts), costs)
    if state := engine.controller.state():
        controller.restore(state)
    return controller


class _Bench:
    """Variants that serve traces in turn on the worker of one engine."""

    def __init__(
        self, llm: LLM, args: argparse.Namespace, pool: PromptPool, variants: Sequence[Variant]
    ) -> None:
        self.objective = Objective.of(args.goodput)
        bounds = [
            args.inter_token_ms,
            llm.config.scheduler.max_inter_token_ms,
            *(variant.chunk.max_inter_token_ms for variant in variants),
        ]
        self.inter_token_ms: float | None = next(filter(None, bounds), None)
        self._llm, self._args, self._pool = llm, args, pool
        self._variants = variants

    def measure(self, trace: RequestTrace) -> Iterator[dict[str, Any]]:
        """Yield the record of every repetition of every variant and load of a trace."""
        args = self._args
        requests = trace.requests(self._pool, temperature=args.temperature, seed=args.seed)
        self._warm_up(trace, requests)
        texts: list[tuple[int, ...]] = []
        speeds: dict[str, list[float]] = {}
        if CLOSED in args.loads:
            for record in self._runs(trace, ClosedLoop(trace.streams), requests, texts):
                speeds.setdefault(record["variant"], []).append(record["requests_per_second"])
                yield {**record, "of_capacity": None}
        capacity = args.capacity or max(map(median, speeds.values()))
        for fraction in args.loads:
            if fraction != CLOSED:
                load = Poisson(fraction * capacity)
                for record in self._runs(trace, load, requests, texts):
                    yield {**record, "of_capacity": fraction}

    def _warm_up(self, trace: RequestTrace, requests: Requests) -> None:
        """Run first steps of every variant, which are slow."""
        few = [
            replace(each, params=replace(each.params, max_tokens=tokens))
            for each in requests[: self._args.warm_up]
            for tokens in [min(WARM_UP_TOKENS, each.params.max_tokens or 1)]
        ]
        for variant in tqdm(self._variants, f"{trace.name}, warm-up", leave=False):
            self._serve(variant, trace, ClosedLoop(trace.streams), few, 0)

    def _runs(
        self, trace: RequestTrace, load: Load, requests: Requests, texts: list[tuple[int, ...]]
    ) -> Iterator[dict[str, Any]]:
        """Yield the figures of every repetition and variant, in a new order each time.

        texts: those of the first run of the trace, or empty.
        """
        trials = list(
            interleaved(self._args.repetitions, self._variants, f"{trace.name} {load.name}")
        )
        for repetition, variant in tqdm(trials, f"{trace.name}, {load.name}", leave=False):
            seed = self._args.seed + repetition
            run, steps = self._serve(variant, trace, load, requests, seed)
            texts[:] = texts or [served.token_ids for served in run.served]
            yield {
                "section": "measurement",
                "trace": trace.name,
                "load": load.name,
                "variant": variant.name,
                "repetition": repetition,
                **figures(run, steps, self.objective, self.inter_token_ms, texts),
            }

    def _serve(
        self, variant: Variant, trace: RequestTrace, load: Load, requests: Requests, seed: int
    ) -> tuple[LoadRun, list[StepRecord]]:
        limits = variant.chunk.applied(self._llm.config.scheduler)
        limits = limits.model_copy(update={"max_num_seqs": trace.streams})
        engine = engine_beside(self._llm.engine, variant.controller, limits)
        with recorded_steps(engine) as steps:
            run = run_offline(engine, load, requests, seed=seed)
            engine.drain()
        return run, steps
