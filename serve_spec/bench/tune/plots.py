"""The plot of a sweep, drawn from its JSON alone so that an old result can be drawn anew."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_spec.bench.tune.cells import Cell, label
from serve_spec.core.draft import PLAIN, DraftShape


def plot_tune(result: Mapping[str, Any], path: Path) -> None:
    """Speed relative to off over the batch size: a panel per prompt class, a line per K and tree.

    result: what `serve-spec tune` prints.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    cells = [Cell(**cell) for cell in result["cells"]]
    classes: Mapping[str, str] = result["classes"]
    batch_sizes = sorted({cell.batch_size for cell in cells})
    figure, axes = plt.subplots(
        1, len(classes), figsize=(1 + 4 * len(classes), 3.8), sharey=True, squeeze=False
    )
    for axis, (name, about) in zip(axes[0], classes.items(), strict=True):
        mine = [cell for cell in cells if cell.prompt_class == name]
        speed = {(cell.batch_size, cell.shape): cell.tokens_per_second for cell in mine}
        for shape in dict.fromkeys(cell.shape for cell in mine):
            speedups = [speed[size, shape] / speed[size, PLAIN] for size in batch_sizes]
            axis.plot(batch_sizes, speedups, markersize=3, label=label(shape), **_style(shape))
        axis.set_xscale("log", base=2)
        axis.set_xticks(batch_sizes, [str(size) for size in batch_sizes])
        axis.set_xlabel("batch size")
        axis.set_title(f"{name}: {about}", fontsize=9)
    axes[0][0].set_ylabel("tokens/s relative to off")
    axes[0][-1].legend(fontsize=7)
    figure.suptitle(result["environment"]["gpu"] or result["environment"]["cpu"], fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _style(shape: DraftShape) -> dict[str, Any]:
    """Off is a thin line, trees are dashed."""
    if shape == PLAIN:
        return {"color": "black", "linewidth": 0.8}
    return {"marker": "o"} if shape.is_chain else {"marker": "^", "linestyle": "--"}
