"""The plot of every benchmark: panels of lines or bars, drawn from records alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

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
