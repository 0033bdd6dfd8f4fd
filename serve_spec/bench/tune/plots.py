"""The plot of a sweep, drawn from its JSON alone so that an old result can be drawn anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_tune(result: Mapping[str, Any], path: Path) -> None:
    """Speed relative to off over the batch size: a panel per prompt class, a line per K.

    result: what `serve-spec tune` prints.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    cells: Sequence[Mapping[str, Any]] = result["cells"]
    classes: Mapping[str, str] = result["classes"]
    batch_sizes = sorted({cell["batch_size"] for cell in cells})
    figure, axes = plt.subplots(
        1, len(classes), figsize=(1 + 4 * len(classes), 3.8), sharey=True, squeeze=False
    )
    for axis, (name, about) in zip(axes[0], classes.items(), strict=True):
        mine = {(c["batch_size"], c["num_steps"]): c for c in cells if c["prompt_class"] == name}
        for num_steps in sorted({num_steps for _, num_steps in mine}):
            speedups = [
                mine[size, num_steps]["tokens_per_second"] / mine[size, 0]["tokens_per_second"]
                for size in batch_sizes
            ]
            style = {"color": "black", "linewidth": 0.8} if num_steps == 0 else {"marker": "o"}
            axis.plot(batch_sizes, speedups, markersize=3, label=f"K={num_steps}", **style)
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
