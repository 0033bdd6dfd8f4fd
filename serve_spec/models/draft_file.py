"""Opening a draft checkpoint of any public layout: a flat config, tensors by their current names.

Published configs are wrong about many things (number of layers, biases, tied embeddings), so what a
tensor's presence or shape can tell, it tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from serve_spec.config import SpeculativeConfig
from serve_spec.core.errors import CheckpointError
from serve_spec.models import speculators
from serve_spec.models.draft_layout import Recognition, current_names, recognise
from serve_spec.models.expansion import open_weights
from serve_spec.models.shape import check_supported, read_json
from serve_spec.models.weights import Checkpoint, PickleFile, SafetensorsFile, TensorFile

_MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


@dataclass(frozen=True)
class DraftOptions:
    """What a user may know better than the checkpoint's config. None: believe the checkpoint.

    `rope_theta`: some published heads were trained with 10000 whatever their config says.
    `aux_layer_ids`: layers of the target whose inputs the head reads (EAGLE-3). `aux_layers_mean`:
    how to read the config's own ids, as a layer's input or its output. `norm_before_residual` and
    `norm_output`: EAGLE-3's two switches that configs leave out.
    """

    rope_theta: float | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    aux_layers_mean: Literal["input", "output"] | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None

    @staticmethod
    def of(config: SpeculativeConfig) -> DraftOptions:
        """What the configuration says. What is to be measured is not known yet: None."""
        theta = config.speculative_draft_rope_theta
        mean = config.speculative_draft_aux_layers_mean
        return DraftOptions(
            rope_theta=None if theta == "probe" else theta,
            aux_layer_ids=config.speculative_draft_aux_layer_ids,
            aux_layers_mean=None if mean == "probe" else mean,
            norm_before_residual=config.speculative_draft_norm_before_residual,
            norm_output=config.speculative_draft_norm_output,
        )


@dataclass(frozen=True)
class DraftFile:
    """A draft's config (flat) and tensors (by their current names: `layers.0.`, `fc`, ...)."""

    path: Path
    config: Mapping[str, Any]
    checkpoint: Checkpoint
    recognition: Recognition

    def setting(self, key: str) -> Any:
        """A key of the config, at the top or inside `eagle_config`; None when absent."""
        value = self.config.get(key)
        return self.nested.get(key) if value is None else value

    @property
    def nested(self) -> Mapping[str, Any]:
        """The config's `eagle_config`; empty when absent."""
        return self.config.get("eagle_config") or {}


def open_draft(path: Path | str, algorithm: str) -> DraftFile:
    """Opens the draft in `path` and makes sure it is what `algorithm` runs; reads no weight.

    Raises:
        CheckpointError: damaged files, another family, or a format not supported.
    """
    file = read_draft(path)
    family = draft_family(file)
    if family != algorithm:
        raise CheckpointError(
            f"{file.path} is of family {family} by its tensors ({file.recognition.evidence}), but "
            f"speculative_algorithm={algorithm!r}; set it to {family!r}"
        )
    return file


def read_draft(path: Path | str) -> DraftFile:
    """Opens the draft in `path`, of whatever family and layout; reads no weight.

    Raises:
        CheckpointError: damaged files, or a format not supported.
    """
    directory = Path(path)
    config = read_json(directory / "config.json")
    if isinstance(config.get("model"), dict):
        # Early vLLM conversions wrap the head's config: {"model_type": "eagle", "model": {...}}.
        config = {**config, **config["model"]}
    if config.get("speculators_model_type"):
        config = speculators.flat_config(directory, config)
    check_supported(config)
    checkpoint = _open(directory)
    stored = checkpoint.shapes
    checkpoint.rename(current_names(stored))
    try:
        recognition = recognise(stored, config)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    return DraftFile(directory, config, checkpoint, recognition)


def open_draft_file(path: Path | str) -> DraftFile:
    """Opens the EAGLE or EAGLE-3 head in `path`, if its config is its authors' own.

    Raises:
        CheckpointError: another family, a config that something else wrote, or as `read_draft`.
    """
    file = read_draft(path)
    if file.recognition.family not in ("EAGLE", "EAGLE3"):
        raise CheckpointError(
            f"{file.path} is of family {file.recognition.family} ({file.recognition.evidence}); "
            "an EAGLE or EAGLE-3 head is needed here"
        )
    if file.recognition.layout == "speculators":
        raise CheckpointError(
            f"{file.path} is a speculators checkpoint; a head in the official layout is needed here"
        )
    return file


def draft_family(file: DraftFile) -> str:
    """The `speculative_algorithm` that runs the draft: `EAGLE`, `EAGLE3`, ..."""
    return file.recognition.family


def _open(directory: Path) -> Checkpoint:
    """The weights: under the names of any checkpoint, or under Medusa's own."""
    for name in _MEDUSA_FILES:
        path = directory / name
        if path.exists():
            is_safe = path.suffix == ".safetensors"
            file: TensorFile = SafetensorsFile(path) if is_safe else PickleFile(path)
            return Checkpoint([file], directory)
    return open_weights(directory)
