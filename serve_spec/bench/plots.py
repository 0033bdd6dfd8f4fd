"""Plots of benchmark results, drawn from the JSON alone so that an old result can be drawn anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serve_spec.bench.report import forced_note


def pyplot() -> Any:
    """Return matplotlib's pyplot, set up to draw into files alone."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of `pyplot` and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot().close(figure)


def plot_offline(result: Mapping[str, Any], path: Path) -> None:
    """Speed of every arm relative to off, one panel per batch size, grouped by temperature.

    Of decoding while the batch is full, if every cell knows it; else of whole runs.

    result: what `serve-spec bench offline` prints; accept length stands above each bar.
    """
    plt = pyplot()
    cells: Sequence[Mapping[str, Any]] = result["cells"]
    decodes = all(cell.get("decode_speedup") is not None for cell in cells)
    speed = "decode_speedup" if decodes else "speedup"
    batch_sizes = _in_order(cell["batch_size"] for cell in cells)
    temperatures = _in_order(cell["temperature"] for cell in cells)
    arms = _in_order(cell["arm"] for cell in cells)
    figure, axes = plt.subplots(
        1, len(batch_sizes), figsize=(2 + 4 * len(batch_sizes), 3.6), sharey=True, squeeze=False
    )
    for axis, batch_size in zip(axes[0], batch_sizes, strict=True):
        for index, arm in enumerate(arms):
            mine = [c for c in cells if c["arm"] == arm and c["batch_size"] == batch_size]
            places = [t + (index - len(arms) / 2 + 0.5) * 0.8 / len(arms) for t in range(len(mine))]
            bars = axis.bar(places, [c[speed] for c in mine], 0.75 / len(arms), label=arm)
            labels = [f"{c['accept_length']:.1f}" for c in mine]
            axis.bar_label(bars, labels, fontsize=6)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks(range(len(temperatures)), [f"T={t}" for t in temperatures])
        axis.set_title(f"batch {batch_size}")
    of = "decode tokens/s of full batches" if decodes else "tokens/s"
    axes[0][0].set_ylabel(f"{of}, relative to off")
    axes[0][-1].legend(fontsize=7)
    hardware = result["environment"]["gpu"] or result["environment"]["cpu"]
    figure.suptitle(f"{hardware}; accept length above each bar{forced_note(result)}", fontsize=9)
    figure.tight_layout()
    save_figure(figure, path)


def _in_order(values: Any) -> list[Any]:
    """Distinct values in order of first appearance."""
    return list(dict.fromkeys(values))
