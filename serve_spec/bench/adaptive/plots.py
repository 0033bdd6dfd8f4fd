"""The picture of `bench adaptive`: depth and speed of every arm by phase."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_spec.bench.plots import pyplot, save_figure
from serve_spec.bench.report import forced_note


def plot_adaptive(result: Mapping[str, Any], path: Path) -> None:
    """Draw drafts verified per request and step, and speed over off, by phase.

    result: what `serve-spec bench adaptive` prints last. Fixed depths are grey, darker the deeper.
    """
    phases, arms = result["phases"], result["arms"]
    figure, (depth, speed) = pyplot().subplots(
        2,
        1,
        figsize=(max(8.0, 3 + 0.5 * len(phases)), 8),
        sharex=True,
        height_ratios=(1, 2),
        layout="constrained",
    )
    num_fixed = sum(arm["is_static"] for arm in arms)
    for number, arm in enumerate(arms):
        name, is_static = arm["arm"], arm["is_static"]
        cells = [phase["arms"][name] for phase in phases]
        label = f"{name}: {arm['over_off']:.2f} x off, worst {arm['worst_over_off']:.2f}"
        shade = str(0.8 - 0.6 * number / num_fixed)
        style = {"color": shade, "linewidth": 1} if is_static else {"color": f"C{number}"}
        speed.plot([cell["over_off"] for cell in cells], label=label, marker=".", **style)
        if not is_static:
            depth.plot([cell["verified"] for cell in cells], marker=".", **style)
    depth.set_ylabel("drafts per request and step")
    depth.set_ylim(bottom=0)
    speed.set_ylabel("tokens/s relative to off")
    speed.set_xticks(
        range(len(phases)), [phase["phase"] for phase in phases], rotation=60, ha="right"
    )
    for axis in (depth, speed):
        axis.grid(axis="y", alpha=0.4)
    speed.legend(fontsize=8)
    hardware = result["environment"]["gpu"] or result["environment"]["cpu"]
    figure.suptitle(f"{hardware}{forced_note(result)}", fontsize=9)
    save_figure(figure, path)
