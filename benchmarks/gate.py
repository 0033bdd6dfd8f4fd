"""Compare steps and rounds of two commits by turns on one GPU, and fail if any takes 1% longer.

    python benchmarks/gate.py --base COMMIT
    python benchmarks/gate.py --base-dir DIR --config new/expanded.yaml --base-config base.yaml

Each turn starts a process for either tree, every other turn in the other order. It runs
`benchmarks/steps.py` of this checkout, which uses only public calls: a step is one without drafts,
a round one with them. Without --config each tree first writes the shipped pair in the shape of
Llama 3.1 8B. DIR holds a checkout of the base commit; git is needed only for --base.

Exit status: 0 within the limit, 1 beyond it, 2 if it cannot be measured.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import torch

ROOT = Path(__file__).resolve().parents[1]
ASSETS = Path("serve_spec", "assets")
EXPANSION = ("--target", "asset:tiny/target", "--draft", "asset:tiny/eagle3")
SHAPE = "llama-3.1-8b"

_TITLES = ("drafts", "batch", "base ms", "new ms", "ratio", "spread")


class Cell(NamedTuple):
    """What is timed: a step of so many requests with so many drafts each."""

    depth: int
    batch_size: int


Times: TypeAlias = Mapping[Cell, float]
"""Median time of each cell in one process, in milliseconds."""


@dataclass(frozen=True)
class Comparison:
    """A cell on both trees: medians over processes, in milliseconds.

    spread: from the fastest process to the slowest of the same tree, as a fraction of the median;
    the larger one of both trees. A ratio within it may be noise.
    """

    mode: str
    depth: int
    batch_size: int
    base_ms: float
    new_ms: float
    ratio: float
    spread: float


def compare(base: Sequence[Times], new: Sequence[Times]) -> list[Comparison]:
    """Compare the processes of two trees. Raises ValueError: they did not time the same cells."""
    cells = sorted({cell for times in (*base, *new) for cell in times})
    if not cells or any(len(times) < len(cells) for times in (*base, *new)):
        raise ValueError("not every process timed every depth and batch size; run it again")
    return [
        _compared(cell, [times[cell] for times in base], [times[cell] for times in new])
        for cell in cells
    ]


def _compared(cell: Cell, base: Sequence[float], new: Sequence[float]) -> Comparison:
    before, after = median(base), median(new)
    spread = max((max(found) - min(found)) / median(found) for found in (base, new))
    mode = "round" if cell.depth else "step"
    return Comparison(mode, *cell, before, after, after / before, spread)


def slowest(comparisons: Sequence[Comparison]) -> Comparison:
    """Return the cell whose time grew most."""
    return max(comparisons, key=lambda each: each.ratio)


def table(comparisons: Sequence[Comparison]) -> str:
    """Return a line for each cell."""
    lines = [f"{'':8}" + "".join(f"{title:>9}" for title in _TITLES)]
    lines += [
        f"{each.mode:8}{each.depth:>9}{each.batch_size:>9}{each.base_ms:>9.3f}"
        f"{each.new_ms:>9.3f}{each.ratio:>9.4f}{each.spread:>9.2%}"
        for each in comparisons
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Tree:
    """A checkout. config: what it runs."""

    name: str
    commit: str | None
    folder: Path
    config: Path

    def time(self, arguments: Sequence[str]) -> tuple[Times, dict[str, Any]]:
        """Return the times of one process, and what it says about its machine."""
        script = str(ROOT / "benchmarks" / "steps.py")
        printed = _run(self.folder, [script, "--config", str(self.config), *arguments], self.commit)
        machine, *rows = [json.loads(line) for line in printed.splitlines() if line[:1] == "{"]
        return {Cell(row["depth"], row["batch_size"]): row["ms"] for row in rows}, machine


def expand(folder: Path, output: Path) -> Path:
    """Write the shipped pair in a published shape, by the command of a tree: its configuration."""
    has_script = (folder / "benchmarks" / "expand.py").exists()
    command = ["benchmarks.expand"] if has_script else ["serve_spec", "expand"]
    _run(folder, ["-m", *command, *EXPANSION, "--shape", SHAPE, "--output-dir", str(output)])
    return output / "expanded.yaml"


def extract(commit: str, folder: Path) -> str:
    """Write the files of a commit to a folder, without the shipped pair; return its short hash."""
    found = _git(commit, "rev-parse", "--short", f"{commit}^{{commit}}").decode().strip()
    files = _git(commit, "archive", found, "--", ".", f":(exclude){ASSETS.as_posix()}")
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extractall(folder, filter="data")
    return found


def _git(commit: str, *arguments: str) -> bytes:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    if run.returncode:
        raise ValueError(f"base={commit}: {run.stderr.decode().strip()}")
    return run.stdout


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; return the exit status."""
    args = _arguments(argv)
    if not torch.cuda.is_available():
        print("gate: no GPU here: steps and rounds are compared on one", file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory() as work:
            return _gate(args, Path(work))
    except (OSError, ValueError) as error:
        print(f"gate: {error}", file=sys.stderr)
        return 2


def _gate(args: argparse.Namespace, work: Path) -> int:
    base, new = _trees(args, work)
    arguments = ["--depths", *args.depths, "--batch-sizes", *args.batch_sizes]
    times: dict[Tree, list[Times]] = {base: [], new: []}
    machines = {}
    for turn in range(args.turns):
        for tree in (new, base) if turn % 2 else (base, new):
            print(f"turn {turn + 1} of {args.turns}: {tree.name}", file=sys.stderr, flush=True)
            found, machines[tree] = tree.time(list(map(str, arguments)))
            times[tree].append(found)
    comparisons = compare(times[base], times[new])
    worst = slowest(comparisons)
    print(table(comparisons))
    record = {
        "gpu": machines[new]["gpu"],
        "base": base.commit,
        "new": machines[new]["commit"],
        "turns": args.turns,
        "limit": args.limit,
        "slowest": worst.ratio,
        "rows": list(map(asdict, comparisons)),
    }
    print(json.dumps(record))
    return int(worst.ratio > 1 + args.limit)


def _trees(args: argparse.Namespace, work: Path) -> tuple[Tree, Tree]:
    folder = args.base_dir.resolve() if args.base_dir else work / "tree"
    commit = folder.name if args.base is None else extract(args.base, folder)
    if not (folder / ASSETS).exists():
        (folder / ASSETS).symlink_to(ROOT / ASSETS)
    new_config = args.config or expand(ROOT, work / "new")
    base_config = args.base_config or args.config or expand(folder, work / "base")
    return (
        Tree("base", commit, folder, base_config.resolve()),
        Tree("new", None, ROOT, new_config.resolve()),
    )


def _run(folder: Path, arguments: Sequence[str], commit: str | None = None) -> str:
    """Run Python with the package of a tree; return what it prints. May raise ValueError."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if commit is not None:
        env["SERVE_SPEC_COMMIT"] = commit
    command = [sys.executable, *arguments]
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if run.returncode:
        raise ValueError(f"{folder}: {' '.join(arguments)} failed:\n{run.stderr[-4000:]}")
    return run.stdout


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    base = parser.add_mutually_exclusive_group(required=True)
    base.add_argument("--base", metavar="COMMIT", help="commit to compare with")
    base.add_argument("--base-dir", type=Path, metavar="DIR", help="or a folder with its files")
    parser.add_argument("--config", type=Path, help="configuration (YAML), for both trees")
    parser.add_argument("--base-config", type=Path, help="another one for the base tree")
    parser.add_argument("--turns", type=int, default=4, help="processes of each tree")
    parser.add_argument("--limit", type=float, default=0.01, help="largest growth, as a fraction")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 3], help="drafts; 0: steps")
    sizes = [1, 8, 32, 128]
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=sizes, help="requests")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
