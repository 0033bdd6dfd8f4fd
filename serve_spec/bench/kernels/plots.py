"""The pictures of `bench kernels`, from its JSON alone, so that old results can be drawn anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_spec.bench.kernels.report import with_others
from serve_spec.bench.report import forced_note

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]

_STAGES = {"draft_ms": "#1565c0", "verify_ms": "#90a4ae", "idle_ms": "#c2185b"}
_LEADING: dict[str, Any] = {"color": "#ef6c00", "marker": "D", "markersize": 4, "linewidth": 0.8}
_AIM: dict[str, Any] = {"color": "black", "marker": "_", "markersize": 14, "linewidth": 0}
_POINTS: dict[str, Any] = {"marker": "o", "markersize": 3, "linewidth": 0}
_POLICY = "#c2185b"


def plot_kernels(result: Result, folder: Path) -> list[Path]:
    """One PNG in `folder` for each section that has a picture; the files written.

    result: what `serve-spec bench kernels` prints.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (draw, num_panels) in _PICTURES.items():
        if not result["sections"].get(name, {}).get("rows"):
            continue
        figure, axes = plt.subplots(
            1, num_panels, figsize=(2 + 4.5 * num_panels, 4), squeeze=False, layout="constrained"
        )
        draw(axes[0], with_others(name, result))
        figure.suptitle(_title(result), fontsize=9)
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=130)
        plt.close(figure)
    return written


def _draw_floor(axes: Sequence[Axes], section: Result) -> None:
    (axis,) = axes
    rows = section["rows"]
    for key, label in (("torch_ms", "torch's products"), ("ours_ms", "ours")):
        _line(axis, rows, "rows", key, label=label, marker="o", markersize=3)
    axis.axhline(section["facts"]["weights_at_copy_speed_ms"], color="black", linewidth=0.8)
    axis.text(rows[0]["rows"], section["facts"]["weights_at_copy_speed_ms"], "copying", fontsize=7)
    _finish(axis, [row["rows"] for row in rows], "rows", "ms for all products")


def _draw_plain(axes: Sequence[Axes], section: Result) -> None:
    (axis,) = axes
    rows = section["rows"]
    sizes = [row["batch_size"] for row in rows]
    low, high = ([row[key] for row in rows] for key in ("p10_ms", "p90_ms"))
    axis.fill_between(sizes, low, high, alpha=0.3)
    _line(axis, rows, "batch_size", "ms", label="plain step", marker="o", markersize=3)
    _line(axis, rows, "batch_size", "floor_ms", label="products alone", color="grey")
    _line(axis, rows, "batch_size", "aim_ms", label="leading engine", **_LEADING)
    _finish(axis, sizes, "batch size", "ms per step (band: p10 to p90)")


def _draw_rounds(axes: Sequence[Axes], section: Result) -> None:
    """A bar per depth and batch size: where the time of a round goes."""
    (axis,) = axes
    rows = [{**row, "place": place} for place, row in enumerate(section["rows"])]
    places = [row["place"] for row in rows]
    bottom = [0.0] * len(rows)
    for stage, color in _STAGES.items():
        heights = [row[stage] for row in rows]
        axis.bar(places, heights, 0.7, bottom=bottom, color=color, label=stage[:-3])
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    low, high = ([row[key] for row in rows] for key in ("p10_ms", "p90_ms"))
    axis.vlines(places, low, high, color="black")
    _line(axis, rows, "place", "ms", label="round", color="black", **_POINTS)
    _line(axis, rows, "place", "leading_ms", label="leading engine", **{**_LEADING, **_POINTS})
    _line(axis, rows, "place", "aim_ms", label="aim", **_AIM)
    labels = [f"{row['batch_size']}\nK={row['num_steps']}" for row in rows]
    axis.set_xticks(places, labels, fontsize=7)
    axis.set_xlabel("batch size")
    axis.set_ylabel("ms per round (line: p10 to p90)")
    axis.legend(fontsize=7)


def _draw_adaptive(axes: Sequence[Axes], section: Result) -> None:
    """Speed of every arm relative to off, a group of bars per batch size."""
    (axis,) = axes
    arms = _in_order(row["arm"] for row in section["rows"])
    sizes = _in_order(row["batch_size"] for row in section["rows"])
    cells = {(row["arm"], row["batch_size"]): row for row in section["rows"]}
    off = [cells[arms[0], size]["per_law"] for size in sizes]
    width = 0.8 / len(arms)
    for index, arm in enumerate(arms):
        speeds = [
            cells[arm, size]["per_law"] / plain for size, plain in zip(sizes, off, strict=True)
        ]
        places = [place - 0.4 + (index + 0.5) * width for place in range(len(sizes))]
        color = _POLICY if arm == arms[-1] else str(0.85 - 0.6 * index / len(arms))
        axis.bar(places, speeds, 0.9 * width, color=color, label=arm)
    for place, (size, plain) in enumerate(zip(sizes, off, strict=True)):
        for key, style in (("leading", _LEADING), ("aim", _AIM)):
            level = cells[arms[-1], size][key]
            if level is not None:
                axis.hlines(level / plain, place - 0.4, place + 0.4, color=style["color"])
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(sizes)), [f"batch {size}" for size in sizes])
    axis.set_ylabel("tokens/s relative to off; lines: leading engine, aim")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_costs(axes: Sequence[Axes], section: Result) -> None:
    """The longer context: a line per number of drafts."""
    context = max(row["context"] for row in section["rows"])
    for axis, stage in zip(axes, ("draft", "verify"), strict=True):
        rows = [r for r in section["rows"] if (r["context"], r["stage"]) == (context, stage)]
        for num_steps in section["facts"]["num_steps"]:
            label = f"K={num_steps}"
            _line(axis, rows, "batch_size", label, label=label, marker="o", markersize=3)
        axis.set_title(f"{stage}, {context} tokens", fontsize=9)
        _finish(axis, [row["batch_size"] for row in rows], "batch size", "ms")


def _line(axis: Axes, rows: Rows, x: str, y: str, **style: Any) -> None:
    points = [(row[x], row[y]) for row in rows if row.get(y) is not None]
    if points:
        axis.plot(*zip(*points, strict=True), **style)


def _finish(axis: Axes, ticks: Sequence[int], x: str, y: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=7)
    axis.set_ylim(bottom=0)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.legend(fontsize=7)


def _in_order(values: Iterable[Any]) -> list[Any]:
    """Distinct values in order of first appearance."""
    return list(dict.fromkeys(values))


def _title(result: Result) -> str:
    arguments = result["arguments"]
    hardware = result["environment"]["gpu"] or result["environment"]["cpu"]
    lengths = f"{arguments['prompt_tokens']} + {arguments['output_tokens']} tokens"
    return f"{hardware}; {lengths}{forced_note(result)}"


_PICTURES: Mapping[str, tuple[Callable[[Sequence[Any], Result], None], int]] = {
    "floor": (_draw_floor, 1),
    "plain": (_draw_plain, 1),
    "rounds": (_draw_rounds, 1),
    "adaptive": (_draw_adaptive, 1),
    "costs": (_draw_costs, 2),
}
