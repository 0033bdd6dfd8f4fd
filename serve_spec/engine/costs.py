"""Where the goodput policy's costs come from: a file that is named, one kept, or a measurement."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch

import serve_spec
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.config.cost_table import (
    FORMAT_VERSION,
    CostKey,
    CostTable,
    load_cost_table,
    write_cost_table,
)
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.machine import cpu_model
from serve_spec.engine.draft_precision import draft_weights
from serve_spec.engine.profile import MeasuredCosts, Measurement, finish
from serve_spec.log import get_logger
from serve_spec.worker.worker import Worker

logger = get_logger(__name__)

# What stands for the attention backend in keys, by whether steps are launched ahead.
_ATTENTION = {False: "paged", True: "paged, async"}

# The rooms whose code decides what a round costs.
_ROUND_ROOMS = (
    "kvcache",
    "layers",
    "models",
    "ops",
    "parallel",
    "worker",
)
_WEIGHT_FILES = ("*.safetensors", "*.bin")
# Names and shapes stand at the head of a weights file, and its size says the rest.
_HEAD_BYTES = 1 << 16
_HASH_LENGTH = 16

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0
"""Between attempts to measure; each pause is twice as long as the one before."""
_LONGEST_IDLE_RUN_S = 0.5
"""Of one round that an idle engine measures: a request that comes meanwhile waits for it."""

Clock: TypeAlias = Callable[[], float]
Report: TypeAlias = Mapping[str, str]

UNUSED: Report = {"state": "unused", "detail": "the strategy does not weigh costs"}
"""The report where no source is asked."""


class CostSource:
    """Where the costs of an engine's rounds come from: a named file, one kept, or a measurement.

    What was measured is kept under `$SERVE_SPEC_CACHE` (default ~/.cache/serve_spec). A file that
    is corrupt or of another setting is passed over with a warning. What could not be measured at
    start, or only roughly, is measured later, between the engine's rounds: see `advance`.
    """

    def __init__(
        self,
        key: CostKey,
        *,
        path: Path | None,
        max_batch_size: int,
        max_steps: int,
        trees: Sequence[DraftShape] = (),
        measure: Callable[[Clock, float], Measurement],
        clock: Clock = time.perf_counter,
    ) -> None:
        """
        Args:
            path: `speculative_cost_table`; None: whatever was kept.
            max_batch_size: with `max_steps` and `trees`, the grid that is measured.
            measure: starts a measurement, by a clock, of rounds of so many seconds at most.
        """
        self.report: Report = {"state": "missing", "detail": "not measured yet"}
        """What an operator should know: state missing, measured or loaded, and why."""
        self.is_final = False
        """Whether nothing better can be had."""
        self._key = key
        self._path = path
        self._kept = _cache_file(key, max_batch_size, max_steps, trees)
        self._max_steps = max_steps
        self._trees = trees
        self._measure = measure
        self._clock = clock
        self._measurement: Measurement | None = None
        self._left_at = self._away_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._due_s = 0.0

    def load(self) -> CostTable | None:
        """The table of the named file, or of the one that is kept; None if none fits."""
        if self._path is not None:
            if (table := self._read(self._path)) is not None:
                return table
            self._path = None  # warned of once
        return self._read(self._kept) if os.path.exists(self._kept) else None

    def obtain(self) -> CostTable | None:
        """The costs at start; None, with a warning, if they cannot be measured."""
        table = self.load()
        if table is not None:
            return table
        logger.info("costs: measuring rounds")
        try:
            return self._take(finish(self._measure(self._clock, math.inf)))
        except Exception as error:  # whatever a device can come up with
            self._put_off(error)
            return None

    def wait_s(self) -> float:
        """Seconds until `advance` has something to do."""
        return 0.0 if self._measurement else max(0.0, self._due_s - self._clock())

    def advance(self) -> CostTable | None:
        """Runs one round of a measurement while the engine is idle; the table after the last one.

        Its clock stands still between two calls, so requests may come in between.
        """
        if self.wait_s():
            return None
        try:
            if self._measurement is None:
                if (table := self.load()) is not None:  # kept by another engine meanwhile
                    return table
                self._left_at, self._away_s = self._clock(), 0.0
                self._measurement = self._measure(self._working_s, _LONGEST_IDLE_RUN_S)
            self._away_s += self._clock() - self._left_at
            next(self._measurement)
            self._left_at = self._clock()
        except StopIteration as end:
            self._measurement = None
            return self._take(end.value)
        except Exception as error:
            self._measurement = None
            self._put_off(error)
        return None

    def _working_s(self) -> float:
        return self._clock() - self._away_s

    def _read(self, file: Path) -> CostTable | None:
        started = time.perf_counter()
        try:
            table = load_cost_table(file)
            table.refuse_foreign(self._key, max_steps=self._max_steps, trees=_shapes(self._trees))
        except ConfigError as error:
            logger.warning("costs: not used: %s: %s", file, str(error).removeprefix(f"{file}: "))
            return None
        logger.info("costs: read from %s in %.2f s", file, time.perf_counter() - started)
        self.report = {"state": "loaded", "detail": f"from {file}"}
        self.is_final = True
        return table

    def _take(self, measured: MeasuredCosts) -> CostTable:
        """The table of a measurement, kept unless it is rough."""
        table = as_table(self._key, measured)
        self.is_final = not measured.is_rough
        if measured.is_rough:
            self._pause()
            where = "not kept: time ran out, they are measured again when the engine is idle"
        else:
            where = f"kept in {self._kept}" if _keep(table, self._kept) else "not kept"
        detail = (
            f"in {table.measured_s:.1f} s, {len(table.extrapolated)} of "
            f"{len(table.batch_sizes) * len(table.num_steps)} cells extrapolated; {where}"
        )
        self.report = {"state": "measured", "detail": detail}
        logger.info("costs: measured %s", detail)
        return table

    def _put_off(self, error: Exception) -> None:
        self._pause()
        why = f"{type(error).__name__}: {error}"
        if self.report["state"] == "measured":  # roughly
            logger.info("costs: not measured again: %s", why)
            return
        logger.warning(
            "costs: not measured, strategy ema decides until they are; tried again when the engine "
            "is idle: %s",
            why,
        )
        self.report = {"state": "missing", "detail": why}

    def _pause(self) -> None:
        """Waits longer after every attempt."""
        self._due_s = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def as_table(key: CostKey, costs: MeasuredCosts) -> CostTable:
    """What was measured, and on what."""
    found = dataclasses.asdict(costs)
    del found["is_rough"]
    return CostTable(version=FORMAT_VERSION, key=key, padded=True, **found)


def cost_key(config: ServeSpecConfig, worker: Worker) -> CostKey:
    """What the costs of this worker's rounds depend on."""
    draft = config.speculative.speculative_draft_model_path
    return CostKey(
        hardware=_hardware(worker.device),
        threads=torch.get_num_threads(),
        target=fingerprint(config.model.path),
        draft="" if draft is None else fingerprint(draft),
        algorithm=_algorithm(config),
        dtype=_dtype_name(worker.dtype),
        draft_dtype=_draft_numbers(config, worker),
        tensor_parallel_size=config.model.tensor_parallel_size,
        attention_backend=_ATTENTION[worker.async_scheduling],
        topk=config.speculative.speculative_eagle_topk,
        code=code_version() + (", compiled" if config.model.torch_compile else ""),
    )


def _algorithm(config: ServeSpecConfig) -> str:
    """Who drafts and, if drafts are not coupled, how they are judged."""
    speculative = config.speculative
    judged = f", {speculative.rejection_sample_method}" if speculative.samples_drafts else ""
    return speculative.speculative_algorithm + judged


def _draft_numbers(config: ServeSpecConfig, worker: Worker) -> str:
    """What the draft computes in and, if other, what it reads its weights in."""
    if worker.draft_dtype is None:
        return ""
    wanted = config.speculative.speculative_draft_model_quantization
    weights = draft_weights(wanted, worker.device)
    of_weights = "" if weights == "plain" else f", {weights} weights"
    return _dtype_name(worker.draft_dtype) + of_weights


def fingerprint(checkpoint: Path) -> str:
    """A short hash of a checkpoint's config and of its weights files' names, sizes and heads."""
    hashed = hashlib.sha256()
    for pattern in ("config.json", "expansion.json", *_WEIGHT_FILES):
        for file in sorted(checkpoint.glob(pattern)):
            _add(hashed, [file.name.encode(), str(file.stat().st_size).encode()])
            with file.open("rb") as content:
                _add(hashed, [content.read(_HEAD_BYTES)])
    return hashed.hexdigest()[:_HASH_LENGTH]


@cache
def code_version() -> str:
    """Versions of this package and of torch, and a short hash of the code that shapes a round."""
    package = Path(serve_spec.__file__).parent
    hashed = hashlib.sha256()
    for room in _ROUND_ROOMS:
        for file in sorted((package / room).rglob("*.py")):
            _add(hashed, [file.relative_to(package).as_posix().encode(), file.read_bytes()])
    digest = hashed.hexdigest()[:_HASH_LENGTH]
    return f"{serve_spec.__version__}-{digest}, torch {torch.__version__}"


def _add(hashed: hashlib._Hash, parts: Iterable[bytes]) -> None:
    """With lengths, so that no two lists of parts run together to the same bytes."""
    for part in parts:
        hashed.update(len(part).to_bytes(8, "big") + part)


def _keep(table: CostTable, file: Path) -> bool:
    try:
        write_cost_table(table, file)
    except OSError as error:
        logger.warning(
            "costs: not kept for the next start: %s; make $SERVE_SPEC_CACHE writable", error
        )
        return False
    return True


def _cache_file(
    key: CostKey, max_batch_size: int, max_steps: int, trees: Sequence[DraftShape]
) -> Path:
    """One file for each setting and grid."""
    grid = f"{max_batch_size} {max_steps} {_shapes(trees)}"
    setting = f"{FORMAT_VERSION} {grid} {key.model_dump_json()}"
    name = hashlib.sha256(setting.encode()).hexdigest()[:_HASH_LENGTH]
    return _cache_folder() / "costs" / f"{name}.json"


def _shapes(trees: Sequence[DraftShape]) -> list[tuple[int, int]]:
    """As a table knows them."""
    return [(tree.depth, tree.size) for tree in trees]


def _cache_folder() -> Path:
    try:
        return Path(os.environ.get("SERVE_SPEC_CACHE") or "~/.cache/serve_spec").expanduser()
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "serve_spec"


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model()}, {os.cpu_count()} cores"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
