"""Measurements of `serve-spec tune`: the file that keeps them, the adaptive config, the report."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from serve_spec.bench.report import Panel, Record, append_record, draw, plot_title
from serve_spec.config import ConfigError
from serve_spec.core.draft import DraftShape

Place: TypeAlias = tuple[int, str, DraftShape]
"""Place of a measurement in the sweep: batch size, class of prompts, draft shape."""
AdaptiveFile: TypeAlias = dict[str, dict[str, Any]]
"""An adaptive config: candidate steps, and trees, by the lower bound of the batch size."""

COLUMNS = (
    *("class", "batch", "K", "tok/s", "slowest", "x off", "accept length"),
    *("round ms", "draft ms", "verify ms", "same texts"),
)
_HOW_TO_READ = """## How to read the tables

- K is the number of draft steps per round; 0 is off, in the same engine. A batch starts together.
- AxB is a tree of A levels and B drafts, the root not counted (the JSON files count it).
- Only rounds in which every request decodes and drafts in full are counted: no prompts, no draft
  extend over a prompt, no shrinking batch. tok/s is the median over repetitions.
- Accept length is tokens per request and round: accepted drafts, plus one.
- Same texts: texts equal to those of K = 0, token for token. In float32 all are, except for
  near-ties that a GPU rounds differently by batch shape; in bfloat16 such ties are common."""


@dataclass(frozen=True)
class Measurement:
    """Figures of one draft shape on one class of prompts at one batch size.

    Times and tokens are of rounds in which every request of the batch decodes and drafts in full.
    """

    batch_size: int
    prompt_class: str
    num_steps: int
    tokens_per_second: float
    """Median repetition."""
    tokens_per_second_low: float
    """Slowest repetition."""
    speedup: float
    """Speed over that of `num_steps` 0."""
    accept_length: float
    round_ms: float
    draft_ms: float
    verify_ms: float
    same_texts: int
    """Texts that equal those of `num_steps` 0 as far as both were generated."""
    num_texts: int
    tree_drafts: int = 0
    """Drafts of a tree of `num_steps` levels; 0: a chain."""
    topk: int = 1

    @property
    def shape(self) -> DraftShape:
        """Return the draft shape."""
        return DraftShape(self.num_steps, self.tree_drafts or self.num_steps, self.topk)

    @property
    def place(self) -> Place:
        """Return its place in the sweep."""
        return self.batch_size, self.prompt_class, self.shape


class MeasurementFile:
    """A JSON-lines file: the settings of all measurements, then a measurement per line.

    An incomplete last line is dropped. If a place was measured twice, the last one counts.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, fresh: bool = False) -> None:
        """Open or create the file; raise ConfigError if it has other settings, unless `fresh`."""
        self._path = path
        self.by_place: dict[Place, Measurement] = {}
        header = json.dumps({"settings": settings})
        lines = [] if fresh or not path.exists() else _whole_lines(path)
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(header + "\n", encoding="utf-8")
            return
        try:
            before = dict(_leaves(json.loads(lines[0])["settings"]))
            found = [Measurement(**json.loads(line)) for line in lines[1:]]
        except (ValueError, KeyError, TypeError, AttributeError):
            fix = "use another --output-dir, or --fresh to overwrite"
            raise ConfigError(f"{path}: has no measurements of this version; {fix}") from None
        now = dict(_leaves(json.loads(header)["settings"]))
        changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if changed:
            way_out = "use that, another --output-dir, or --fresh to measure all again"
            why = {key: f"{path} was measured with {before.get(key)!r}" for key in changed}
            raise ConfigError(
                *(f"{key}={now.get(key)!r}: {why[key]}; {way_out}" for key in changed)
            )
        self.by_place = {each.place: each for each in found}

    def append(self, measurements: Sequence[Measurement]) -> None:
        """Keep finished measurements, in memory and on disk."""
        for each in measurements:
            self.by_place[each.place] = each
            append_record(self._path, asdict(each))


def _whole_lines(path: Path) -> list[str]:
    """Return the lines of the file, after cutting it back to its last line end."""
    content = path.read_bytes()
    finished = content[: content.rfind(b"\n") + 1]
    os.truncate(path, len(finished))
    return finished.decode(errors="replace").splitlines()


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its dotted key."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def label(shape: DraftShape) -> str:
    """Return the name of a shape in tables and plots."""
    return f"K={shape}" if shape.is_chain else str(shape)


def best_measurements(measurements: Sequence[Measurement]) -> dict[tuple[int, str], Measurement]:
    """Return the fastest per batch size and class; on ties, fewer drafts, then a chain."""

    def order(each: Measurement) -> tuple[float, ...]:
        return -each.tokens_per_second, each.shape.size, each.tree_drafts, each.num_steps

    best: dict[tuple[int, str], Measurement] = {}
    for each in sorted(measurements, key=order):
        best.setdefault((each.batch_size, each.prompt_class), each)
    return best


def adaptive_config(measurements: Sequence[Measurement]) -> AdaptiveFile:
    """Return a slot per batch size with the best steps of its classes; equal neighbours are merged.

    A slot reaches to the next batch size. If trees were measured, it lists the best of them, with
    the root counted, and their levels are among its steps.
    """
    best = best_measurements(measurements)
    slots: AdaptiveFile = {}
    last: dict[str, Any] | None = None
    for batch_size in sorted({batch_size for batch_size, _ in best}):
        shapes = {each.shape for (size, _), each in best.items() if size == batch_size}
        slot: dict[str, Any] = {"candidate_steps": sorted({shape.depth for shape in shapes})}
        if _has_trees(measurements):
            trees = sorted(shape for shape in shapes if not shape.is_chain)
            slot["candidate_trees"] = [[tree.depth, tree.size + 1] for tree in trees]
        if slot != last:
            slots[str(batch_size)] = slot
        last = slot
    return slots


def rows(measurements: Sequence[Measurement]) -> list[list[object]]:
    """Return the rows under `COLUMNS`."""
    return [
        [
            each.prompt_class,
            each.batch_size,
            str(each.shape),
            f"{each.tokens_per_second:.0f}",
            f"{each.tokens_per_second_low:.0f}",
            each.speedup,
            each.accept_length,
            each.round_ms,
            each.draft_ms,
            each.verify_ms,
            f"{each.same_texts}/{each.num_texts}",
        ]
        for each in measurements
    ]


def markdown(
    measurements: Sequence[Measurement],
    *,
    classes: Mapping[str, str],
    keys: Mapping[str, str],
    facts: Mapping[str, object],
) -> str:
    """Return a sweep's report.

    classes: description of each class; keys: for the configuration; facts: hardware and versions.
    """
    parts = [
        "# Speculation on this machine",
        "\n".join(f"- {name}: {value}" for name, value in facts.items()),
        "## Keys for the configuration",
        "```yaml\nspeculative:\n"
        + "".join(f"  {key}: {value}\n" for key, value in keys.items())
        + "```",
        "`serve-spec breakeven --cost-table FILE` shows the break-even accept rates.",
        "## The best steps",
        "A slot holds the best steps of each class of prompts, up to the next slot's batch size.",
        _markdown_table(*_best_table(measurements, list(classes))),
    ]
    for name, about in classes.items():
        mine = [each for each in measurements if each.prompt_class == name]
        shown = [row[1:] for row in rows(mine)]
        parts += [f"## {name}: {about}", _markdown_table(COLUMNS[1:], shown)]
    return "\n\n".join([*parts, _HOW_TO_READ]) + "\n"


def _best_table(
    measurements: Sequence[Measurement], classes: Sequence[str]
) -> tuple[list[str], list[list[object]]]:
    best = best_measurements(measurements)
    slots, has_trees = adaptive_config(measurements), _has_trees(measurements)
    table: list[list[object]] = []
    for batch_size in sorted({each.batch_size for each in measurements}):
        slot = slots[str(max(int(key) for key in slots if int(key) <= batch_size))]
        fastest = [best[batch_size, name] for name in classes]
        shown = [f"{label(each.shape)}, {each.speedup:.2f} x off" for each in fastest]
        trees = []
        if has_trees:
            names = [f"{depth}x{tokens - 1}" for depth, tokens in slot["candidate_trees"]]
            trees = [", ".join(names) or "none"]
        table.append([batch_size, slot["candidate_steps"], *trees, *shown])
    columns = ["candidate steps", *(["candidate trees"] if has_trees else [])]
    return ["batch", *columns, *classes], table


def _has_trees(measurements: Sequence[Measurement]) -> bool:
    return any(each.tree_drafts for each in measurements)


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_shown, line)) + " |" for line in lines)


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def plot(run: Record, measurements: Sequence[Measurement], path: Path) -> None:
    """Draw speed over off by batch size: a panel per class of prompts, a line per shape."""
    sizes = sorted({each.batch_size for each in measurements})
    shapes = list(dict.fromkeys(each.shape for each in measurements))
    trees = {"marker": "^", "linestyle": "--"}
    panels = [
        Panel(
            f"{name}: {about}",
            {
                label(shape): [
                    (sizes.index(each.batch_size), each.speedup)
                    for each in measurements
                    if each.prompt_class == name and each.shape == shape
                ]
                for shape in shapes
            },
            ticks=list(map(str, sizes)),
            x_label="batch size",
            y_label="tokens/s relative to off",
            styles={label(shape): {} if shape.is_chain else trees for shape in shapes},
        )
        for name, about in run["classes"].items()
    ]
    draw(panels, path, plot_title(run))
