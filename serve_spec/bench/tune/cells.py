"""The cells of a sweep, and the file that keeps the finished ones so that a sweep can go on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from serve_spec.config import ConfigError
from serve_spec.core.draft import DraftShape


def label(shape: DraftShape) -> str:
    """Return its name in tables and plots."""
    return f"K={shape}" if shape.is_chain else str(shape)


Place: TypeAlias = tuple[int, str, DraftShape]
"""Where a cell lies in the sweep: batch size, prompt class, shape."""


@dataclass(frozen=True)
class Cell:
    """What one fixed shape did on one prompt class at one batch size.

    Times and tokens are of rounds in which every sequence of the batch decodes and drafts in full;
    prompts, the drafts' catch-up over them and the thinning tail of a batch are left out.
    """

    batch_size: int
    prompt_class: str
    num_steps: int
    tokens_per_second: float
    """Of the median repetition."""
    tokens_per_second_low: float
    """Of the slowest repetition."""
    accept_length: float
    round_ms: float
    draft_ms: float
    verify_ms: float
    same_texts: int
    """Texts equal, token for token, to those of `num_steps` 0 as far as both go."""
    num_texts: int
    tree_drafts: int = 0
    """Drafts of a tree of `num_steps` levels; 0: a chain."""
    topk: int = 1

    @property
    def shape(self) -> DraftShape:
        """What its rounds drafted."""
        return DraftShape(self.num_steps, self.tree_drafts or self.num_steps, self.topk)

    @property
    def place(self) -> Place:
        """Its coordinates, which no other cell of a sweep has."""
        return self.batch_size, self.prompt_class, self.shape


class CellFile:
    """A JSON-lines file: the settings that decide every cell, then one finished cell a line.

    A line that an interruption cut short is dropped; of a place measured twice, the last counts.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, fresh: bool = False) -> None:
        """Opens the file, or starts it; `fresh` starts anew whatever is there.

        Raises:
            ConfigError: it holds cells measured with other settings, or no cells at all.
        """
        self._path = path
        self.cells: dict[Place, Cell] = {}
        header = json.dumps({"settings": settings})
        lines = [] if fresh or not path.exists() else _whole_lines(path)
        if lines:
            _refuse_other_settings(path, lines[0], header)
            self._keep([_parse_cell(path, line) for line in lines[1:]])
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(header + "\n", encoding="utf-8")

    def append(self, cells: Sequence[Cell]) -> None:
        """Keeps finished cells, here and on the disk."""
        self._keep(cells)
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(cell)) + "\n" for cell in cells)

    def _keep(self, cells: Sequence[Cell]) -> None:
        self.cells.update((cell.place, cell) for cell in cells)


def _whole_lines(path: Path) -> list[str]:
    """The lines of the file, which is cut back to its last line end."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return whole.decode(errors="replace").splitlines()


def _refuse_other_settings(path: Path, line: str, header: str) -> None:
    try:
        before = dict(_leaves(json.loads(line)["settings"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _no_cells(path) from None
    now = dict(_leaves(json.loads(header)["settings"]))
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if changed:
        way_out = "use that, another --output-dir, or --fresh to measure all anew"
        raise ConfigError(
            *(
                f"{key}={now.get(key)!r}: {path} was measured with {before.get(key)!r}; {way_out}"
                for key in changed
            )
        )


def _parse_cell(path: Path, line: str) -> Cell:
    try:
        return Cell(**json.loads(line))
    except (ValueError, TypeError):
        raise _no_cells(path) from None


def _no_cells(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}: holds no cells of this version; use another --output-dir, or --fresh to overwrite"
    )


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted key."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
