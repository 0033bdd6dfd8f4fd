"""From the cells of a sweep to what is done with them: the adaptive config, tables, the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from serve_spec.bench.tune.cells import Cell, label
from serve_spec.core.draft import PLAIN

AdaptiveFile: TypeAlias = dict[str, dict[str, Any]]
"""What `config.adaptive_file` reads: candidate steps, and trees, by the lower bound of the batch
sizes."""

COLUMNS = (
    "class",
    "batch",
    "K",
    "tok/s",
    "slowest",
    "x off",
    "accept length",
    "round ms",
    "draft ms",
    "verify ms",
    "same texts",
)


def best_cells(cells: Sequence[Cell]) -> dict[tuple[int, str], Cell]:
    """The fastest cell of every batch size and prompt class; of equals that of the fewest drafts.

    Of as many drafts, a chain before trees.
    """

    def order(cell: Cell) -> tuple[float, ...]:
        return -cell.tokens_per_second, cell.shape.size, cell.tree_drafts, cell.num_steps

    best: dict[tuple[int, str], Cell] = {}
    for cell in sorted(cells, key=order):
        best.setdefault((cell.batch_size, cell.prompt_class), cell)
    return best


def adaptive_config(cells: Sequence[Cell]) -> AdaptiveFile:
    """One slot per measured batch size: the best steps of its classes; equal neighbours are one.

    A slot reaches from its batch size to the next one measured. Where trees were measured it lists
    those that were best, the root counted, and their levels are among its steps.
    """
    best = best_cells(cells)
    slots: AdaptiveFile = {}
    last: dict[str, Any] | None = None
    for batch_size in sorted({batch_size for batch_size, _ in best}):
        shapes = {cell.shape for (size, _), cell in best.items() if size == batch_size}
        slot: dict[str, Any] = {"candidate_steps": sorted({shape.depth for shape in shapes})}
        if _has_trees(cells):
            trees = sorted(shape for shape in shapes if not shape.is_chain)
            slot["candidate_trees"] = [[tree.depth, tree.size + 1] for tree in trees]
        if slot != last:
            slots[str(batch_size)] = slot
        last = slot
    return slots


def speedups(cells: Sequence[Cell]) -> dict[Cell, float]:
    """Tokens per second of every cell over those of its class and batch size with 0 steps."""
    off = {
        (cell.batch_size, cell.prompt_class): cell.tokens_per_second
        for cell in cells
        if cell.shape == PLAIN
    }
    return {
        cell: cell.tokens_per_second / off[cell.batch_size, cell.prompt_class] for cell in cells
    }


def rows(cells: Sequence[Cell]) -> list[list[object]]:
    """The cells under `COLUMNS`."""
    speedup = speedups(cells)
    return [
        [
            cell.prompt_class,
            cell.batch_size,
            str(cell.shape),
            f"{cell.tokens_per_second:.0f}",
            f"{cell.tokens_per_second_low:.0f}",
            speedup[cell],
            cell.accept_length,
            cell.round_ms,
            cell.draft_ms,
            cell.verify_ms,
            f"{cell.same_texts}/{cell.num_texts}",
        ]
        for cell in cells
    ]


def markdown(
    cells: Sequence[Cell],
    *,
    classes: Mapping[str, str],
    keys: Mapping[str, str],
    facts: Mapping[str, object],
) -> str:
    """The report of a sweep.

    classes: what each prompt class is, in the order they are shown. keys: what to put into the
    configuration. facts: what a figure is worthless without, such as hardware and command.
    """
    parts = [
        "# What speculation gives on this machine",
        "\n".join(f"- {name}: {value}" for name, value in facts.items()),
        "## What to put into the configuration",
        "```yaml\nspeculative:\n"
        + "".join(f"  {key}: {value}\n" for key, value in keys.items())
        + "```",
        "`serve-spec breakeven --cost-table FILE` says from which accept rate on drafts pay.",
        "## The best steps",
        "A slot holds the best steps of each class of prompts and reaches up to the next one.",
        _markdown_table(*_best_table(cells, list(classes))),
    ]
    for name, about in classes.items():
        shown = [row[1:] for row in rows([cell for cell in cells if cell.prompt_class == name])]
        parts += [f"## {name}: {about}", _markdown_table(COLUMNS[1:], shown)]
    return "\n\n".join([*parts, _HOW_TO_READ]) + "\n"


_HOW_TO_READ = """## How to read the tables

- K is the number of draft steps a round; 0 is off, in the same engine. A batch starts together.
- AxB is a tree of A levels and B drafts, the root not counted (the JSON files count it).
- Only rounds count in which every sequence of the batch decodes and drafts in full: no prompts, no
  catch-up of the draft over a prompt, no thinning tail. tok/s is of the median repetition.
- Accept length is tokens per sequence and round: drafts kept, plus one.
- Same texts: how many are those of K = 0, token for token. All are in float32, but for near-ties
  that a GPU rounds differently with the number of rows; in bfloat16 such ties are common."""


def _best_table(
    cells: Sequence[Cell], classes: Sequence[str]
) -> tuple[list[str], list[list[object]]]:
    best, speedup, slots = best_cells(cells), speedups(cells), adaptive_config(cells)
    table: list[list[object]] = []
    for batch_size in sorted({cell.batch_size for cell in cells}):
        slot = slots[str(max(int(key) for key in slots if int(key) <= batch_size))]
        fastest = [best[batch_size, name] for name in classes]
        shown = [f"{label(cell.shape)}, {speedup[cell]:.2f} x off" for cell in fastest]
        trees = [_listed(slot["candidate_trees"])] if _has_trees(cells) else []
        table.append([batch_size, slot["candidate_steps"], *trees, *shown])
    columns = ["candidate steps", *(["candidate trees"] if _has_trees(cells) else [])]
    return ["batch", *columns, *classes], table


def _listed(trees: Sequence[tuple[int, int]]) -> str:
    """Those of a slot, by their names."""
    return ", ".join(f"{depth}x{rows - 1}" for depth, rows in trees) or "none"


def _has_trees(cells: Sequence[Cell]) -> bool:
    return any(cell.tree_drafts for cell in cells)


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_shown, line)) + " |" for line in lines)


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
