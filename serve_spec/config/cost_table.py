"""The cost table: a JSON file with measured times of rounds, and the setup they were measured on.

A table of another machine, model or version is rejected.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from serve_spec.config import base
from serve_spec.config.base import ConfigError, Refusal, StrictModel

FORMAT_VERSION = 2

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
    """Median times of drafting a tree of one shape; its verification is known by tokens."""

    num_steps: int = Field(ge=1, description="Levels.")
    num_draft_tokens: int = Field(ge=1, description="Drafts per request, the root not counted.")
    draft_ms: tuple[float, ...] = Field(description="[batch size].")

    @property
    def shape(self) -> tuple[int, int]:
        """Return depth and size, which identify a shape."""
        return self.num_steps, self.num_draft_tokens


class CostTable(StrictModel):
    """Median times of the stages of a round: drafting (draft extend included) and verification.

    Drafting is known by batch size and depth, verification by the tokens of the target's forward.
    """

    version: int = Field(ge=FORMAT_VERSION, le=FORMAT_VERSION, description="Format of this file.")
    key: CostKey = Field(description="What it was measured on.")
    context: int = Field(ge=1, description="Tokens per sequence while drafting was measured.")
    batch_sizes: tuple[int, ...] = Field(description="Decoding requests, ascending.")
    num_steps: tuple[int, ...] = Field(description="Drafts per request, ascending from 1 or more.")
    draft_ms: tuple[tuple[float, ...], ...] = Field(description="[batch size][steps].")
    draft_context_ms: float = Field(
        ge=0, description="Added to each step by a token of context of each request."
    )
    num_tokens: tuple[int, ...] = Field(description="Tokens of a target forward, ascending.")
    verify_ms: tuple[float, ...] = Field(description="[tokens], without the context.")
    verify_context_ms: float = Field(
        ge=0, description="Added to a target forward by a token of context of each request."
    )
    sampled_token_ms: float = Field(
        ge=0, description="Additional cost of a verified token at a temperature above 0."
    )
    extrapolated: tuple[tuple[int, int], ...] = Field(
        description="[batch size, steps] that were not measured; steps 0: a plain round."
    )
    measured_s: float = Field(ge=0, description="Duration of the measurement in seconds.")
    trees: tuple[TreeCosts, ...] = Field((), description="By shape, ascending; empty: chains only.")

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for name in ("batch_sizes", "num_steps", "num_tokens"):
            _check_ascending(name, getattr(self, name))
        _check_times("draft_ms", self.draft_ms, self.batch_sizes, self.num_steps)
        _check_times("verify_ms", self.verify_ms, self.num_tokens)
        for batch_size, num_steps in self.extrapolated:
            if batch_size not in self.batch_sizes or num_steps not in (0, *self.num_steps):
                raise Refusal("extrapolated", [batch_size, num_steps], "no such point in the table")
        shapes = [tree.shape for tree in self.trees]
        if not all(a < b for a, b in pairwise(shapes)):
            raise Refusal("trees", shapes, "must ascend strictly by (num_steps, num_draft_tokens)")
        for i, tree in enumerate(self.trees):
            _check_times(f"trees.{i}.draft_ms", tree.draft_ms, self.batch_sizes)
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
    """Write the table, see `base.write_text`."""
    base.write_text(path, table.model_dump_json(indent=1) + "\n")


def _check_ascending(name: str, values: Sequence[int]) -> None:
    ascending = all(a < b for a, b in pairwise(values))
    if not values or values[0] < 1 or not ascending:
        raise Refusal(name, list(values), "must ascend strictly from at least 1")


def _check_times(
    name: str, times: Sequence[Any], axis: Sequence[int], *inner: Sequence[int]
) -> None:
    """Refuse another shape than that of the axes, and times that are not positive."""
    if len(times) != len(axis):
        raise Refusal(f"len({name})", len(times), f"must be {len(axis)}, one per value of its axis")
    for i, each in enumerate(times):
        if inner:
            _check_times(f"{name}.{i}", each, *inner)
        elif each <= 0:
            raise Refusal(f"{name}.{i}", each, "must be positive")
