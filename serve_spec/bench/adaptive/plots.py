"""The picture of `bench adaptive`, drawn from its JSON alone: load, depth and speed over phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_spec.bench.adaptive.report import CONTROL, OFF
from serve_spec.bench.report import forced_note

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CLASS_COLORS = {
    "predictable": "#c8e6c9",
    "heated": "#ffe0b2",
    "mixture": "#e1d5f0",
    "unpredictable": "#ffcdd2",
}
_ARM_COLORS = {
    "goodput": "#c2185b",
    "goodput-uniform": "#7b1fa2",
    "goodput-chains": "#6d4c41",
    "ema": "#1565c0",
    "ema-aggressive": "#0097a7",
    "per-request": "#ef6c00",
}

_PACE_PIECES = 8
"""Of a phase: more would show single rounds, whose tokens scatter by half their mean."""
_SPEED_TICKS = (0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)

Result = Mapping[str, Any]


def plot_adaptive(result: Result, path: Path) -> None:
    """Four panels over the phases, each phase as wide as any other.

    Batch size with the classes of text as bands; mean drafts per row of every adaptive arm as it
    went; its tokens per second, and those of off; speed of every arm relative to off. The legend
    holds the figures of the whole trace.

    result: what `serve-spec bench adaptive` prints.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    num_phases = len(result["phases"])
    figure, (load, depth, pace, speed) = plt.subplots(
        4,
        1,
        figsize=(max(9.0, 3 + 0.42 * num_phases), 11),
        sharex=True,
        height_ratios=(1, 2, 1.6, 2.4),
        layout="constrained",
    )
    for axis in (load, depth, pace, speed):
        _bands(axis, result["phases"])
    _draw_load(load, result["phases"])
    _draw_depth(depth, result)
    _draw_pace(pace, result)
    _draw_speed(speed, result)
    figure.suptitle(_title(result), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _bands(axis: Axes, phases: Sequence[Result]) -> None:
    for index, phase in enumerate(phases):
        color = _CLASS_COLORS[phase["prompt_class"]]
        axis.axvspan(index, index + 1, color=color, alpha=0.6, linewidth=0)
    axis.set_xlim(0, len(phases))


def _draw_load(axis: Axes, phases: Sequence[Result]) -> None:
    sizes = [phase["batch_size"] for phase in phases]
    axis.step(range(len(sizes) + 1), [*sizes, sizes[-1]], where="post", color="black")
    axis.set_yscale("log", base=2)
    axis.set_yticks(sorted(set(sizes)), [str(size) for size in sorted(set(sizes))])
    axis.set_ylim(min(sizes) / 1.6, max(sizes) * 1.6)
    axis.set_ylabel("batch size")
    shown = {phase["prompt_class"]: phase["temperatures"] for phase in phases}
    for name, temperatures in shown.items():
        label = f"{name}, T = {' and '.join(f'{t:g}' for t in temperatures)}"
        axis.fill_between([], [], color=_CLASS_COLORS[name], label=label)
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(shown), fontsize=8)


def _draw_depth(axis: Axes, result: Result) -> None:
    for arm in result["arms"]:
        if not arm["is_static"]:
            places, steps = _course(result["cells"], arm["arm"], "steps_per_row")
            axis.plot(places, steps, color=_color(arm["arm"]), linewidth=1.1)
    axis.set_ylabel("drafts per row and round")
    axis.set_ylim(bottom=0)
    axis.grid(axis="y", alpha=0.4)


def _draw_pace(axis: Axes, result: Result) -> None:
    for arm in result["arms"]:
        if not arm["is_static"] or arm["arm"] == OFF:
            cells = result["cells"]
            places, speeds = _course(cells, arm["arm"], "tokens_per_second", _PACE_PIECES)
            axis.plot(places, speeds, color=_color(arm["arm"]), linewidth=1.1)
    axis.set_yscale("log")
    axis.set_ylabel("tokens/s (off: black)")
    axis.grid(axis="y", which="both", alpha=0.3)


def _course(
    cells: Sequence[Result], arm: str, key: str, most_pieces: int | None = None
) -> tuple[list[float], list[float]]:
    """A column of the series over the trace: every phase's own time, stretched to one unit.

    most_pieces: of a phase, those that follow each other made one, weighted by their time.
    """
    places: list[float] = []
    values: list[float] = []
    for cell in cells:
        series = cell.get("series")  # results of earlier versions have none of off
        if cell["arm"] != arm or series is None:
            continue
        ends, column = series["ms"], series[key]
        stride = 1 if most_pieces is None else -(-len(ends) // most_pieces)
        for first in range(0, len(ends), stride):
            piece = range(first, min(first + stride, len(ends)))
            starts = [ends[i - 1] if i else 0.0 for i in piece]
            weights = [ends[i] - start for i, start in zip(piece, starts, strict=True)]
            value = sum(column[i] * w for i, w in zip(piece, weights, strict=True)) / sum(weights)
            places += [cell["phase"] + ms / ends[-1] for ms in (starts[0], ends[piece[-1]])]
            values += [value, value]
    return places, values


def _draw_speed(axis: Axes, result: Result) -> None:
    """A level per phase; fixed depths stay in the background, darker the deeper."""
    fixed = [arm for arm in result["arms"] if arm["is_static"] and arm["arm"] not in (OFF, CONTROL)]
    for index, arm in enumerate(fixed):
        shade = str(0.75 - 0.5 * index / max(1, len(fixed) - 1))
        _levels(axis, result, arm, color=shade, linewidth=0.9, linestyle="--")
    for arm in result["arms"]:
        if not arm["is_static"]:
            _levels(axis, result, arm, color=_color(arm["arm"]), linewidth=2.0)
        elif arm["arm"] == CONTROL:
            _levels(axis, result, arm, color="black", linewidth=0.9, linestyle=":")
    axis.axhline(1.0, color="black", linewidth=0.9)
    levels = [cell["speed_over_off"] for cell in result["cells"]]
    axis.set_yscale("log")
    axis.set_yticks(_SPEED_TICKS, [f"{tick:g}" for tick in _SPEED_TICKS])
    axis.minorticks_off()
    axis.set_ylim(min(levels) / 1.1, max(levels) * 1.1)
    axis.set_ylabel("tokens/s relative to off")
    axis.grid(axis="y", alpha=0.4)
    _phase_ticks(axis, result["phases"])
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, fontsize=8)


def _levels(axis: Axes, result: Result, arm: Result, **style: Any) -> None:
    levels = [cell["speed_over_off"] for cell in result["cells"] if cell["arm"] == arm["arm"]]
    places = range(len(levels) + 1)
    regret = "" if arm["regret"] is None else f"regret {arm['regret']:.1%}, "
    label = f"{arm['arm']}: {regret}worst {arm['worst_over_off']:.2f} x off"
    axis.step(places, [*levels, levels[-1]], where="post", label=label, **style)


def _phase_ticks(axis: Axes, phases: Sequence[Result]) -> None:
    """Batch sizes below the phases that share them."""
    runs = [
        (size, [index for index, _ in run])
        for size, run in groupby(enumerate(phases), key=lambda item: item[1]["batch_size"])
    ]
    for _, indices in runs[1:]:
        axis.axvline(indices[0], color="black", linewidth=0.5, alpha=0.5)
    centres = [(indices[0] + indices[-1] + 1) / 2 for _, indices in runs]
    axis.set_xticks(centres, [f"batch {size}" for size, _ in runs])
    axis.tick_params(axis="x", length=0)


def _color(arm: str) -> str:
    return _ARM_COLORS.get(arm, "black")


def _title(result: Result) -> str:
    hardware = result["environment"]["gpu"] or result["environment"]["cpu"]
    repetitions = result["arguments"]["repetitions"]
    return (
        f"{hardware}; speed: median of {repetitions} repetitions, time of prompts taken out; "
        f"what went on within phases: the last repetition{forced_note(result)}"
    )
