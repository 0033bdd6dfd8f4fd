"""The picture of `bench drafters`, drawn from its JSON alone."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from serve_spec.bench.drafters.run import OFF
from serve_spec.bench.report import forced_note


def plot_drafters(result: Mapping[str, Any], path: Path) -> None:
    """Speed of every arm relative to off: drafter by drafter, a row per batch, a column per T.

    result: what `serve-spec bench drafters` prints; accept length stands above each bar.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if row["drafts"] != OFF]
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    temperatures, batch_sizes = (
        sorted({row[key] for row in rows}) for key in ("temperature", "batch_size")
    )
    across, down = len(temperatures), len(batch_sizes)
    width = max(4.5, 1 + 1.2 * len(drafters))
    figure, axes = plt.subplots(down, across, figsize=(width * across, 2.8 * down), squeeze=False)
    panels = product(temperatures, batch_sizes)
    for axis, panel in zip(axes.T.flat, panels, strict=True):
        for number, arm in enumerate(arms):
            mine = [
                row
                for row in rows
                if row["arm"] == arm and (row["temperature"], row["batch_size"]) == panel
            ]
            shift = (number - (len(arms) - 1) / 2) * 0.8 / len(arms)
            places = [drafters.index(row["drafter"]) + shift for row in mine]
            bars = axis.bar(places, [row["speedup"] for row in mine], 0.75 / len(arms), label=arm)
            axis.bar_label(bars, [f"{row['accept_length']:.1f}" for row in mine], fontsize=6)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks(range(len(drafters)), drafters, fontsize=8)
        axis.set_title(f"T={panel[0]:g}, batch {panel[1]}", fontsize=9)
        axis.set_ylabel("speed over off")
    axes[0][0].legend(fontsize=7)
    hardware = result["environment"]["gpu"] or result["environment"]["cpu"]
    figure.suptitle(f"{hardware}; accept length above each bar{forced_note(result)}", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
