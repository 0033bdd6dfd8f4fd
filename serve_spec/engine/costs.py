"""Where the goodput policy's costs come from: a file that is named, one kept, or a measurement."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

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
from serve_spec.core.machine import cpu_model
from serve_spec.core.round import TreeShape
from serve_spec.engine.draft_precision import draft_weights
from serve_spec.engine.profile import MeasuredCosts
from serve_spec.log import get_logger
from serve_spec.worker.worker import Worker

logger = get_logger(__name__)

LANES = "lanes"
"""What stands for the attention backend in the key of rounds on lanes."""

# The rooms whose code decides what a round costs.
_ROUND_ROOMS = (
    "attention",
    "drafters",
    "kvcache",
    "layers",
    "models",
    "ops",
    "parallel",
    "runtime",
    "verify",
    "worker",
)
_WEIGHT_FILES = ("*.safetensors", "*.bin")
# Names and shapes stand at the head of a weights file, and its size says the rest.
_HEAD_BYTES = 1 << 16
_HASH_LENGTH = 16


def obtain_costs(
    key: CostKey,
    *,
    path: Path | None,
    max_batch_size: int,
    max_steps: int,
    trees: Sequence[TreeShape] = (),
    measure: Callable[[], MeasuredCosts],
) -> CostTable | None:
    """The costs of rounds here: loaded from `path`, else kept from an earlier start, else measured.

    A file that is corrupt or of another setting is passed over with a warning; what was measured
    is kept under `$SERVE_SPEC_CACHE` (default ~/.cache/serve_spec). None, with a warning, if
    measuring fails: nobody should be refused a text for want of a table.

    Args:
        path: `speculative_cost_table`; None: whatever was kept.
        max_batch_size: with `max_steps` and `trees`, the grid that `measure` covers.
    """
    started = time.perf_counter()
    kept = _cache_file(key, max_batch_size, max_steps, trees)
    for file in (path, kept if os.path.exists(kept) else None):
        table = None if file is None else _load(file, key, max_steps, trees)
        if table is not None:
            seconds = time.perf_counter() - started
            logger.info("costs: read from %s in %.2f s", file, seconds)
            return table
    try:
        table = as_table(key, measure())
    except Exception as error:  # whatever a device can come up with
        logger.warning("costs: can not be measured here: %s: %s", type(error).__name__, error)
        return None
    is_kept = _keep(table, kept)
    logger.info(
        "costs: measured in %.1f s, %d of %d cells extrapolated; %s",
        table.measured_s,
        len(table.extrapolated),
        len(table.batch_sizes) * len(table.num_steps),
        f"kept in {kept}" if is_kept else "not kept",
    )
    return table


def as_table(key: CostKey, costs: MeasuredCosts) -> CostTable:
    """What was measured, and on what."""
    padded = key.attention_backend == LANES  # their draft stages run every row to the end
    return CostTable(version=FORMAT_VERSION, key=key, padded=padded, **dataclasses.asdict(costs))


def cost_key(config: ServeSpecConfig, worker: Worker) -> CostKey:
    """What the costs of this worker's rounds depend on."""
    draft = config.speculative.speculative_draft_model_path
    # On lanes, whatever attends in the other rounds.
    backend = LANES if worker.execution == "lanes" else worker.tiers[0].verify.name
    return CostKey(
        hardware=_hardware(worker.device),
        threads=torch.get_num_threads(),
        target=fingerprint(config.model.path),
        draft="" if draft is None else fingerprint(draft),
        algorithm=_algorithm(config),
        dtype=_dtype_name(worker.dtype),
        draft_dtype=_draft_numbers(config, worker),
        tensor_parallel_size=config.model.tensor_parallel_size,
        attention_backend=backend,
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


def _load(file: Path, key: CostKey, max_steps: int, trees: Sequence[TreeShape]) -> CostTable | None:
    try:
        table = load_cost_table(file)
        table.refuse_foreign(key, max_steps=max_steps, trees=_shapes(trees))
    except ConfigError as error:
        logger.warning("costs: not used: %s: %s", file, str(error).removeprefix(f"{file}: "))
        return None
    return table


def _keep(table: CostTable, file: Path) -> bool:
    try:
        write_cost_table(table, file)
    except OSError as error:
        logger.warning("costs: can not be kept for the next start: %s", error)
        return False
    return True


def _cache_file(
    key: CostKey, max_batch_size: int, max_steps: int, trees: Sequence[TreeShape]
) -> Path:
    """One file for each setting and grid."""
    grid = f"{max_batch_size} {max_steps} {_shapes(trees)}"
    setting = f"{FORMAT_VERSION} {grid} {key.model_dump_json()}"
    name = hashlib.sha256(setting.encode()).hexdigest()[:_HASH_LENGTH]
    return _cache_folder() / "costs" / f"{name}.json"


def _shapes(trees: Sequence[TreeShape]) -> list[tuple[int, int]]:
    """As a table knows them."""
    return [(tree.num_steps, tree.num_draft_tokens) for tree in trees]


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
