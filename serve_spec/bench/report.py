"""Records of a run as JSON lines, tables, plots, and where a figure was measured.

A file may hold several runs. Each starts with a record of section `run`. Every measurement is
appended immediately, so an interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from serve_spec.config import ConfigError, ServeSpecConfig

Record: TypeAlias = Mapping[str, Any]

OUTPUTS = ("json", "plot", "from_json")
"""Arguments without effect on the figures."""
_OLD_KEYS = {"arm": "variant", "arms": "variants", "turn": "trial"}
_OLD_SECTIONS = {"turn": "trial"}


def option(name: str) -> str:
    """Return the command-line option of an argument."""
    return f"--{name.replace('_', '-')}"


def environment(config: ServeSpecConfig | None = None) -> dict[str, Any]:
    """Return hardware, versions, commit, command, and `config`'s synthetic acceptance."""
    # `--help` and `breakeven` do not need torch.
    import torch

    from serve_spec.core.machine import cpu_model

    forced = None if config is None else config.speculative.synthetic_acceptance
    cuda = torch.cuda.is_available()
    versions = {name: _version(name) for name in ("torch", "triton", "flashinfer-python", "ray")}
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cpu": f"{cpu_model()} ({os.cpu_count()} cores)",
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: version for name, version in versions.items() if version},
        "commit": _commit(),
        "command": _command(*sys.argv),
        **({} if forced is None else {"synthetic_acceptance": forced}),
    }


def run_record(
    bench: str, args: argparse.Namespace, config: ServeSpecConfig | None, **fields: object
) -> dict[str, Any]:
    """Return the first record of a run."""
    arguments = {key: value for key, value in vars(args).items() if key not in OUTPUTS}
    # A record is published, keys are secret.
    arguments["flags"] = {
        key: value for key, (_, value) in arguments.get("flags", {}).items() if key != "api_keys"
    }
    where = {"environment": environment(config), "arguments": arguments}
    return {"section": "run", "bench": bench, **where, **fields}


def append_record(path: Path | None, record: Record) -> None:
    """Append a record to a file of JSON lines, if there is one."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(record, default=str) + "\n")


def print_record(path: Path | None, **record: object) -> None:
    """Print a record as a JSON line and append it to the file, if there is one."""
    print(json.dumps(record), flush=True)
    append_record(path, record)


def records_of(
    args: argparse.Namespace,
    bench: str,
    measured: Callable[[argparse.Namespace], Iterable[Record]],
) -> list[Record]:
    """Return the records of --from-json, or measure them and append each to --json."""
    if args.from_json is not None:
        return list(read_records(args.from_json, bench))
    records = []
    for record in measured(args):
        records.append(record)
        append_record(args.json, record)
    return records


def read_records(path: Path, bench: str) -> list[dict[str, Any]]:
    """Return the records of the last run in a file of any version, or raise ConfigError."""
    try:
        found = _records(path.read_text())
        first = max(at for at, record in enumerate(found) if record["section"] == "run")
    except (OSError, ValueError, TypeError, KeyError) as error:
        fix = "give a file that --json wrote"
        raise ConfigError(f"--from-json={path}: {error!r}; {fix}") from error
    if found[first].get("bench", bench) != bench:
        fix = f"is of bench {found[first]['bench']}; give one of bench {bench}"
        raise ConfigError(f"--from-json={path}: {fix}")
    return [_in_new_words(record) for record in found[first:]]


def _records(text: str) -> list[dict[str, Any]]:
    try:
        record = json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]
    if "cells" not in record:
        return [record]
    cells = record.pop("cells")  # older files hold one object
    return [{"section": "run", **record}, *({"section": "measurement"} | cell for cell in cells)]


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return an aligned text table: floats with two decimals, None as an empty cell."""
    cells = [list(map(_cell, row)) for row in rows]
    widths = [max(len(c), *(len(row[i]) for row in cells)) for i, c in enumerate(columns)]
    lines = [
        "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True))
        for line in [list(columns), *cells]
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def show(tables: str, run: Record) -> None:
    """Print the tables of a run, below a banner if its acceptance was forced."""
    forced = forced_acceptance(run)
    if forced is not None:
        print(f"*** synthetic_acceptance={forced}: the texts are not the model's ***")
    print(tables)


def status(run: Record, same: bool, args: argparse.Namespace) -> int:
    """Return the exit status: 1 if texts differ, unless that is allowed or by construction."""
    return int(not (same or args.allow_differences or forced_acceptance(run) is not None))


def forced_acceptance(run: Record) -> object:
    """Return the run's synthetic acceptance, or None."""
    return run["environment"].get("synthetic_acceptance")


def plot_title(run: Record) -> str:
    """Return the hardware and the synthetic acceptance, if any."""
    forced = forced_acceptance(run)
    note = "" if forced is None else f"; acceptance forced to {forced} where drafts are made"
    return f"{run['environment']['gpu'] or run['environment']['cpu']}{note}"


def _in_new_words(record: Record) -> dict[str, Any]:
    renamed = {_OLD_KEYS.get(key, key): value for key, value in record.items()}
    return renamed | {"section": _OLD_SECTIONS.get(record["section"], record["section"])}


def _command(program: str, *argv: str) -> str:
    """Return the command of this process without the files that it writes."""
    kept = list(argv)
    for flag in ("--json", "--plot"):
        if flag in kept:
            at = kept.index(flag)
            del kept[at : at + 2]
    is_script = program.endswith(".py") and not program.endswith("__main__.py")
    return shlex.join([program if is_script else "serve-spec", *kept])


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the source tree, `+` if changed; without git $SERVE_SPEC_COMMIT."""
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("SERVE_SPEC_COMMIT")
    return run.stdout.strip()


Points: TypeAlias = Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Panel:
    """One set of axes. Series by label; a label that begins with `_` is left out of the legend."""

    title: str
    series: Mapping[str, Points]
    kind: Literal["lines", "bars", "steps"] = "lines"
    ticks: Sequence[str] = ()
    """Names of x = 0, 1, ...; none: x is a number."""
    x_label: str = ""
    y_label: str = ""
    baseline: float | None = None
    """Height of a horizontal line."""
    bar_labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    styles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def variant_bars(title: str, found: Sequence[tuple[str, Record]], key: str, label: str) -> Panel:
    """Return bars of `key` by variant over the names of `found`, with accept lengths above."""
    ticks = list(dict.fromkeys(name for name, _ in found))
    variants: dict[str, list[tuple[str, Record]]] = {}
    for name, each in found:
        variants.setdefault(each["variant"], []).append((name, each))
    return Panel(
        title,
        {
            variant: [(ticks.index(name), each[key]) for name, each in mine]
            for variant, mine in variants.items()
        },
        kind="bars",
        ticks=ticks,
        y_label=label,
        baseline=1.0,
        bar_labels={
            variant: [f"{each['accept_length']:.1f}" for _, each in mine]
            for variant, mine in variants.items()
        },
    )


def draw(panels: Sequence[Panel], path: Path, title: str, columns: int | None = None) -> None:
    """Write the panels to a PNG file, `columns` side by side; None: all."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    columns = columns or len(panels)
    num_rows = -(-len(panels) // columns)
    widths = [max(4.0, 1 + 0.45 * len(p.ticks) * _bars_per_tick(p)) for p in panels]
    figure, axes = plt.subplots(
        num_rows,
        columns,
        figsize=(1.5 + columns * min(max(widths), 14.0), 3.9 * num_rows),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_panel(axis, panel)
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _bars_per_tick(panel: Panel) -> float:
    return max(1.0, len(panel.series) / 3) if panel.kind == "bars" else 1.0


def _draw_panel(axis: Any, panel: Panel) -> None:
    count = len(panel.series)
    for place, (label, points) in enumerate(panel.series.items()):
        xs = [x for x, _ in points]
        ys = [float("nan") if y is None else y for _, y in points]
        style = panel.styles.get(label, {})
        if panel.kind == "bars":
            beside = [x + (place - (count - 1) / 2) * 0.8 / count for x in xs]
            bars = axis.bar(beside, ys, 0.75 / count, label=label, **style)
            if label in panel.bar_labels:
                axis.bar_label(bars, panel.bar_labels[label], fontsize=6)
        else:
            where = "steps-post" if panel.kind == "steps" else "default"
            axis.plot(xs, ys, **{"marker": ".", "drawstyle": where, "label": label, **style})
    if panel.baseline is not None:
        axis.axhline(panel.baseline, color="black", linewidth=0.8)
    if panel.ticks:
        is_long = max(map(len, panel.ticks)) > 8
        turned = {"rotation": 60, "ha": "right"} if is_long else {}
        axis.set_xticks(range(len(panel.ticks)), panel.ticks, fontsize=7, **turned)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    axis.set_title(panel.title, fontsize=9)
    axis.grid(axis="y", alpha=0.4)
    if any(not label.startswith("_") for label in panel.series):
        axis.legend(fontsize=7)
