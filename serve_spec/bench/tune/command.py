"""`serve-spec tune CONFIG --output-dir DIR`: measures a pair and writes how to speculate with it.

Every batch size x prompt class x number of draft steps runs on one engine, and trees beside them
where speculative_eagle_topk is above 1. DIR then holds

    adaptive.json     the steps and trees worth taking by batch size: speculative_adaptive_config
    cost_table.json   what rounds cost on this machine: speculative_cost_table
    report.md         tables of all cells; tune.png (needs matplotlib), tune.json
    cells.jsonl       finished measurements: a sweep that was cut short goes on where it stopped
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from serve_spec.bench.configuration import tree_size
from serve_spec.bench.report import emit, environment, table
from serve_spec.bench.tune.cells import Cell, CellFile
from serve_spec.bench.tune.costs import write_costs
from serve_spec.bench.tune.plots import plot_tune
from serve_spec.bench.tune.report import COLUMNS, adaptive_config, markdown, rows
from serve_spec.bench.tune.sweep import PROMPT_CLASSES, Workload, sweep
from serve_spec.bench.tune.trees import swept_trees
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.config.adaptive_file import load_slots
from serve_spec.config.root import parse_override
from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.engine.costs import code_version, fingerprint
from serve_spec.engine.llm import LLM

_CLASSES = {
    name: f"{kind.prompts}, T = {kind.temperature:g}" for name, kind in PROMPT_CLASSES.items()
}
# What a sweep sets itself, so that it decides no cell.
_POLICY_KEYS = {
    "speculative_num_steps",
    "speculative_num_draft_tokens",
    "speculative_adaptive",
    "speculative_adaptive_config",
    "speculative_adaptive_strategy",
    "speculative_per_sequence",
    "speculative_cost_table",
}


def main(argv: list[str]) -> int:
    """Measures what is not measured yet and writes the files; prints a table and one JSON line.

    1 if texts differ between steps in float32, where they must not.
    """
    args = _parser().parse_args(argv)
    batch_sizes = _distinct("batch_sizes", args.batch_sizes, least=1)
    num_steps = _distinct("num_steps", [0, *args.num_steps], least=0)
    work = _workload(args)
    config = _configuration(args)
    trees = swept_trees(args.trees, config.speculative)
    shapes = [*map(DraftShape.chain, num_steps), *trees]
    if shapes == [PLAIN]:
        raise ConfigError(f"num_steps={args.num_steps}: give one above 0, to compare with 0")
    record = CellFile(args.output_dir / "cells.jsonl", _settings(config, work), fresh=args.fresh)
    llm = _load(config, max(batch_sizes), shapes, work)
    sweep(llm.engine, record, batch_sizes, shapes, work)
    costs = args.output_dir / "cost_table.json"
    deepest = max(shape.depth for shape in shapes)
    write_costs(llm, costs, max_steps=deepest, trees=trees, fresh=args.fresh)
    cells = [
        record.cells[batch_size, name, shape]
        for name in _CLASSES
        for batch_size in batch_sizes
        for shape in shapes
    ]
    num_different = sum(cell.num_texts - cell.same_texts for cell in cells)
    print(f"{table(COLUMNS, rows(cells))}\n{num_different} texts differ from those of K = 0")
    _write(args, config, trees, cells)
    is_exact = llm.engine.worker.dtype == torch.float32
    return int(is_exact and num_different > 0)


def _parser() -> argparse.ArgumentParser:
    about, _, files = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="serve-spec tune",
        description=about,
        epilog=files,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="configuration file (YAML) of the pair")
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument(
        "--num-steps", type=int, nargs="+", default=[0, 1, 2, 3, 5, 7], help="0 is always measured"
    )
    parser.add_argument(
        "--trees", type=tree_size, nargs="+", metavar="LEVELSxDRAFTS",
        help="with speculative_eagle_topk above 1; the root is not counted (default: the "
        "configured tree and the smaller ones that a policy may draft)",
    )  # fmt: skip
    parser.add_argument("--num-prompts", type=int, default=8, help="at least; whole batches run")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3, help="per cell, interleaved")
    parser.add_argument("--device", help="overrides the configuration")
    parser.add_argument("--dtype", help="overrides the configuration")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="other keys")
    parser.add_argument("--fresh", action="store_true", help="measure anew what DIR holds already")
    return parser


def _distinct(name: str, values: Sequence[int], *, least: int) -> list[int]:
    if min(values) < least:
        raise ConfigError(f"{name}={list(values)}: give integers from {least} on")
    return sorted(set(values))


def _workload(args: argparse.Namespace) -> Workload:
    sizes = {name: getattr(args, name) for name in Workload.__dataclass_fields__}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name}={value}: give at least 1")
    return Workload(**sizes)


def _configuration(args: argparse.Namespace) -> ServeSpecConfig:
    said = {key: getattr(args, key) for key in ("device", "dtype") if getattr(args, key)}
    others = dict(parse_override(pair) for pair in args.set)
    config = ServeSpecConfig.load(args.config, **{**said, **others})
    if not config.speculative.enabled:
        fix = "a pair is tuned; name an algorithm and its draft"
        raise ConfigError(f"speculative.speculative_algorithm='NONE': {fix}")
    forced = config.speculative.synthetic_acceptance
    if forced is not None:
        fix = "what is tuned under forced acceptance fits no real text; leave the key out"
        raise ConfigError(f"speculative.synthetic_acceptance={forced!r}: {fix}")
    return config


def _settings(config: ServeSpecConfig, work: Workload) -> dict[str, Any]:
    """Everything that decides what a cell measures, but for its place in the sweep."""
    here, draft = environment(), config.speculative.speculative_draft_model_path
    return {
        **asdict(work),
        "model": config.model.model_dump(mode="json"),
        "speculative": config.speculative.model_dump(mode="json", exclude=_POLICY_KEYS),
        "cache": config.cache.model_dump(mode="json"),
        "scheduler": config.scheduler.model_dump(mode="json"),
        "target_fingerprint": fingerprint(config.model.path),
        "draft_fingerprint": None if draft is None else fingerprint(draft),
        "code": code_version(),
        "hardware": here["gpu"] or here["cpu"],
        "torch_threads": config.replica.torch_num_threads or here["torch_threads"],
    }


def _load(
    config: ServeSpecConfig, batch_size: int, shapes: Sequence[DraftShape], work: Workload
) -> LLM:
    """One engine with every shape, and room for the largest batch at the largest of them."""
    scheduler, cache = config.scheduler, config.cache
    num_rows = batch_size * (1 + max(shape.size for shape in shapes))
    sizes = {
        "max_num_seqs": max(scheduler.max_num_seqs, batch_size),
        "max_num_batched_tokens": max(scheduler.max_num_batched_tokens, num_rows),
    }
    if cache.num_pages is not None:
        slots = max(shape.draft_slots for shape in shapes)
        tokens = work.prompt_tokens + work.output_tokens + slots
        needed = batch_size * -(-tokens // cache.page_size)
        sizes["num_pages"] = max(cache.num_pages, needed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tiers.json"
        file.write_text(json.dumps(_slots(shapes)))
        return LLM(
            config,
            **sizes,
            prefix_caching=False,  # every cell computes its prompts
            speculative_adaptive=True,
            speculative_adaptive_strategy="ema",
            speculative_adaptive_config=file,
        )


def _slots(shapes: Sequence[DraftShape]) -> dict[str, Any]:
    """An adaptive config of which ema builds these shapes, and it measures nothing at start.

    A slot for each tree: of those of one depth, a slot of ema drafts the largest alone.
    """
    steps = sorted({shape.depth for shape in shapes})
    trees = [[shape.depth, shape.size + 1] for shape in shapes if not shape.is_chain]
    if not trees:
        return {"candidate_steps": steps}
    return {
        str(slot): {"candidate_steps": steps, "candidate_trees": [tree]}
        for slot, tree in enumerate(trees, start=1)
    }


def _write(
    args: argparse.Namespace,
    config: ServeSpecConfig,
    trees: Sequence[DraftShape],
    cells: Sequence[Cell],
) -> None:
    """Everything but the cost table; prints the JSON line."""
    folder: Path = args.output_dir
    slots = adaptive_config(cells)
    load_slots(slots)  # what a server would refuse is not written
    (folder / "adaptive.json").write_text(json.dumps(slots, indent=1) + "\n")
    here = environment(config)
    facts = {
        "hardware": here["gpu"] or here["cpu"],
        "versions": ", ".join(f"{name} {version}" for name, version in here["versions"].items()),
        "commit": here["commit"] or "unknown",
        "command": f"`{here['command']}`",
    }
    topk = config.speculative.topk
    keys = {
        **({"speculative_eagle_topk": str(topk)} if trees else {}),
        "speculative_adaptive_config": str((folder / "adaptive.json").absolute()),
        "speculative_cost_table": str((folder / "cost_table.json").absolute()),
    }
    report = markdown(cells, classes=_CLASSES, keys=keys, facts=facts)
    (folder / "report.md").write_text(report, encoding="utf-8")
    result = {
        "bench": "tune",
        "environment": here,
        "arguments": {**vars(args), "output_dir": str(folder), "trees": list(map(str, trees))},
        "classes": _CLASSES,
        "adaptive_config": slots,
        "cells": [asdict(cell) for cell in cells],
    }
    if importlib.util.find_spec("matplotlib") is not None:  # an extra: not worth a lost sweep
        plot_tune(result, folder / "tune.png")
    emit(result, folder / "tune.json")
