"""Write docs/results/README.md from docs/results/history.csv: newest figures and commands.

PYTHONPATH=. python benchmarks/results_page.py [--plot docs/speed.png]

A row of the CSV is one figure of one run. Raw rows are in MACHINE-BENCHMARK.json(l), of
one run or of several.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

RESULTS = Path("docs/results")
MACHINES = {
    "cpu": "two CPU cores, float32",
    "h200": "one NVIDIA H200, bfloat16, the cost of an 8B model",
}
HEAD = """\
# Results

Written by `benchmarks/results_page.py` from [history.csv](history.csv), which has every figure of
every run, the newest last. Each section shows the newest run of one benchmark on one kind of
machine: its command, its raw rows, and its figures beside their aims.
"""
OPERATORS = {">=": float.__ge__, "<=": float.__le__}

Row = dict[str, str]


def newest(rows: list[Row]) -> dict[tuple[str, str], dict[str, dict[str, Row]]]:
    """Return the figures of the newest runs: by machine and benchmark, variant, metric."""
    last = {(row["machine"], row["benchmark"]): row["commit"] for row in rows}
    rows = [row for row in rows if row["commit"] == last[row["machine"], row["benchmark"]]]
    found: dict[tuple[str, str], dict[str, dict[str, Row]]] = {}
    for row in rows:
        variants = found.setdefault((row["machine"], row["benchmark"]), {})
        variants.setdefault(row["variant"], {})[row["metric"]] = row
    return found


def value_with_aim(row: Row) -> str:
    """Return the value and, if there is an aim, whether it is met."""
    if not row["aim"]:
        return row["value"]
    operator, aim = row["aim"].split()
    reached = OPERATORS[operator](float(row["value"]), float(aim))
    return (
        f"{row['value']} ({row['aim']})"
        if reached
        else f"**{row['value']}** (missed: {row['aim']})"
    )


def table(variants: dict[str, dict[str, Row]]) -> list[str]:
    """Return a Markdown table of variants by metrics."""
    metrics = list(dict.fromkeys(metric for row in variants.values() for metric in row))
    lines = [" | ".join(["| variant", *metrics, "commit |"]), "|---" * (len(metrics) + 2) + "|"]
    for variant, row in variants.items():
        values = [value_with_aim(row[metric]) if metric in row else "" for metric in metrics]
        commit = next(iter(row.values()))["commit"]
        lines.append(" | ".join([f"| {variant}", *values, f"{commit} |"]))
    return lines


def raw_file(name: str) -> Path | None:
    """Return the file with the raw records of a benchmark's newest runs, if kept."""
    return next((path for path in sorted(RESULTS.glob(f"{name}.json*"))), None)


def environments(path: Path) -> list[dict[str, Any]]:
    """Return commit, machine, versions and command of each run in a file."""
    text = path.read_text()
    if path.suffix != ".jsonl":
        records = [json.loads(text)]
    else:
        first, *others = map(json.loads, text.splitlines())
        records = [first, *(each for each in others if {"environment", "command"} & each.keys())]
    return [record.get("environment", record) for record in records]


def section(machine: str, benchmark: str, variants: dict[str, dict[str, Row]]) -> list[str]:
    """Return a benchmark's commands and figures."""
    lines = ["", f"### {benchmark}, {machine}", ""]
    path = raw_file(f"{machine}-{benchmark}")
    if path is not None:
        runs = environments(path)
        facts = runs[0]
        versions = ", ".join(f"{name} {value}" for name, value in facts["versions"].items())
        device = facts.get("gpu") or facts["cpu"]
        lines += [
            f"[{path.name}]({path.name}), {device}, Python {facts['python']}, {versions}.",
            *("", "```sh", *(run["command"] for run in runs), "```", ""),
        ]
    return lines + table(variants)


def page(rows: list[Row]) -> str:
    """Return the whole page."""
    lines = [HEAD]
    for machine, title in MACHINES.items():
        lines += ["", f"## {title[0].upper()}{title[1:]}"]
        for (of, benchmark), variants in newest(rows).items():
            if of == machine:
                lines += section(machine, benchmark, variants)
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """Draw the speed of the default policy over off by batch size and category of prompts."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2))
    found = newest(rows)
    cells = found["h200", "adaptive"] | found["h200", "adaptive-large"]
    for color, category in enumerate(("code", "chat", "tools", "writing")):
        for temperature, line in (("0", "o-"), ("1", "o:")):
            points = []
            for variant, metrics in cells.items():
                if variant.endswith(f", {category} T={temperature}"):
                    size = int(variant.removeprefix("batch ").partition(",")[0])
                    points.append((size, float(metrics["tokens/s over off"]["value"])))
            label = f"{category}, T = {temperature}"
            axes.plot(*zip(*sorted(points), strict=True), line, color=f"C{color}", label=label)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="requests in the batch", ylabel="tokens/s over no speculation", ylim=(0, None))
    sizes = [1, 8, 32, 128, 256, 512]
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.legend(frameon=False, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Write the page, and the plot if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, help="draw the README's plot into this file")
    args = parser.parse_args()
    rows = read()
    (RESULTS / "README.md").write_text(page(rows))
    if args.plot:
        plot(rows, args.plot)


def read() -> list[Row]:
    """Return the rows of the history."""
    with (RESULTS / "history.csv").open() as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
