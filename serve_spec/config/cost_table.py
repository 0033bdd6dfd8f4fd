"""The cost table: a JSON file with measured times of rounds, and the setup they were measured on.

A table of another machine, model or version is rejected.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from serve_spec.config import base
from serve_spec.config.base import ConfigError, Refusal, StrictModel

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
    """Medians of rounds in which every request drafts a tree of one shape."""

    num_steps: int = Field(ge=1, description="Levels.")
    num_draft_tokens: int = Field(ge=1, description="Drafts per request, the root not counted.")
    draft_ms: tuple[tuple[float, ...], ...] = Field(description="[context][batch size].")
    verify_ms: tuple[tuple[float, ...], ...] = Field(description="[context][batch size].")

    @property
    def shape(self) -> tuple[int, int]:
        """Return depth and size, which identify a shape."""
        return self.num_steps, self.num_draft_tokens


class CostTable(StrictModel):
    """Median times of the stages of a round: drafting (draft extend included) and verification."""

    version: int = Field(ge=FORMAT_VERSION, le=FORMAT_VERSION, description="Format of this file.")
    key: CostKey = Field(description="What it was measured on.")
    batch_sizes: tuple[int, ...] = Field(description="Decoding requests, ascending.")
    num_steps: tuple[int, ...] = Field(description="Drafts per request, ascending from 0.")
    contexts: tuple[int, int] = Field(description="Tokens per sequence: a short and a long text.")
    draft_ms: Grid = Field(description="[context][batch size][steps]; 0 at 0 steps.")
    verify_ms: Grid = Field(description="[context][batch size][steps]; at 0 steps a plain round.")
    sampled_row_ms: float = Field(
        ge=0, description="Additional cost of a verified token at a temperature above 0."
    )
    padded: bool = Field(
        description="Drafting is padded: every step runs all requests, whatever the depth of each."
    )
    extrapolated: tuple[tuple[int, int], ...] = Field(
        description="[batch size, steps] that were not measured at every context."
    )
    measured_s: float = Field(ge=0, description="Duration of the measurement in seconds.")
    trees: tuple[TreeCosts, ...] = Field((), description="By shape, ascending; empty: chains only.")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        _check_grid("batch_sizes", self.batch_sizes, at_least=1)
        _check_grid("num_steps", self.num_steps, at_least=0)
        _check_grid("contexts", self.contexts, at_least=1)
        if self.num_steps[0] != 0:
            raise Refusal("num_steps", list(self.num_steps), "must start with 0, the plain round")
        axes = self.contexts, self.batch_sizes
        _check_times("draft_ms", self.draft_ms, *axes, self.num_steps, num_zeros=1)
        _check_times("verify_ms", self.verify_ms, *axes, self.num_steps)
        for batch_size, num_steps in self.extrapolated:
            if batch_size not in self.batch_sizes or num_steps not in self.num_steps:
                raise Refusal("extrapolated", [batch_size, num_steps], "no such cell in the table")
        shapes = [tree.shape for tree in self.trees]
        if not all(a < b for a, b in pairwise(shapes)):
            raise Refusal("trees", shapes, "must ascend strictly by (num_steps, num_draft_tokens)")
        for i, tree in enumerate(self.trees):
            _check_times(f"trees.{i}.draft_ms", tree.draft_ms, *axes)
            _check_times(f"trees.{i}.verify_ms", tree.verify_ms, *axes)
        return self

    def refuse_foreign(
        self, key: CostKey, *, max_steps: int, trees: Collection[tuple[int, int]] = ()
    ) -> None:
        """Raise ConfigError unless the table was measured with `key` and covers these shapes.

        max_steps: of chains. trees: (depth, size).
        """
        problems = [
            f"key.{name}={mine!r}, but this engine has {getattr(key, name)!r}"
            for name, mine in self.key
            if mine != getattr(key, name)
        ]
        if self.num_steps[-1] < max_steps:
            problems.append(f"num_steps={list(self.num_steps)}, but {max_steps} is needed")
        known = [tree.shape for tree in self.trees]
        if missing := sorted(set(trees).difference(known)):
            problems.append(f"trees={known}, but {missing} are needed")
        if problems:
            raise ConfigError(f"{'; '.join(problems)}: {_WAY_OUT}")


def load_cost_table(path: Path) -> CostTable:
    """Return the table in a JSON file of this version, or raise ConfigError."""
    try:
        content = base.parse_json_object(base.read_text(path), "a cost table")
        version = content.get("version", FORMAT_VERSION)
        if version != FORMAT_VERSION:  # other versions have other fields
            raise ConfigError(f"version={version!r}, but format {FORMAT_VERSION} is supported")
        return base.validate(CostTable, content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {'; '.join(error.problems)}: {_WAY_OUT}") from None


def write_cost_table(table: CostTable, path: Path) -> None:
    """Write the table atomically; create its folder. Raises OSError: the file cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several replicas may write the same table at once.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(table.model_dump_json(indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _check_grid(name: str, values: Sequence[int], at_least: int) -> None:
    ascending = all(a < b for a, b in pairwise(values))
    if not values or values[0] < at_least or not ascending:
        raise Refusal(name, list(values), f"must ascend strictly from at least {at_least}")


def _check_times(
    name: str, times: Sequence[Any], axis: Sequence[int], *inner: Sequence[int], num_zeros: int = 0
) -> None:
    """Refuse another shape than that of the axes, and values that are not positive.

    num_zeros: first entries of the last axis that must be 0.
    """
    if len(times) != len(axis):
        raise Refusal(f"len({name})", len(times), f"must be {len(axis)}, one per value of its grid")
    for i, each in enumerate(times):
        if inner:
            _check_times(f"{name}.{i}", each, *inner, num_zeros=num_zeros)
        elif (each != 0) if i < num_zeros else (each <= 0):
            fix = "must be 0 without drafts" if i < num_zeros else "must be positive"
            raise Refusal(f"{name}.{i}", each, fix)


Floats: TypeAlias = NDArray[np.float64]

_CONTEXT_PARTS = 16
"""Contexts are distinguished in sixteenths of the distance between the two measured ones."""


class CostSurface:
    """ms of one stage for every batch size, every number of steps, every context.

    A measured table becomes monotone in every direction, is interpolated between its points and
    continued in lines beyond the last ones. Contexts below the shorter one cost what it costs.
    """

    def __init__(
        self,
        ms: Grid,
        *,
        contexts: tuple[int, int],
        batch_sizes: Sequence[int],
        num_steps: Sequence[int],
    ) -> None:
        self._contexts = contexts
        steps = np.arange(num_steps[-1] + 1)
        values = np.apply_along_axis(
            lambda cells: np.interp(steps, num_steps, cells), 2, monotone(np.array(ms))
        )
        self._sizes = list(batch_sizes)
        if len(self._sizes) == 1:  # twice as many take twice as long
            values = np.concatenate([values, 2.0 * values], axis=1)
            self._sizes.append(2 * self._sizes[0])
        self._ms = values
        self._curve = lru_cache(maxsize=1024)(self._interpolated)

    def curve(self, batch_size: int, context: float) -> Floats:
        """Return ms at 0 .. max_steps steps of `batch_size` requests; shared, not to be written."""
        return self._curve(batch_size, self._position(context))

    def _interpolated(self, batch_size: int, position: float) -> Floats:
        short, long = (_on_lines(self._sizes, each, batch_size) for each in self._ms)
        # Only far beyond both edges could lines have crossed.
        curve: Floats = np.maximum.accumulate(short + position * np.maximum(long - short, 0.0))
        return curve

    def of_tokens(self, num_tokens: Any, context: float) -> Floats:
        """Return ms for arrays of numbers of tokens, interpolated at full depth."""
        position, tokens = self._position(context), np.array(self._sizes) * self._ms.shape[2]
        ms = self._ms[0, :, -1] + position * (self._ms[1, :, -1] - self._ms[0, :, -1])
        slope = (ms[-1] - ms[-2]) / (tokens[-1] - tokens[-2])
        beyond = np.maximum(np.asarray(num_tokens) - tokens[-1], 0.0) * slope
        found: Floats = np.interp(num_tokens, tokens, ms) + beyond
        return found

    def _position(self, context: float) -> float:
        """Return where a context lies: 0 the shorter, 1 the longer, 2 as far again."""
        short, long = self._contexts
        position = max(0.0, (context - short) / (long - short))
        return round(position * _CONTEXT_PARTS) / _CONTEXT_PARTS


def monotone(ms: Floats) -> Floats:
    """Make each cell the least of itself and all cells beyond it: rising along every axis.

    Other work only ever makes a round slower, so of two cells that contradict each other the
    cheaper one is the better measurement.
    """
    for axis in range(ms.ndim):
        ms = np.flip(np.minimum.accumulate(np.flip(ms, axis), axis), axis)
    return ms


def _on_lines(points: Sequence[int], values: Floats, x: int) -> Floats:
    """Return `values` [n, ...] at x: lines between the points and beyond the last, flat before."""
    i = min(max(bisect_right(points, x) - 1, 0), len(points) - 2)
    part = max(0.0, (x - points[i]) / (points[i + 1] - points[i]))
    found: Floats = values[i] + part * (values[i + 1] - values[i])
    return found
