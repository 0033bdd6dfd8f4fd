"""The picture of `bench parallel`, from its JSON alone, so that old results can be drawn anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_spec.bench.report import forced_note

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[Mapping[str, Any]]

_STAGES = {"draft_ms": "#1565c0", "verify_ms": "#90a4ae", "idle_ms": "#c2185b"}
_EXCHANGES = {
    "sum_us": "the engine's",
    "add_norm_us": "the engine's with addition and norm",
    "norm_us": "addition and norm alone",
    "nccl_us": "NCCL",
    "one_shot_us": "one shot",
    "two_shot_us": "two shots",
}
_COLORS = ("C0", "C1", "C2", "C3", "C4", "C5")
_STYLES = ("-", "--", ":")


def plot_parallel(result: Mapping[str, Any], path: Path) -> None:
    """Speed by size, where the time of a round goes, and what one sum between ranks takes.

    result: what `serve-spec bench parallel` prints.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    drawn = {
        draw: result["sections"][name]["rows"]
        for draw, name in ((_speed, "rounds"), (_stages, "rounds"), (_latency, "latency"))
        if result["sections"].get(name, {}).get("rows")
    }
    figure, axes = plt.subplots(
        1,
        max(1, len(drawn)),
        figsize=(2 + 4.5 * len(drawn), 4),
        squeeze=False,
        layout="constrained",
    )
    for axis, (draw, rows) in zip(axes[0], drawn.items(), strict=False):
        draw(axis, rows)
    figure.suptitle(_title(result), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _speed(axis: Axes, rows: Rows) -> None:
    """Tokens per second over one rank's, a line per batch size and depth."""
    sizes = sorted({row["tensor_parallel_size"] for row in rows})
    for batch_size, num_steps in dict.fromkeys((r["batch_size"], r["num_steps"]) for r in rows):
        points = [
            (row["tensor_parallel_size"], row["over_one"])
            for row in rows
            if (row["batch_size"], row["num_steps"]) == (batch_size, num_steps)
            and row["over_one"] is not None
        ]
        if points:
            label = f"batch {batch_size}, K={num_steps}"
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
    axis.plot(sizes, sizes, color="black", linewidth=0.8, label="linear")
    axis.set_xticks(sizes)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("tensor-parallel size")
    axis.set_ylabel("tokens/s relative to size 1")
    axis.legend(fontsize=7)


def _stages(axis: Axes, rows: Rows) -> None:
    """A bar per batch size, depth and size."""
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    for stage, color in _STAGES.items():
        heights = [row[stage] for row in rows]
        axis.bar(places, heights, 0.7, bottom=bottom, color=color, label=stage[:-3])
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    low, high = ([row[key] for row in rows] for key in ("p10_ms", "p90_ms"))
    axis.vlines(places, low, high, color="black")
    keys = ("batch_size", "num_steps", "tensor_parallel_size")
    labels = ["{}\nK={}\nTP={}".format(*(row[key] for key in keys)) for row in rows]
    axis.set_xticks(places, labels, fontsize=6)
    axis.set_xlabel("batch size, drafts, tensor-parallel size")
    axis.set_ylabel("ms per round (line: p10 to p90)")
    axis.legend(fontsize=7)


def _latency(axis: Axes, rows: Rows) -> None:
    """Each way to sum by rows, and what follows a sum: a color per way, a line style per size."""
    sizes = sorted({row["tensor_parallel_size"] for row in rows})
    for (size, style), (name, color) in product(
        zip(sizes, cycle(_STYLES)), zip(_EXCHANGES, cycle(_COLORS))
    ):
        points = [
            (row["rows"], row[name])
            for row in rows
            if row["tensor_parallel_size"] == size and row.get(name) is not None
        ]
        if points:
            axis.plot(
                *zip(*points, strict=True), marker="o", markersize=3, color=color, linestyle=style,
                label=f"{_EXCHANGES[name]}, TP={size}",
            )  # fmt: skip
    ticks = sorted({row["rows"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=7)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("rows")
    axis.set_ylabel("us per call")
    axis.legend(fontsize=6)


def _title(result: Mapping[str, Any]) -> str:
    arguments, here = result["arguments"], result["environment"]
    hardware = f"{here['num_gpus']} x {here['gpu']}" if here["num_gpus"] else here["cpu"]
    lengths = f"{arguments['prompt_tokens']} + {arguments['output_tokens']} tokens"
    return f"{hardware}; {lengths}{forced_note(result)}"
