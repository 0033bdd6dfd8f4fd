"""Source of the goodput policy's cost table: a given file, a cached one, or a measurement."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch

import serve_spec
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.config.cache import cache_folder
from serve_spec.config.cost_table import (
    FORMAT_VERSION,
    CostKey,
    CostTable,
    load_cost_table,
    write_cost_table,
)
from serve_spec.core.draft import DraftShape
from serve_spec.core.machine import cpu_model
from serve_spec.log import get_logger
from serve_spec.models.drafts.loader import draft_weights
from serve_spec.profile.measure import CostGrid, MeasuredCosts, Measurement, finish
from serve_spec.worker.worker import SpecWorker

logger = get_logger(__name__)

# The attention backend in keys, by whether steps are launched ahead.
_ATTENTION = {False: "paged", True: "paged, async"}

# The packages whose code affects the cost of a step.
_STEP_PACKAGES = ("kvcache", "layers", "models", "ops", "parallel", "worker")
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")
_TOKENIZER_FILES = ("tokenizer", "special_tokens", "added_tokens", "vocab", "chat_template")
# The head of a weights file has names and shapes, and its size covers the rest.
_HEAD_BYTES = 1 << 16
_HASH_LENGTH = 16

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0
"""Between attempts to measure; every pause is twice as long as the one before."""
_LONGEST_IDLE_RUN_S = 0.5
"""Longest step that an idle engine measures, because a request that arrives waits for it."""

Clock: TypeAlias = Callable[[], float]
Report: TypeAlias = Mapping[str, str]

UNUSED: Report = {"state": "unused", "detail": "the strategy does not weigh costs"}
"""The report without a source."""


@dataclass(eq=False)
class CostSource:
    """Source of an engine's cost table: a given file, a cached one, or a measurement.

    Measurements are cached under `$SERVE_SPEC_CACHE` (default ~/.cache/serve_spec). A file that is
    corrupt or of another setting is ignored with a warning. If measuring at start failed or ran out
    of time, the engine measures again while it is idle: see `advance`.
    """

    key: CostKey
    grid: CostGrid
    """What `measure` measures."""
    path: Path | None
    """`speculative_cost_table`; None: the cached file."""
    measure: Callable[[Clock, float], Measurement]
    """Starts a measurement with a clock and the longest step in seconds."""
    clock: Clock = time.perf_counter
    is_final: bool = field(default=False, init=False)
    """Whether no better measurement is possible."""

    def __post_init__(self) -> None:
        self.report: Report = {"state": "missing", "detail": "not measured yet"}
        """State (missing, measured or loaded) and its reason."""
        self.cached = _cache_file(self.key, self.grid)
        self._measurement: Measurement | None = None
        self._left_at = self._away_s = 0.0
        self._pause_s, self._due_s = _FIRST_PAUSE_S, 0.0

    def load(self) -> CostTable | None:
        """Return the table of the given or the cached file; None if neither fits."""
        if self.path is not None:
            if (table := self._read(self.path)) is not None:
                return table
            self.path = None  # warn once
        return self._read(self.cached) if os.path.exists(self.cached) else None

    def obtain(self) -> CostTable | None:
        """Return the table at start; None, with a warning, if it cannot be measured."""
        table = self.load()
        if table is not None:
            return table
        logger.info("costs: measuring steps")
        try:
            return self._take(finish(self.measure(self.clock, math.inf)))
        except Exception as error:  # a device may raise anything
            self._retry_later(error)
            return None

    def wait_s(self) -> float:
        """Return the seconds until `advance` has something to do."""
        return 0.0 if self._measurement else max(0.0, self._due_s - self.clock())

    def advance(self) -> CostTable | None:
        """Run one step of a measurement while the engine is idle. Return the table at its end.

        The clock of a measurement stops between calls, so requests may run in between.
        """
        if self.wait_s():
            return None
        try:
            if self._measurement is None:
                if (table := self.load()) is not None:  # cached by another engine meanwhile
                    return table
                self._left_at, self._away_s = self.clock(), 0.0
                self._measurement = self.measure(self._working_s, _LONGEST_IDLE_RUN_S)
            self._away_s += self.clock() - self._left_at
            next(self._measurement)
            self._left_at = self.clock()
        except StopIteration as end:
            self._measurement = None
            return self._take(end.value)
        except Exception as error:
            self._measurement = None
            self._retry_later(error)
        return None

    def _working_s(self) -> float:
        return self.clock() - self._away_s

    def _read(self, file: Path) -> CostTable | None:
        started = time.perf_counter()
        try:
            table = load_cost_table(file)
            table.refuse_foreign(
                self.key, max_steps=self.grid.max_steps, trees=_shapes(self.grid.trees)
            )
        except ConfigError as error:
            logger.warning("costs: not used: %s: %s", file, str(error).removeprefix(f"{file}: "))
            return None
        logger.info("costs: read from %s in %.2f s", file, time.perf_counter() - started)
        self.report = {"state": "loaded", "detail": f"from {file}"}
        self.is_final = True
        return table

    def _take(self, measured: MeasuredCosts) -> CostTable:
        """Return the table of a measurement, and cache it unless it is rough."""
        table, is_rough = measured
        self.is_final = not is_rough
        if is_rough:
            self._pause()
            where = "not cached: time ran out, they are measured again when the engine is idle"
        else:
            where = f"cached in {self.cached}" if _cache(table, self.cached) else "not cached"
        detail = (
            f"in {table.measured_s:.1f} s, {len(table.extrapolated)} of "
            f"{len(table.batch_sizes) * (len(table.num_steps) + 1)} points extrapolated; {where}"
        )
        self.report = {"state": "measured", "detail": detail}
        logger.info("costs: measured %s", detail)
        return table

    def _retry_later(self, error: Exception) -> None:
        self._pause()
        why = f"{type(error).__name__}: {error}"
        if self.report["state"] == "measured":  # roughly
            logger.info("costs: not measured again: %s", why)
            return
        logger.warning(
            "costs: not measured, strategy ema decides until they are; the engine tries again when "
            "it is idle: %s",
            why,
        )
        self.report = {"state": "missing", "detail": why}

    def _pause(self) -> None:
        self._due_s = self.clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def cost_key(
    config: ServeSpecConfig, worker: SpecWorker, trees: Sequence[DraftShape] = ()
) -> CostKey:
    """Return what the costs of this worker's steps depend on. trees: those that are measured."""
    speculative = config.speculative
    draft = config.draft_folder
    method = f", {speculative.rejection_sample_method}" if speculative.samples_drafts else ""
    hardware = f"{cpu_model()}, {os.cpu_count()} cores"
    if worker.device.type == "cuda":
        hardware = torch.cuda.get_device_name(worker.device)
    most_captured = config.model.cuda_graph_max_bs if config.model.cuda_graphs else 0
    code = code_version() + (", compiled" if config.model.torch_compile else "")
    return CostKey(
        hardware=hardware,
        threads=torch.get_num_threads(),
        target=fingerprint(config.model.folder),
        draft="" if draft is None else fingerprint(draft),
        algorithm=speculative.speculative_algorithm + method,
        dtype=_dtype_name(worker.dtype) + _of_weights(config.model.quantization),
        draft_dtype=_draft_numbers(config, worker),
        tensor_parallel_size=config.model.tensor_parallel_size,
        attention_backend=_ATTENTION[worker.settings.async_scheduling] + _of_cache(worker),
        topk=max([speculative.topk, *(tree.topk for tree in trees)]),
        code=code + ("" if most_captured is None else f", graphs up to {most_captured}"),
    )


def _of_weights(quantization: str | None) -> str:
    return "" if quantization in (None, "auto") else f", {quantization} weights"


def _of_cache(worker: SpecWorker) -> str:
    """Return the dtypes of the target's KV cache if they are not the compute dtype."""
    stored = {cache.dtype for cache in worker.target.pool.caches if cache.dtype is not None}
    return "".join(f", {_dtype_name(dtype)} cache" for dtype in stored)


def _draft_numbers(config: ServeSpecConfig, worker: SpecWorker) -> str:
    """Return the draft's compute dtype and, if given, its weights' format and its ranks."""
    if worker.drafter is None:
        return ""
    wanted = config.speculative.speculative_draft_model_quantization
    weights = draft_weights(wanted, worker.device)
    of_weights = "" if weights == "plain" else f", {weights} weights"
    ranks = config.speculative.speculative_draft_tp_size
    of_ranks = "" if ranks is None else f", on {ranks} ranks"
    return _dtype_name(worker.drafter.dtype) + of_weights + of_ranks


def fingerprint(checkpoint: Path) -> str:
    """Return a hash of a checkpoint's JSON and weights files: names, sizes and heads.

    Files of the tokenizer do not count: no step reads them.
    """
    parts: list[bytes] = []
    for pattern in ("*.json", *_WEIGHT_FILES):
        for file in sorted(checkpoint.glob(pattern)):
            if file.name.startswith(_TOKENIZER_FILES):
                continue
            with file.open("rb") as content:
                head = content.read(_HEAD_BYTES)
            parts += [file.name.encode(), str(file.stat().st_size).encode(), head]
    return _digest(parts)


@cache
def code_version() -> str:
    """Return the versions of this package and torch, and a short hash of `_STEP_PACKAGES`."""
    package = Path(serve_spec.__file__).parent
    parts: list[bytes] = []
    for room in _STEP_PACKAGES:
        for file in sorted((package / room).rglob("*.py")):
            parts += [file.relative_to(package).as_posix().encode(), file.read_bytes()]
    return f"{serve_spec.__version__}-{_digest(parts)}, torch {torch.__version__}"


def _digest(parts: Iterable[bytes]) -> str:
    """Return a short hash of parts with their lengths, so that no two lists have the same bytes."""
    joined = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hashlib.sha256(joined).hexdigest()[:_HASH_LENGTH]


def _cache(table: CostTable, file: Path) -> bool:
    try:
        write_cost_table(table, file)
    except OSError as error:
        logger.warning(
            "costs: not cached for the next start: %s; make $SERVE_SPEC_CACHE writable", error
        )
        return False
    return True


def _cache_file(key: CostKey, grid: CostGrid) -> Path:
    trees = f"{_shapes(grid.trees)} {[*grid.trees.values()]}"
    sizes = f"{grid.max_batch_size} {grid.max_steps} {trees}"
    setting = f"{FORMAT_VERSION} {sizes} {key.model_dump_json()}"
    name = hashlib.sha256(setting.encode()).hexdigest()[:_HASH_LENGTH]
    return cache_folder() / "costs" / f"{name}.json"


def _shapes(trees: Iterable[DraftShape]) -> list[tuple[int, int]]:
    """Return trees as a table stores them."""
    return [(tree.depth, tree.size) for tree in trees]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
