"""The picture of `bench online`, drawn from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from serve_spec.bench.online.figures import OFFLINE, fleet_course
from serve_spec.bench.plots import pyplot, save_figure
from serve_spec.bench.report import forced_note

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = Mapping[str, Any]

_PERCENTILES = {"p50": "#90caf9", "p90": "#1e88e5", "p99": "#0d47a1"}


def plot_online(result: Result, path: Path) -> None:
    """Five panels: time to first token, time per token, speed with goodput; batch sizes and K.

    The first three have a group per load and side; the last two run over the time of the last
    repetition of each load, as far as the server tells.

    result: what `serve-spec bench online` prints.
    """
    plt = pyplot()
    cells: Sequence[Result] = result["cells"]
    figure = plt.figure(figsize=(max(10.0, 4 + 1.4 * len(cells)), 8), layout="constrained")
    grid = figure.add_gridspec(2, 6)
    above = [figure.add_subplot(grid[0, 2 * place : 2 * place + 2]) for place in range(3)]
    below = [figure.add_subplot(grid[1, 3 * place : 3 * place + 3]) for place in range(2)]
    objective = result["objective"]
    _draw_latency(above[0], cells, "ttft_ms", objective["ttft_ms"], "time to first token, ms")
    _draw_latency(above[1], cells, "tpot_ms", objective["tpot_ms"], "time per output token, ms")
    _draw_speed(above[2], cells)
    _draw_course(below[0], below[1], [cell for cell in cells if cell["side"] != OFFLINE])
    hardware = result["environment"]["gpu"] or result["environment"]["cpu"]
    asked = result["arguments"]
    figure.suptitle(
        f"{hardware}; {asked['num_requests']} requests of {asked['output_tokens']} tokens a load, "
        f"{asked['repetitions']} repetitions, T = {asked['temperature']:g}{forced_note(result)}",
        fontsize=9,
    )
    save_figure(figure, path)


def _draw_latency(
    axis: Axes, cells: Sequence[Result], key: str, limit_ms: float | None, title: str
) -> None:
    for place, (name, color) in enumerate(_PERCENTILES.items()):
        heights = [0.0 if cell[key] is None else cell[key][name] for cell in cells]
        axis.bar(_beside(cells, place, 3), heights, 0.27, color=color, label=name)
    if limit_ms is not None:
        axis.axhline(limit_ms, color="black", linewidth=0.8, linestyle="--", label="objective")
    _finish(axis, cells, title)


def _draw_speed(axis: Axes, cells: Sequence[Result]) -> None:
    speeds = {
        "tokens_per_second": ("every whole answer", "#bdbdbd"),
        "goodput_tokens_per_second": ("those within the objective", "#2e7d32"),
    }
    for place, (key, (label, color)) in enumerate(speeds.items()):
        axis.bar(_beside(cells, place, 2), [c[key] for c in cells], 0.4, color=color, label=label)
    _finish(axis, cells, "tokens/s")


def _draw_course(batch: Axes, depth: Axes, cells: Sequence[Result]) -> None:
    for cell in cells:
        times, sizes = fleet_course(cell["samples"], "batch_size")
        batch.step(times, list(map(sum, sizes)), where="post", marker=".", label=cell["load"])
        times, steps = fleet_course(cell["samples"], "num_steps")
        depth.step(times, list(map(fmean, steps)), where="post", marker=".")
    batch.set_title("sequences that decode, all replicas, as they report it", fontsize=9)
    depth.set_title("K, mean of the replicas, as they report it", fontsize=9)
    for axis in (batch, depth):
        axis.set_xlabel("seconds")
        axis.set_ylim(bottom=0)
    batch.legend(fontsize=7)


def _beside(cells: Sequence[Result], place: int, of: int) -> list[float]:
    return [index + (place - (of - 1) / 2) * 0.8 / of for index in range(len(cells))]


def _finish(axis: Axes, cells: Sequence[Result], title: str) -> None:
    labels = [f"{cell['load']}\n{cell['side']}" for cell in cells]
    axis.set_xticks(range(len(cells)), labels, fontsize=7, rotation=90 if len(cells) > 4 else 0)
    axis.set_title(title, fontsize=9)
    axis.legend(fontsize=7)
