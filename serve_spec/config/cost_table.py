"""The cost table: a JSON file with measured times of rounds, and the setup they were measured on.

A table of another machine, model or version is rejected.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from serve_spec.config.base import ConfigError, Refusal, StrictModel, read_text, validate

Grid: TypeAlias = tuple[tuple[tuple[float, ...], ...], ...]
"""Milliseconds by context, batch size and steps, in the order of the table's grids."""

FORMAT_VERSION = 1

_WAY_OUT = "measure again (`serve-spec tune`) or delete the file"


class CostKey(StrictModel):
    """Everything that costs depend on. Tables with equal keys are interchangeable."""

    hardware: str = Field(min_length=1, description="GPU name, or CPU model and core count.")
    threads: int = Field(ge=1, description="Threads a tensor operation may use on the CPU.")
    target: str = Field(min_length=1, description="Fingerprint of the target checkpoint.")
    draft: str = Field(description="Fingerprint of the draft checkpoint; empty: none.")
    algorithm: str = Field(description="speculative_algorithm.")
    dtype: str = Field(description="Data type of the target.")
    draft_dtype: str = Field(description="Data type of the draft; empty: none.")
    tensor_parallel_size: int = Field(ge=1, description="GPUs that share the model.")
    attention_backend: str = Field(description="Attention backend, never 'auto'.")
    code: str = Field(min_length=1, description="Version of the code of a round.")
    topk: int = Field(1, ge=1, description="Children per drafted token; 1: chains only.")


class TreeCosts(StrictModel):
    """Median times of rounds in which every request drafts a tree of one shape."""

    num_steps: int = Field(ge=1, description="Levels.")
    num_draft_tokens: int = Field(ge=1, description="Drafts per request, without the root.")
    draft_ms: tuple[tuple[float, ...], ...] = Field(description="[context][batch size].")
    verify_ms: tuple[tuple[float, ...], ...] = Field(description="[context][batch size].")

    @field_validator("draft_ms", "verify_ms", mode="before")
    @classmethod
    def _tuples(cls, value: object) -> object:
        return _as_tuples(value)

    @property
    def shape(self) -> tuple[int, int]:
        """Steps and drafts of the tree."""
        return self.num_steps, self.num_draft_tokens


class CostTable(StrictModel):
    """Median times of the stages of a round: drafting (draft extend included) and verification."""

    version: int = Field(ge=FORMAT_VERSION, le=FORMAT_VERSION, description="Format of this file.")
    key: CostKey = Field(description="Setup of the measurement.")
    batch_sizes: tuple[int, ...] = Field(description="Decoding requests, ascending.")
    num_steps: tuple[int, ...] = Field(description="Drafts per request, ascending from 0.")
    contexts: tuple[int, int] = Field(description="Tokens per sequence: a short and a long text.")
    draft_ms: Grid = Field(description="[context][batch size][steps]; 0 at 0 steps.")
    verify_ms: Grid = Field(description="[context][batch size][steps]; at 0 steps a plain round.")
    sampled_row_ms: float = Field(
        ge=0, description="Additional ms per verified token at temperatures above 0."
    )
    padded: bool = Field(
        description="Whether every draft step runs all requests, whatever their depth."
    )
    extrapolated: tuple[tuple[int, int], ...] = Field(
        description="[batch size, steps] that were not measured at every context."
    )
    measured_s: float = Field(ge=0, description="Duration of the measurement in seconds.")
    trees: tuple[TreeCosts, ...] = Field((), description="By shape, ascending; empty: chains only.")

    @field_validator("draft_ms", "verify_ms", "extrapolated", mode="before")
    @classmethod
    def _tuples(cls, value: object) -> object:
        return _as_tuples(value)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        _check_grid("batch_sizes", self.batch_sizes, at_least=1)
        _check_grid("num_steps", self.num_steps, at_least=0)
        _check_grid("contexts", self.contexts, at_least=1)
        if self.num_steps[0] != 0:
            raise Refusal("num_steps", list(self.num_steps), "must start with 0, the plain round")
        self._check_durations("draft_ms", self.draft_ms, free_steps=1)
        self._check_durations("verify_ms", self.verify_ms, free_steps=0)
        for batch_size, num_steps in self.extrapolated:
            if batch_size not in self.batch_sizes or num_steps not in self.num_steps:
                raise Refusal("extrapolated", [batch_size, num_steps], "no such cell in the table")
        self._check_trees()
        return self

    def _check_trees(self) -> None:
        shapes = [tree.shape for tree in self.trees]
        if not all(a < b for a, b in pairwise(shapes)):
            raise Refusal("trees", shapes, "must ascend strictly by (num_steps, num_draft_tokens)")
        for i, tree in enumerate(self.trees):
            for name, grid in (("draft_ms", tree.draft_ms), ("verify_ms", tree.verify_ms)):
                _check_length(f"trees.{i}.{name}", grid, self.contexts)
                for c, cells in enumerate(grid):
                    _check_length(f"trees.{i}.{name}.{c}", cells, self.batch_sizes)
                    for b, ms in enumerate(cells):
                        if ms <= 0:
                            raise Refusal(f"trees.{i}.{name}.{c}.{b}", ms, "must be positive")

    def _check_durations(self, name: str, grid: Grid, free_steps: int) -> None:
        """Reject a wrong shape, and times other than 0 in the first `free_steps` columns."""
        _check_length(name, grid, self.contexts)
        for c, rows in enumerate(grid):
            _check_length(f"{name}.{c}", rows, self.batch_sizes)
            for b, cells in enumerate(rows):
                _check_length(f"{name}.{c}.{b}", cells, self.num_steps)
                for k, ms in enumerate(cells):
                    if (ms != 0) if k < free_steps else (ms <= 0):
                        fix = "must be 0 without drafts and positive otherwise"
                        raise Refusal(f"{name}.{c}.{b}.{k}", ms, fix)

    def refuse_foreign(
        self, key: CostKey, *, max_steps: int, trees: Collection[tuple[int, int]] = ()
    ) -> None:
        """Check that the table was measured with `key` and covers all draft shapes.

        max_steps: maximum drafts of a chain. trees: shapes, (num_steps, num_draft_tokens).

        Raises:
            ConfigError: a field differs, or a shape is missing.
        """
        problems = [
            f"key.{name}={mine!r}, but this engine has {here!r}"
            for name, mine, here in _differences(self.key, key)
        ]
        if self.num_steps[-1] < max_steps:
            problems.append(f"num_steps={list(self.num_steps)}, but {max_steps} is needed")
        known = [tree.shape for tree in self.trees]
        if missing := sorted(set(trees).difference(known)):
            problems.append(f"trees={known}, but {missing} are needed")
        if problems:
            raise ConfigError(f"{'; '.join(problems)}: {_WAY_OUT}")


def load_cost_table(path: Path) -> CostTable:
    """Return the cost table in a JSON file.

    Raises:
        ConfigError: it is unreadable, not JSON, of another version, or has an invalid value.
    """
    try:
        content = _parse_json(read_text(path))
        version = content.get("version", FORMAT_VERSION)
        if version != FORMAT_VERSION:  # other errors would mislead
            raise ConfigError(f"version={version!r}, but format {FORMAT_VERSION} is supported")
        return validate(CostTable, content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {'; '.join(error.problems)}: {_WAY_OUT}") from None


def write_cost_table(table: CostTable, path: Path) -> None:
    """Write the table atomically; create its folder.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several replicas may write the same table at once.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(table.model_dump_json(indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _parse_json(text: str) -> dict[str, object]:
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"holds {content!r:.40}, not a cost table object")
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _as_tuples(value: object) -> object:
    """Convert nested lists to tuples, as strict models require."""
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def _check_grid(name: str, values: Sequence[int], at_least: int) -> None:
    ascending = all(a < b for a, b in pairwise(values))
    if not values or values[0] < at_least or not ascending:
        raise Refusal(name, list(values), f"must ascend strictly from at least {at_least}")


def _check_length(name: str, found: Sequence[object], grid: Sequence[int]) -> None:
    if len(found) != len(grid):
        raise Refusal(f"len({name})", len(found), f"must be {len(grid)}, one per value of its grid")


def _differences(mine: CostKey, theirs: CostKey) -> Iterator[tuple[str, object, object]]:
    for name in CostKey.model_fields:
        values = getattr(mine, name), getattr(theirs, name)
        if values[0] != values[1]:
            yield name, *values
