"""`serve-spec tune CONFIG --output-dir DIR`: measure a pair and write its tuned configuration.

Every batch size, class of prompts and draft shape runs in steady-state batches on one engine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from serve_spec.adaptive import AdaptiveController, PolicySettings
from serve_spec.adaptive.settings import ladder
from serve_spec.bench import tune_report
from serve_spec.bench.command import configured
from serve_spec.bench.harness import equal_prefixes, steady_batch
from serve_spec.bench.prompts import dataset_prompts
from serve_spec.bench.report import environment, run_record, table
from serve_spec.bench.tune_report import Measurement, MeasurementFile, plot
from serve_spec.bench.variants import fixed_controller, interleaved
from serve_spec.bench.workload import PROMPT_TOKENS, TextKind, TextRequest, prompts_by_source
from serve_spec.config import ConfigError, ServeSpecConfig, SpeculativeConfig
from serve_spec.config.adaptive_file import load_slots
from serve_spec.config.cost_table import load_cost_table, write_cost_table
from serve_spec.config.speculative import max_tree_tokens
from serve_spec.core.draft import MAX_TREE_TOKENS, PLAIN, DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.engine.engine import SpecEngine
from serve_spec.engine.llm import LLM
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.profile.measure import CostGrid, ProfileLimits, TimeBudget, finish, measure_costs
from serve_spec.profile.source import code_version, cost_key, fingerprint

SOURCE_CLASSES = {
    "predictable": TextKind("code", 0.0),
    "mixed": TextKind("code", 0.7),
    "unpredictable": TextKind("shuffled", 1.0),
}
"""Classes of prompts from source files, by predictability."""
DATASET_TEMPERATURES = (0.0, 1.0)
"""Temperatures of each category of a dataset."""
COST_BUDGET_S = 300.0
"""Time limit of the cost table; a small pair takes far less."""

_WORKLOAD = ("num_prompts", "output_tokens", "repetitions")
_SAMPLE = (
    *("dataset", "column", "category", "category_column"),
    *("max_prompt_tokens", "seed"),
)
_POLICY_KEYS = {
    *("speculative_num_steps", "speculative_num_draft_tokens", "speculative_adaptive"),
    *("speculative_adaptive_config", "speculative_adaptive_strategy"),
    *("speculative_per_sequence", "speculative_cost_table"),
}
"""Keys that a sweep sets itself, so they do not affect measurements."""


class PromptClass(NamedTuple):
    """Prompts of one source and temperature, as many as the largest sweep of them takes."""

    kind: TextKind
    prompts: Sequence[Sequence[int]]

    @property
    def about(self) -> str:
        """Return source and temperature."""
        return f"{self.kind.prompts}, T = {self.kind.temperature:g}"


class PromptClasses(NamedTuple):
    """Classes of prompts by name. about: of a dataset, in words."""

    by_name: Mapping[str, PromptClass]
    about: str | None

    @property
    def longest(self) -> int:
        """Return the tokens of the longest prompt."""
        return max(len(prompt) for each in self.by_name.values() for prompt in each.prompts)


def prompt_classes(args: argparse.Namespace, config: ServeSpecConfig) -> PromptClasses:
    """Return the classes of a dataset, or of source files; config: of a downloaded checkpoint."""
    count = max(_num_prompts(args, batch_size) for batch_size in args.batch_sizes)
    room = args.output_tokens + MAX_TREE_TOKENS
    found = dataset_prompts(args, config, count, output_tokens=room, others=("prompt_tokens",))
    if found is None:
        encode = Tokenizer(config.model.tokenizer_folder).encode
        num_tokens = args.prompt_tokens or PROMPT_TOKENS
        prompts = prompts_by_source(encode, count=count, num_tokens=num_tokens)
        kinds = SOURCE_CLASSES.items()
        return PromptClasses(
            {n: PromptClass(kind, prompts[kind.prompts]) for n, kind in kinds}, None
        )
    classes = {
        f"{name} T={temperature:g}": PromptClass(
            TextKind(name, temperature), found.repeated(name, count)
        )
        for name in found.by_category
        for temperature in DATASET_TEMPERATURES
    }
    return PromptClasses(classes, found.about)


def _num_prompts(args: argparse.Namespace, batch_size: int) -> int:
    """Return the prompts of a class, in full batches."""
    return int(-(-args.num_prompts // batch_size) * batch_size)


def run(args: argparse.Namespace) -> int:
    """Measure what is missing and write the files; return 1 if texts differ in float32."""
    batch_sizes, num_steps = sorted({*args.batch_sizes}), sorted({0, *args.num_steps})
    config = _configuration(args)
    trees = swept_trees(args.trees, config.speculative)
    shapes = [*map(DraftShape.chain, num_steps), *trees]
    if shapes == [PLAIN]:
        raise ConfigError(f"--num-steps={args.num_steps}: add a depth above 0 to compare with 0")
    config = config.download()
    classes = prompt_classes(args, config)
    folder: Path = args.output_dir
    settings = _settings(config, args, is_dataset=classes.about is not None)
    found = MeasurementFile(folder / "cells.jsonl", settings, fresh=args.fresh)
    llm = _load(config, max(batch_sizes), shapes, classes.longest + args.output_tokens)
    sweep(llm.engine, found, classes.by_name, batch_sizes, shapes, args)
    write_costs(llm, folder / "cost_table.json", shapes, fresh=args.fresh)
    measurements = [
        found.by_place[batch_size, name, shape]
        for name in classes.by_name
        for batch_size in batch_sizes
        for shape in shapes
    ]
    if classes.about is not None:
        print(classes.about)
    num_different = sum(each.num_texts - each.same_texts for each in measurements)
    print(table(tune_report.COLUMNS, tune_report.rows(measurements)))
    print(f"{num_different} texts differ from those of K = 0")
    _write(args, config, classes, measurements)
    return int(llm.engine.worker.dtype == torch.float32 and num_different > 0)


def swept_trees(
    wanted: Sequence[tuple[int, int]] | None, speculative: SpeculativeConfig
) -> list[DraftShape]:
    """Return the wanted trees (depth, size), ascending, or the policy's; may raise ConfigError."""
    configured, topk = PolicySettings.of(speculative).tree, speculative.topk
    if wanted is None:
        return [] if configured is None else list(ladder(configured))
    if configured is None:
        raise ConfigError(
            f"--trees: speculative_eagle_topk={topk} with speculative_num_steps="
            f"{speculative.speculative_num_steps} drafts chains only; "
            "raise them to at least 2 and 1, or omit --trees"
        )
    trees = sorted({DraftShape(depth, size, topk) for depth, size in wanted})
    for tree in trees:
        makes = f"--trees={tree}: speculative_eagle_topk={topk} makes trees of"
        levels, deepest = tree.depth, MAX_TREE_TOKENS // topk + 1
        if not 1 <= levels <= deepest:
            raise ConfigError(f"{makes} 1 to {deepest} levels; give one of those")
        most = max_tree_tokens(topk, levels) - 1
        if not levels <= tree.size <= most:
            raise ConfigError(f"{makes} {levels} levels with {levels} to {most} drafts; change it")
    return trees


def sweep(
    engine: SpecEngine,
    found: MeasurementFile,
    classes: Mapping[str, PromptClass],
    batch_sizes: Sequence[int],
    shapes: Sequence[DraftShape],
    args: argparse.Namespace,
) -> None:
    """Measure every class of prompts and batch size with missing shapes; plain comes first.

    Raises ConfigError: the engine has no room for a batch, or the texts are too short.
    """
    missing = [
        (batch_size, name)
        for batch_size in sorted(batch_sizes, reverse=True)  # the largest may not fit
        for name in classes
        if any((batch_size, name, shape) not in found.by_place for shape in shapes)
    ]
    controllers = {shape: fixed_controller(engine.controller, shape) for shape in shapes}
    with tqdm(total=len(missing) * len(shapes) * args.repetitions, unit="run") as bar:
        for batch_size, name in missing:
            bar.set_description(f"batch {batch_size}, {name}")
            requests = _requests(classes[name], _num_prompts(args, batch_size))
            place = batch_size, name
            found.append(_measure(engine, controllers, place, requests, args, bar.update))


class _Run(NamedTuple):
    """Measured steps of one pass through the prompts, and its texts."""

    steps: list[StepRecord]
    texts: list[list[int]]

    @property
    def tokens_per_second(self) -> float:
        tokens = sum(step.num_output_tokens for step in self.steps)
        return tokens / sum(step.step_ms for step in self.steps) * 1e3


def _measure(
    engine: SpecEngine,
    controllers: dict[DraftShape, AdaptiveController],
    place: tuple[int, str],
    requests: Sequence[TextRequest],
    args: argparse.Namespace,
    tick: Callable[[], object],
) -> list[Measurement]:
    """Measure every shape at a place, batch size and class of prompts; `tick` after every run."""
    batch_size, name = place
    for shape in controllers:  # first steps are slow
        few = min(args.output_tokens, 4 * (shape.depth + 2))
        _run_batch(engine, controllers, shape, requests[:batch_size], few)
    runs: dict[DraftShape, list[_Run]] = {shape: [] for shape in controllers}
    for _, shape in interleaved(args.repetitions, controllers, f"{batch_size} {name}"):
        run = _Run([], [])
        for first in range(0, len(requests), batch_size):
            group = requests[first : first + batch_size]
            batch = _run_batch(engine, controllers, shape, group, args.output_tokens)
            run.steps.extend(batch.steps)
            run.texts.extend(batch.texts)
        if not run.steps:
            raise ConfigError(
                f"--output-tokens={args.output_tokens}: at batch size {batch_size} a text ends "
                f"before one step of depth {shape.depth} could be measured; raise it"
            )
        runs[shape].append(run)
        tick()
    return [_measurement(batch_size, name, shape, runs) for shape in controllers]


def _requests(prompts: PromptClass, count: int) -> list[TextRequest]:
    """Return the first `count` requests; their texts go on past the model's end of them."""
    numbered = enumerate(prompts.prompts[:count], start=1000)
    return [TextRequest(prompts.kind, prompt, seed) for seed, prompt in numbered]


def _run_batch(
    engine: SpecEngine,
    controllers: dict[DraftShape, AdaptiveController],
    shape: DraftShape,
    requests: Sequence[TextRequest],
    num_tokens: int,
) -> _Run:
    """Run a batch until a request can no longer draft in full; return its full steps and texts."""
    steps: list[StepRecord] = []
    is_first = True
    pairs = [(request, num_tokens) for request in requests]
    with steady_batch(engine, pairs, controllers[PLAIN]) as batch:
        while batch.num_remaining > shape.depth:
            step = batch.step(controllers[shape])
            if step is None or step.shape != shape:
                continue
            if is_first:  # drafts are extended over the prompts
                is_first = False
                continue
            if step.num_draft_tokens != len(requests) * shape.size:
                raise ConfigError(
                    f"--batch-sizes={len(requests)}: there was no room for {shape.size} drafts of "
                    "every request in every step; raise num_pages, or measure smaller batches"
                )
            steps.append(step)
        return _Run(steps, [sequence.output_token_ids for sequence in batch.sequences])


def _measurement(
    batch_size: int, name: str, shape: DraftShape, runs: Mapping[DraftShape, Sequence[_Run]]
) -> Measurement:
    mine, plain = runs[shape], runs[PLAIN]
    speeds = [run.tokens_per_second for run in mine]
    steps = [step for run in mine for step in run.steps]
    return Measurement(
        batch_size=batch_size,
        prompt_class=name,
        num_steps=shape.depth,
        tree_drafts=shape.tree_size,
        topk=shape.topk,
        tokens_per_second=median(speeds),
        tokens_per_second_low=min(speeds),
        speedup=median(speeds) / median(run.tokens_per_second for run in plain),
        accept_length=fmean(step.num_output_tokens for step in steps) / batch_size,
        round_ms=fmean(step.step_ms for step in steps),
        draft_ms=fmean(step.draft_ms for step in steps),
        verify_ms=fmean(step.verify_ms for step in steps),
        same_texts=equal_prefixes(mine[-1].texts, plain[-1].texts),
        num_texts=len(plain[-1].texts),
    )


def write_costs(llm: LLM, path: Path, shapes: Sequence[DraftShape], *, fresh: bool) -> None:
    """Measure the costs of steps on the idle engine, unless a table matches.

    Raises ConfigError if there is too little room.
    """
    key = cost_key(llm.config, llm.engine.worker)
    max_batch_size = llm.config.scheduler.max_num_seqs
    max_steps = max(shape.depth for shape in shapes)
    trees = [shape for shape in shapes if not shape.is_chain]
    if not fresh and path.exists():
        try:
            known = load_cost_table(path)
            sizes = [(tree.depth, tree.size) for tree in trees]
            known.refuse_foreign(key, max_steps=max_steps, trees=sizes)
            if known.batch_sizes[-1] >= max_batch_size:
                return
        except ConfigError:
            pass  # measure again
    with tqdm(total=100.0, desc="cost table", unit="%", bar_format="{l_bar}{bar}") as bar:
        try:
            measurement = measure_costs(
                key,
                llm.engine.worker,
                CostGrid(max_batch_size, max_steps, dict.fromkeys(trees)),
                ProfileLimits(
                    llm.config.cache.page_size,
                    llm.engine.scheduler.cache.num_pages,
                    llm.config.scheduler.max_num_batched_tokens,
                    llm.engine.limits.max_model_len,
                ),
                TimeBudget(COST_BUDGET_S),
            )
            costs = finish(measurement, progress=lambda part: bar.update(100 * part - bar.n))
        except ValueError as error:
            raise ConfigError(str(error)) from error
    write_cost_table(costs.table, path)


def _configuration(args: argparse.Namespace) -> ServeSpecConfig:
    config = configured(args)
    if not config.speculative.enabled:
        fix = "there is no draft to tune; set an algorithm and its draft"
        raise ConfigError(f"speculative.speculative_algorithm='NONE': {fix}")
    forced = config.speculative.synthetic_acceptance
    if forced is not None:
        fix = "tuning needs real acceptance; omit the key"
        raise ConfigError(f"speculative.synthetic_acceptance={forced!r}: {fix}")
    return config


def _settings(
    config: ServeSpecConfig, args: argparse.Namespace, *, is_dataset: bool
) -> dict[str, Any]:
    """Return all settings that affect a measurement, except its place in the sweep."""
    here, draft = environment(), config.draft_folder
    prompts: dict[str, Any] = {"prompt_tokens": args.prompt_tokens or PROMPT_TOKENS}
    if is_dataset:
        prompts = {key: getattr(args, key) for key in _SAMPLE}
    return {
        **{key: getattr(args, key) for key in _WORKLOAD},
        **prompts,
        "model": config.model.model_dump(mode="json"),
        "speculative": config.speculative.model_dump(mode="json", exclude=_POLICY_KEYS),
        "cache": config.cache.model_dump(mode="json"),
        "scheduler": config.scheduler.model_dump(mode="json"),
        "target_fingerprint": fingerprint(config.model.folder),
        "draft_fingerprint": None if draft is None else fingerprint(draft),
        "code": code_version(),
        "hardware": here["gpu"] or here["cpu"],
        "torch_threads": config.replica.torch_num_threads or here["torch_threads"],
    }


def _load(
    config: ServeSpecConfig, batch_size: int, shapes: Sequence[DraftShape], text_tokens: int
) -> LLM:
    """Return an engine with every shape captured, and room for the largest batch and shape.

    text_tokens: most tokens of a request, prompt and output.
    """
    scheduler, cache = config.scheduler, config.cache
    num_tokens = batch_size * (1 + max(shape.size for shape in shapes))
    sizes = {
        "max_num_seqs": max(scheduler.max_num_seqs, batch_size),
        "max_num_batched_tokens": max(scheduler.max_num_batched_tokens, num_tokens),
    }
    if cache.num_pages is not None:
        needed = batch_size * -(-(text_tokens + MAX_TREE_TOKENS) // cache.page_size)
        sizes["num_pages"] = max(cache.num_pages, needed)
    with _slots_file(shapes) as file:
        return LLM(
            config,
            **sizes,
            speculative_adaptive=True,
            speculative_adaptive_strategy="ema",
            speculative_adaptive_config=file,
        )


@contextmanager
def _slots_file(shapes: Sequence[DraftShape]) -> Iterator[Path]:
    """Yield an adaptive config for which strategy `ema` captures these shapes.

    It has a slot per tree, because a slot drafts only the largest of the trees of one depth.
    """
    steps = sorted({shape.depth for shape in shapes})
    trees = [[shape.depth, shape.size + 1] for shape in shapes if not shape.is_chain]
    slots: dict[str, Any] = {
        str(slot): {"candidate_steps": steps, "candidate_trees": [tree]}
        for slot, tree in enumerate(trees, start=1)
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "slots.json"
        file.write_text(json.dumps(slots or {"candidate_steps": steps}))
        yield file


def _write(
    args: argparse.Namespace,
    config: ServeSpecConfig,
    classes: PromptClasses,
    measurements: Sequence[Measurement],
) -> None:
    """Write every file but the cost table."""
    folder: Path = args.output_dir
    slots = tune_report.adaptive_config(measurements)
    load_slots(slots)  # raises if they are invalid
    (folder / "adaptive.json").write_text(json.dumps(slots, indent=1) + "\n")
    about = {name: each.about for name, each in classes.by_name.items()}
    result = run_record("tune", args, config, classes=about, adaptive_config=slots)
    here = result["environment"]
    facts = {
        "hardware": here["gpu"] or here["cpu"],
        "versions": ", ".join(f"{name} {version}" for name, version in here["versions"].items()),
        "commit": here["commit"] or "unknown",
        "command": f"`{here['command']}`",
        **({} if classes.about is None else {"prompts": classes.about}),
    }
    has_trees = any(each.tree_drafts for each in measurements)
    keys = {
        **({"speculative_eagle_topk": str(config.speculative.topk)} if has_trees else {}),
        "speculative_adaptive_config": str((folder / "adaptive.json").absolute()),
        "speculative_cost_table": str((folder / "cost_table.json").absolute()),
    }
    report = tune_report.markdown(measurements, classes=about, keys=keys, facts=facts)
    (folder / "report.md").write_text(report, encoding="utf-8")
    result["cells"] = [asdict(each) for each in measurements]
    (folder / "tune.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
    if importlib.util.find_spec("matplotlib") is not None:  # optional
        plot(result, measurements, folder / "tune.png")
