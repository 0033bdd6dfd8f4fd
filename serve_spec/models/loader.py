"""Loading a target: its config chooses the family, which names and builds everything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from serve_spec.config.base import ConfigError
from serve_spec.config.checkpoint import text_config
from serve_spec.config.engine import MAX_POSITIONS
from serve_spec.core.context import torch_dtype
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.formats.fp8 import Fp8OnLoadFormats
from serve_spec.layers.formats.registry import formats_of
from serve_spec.layers.module import finish_loading, tensor_defaults
from serve_spec.log import get_logger
from serve_spec.models.config import read_config, read_json
from serve_spec.models.dummy import dummy_checkpoint
from serve_spec.models.gguf import is_gguf, open_files
from serve_spec.models.interfaces import Config, Target, TargetFamily, TargetSpec
from serve_spec.models.kv_cache import CacheScales, take_scales
from serve_spec.models.registry import find_family
from serve_spec.models.weights import Checkpoint
from serve_spec.ops.scaled_linear import converts_fp8
from serve_spec.parallel.group import SINGLE, TensorParallel

_log = get_logger(__name__)


def load_target(
    path: Path | str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    parallel: TensorParallel = SINGLE,
    *,
    finish: bool = True,
    load_format: str = "auto",
    formats: Formats | None = None,
) -> Target:
    """Load a Hugging Face directory, or raise CheckpointError.

    `max_model_len` bounds positions (default: the config's). Each of several ranks loads its part.
    finish: False for a model that has gradients. load_format: as in `model.load_format`.
    formats: of its matrices, by their names in the checkpoint; None: those of its config.
    """
    file = open_target(path, load_format)
    file.check(max_model_len, parallel)
    formats = formats or file.formats
    with tensor_defaults(dtype, device):
        model = file.family.build(file.config, max_model_len, parallel, formats)
    file.checkpoint.load_into(model.tensors())
    if finish:
        finish_loading(model)
    if report := formats.report():
        _log.info("%s: %s", path, report)
    model.path, model.cache_scales = Path(path), file.scales
    return model


@dataclass(frozen=True)
class TargetFile:
    """A target's checkpoint: its family, its text model's config, and its tensors, not yet read.

    scales: of an FP8 cache, which are read.
    """

    family: TargetFamily
    config: Config
    checkpoint: Checkpoint
    scales: CacheScales = field(default_factory=dict)

    def check(self, max_model_len: int | None = None, parallel: TensorParallel = SINGLE) -> None:
        """Raise CheckpointError if config.json claims more than the files hold, or is too long.

        Also if a format cannot be cut for the ranks. Nothing is allocated. max_model_len: the
        longest text; None: the config's.
        """
        directory = self.checkpoint.directory
        # Files that tell their quantization themselves have the shapes of floats.
        if formats_of(self.config) is None or self.checkpoint.quantization is not None:
            self.family.check(self.config, self.checkpoint.shapes, directory)
        else:
            self.checkpoint.check(self.skeleton(parallel).tensors())
        longest = self.family.spec(self.config).max_position_embeddings
        if max_model_len is None and longest > MAX_POSITIONS:
            why = f"max_position_embeddings={longest}: more than {MAX_POSITIONS}"
            raise CheckpointError(f"{directory}/config.json: {why}; set max_model_len")

    @property
    def formats(self) -> Formats:
        """Return the formats of the matrices that the config asks for."""
        return formats_of(self.config) or PLAIN

    def skeleton(self, parallel: TensorParallel = SINGLE) -> Target:
        """Return the target without memory, on the meta device."""
        with tensor_defaults(torch.float32, "meta"):
            return self.family.build(self.config, 1, parallel, self.formats)


def open_target(path: Path | str, load_format: str = "auto") -> TargetFile:
    """Open a directory's config and weights, as `model.load_format` says; read no weight.

    Raises CheckpointError.
    """
    folder = Path(path)
    family, config = read_target(folder)
    if load_format == "dummy":
        empty = TargetFile(family, config, Checkpoint([], folder)).skeleton()
        return TargetFile(family, config, dummy_checkpoint(folder, empty.tensors()))
    checkpoint = open_files(folder, load_format)
    if checkpoint.quantization is not None:
        config = {**config, "quantization_config": checkpoint.quantization}
    checkpoint.rename(family.renames(checkpoint.shapes))
    if (formats := formats_of(config)) is not None:
        checkpoint.rename(formats.renames(checkpoint.shapes))
    scales = take_scales(checkpoint)
    # A stored matrix wins over the flag: some exporters write both.
    has_head = any(name.startswith("lm_head.") for name in checkpoint.shapes)
    default = family.defaults.get(str(config.get("model_type")), {}).get("tie_word_embeddings")
    is_tied = bool(config.get("tie_word_embeddings", default)) and not has_head
    return TargetFile(family, {**config, "tie_word_embeddings": is_tied}, checkpoint, scales)


def check_target(path: Path | str, load_format: str = "auto") -> Target:
    """Return the model in `path` on the meta device; raise CheckpointError as loading it would."""
    file = open_target(path, load_format)
    file.check()
    model = file.skeleton()
    file.checkpoint.check(model.tensors())
    model.spec = replace(model.spec, num_ids=None)
    model.path = Path(path)
    return model


def read_target(folder: Path | str) -> tuple[TargetFamily, Config]:
    """Return the family of a directory, and the config of its text model, which it computes.

    Raises CheckpointError.
    """
    with _of_folder(folder):
        family, config = find_family(read_config(folder))
        family.spec(config)
        return family, config


def read_spec(folder: Path | str, ranks: int = 1) -> TargetSpec:
    """Return what a directory's config says, for one of `ranks` ranks. Raises CheckpointError."""
    family, config = read_target(folder)
    return family.spec(config, ranks)


def divides(folder: Path | str, ranks: int) -> bool:
    """Return whether `ranks` ranks can share a model. Raises CheckpointError for a wrong config."""
    family, config = read_target(folder)
    try:
        family.spec(config, ranks)
    except CheckpointError:
        return False
    return True


def quantized_formats(
    name: str | None, path: Path | str, device: torch.device | None
) -> Formats | None:
    """Return the formats for `model.quantization`; None: those of the checkpoint.

    device: None is any. Raises ConfigError: the checkpoint is stored otherwise, or the device lacks
    such products.
    """
    own = "gguf" if is_gguf(path) else _quant_method(path)
    if name in (None, "auto", own):
        return None
    if own not in (None, "gguf") or name != "fp8":
        stored = "is not quantized" if own is None else f"has quant_method {own!r}"
        raise ConfigError(f"quantization={name!r}: the checkpoint {stored}; leave it out")
    if device is not None and not converts_fp8(device):
        why = f"only GPUs of compute capability 8.9 or newer are supported, and this is {device}"
        raise ConfigError(f"quantization='fp8': {why}; leave it out")
    return Fp8OnLoadFormats()


def _quant_method(path: Path | str) -> str | None:
    settings = read_target(path)[1].get("quantization_config") or {}
    method: str | None = settings.get("quant_method")
    return method


def target_dtype(name: str, path: Path | str, device: torch.device) -> torch.dtype:
    """Return the dtype for `model.dtype`.

    auto: as in vLLM on a GPU, that is float16 for a float16 checkpoint, else bfloat16. float32 on a
    CPU, where it is exact and no slower.
    """
    if name != "auto":
        return torch_dtype(name)
    if device.type != "cuda":
        return torch.float32
    config = text_config(read_json(Path(path) / "config.json"))
    is_half = "float16" in (config.get("dtype"), config.get("torch_dtype"))
    return torch.float16 if is_half else torch.bfloat16


@contextmanager
def _of_folder(folder: Path | str) -> Iterator[None]:
    """Name the folder in refusals of its config."""
    try:
        yield
    except CheckpointError as error:
        what = str(error)
        if not what.startswith("config.json: "):
            raise
        raise CheckpointError(f"{folder}/{what}") from None
