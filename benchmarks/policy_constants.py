"""Halve and double every tuned constant of strategy `goodput` in replays of recorded drafts.

python benchmarks/policy_constants.py [--costs h200 cpu] [--seeds 2] [--markdown docs/policy.md]

Figures are geometric means over kinds of text and batch sizes, and means of seeds.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing import Pool
from pathlib import Path
from statistics import fmean
from textwrap import wrap
from typing import NamedTuple, TypeAlias

from benchmarks.policy_replay import COSTS, KINDS, NUM_TOKENS, SPREAD, TRACES, goodput
from benchmarks.simulator import Phase, Simulator
from tests.helpers.simulated_costs import noisy

PACKAGE = "serve_spec.adaptive"
MODULES = ("goodput", "exploration", "drafts", "planner", "costs")
SIZES = {"h200": (1, 16, 64, 256), "cpu": (1, 4, 16, 64)}
FACTORS = {"half": 0.5, "double": 2.0}
NUM_WORKERS = 2
MEANING_WIDTH = 62
MARKS = "<!-- constants -->", "<!-- /constants -->"
NOTE = """\
Change of tokens per ms in percent, relative to the shipped constants; noise is about 0.2. For a
ratio from 0.5 to 1.5, its distance from 1 is halved and doubled."""

Value: TypeAlias = float | tuple[float, ...]
Effects: TypeAlias = dict[tuple[str, str, str], list[list[float]]]
"""By constant, costs and factor."""


class Constant(NamedTuple):
    """A tuned constant: a number or several."""

    name: str
    value: Value
    meaning: str

    def changed(self, factor: float) -> Value:
        """Return the value times a factor; for a ratio from 0.5 to 1.5, scale its distance to 1."""
        if isinstance(self.value, tuple):
            return tuple(each * factor for each in self.value)
        if isinstance(self.value, int):
            return max(1, int(self.value * factor))
        if 0.5 < self.value < 1.5:
            return 1.0 + (self.value - 1.0) * factor
        return self.value * factor


class Job(NamedTuple):
    """One replay of all kinds of text and batch sizes; no name: the shipped constants."""

    costs: str
    seed: int
    name: str = ""
    kind: str = ""
    value: Value = 0.0


def constants() -> list[Constant]:
    """Return the public module-level numbers with a docstring."""
    found = []
    for name in MODULES:
        module = importlib.import_module(f"{PACKAGE}.{name}")
        body = ast.parse(Path(str(module.__file__)).read_text()).body
        for node, after in pairwise(body):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(after, ast.Expr):
                continue
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            text = after.value.value if isinstance(after.value, ast.Constant) else None
            if isinstance(target, ast.Name) and isinstance(text, str):
                value = getattr(module, target.id)
                if re.fullmatch(r"[A-Z][A-Z0-9_]*", target.id) and type(value) in (
                    int,
                    float,
                    tuple,
                ):
                    found.append(Constant(target.id, value, " ".join(text.split())))
    return found


@contextmanager
def patched(name: str, value: Value) -> Iterator[None]:
    """Set a constant in every module of the package that holds it; restore it afterwards."""
    modules = [each for key, each in sys.modules.items() if key.startswith(f"{PACKAGE}.")]
    before = [(each, getattr(each, name)) for each in modules if name and hasattr(each, name)]
    try:
        for each, _ in before:
            setattr(each, name, value)
        yield
    finally:
        for each, old in before:
            setattr(each, name, old)


def replay(job: Job) -> tuple[float, float]:
    """Return the mean logarithm of tokens per ms, prompts apart and beside drafts."""
    found = []
    with patched(job.name, job.value):
        for mixes_prompts in (False, True):
            speeds = []
            for kind in KINDS:
                for size in SIZES[job.costs]:
                    simulator = Simulator(
                        goodput(job.costs),
                        TRACES,
                        noisy(COSTS[job.costs][0], 0.02, job.seed),
                        charge_thinking=job.costs == "cpu",
                        mixes_prompts=mixes_prompts,
                    )
                    num_requests = size * max(4, min(12, 320 // size))
                    phase = Phase(kind, size, num_requests, NUM_TOKENS, SPREAD)
                    speeds.append(math.log(simulator.run(phase).tokens_per_ms))
            found.append(fmean(speeds))
    return found[0], found[1]


def effects(known: list[Constant], names: list[str], num_seeds: int) -> Effects:
    """Return the effects of every constant: percent by seed, prompts apart and beside drafts."""
    jobs = [Job(costs, seed) for costs in names for seed in range(num_seeds)]
    jobs += [
        job._replace(name=each.name, kind=kind, value=each.changed(factor))
        for each in known
        for job in jobs
        for kind, factor in FACTORS.items()
    ]
    with Pool(NUM_WORKERS) as pool:
        speeds = dict(zip(jobs, pool.map(replay, jobs, chunksize=1), strict=True))
    found: Effects = defaultdict(list)
    for job, mine in speeds.items():
        shipped = speeds[Job(job.costs, job.seed)]
        found[job.name, job.costs, job.kind].append(
            [100.0 * math.expm1(x - y) for x, y in zip(mine, shipped, strict=True)]
        )
    return found


def table(
    known: list[Constant], names: list[str], found: Effects, *, width: int, apart: bool
) -> list[str]:
    """Return the lines of a Markdown table.

    width: column width of the meaning, which wraps into further rows. apart: whether to show both
    figures or their mean.
    """
    columns = [(costs, kind) for costs in names for kind in FACTORS]
    rows = [["constant", "value", "meaning", *map(" ".join, columns)], ["---"] * (3 + len(columns))]
    for each in known:
        figures = []
        for at in columns:
            pair = [fmean(x) for x in zip(*found[each.name, *at], strict=True)]
            figures.append(" ".join(map(_signed, pair if apart else [fmean(pair)])))
        first, *more = wrap(each.meaning, width)
        values = each.value if isinstance(each.value, tuple) else (each.value,)
        shown = ", ".join(f"{value:g}" for value in values)
        rows.append([f"`{each.name}`", shown, first, *figures])
        rows += [["", "", text, *[""] * len(columns)] for text in more]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _signed(percent: float) -> str:
    text = f"{percent:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text


def main() -> None:
    """Print the table; write it into a document if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--costs", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--markdown", type=Path, help="file whose table is replaced")
    args = parser.parse_args()
    known = constants()
    found = effects(known, args.costs, args.seeds)
    print(NOTE, "Two figures: prompts in rounds of their own, and beside drafts.", sep="\n")
    print(*table(known, args.costs, found, width=1000, apart=True), sep="\n")
    if args.markdown is not None:
        lines = table(known, args.costs, found, width=MEANING_WIDTH, apart=False)
        start, end = MARKS
        before, rest = args.markdown.read_text().split(start)
        after = rest.split(end)[1]
        text = "\n".join([start, NOTE, "", *lines, end])
        args.markdown.write_text(before + text + after)


if __name__ == "__main__":
    main()
