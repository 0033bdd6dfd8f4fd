"""Train the shipped drafts, or drafts for another target: `python -m recipes.train PHASE`.

Every phase writes its result to the work folder, where later phases and runs continue:

    WORK/export/    target/ eagle3/ ...      checkpoints in the public layouts
    WORK/tokens.pt  WORK/pool.pt             token streams (train, held_out), on-policy rows
    WORK/logs/      *.jsonl  *.state.pt      loss logs and resumable state
    WORK/report/    acceptance.json  *.md  *.png

For drafts of your own target put it, with its tokenizer, into WORK/export/target, and
{"train": ids, "held_out": ids} into WORK/tokens.pt with torch.save (integer tensors [N]).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from recipes.smollm2 import program as smollm2
from recipes.tiny import program as tiny
from recipes.training.phases import Program, Workshop, say
from recipes.training.settings import Recipe, with_length

PROGRAMS: Mapping[str, Program[Any]] = {**tiny.PROGRAMS, **smollm2.PROGRAMS}
"""Programs by preset."""


def main(argv: list[str]) -> int:
    """Run one phase or all; return 0, or 2 for an invalid argument."""
    options = _parser().parse_args(argv)
    program = PROGRAMS[options.preset]
    try:
        recipe = _with_lengths(program.recipe(), options)
        if options.phase == "export" and options.out is None:
            raise ValueError("phase='export': no folder; give --out FOLDER")
        known = [*program.extra, *program.phases, "export", "all"]
        if options.phase not in known:
            why = f"phase={options.phase!r}: preset {options.preset!r} has none"
            raise ValueError(f"{why}; use one of {known}")
    except ValueError as error:
        print(f"recipes.train: {error}", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("high")
    try:
        shop = program.shop(recipe, options.work, torch.device(options.device), options.quiet)
        _run(program, shop, options)
    except FileNotFoundError as error:  # the output of an earlier phase is missing
        print(f"recipes.train: {error}", file=sys.stderr)
        return 2
    return 0


def _run(program: Program[Any], shop: Workshop[Any], options: argparse.Namespace) -> None:
    if options.phase == "all":
        run_all(program, shop)
    elif options.phase in program.extra:
        program.extra[options.phase](shop)
    elif options.phase != "export":
        program.phases[options.phase][0](shop)
    if options.out is not None and options.phase in ("all", "export"):
        export(shop, options.out)


def run_all(program: Program[Any], shop: Workshop[Any]) -> None:
    """Run all phases in order; skip those that are done."""
    for name, (phase, mark) in program.phases.items():
        if (shop.work / mark).exists():
            say(f"{name}: already done")
            continue
        started = time.monotonic()
        phase(shop)
        say(f"{name}: {time.monotonic() - started:.1f} s")


def export(shop: Workshop[Any], out: Path) -> None:
    """Copy checkpoints and manifest to `out`, and figures and plots to `out`/report."""
    for folder in sorted(shop.export.iterdir()):
        shutil.copytree(folder, out / folder.name, dirs_exist_ok=True)
    if (shop.work / "corpus.json").exists():
        shutil.copy(shop.work / "corpus.json", out / "corpus.json")
    if shop.report.exists():
        shutil.copytree(shop.report, out / "report", dirs_exist_ok=True)


def _parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m recipes.train", description=__doc__)
    root.formatter_class = argparse.RawDescriptionHelpFormatter
    phases = dict.fromkeys(
        name for program in PROGRAMS.values() for name in (*program.extra, *program.phases)
    )
    root.add_argument("phase", choices=[*phases, "export", "all"])
    root.add_argument(
        "--preset", choices=PROGRAMS, default="tiny", help="settings (default: tiny, as shipped)"
    )
    root.add_argument(
        "--work", type=Path, default=Path("train-work"), help="work folder (default: train-work)"
    )
    root.add_argument("--out", type=Path, help="output folder of `export` and `all`")
    root.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for kind, text in (
        ("seconds", "length of a phase in wall-clock seconds (repeatable)"),
        ("steps", "length of a phase in steps, reproducible (repeatable)"),
    ):
        metavar = f"PHASE={kind.upper()}"
        root.add_argument(f"--{kind}", action="append", default=[], metavar=metavar, help=text)
    root.add_argument("--quiet", action="store_true", help="no progress bars")
    return root


def _with_lengths(recipe: Recipe, options: argparse.Namespace) -> Recipe:
    for kind in ("seconds", "steps"):
        for item in getattr(options, kind):
            name, equals, value = item.partition("=")
            if not equals or not value.replace(".", "", 1).isdigit():
                raise ValueError(f"{kind}={item!r}: not PHASE=NUMBER; write e.g. target=480")
            length: dict[str, Any] = {kind: float(value) if kind == "seconds" else int(value)}
            recipe = with_length(recipe, name, **length)
    return recipe


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
